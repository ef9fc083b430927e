"""backends: they move bytes between a prefill and a decode engine, and decide nothing.

`local` within a process, `shm` within a machine, `tcp` anywhere: receiver-checked (mode A). One-sided, from pool to
pool: `cuda_ipc` reads on a GPU (mode C); `nixl` reads (mode C), `mooncake` writes (mode B), both optional packages.
"""

from __future__ import annotations

from typing import TypeAlias

from serinus.core.errors import ConfigError
from serinus.pd.backends.base import Backend, Receiver, Sender, Staged
from serinus.pd.backends.cuda_driver import CudaDriver
from serinus.pd.backends.cuda_ipc import CudaIpcBackend, Pull, SharedAllocation
from serinus.pd.backends.local import LocalBackend
from serinus.pd.backends.mooncake import MooncakeBackend
from serinus.pd.backends.nixl import NixlBackend
from serinus.pd.backends.one_sided import (
    Endpoint,
    Fenced,
    OneSided,
    OpResult,
    OpState,
    PageRows,
    Region,
    RowReader,
    SliceReader,
    Strips,
    pack_endpoint,
    rows_of,
    strips_between,
    strips_between_rows,
    strips_into_rows,
    strips_of_part,
    unpack_endpoint,
    whole_rows,
)
from serinus.pd.backends.shm import ShmBackend, host_identity, shm_works
from serinus.pd.backends.tcp import TcpBackend

__all__ = [
    "AnyBackend",
    "Backend",
    "CudaDriver",
    "CudaIpcBackend",
    "Endpoint",
    "Fenced",
    "LocalBackend",
    "MooncakeBackend",
    "NixlBackend",
    "OneSided",
    "OpResult",
    "OpState",
    "PageRows",
    "Pull",
    "Receiver",
    "Region",
    "RowReader",
    "Sender",
    "SharedAllocation",
    "ShmBackend",
    "SliceReader",
    "Staged",
    "Strips",
    "TcpBackend",
    "host_identity",
    "make_backends",
    "make_one_sided",
    "pack_endpoint",
    "rows_of",
    "shm_works",
    "strips_between",
    "strips_between_rows",
    "strips_into_rows",
    "strips_of_part",
    "unpack_endpoint",
    "whole_rows",
]


AnyBackend: TypeAlias = Backend | OneSided


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


def make_one_sided(choice: str, *, tag: str, host: str = "127.0.0.1", device: str = "cpu") -> OneSided | None:
    """The one-sided backend that `--disaggregation-transfer-backend` names; None where it names another kind.

    `tag` differs between any two processes, restarts included; `host` is where peers reach this process; the pools are
    on `device`. Raises ConfigError: its package is not installed (the extra is named), or does not reach the device.
    """
    if choice == "nixl":
        return NixlBackend(tag, device=None if device == "cpu" else CudaDriver(device))
    if choice == "mooncake" and device != "cpu":
        raise ConfigError(
            f"pd: data backend mooncake writes into decode's pool, the pools are on {device!r}, and no fence is known"
            " that ends its writes into memory of a GPU; expected auto, cuda_ipc, nixl, shm or tcp"
        )
    if choice == "mooncake":
        return MooncakeBackend(host)
    return None
