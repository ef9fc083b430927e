"""HostPool: the host tier's bytes of one part. Holds; which page is where is decided elsewhere.

Page-first: one page of all layers of the part is one contiguous row, in the layout of `DevicePool.read_pages`, so that
a page goes to storage in one piece and to the device a range of layers at a time. Shapes: P = pages, Y = page bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.kernels import populate
from serinus.pool.device import PoolSpec, lazy_zeros
from serinus.pool.workers import ThreadWorkers

_GB = 10**9
_PIECE_BYTES = 1 << 21
"""Mapped at a time: the process maps nothing else meanwhile."""


class HostPool:
    """uint8 [P, Y]. Plain memory beside a CPU; pinned beside an accelerator, so that copies need no host wait.

    Cost: on the CPU nothing until a page is written (mapped lazily, or by `map_ahead`); pinning touches all of it,
    about 1 s per 10 GB.
    """

    def __init__(self, spec: PoolSpec, page_count: int) -> None:
        """`spec`: of the device pool it stands behind; `page_count`: host pages, page 0 (which has no owner) included.

        Raises ConfigError: fewer than 2 pages, or the system does not give (or pin) the memory.
        """
        if page_count < 2:
            raise ConfigError(f"pool: a host tier of {page_count} pages, expected at least 2 (page 0 is never used)")
        self.page_count = page_count
        """Host pages, page 0 included."""
        self.page_bytes = spec.page_bytes
        """Bytes of one page: those of the device pool's; 0 where the part has no layers."""
        byte_count = page_count * spec.page_bytes
        try:
            memory = lazy_zeros(byte_count)
        except MemoryError as error:
            raise ConfigError(
                f"pool: the system gives no {byte_count / _GB:.2f} GB for the host tier, expected --hicache-size "
                f"or --hicache-ratio to fit"
            ) from error
        self.data_PY: NDArray[np.uint8] = memory.reshape(page_count, spec.page_bytes)
        """The pages as numpy sees them: what storage reads and writes."""
        self.tensor_PY: Tensor = torch.from_numpy(self.data_PY)
        """The same memory as torch sees it: what copies from and to the device use."""
        self.stamps_PZ: Tensor = self.tensor_PY[:, spec.kv_bytes :]
        """Of each page the stamps alone; a view."""
        self.pinned = spec.device != "cpu" and byte_count > 0
        """Whether the memory is registered with the accelerator."""
        if self.pinned:
            self._pin(byte_count)

    def _pin(self, byte_count: int) -> None:
        # Not torch's pinned allocator: it rounds up to a power of two, which doubles a large pool.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(self.data_PY.ctypes.data, byte_count, 0))
        if code:
            raise ConfigError(
                f"pool: {byte_count / _GB:.2f} GB of host memory cannot be pinned (CUDA error {code}), expected "
                f"--hicache-size or --hicache-ratio to fit what the system may lock (ulimit -l)"
            )
        # Holds the memory itself: it is unpinned before its addresses can be given away.
        self._unpin = weakref.finalize(self, _unregister, self.data_PY)

    def close(self) -> None:
        """Unpin. Call when no copy is under way. May be called again."""
        if self.pinned:
            self.pinned = False
            self._unpin()


def map_ahead(pools: Iterable[HostPool]) -> ThreadWorkers:
    """A thread that maps what was not written yet: a copy into 250 MB of fresh memory took 200 to 1,600 ms in a virtual
    machine, 25 ms into the same memory afterwards, on cores that compute. `stop` it before the pools are closed.

    Cost: one core for 0.7 s per GB in that machine.
    """
    pieces = (
        partial(_map, pool.data_PY, at)
        for pool in pools
        if not pool.pinned
        for at in range(0, pool.data_PY.nbytes, _PIECE_BYTES)
    )
    workers = ThreadWorkers("serinus-memory")
    workers.start(lambda: next(pieces, None))
    return workers


def _map(memory: NDArray[np.uint8], at: int) -> None:
    populate(memory.ctypes.data + at, min(_PIECE_BYTES, memory.nbytes - at))


def _unregister(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


def host_page_counts(
    device: Mapping[Part, PoolSpec], *, ratio: float, size_gb: float, available_bytes: int
) -> dict[Part, int]:
    """How many host pages each part gets (page 0 included), in the proportion of the device pools.

    Args:
        device: the device pool of each part.
        ratio: host pages per device page; counts where size_gb is 0.
        size_gb: 10**9 bytes for all parts together.
        available_bytes: what the machine can still give, the device pools taken off where they lie on the host too.
    Raises:
        ConfigError: more than the machine has, or not one page.
    """
    device_bytes = sum(spec.page_bytes * (spec.page_count - 1) for spec in device.values())
    if size_gb > 0 and not device_bytes:
        raise ConfigError(f"pool: --hicache-size is {size_gb} for a model without KV, expected 0")
    factor = size_gb * _GB / device_bytes if size_gb > 0 else ratio
    counts = {part: 1 + int(factor * (spec.page_count - 1)) for part, spec in device.items()}
    wanted = sum(device[part].page_bytes * count for part, count in counts.items())
    asked = f"--hicache-size {size_gb:g}" if size_gb > 0 else f"--hicache-ratio {ratio:g}"
    small = [part for part, count in counts.items() if count < 2]
    if small:
        raise ConfigError(
            f"pool: {asked} leaves part {small[0].name} no host page ({device[small[0]].page_bytes} bytes each), "
            f"expected room for at least one"
        )
    if wanted > available_bytes:
        most = max(available_bytes, 0) / device_bytes
        raise ConfigError(
            f"pool: {asked} takes {wanted / _GB:.2f} GB of host memory, the machine can give "
            f"{max(available_bytes, 0) / _GB:.2f} GB; expected --hicache-size at most "
            f"{max(available_bytes, 0) / _GB:.2f}, or --hicache-ratio at most {most:.2f}"
        )
    return counts
