"""Free TCP ports, for processes that are about to be started and told theirs."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from serinus.core.errors import ConfigError
from serinus.core.ids import new_incarnation

_PORTS_FROM = 20_000
_CONNECTION_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct free ports at an address of this machine, for processes that are started now.

    They lie outside of the range from which the kernel gives ports to connections: none of those takes one before it is
    used. Raises ConfigError where there are not so many.
    """
    low, high = _connection_ports()
    ports = [port for port in range(_PORTS_FROM, 1 << 16) if not low <= port <= high]
    first = new_incarnation() % len(ports)  # two processes that look at the same time find others
    found: list[int] = []
    for port in ports[first:] + ports[:first]:
        if len(found) == count:
            break
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            found.append(port)
    if len(found) < count:
        raise ConfigError(f"core: {len(found)} ports of {host} are free, expected {count}")
    return found


def _connection_ports() -> tuple[int, int]:
    """The range of ports that the kernel gives to connections; Linux's default where it does not say."""
    try:
        low, high = _CONNECTION_PORTS.read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(low), int(high)
