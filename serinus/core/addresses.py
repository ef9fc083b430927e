"""Addresses: host and port, joined and split. An IPv6 address has brackets wherever a port follows: [::1]:30000."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from serinus.core.errors import ConfigError

PEERS_MAX: Final = 64
"""Prefill engines that one decode engine knows: those of its settings, and those whose addresses come with requests."""


def bare_host(host: str) -> str:
    """`host` as sockets take it: an IPv6 address without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets: [::1]:30000. `host` may have them already."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of an HTTP server: `http://host:port`, or https with `tls`."""
    return f"{'https' if tls else 'http'}://{host_port(host, port)}"


def tcp_url(host: str, port: int) -> str:
    """The address of a socket of wire: `tcp://host:port`."""
    return f"tcp://{host_port(host, port)}"


def split_host_port(address: str, what: str) -> tuple[str, int]:
    """Host, without brackets, and port (0 to 65535) of host:port.

    Raises ConfigError, which begins with `what` (the name of the setting): anything else; an IPv6 address without
    brackets too, as its last group might be the port.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"{what} is {address!r}, expected host:port, as in 10.0.0.1:5000 or [::1]:5000")
    bare = bare_host(host)
    if bare == host and ":" in host:
        raise ConfigError(f"{what} is {address!r}, expected an IPv6 address in brackets, as in [::1]:5000")
    check_host(host, what)
    return bare, int(port)


def check_host(host: str, what: str) -> None:
    """Raise ConfigError, which begins with `what`, unless `host` may be a name or an address (IPv6 with or without
    brackets), without a port. Asks no name server."""
    bare = bare_host(host)
    if (":" in bare and not isinstance(_ip(bare), IPv6Address)) or (bare != host and ":" not in bare):
        raise ConfigError(f"{what} is {host!r}, expected a name or an address such as 10.0.0.1 or ::1, without a port")
    if not bare or set(bare) & set("[]/ "):
        raise ConfigError(f"{what} is {host!r}, expected a name or an address such as 10.0.0.1 or ::1")


def check_tcp_url(url: str, what: str) -> None:
    """Raise ConfigError, which begins with `what`, unless `url` is tcp://host:port with a port above 0."""
    scheme, _, address = url.partition("://")
    if scheme != "tcp" or not address:
        raise ConfigError(f"{what} is {url!r}, expected tcp://host:port")
    if not split_host_port(address, what)[1]:
        raise ConfigError(f"{what} is {url!r}, expected a port above 0")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`, as far as it says: localhost, 127.0.0.1, ::1."""
    found = _ip(bare_host(host))
    return host == "localhost" if found is None else found.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether to listen at `host` is to listen on every interface: 0.0.0.0, ::, *."""
    found = _ip(bare_host(host))
    return host == "*" if found is None else found.is_unspecified


def reachable(url: str, host: str) -> str:
    """Where others find the process that listens at `url` (tcp://host:port) and is known to be at `host`: `host`, where
    `url` says every interface (0.0.0.0, ::)."""
    scheme, _, address = url.partition("://")
    listens, _, port = address.rpartition(":")
    return f"{scheme}://{host_port(host, int(port))}" if is_wildcard(listens) else url


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
