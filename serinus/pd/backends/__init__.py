"""backends: they move bytes between a prefill and a decode engine, and decide nothing.

`local` within a process, `shm` within a machine, `tcp` anywhere. All are receiver-checked (mode A).
"""

from __future__ import annotations

from serinus.core.errors import ConfigError
from serinus.pd.backends.base import Backend, Receiver, Sender, Staged
from serinus.pd.backends.local import LocalBackend
from serinus.pd.backends.shm import ShmBackend, host_identity, shm_works
from serinus.pd.backends.tcp import TcpBackend

__all__ = [
    "Backend",
    "LocalBackend",
    "Receiver",
    "Sender",
    "ShmBackend",
    "Staged",
    "TcpBackend",
    "host_identity",
    "make_backends",
    "shm_works",
]


def make_backends(choice: str, staging_bytes: int = 256 << 20) -> tuple[Backend, ...]:
    """What `--disaggregation-transfer-backend` means between processes, best first: auto, shm or tcp.

    Raises ConfigError for anything else, and for shm where it does not work.
    """
    if choice == "auto":
        tcp = TcpBackend(staging_bytes)
        return (ShmBackend(staging_bytes), tcp) if shm_works() else (tcp,)
    if choice == "shm":
        return (ShmBackend(staging_bytes),)
    if choice == "tcp":
        return (TcpBackend(staging_bytes),)
    raise ConfigError(f"pd: data backend is {choice!r}, expected auto, shm or tcp (local joins engines of one process)")
