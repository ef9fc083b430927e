"""CUDA as backends use it: handles of memory by the driver's interface (cuda_ipc), gathers and sums of pages by a
kernel, on streams.

The driver, not torch's own sharing of tensors: a handle is 64 bytes that any process of the machine opens, with no file
and no counter beside it that a killed process leaves behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.kernels import CUDA_HANDLE_BYTES, CudaFailed, CudaLibrary, PoolLane
from serinus.pd.backends.cuda_ipc import SharedAllocation
from serinus.pd.backends.cuda_pulls import DevicePull, DevicePulls, Mark, PageJob
from serinus.pd.backends.one_sided import PageRows, Region, whole_rows
from serinus.pd.backends.shm import host_identity

_HIGH_PRIORITY: Final = -1
"""Of streams; the model's is 0, which is the lowest there is."""


class CudaDriver:
    """pd's IpcLibrary and PoolDevice, on one device."""

    def __init__(self, device: str = "cuda") -> None:
        """`device`: that the pools are on.

        Raises ConfigError: there is no driver of CUDA, no Triton, or no device.
        """
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"pd: memory of a GPU is to be reached, the pools are on {device!r}; expected shm or tcp")
        self._device = torch.device(device, torch.cuda.current_device())
        index = self.index = self._device.index
        self._ids = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pulls, self._own, reads = (
            torch.cuda.Stream(self._device, priority=priority).cuda_stream  # type: ignore[no-untyped-call]
            for priority in (0, _HIGH_PRIORITY, _HIGH_PRIORITY)
        )
        try:
            from serinus.kernels.triton.pull_pages import PagePull

            self._cuda = CudaLibrary(self._ids.cuda_stream)
        except (ImportError, OSError, AttributeError, CudaFailed) as error:
            raise ConfigError(f"pd: pages on a GPU need the driver of CUDA and Triton: {error}") from None
        self.device = _uuid(index)
        others = range(torch.cuda.device_count())
        reached = [i for i in others if i == index or torch.cuda.can_device_access_peer(index, i)]
        self.reachable = tuple(_uuid(i) for i in reached)
        self.process = f"{host_identity()}/{os.getpid()}"
        model = partial(torch._C._cuda_getCurrentRawStream, index)
        self._queue = DevicePulls(self._cuda, self._allocate, model, self._ids.cuda_stream, reads)

        @lru_cache(maxsize=256)
        def job(own: tuple[PageRows, ...], sources: tuple[PageRows, ...], sums: tuple[int, ...]) -> PageJob:
            with torch.cuda.stream(self._ids):
                return PagePull(list(map(_lane, own)), list(map(_lane, sources)), sums, self._device)

        self._job = job

    def warm(self, regions: Sequence[Region]) -> None:
        """Have the kernels compiled. Raises ConfigError: a page that is read twice has two sums."""
        torch.cuda.current_stream(self._device).synchronize()  # what fills the pool, and steps that were tried
        padding = np.zeros(1, np.int32)
        for rows in [rows for region in regions for rows in (whole_rows(region), _some_rows(region))]:
            expected = self.sums(((rows,),), padding, 0)
            if self.pull([(rows, rows)], padding, padding, 0, self.mark()).sums() != expected:
                raise ConfigError("pd: a page read twice has two sums, expected a device that works")

    # ---- memory -----------------------------------------------------------------------------------------------------

    def share(self, address: int) -> SharedAllocation:
        """The allocation that an address lies in. Raises ConfigError: it cannot be shared."""
        try:
            with self._cuda as cuda:
                start, byte_count = cuda.allocation(address)
                return SharedAllocation(handle=cuda.share(start), address=start, byte_count=byte_count)
        except CudaFailed as error:
            raise ConfigError(
                f"pd: memory of the pool cannot be shared by CUDA IPC: {error}; expected memory of cudaMalloc"
                " (PYTORCH_CUDA_ALLOC_CONF without expandable_segments), or shm or tcp"
            ) from None

    def open(self, memory: SharedAllocation) -> int:
        """Map memory of another process. Raises TransferFailed."""
        if len(memory.handle) != CUDA_HANDLE_BYTES:
            raise TransferFailed(f"pd: a handle of {len(memory.handle)} bytes, expected {CUDA_HANDLE_BYTES}")
        try:
            with self._cuda as cuda:
                address = cuda.open(memory.handle)
                _, found = cuda.allocation(address)
        except CudaFailed as error:
            raise TransferFailed(f"pd: memory of the peer cannot be opened: {error}") from None
        if found < memory.byte_count:
            self.close(address)
            raise TransferFailed(f"pd: the peer shares {found} bytes, expected {memory.byte_count}")
        return address

    def close(self, address: int) -> None:
        """Unmap it. Raises InvariantError: it was not open."""
        try:
            with self._cuda as cuda:
                cuda.close(address)
        except CudaFailed as error:
            raise InvariantError(f"pd: memory of a peer cannot be closed: {error}, expected it to be open") from None

    # ---- pages ------------------------------------------------------------------------------------------------------

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int, behind: Mark,
    ) -> DevicePull:  # fmt: skip
        """Queue a gather behind a mark; it shares the device with what was queued for the model later."""
        ours, theirs = zip(*pairs, strict=True)
        return self._queue.begin(self._job(ours, theirs, ()), self._pulls, pages, seed, sources, behind=behind)

    def mark(self) -> Mark:
        """What is queued for the model now."""
        return self._queue.mark()

    def is_idle(self) -> bool:
        """Whether all that was queued for the model has run."""
        return self._queue.is_idle()

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        """Of own pages, which are whole when what is queued for the model now has run: the host need not have waited
        for a step that chose no token. Waits for the device."""
        return self._queue.begin(self._of_own(rows), self._own, pages, seed, behind=self.mark()).sums()

    def begin_sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> DevicePull:
        """Queue sums of own pages, which are whole, beside what is queued for the model."""
        return self._queue.begin(self._of_own(rows), self._own, pages, seed)

    def _of_own(self, rows: Sequence[Sequence[PageRows]]) -> PageJob:
        return self._job(tuple(each for group in rows for each in group), (), tuple(map(len, rows)))

    def behind_queue(self) -> Callable[[], bool]:
        """Asks, without waiting, whether all that is queued for the model now has run."""
        return self.mark().has_passed

    def settle(self) -> None:
        """Wait for all that this process has queued on the device, by any library."""
        torch.cuda.synchronize(self._device)

    def _allocate(self, word_count: int) -> tuple[Tensor, Tensor]:
        """As DevicePulls wants it: memory that torch has had before was queued on this stream alone."""
        with torch.cuda.stream(self._ids):
            there_N = torch.empty(word_count, dtype=torch.int64, device=self._device)
        return there_N, torch.empty(word_count, dtype=torch.int64, pin_memory=True)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _lane(rows: PageRows) -> PoolLane:
    return PoolLane(rows.address, (rows.page_count, *rows.shape), (rows.page_step, rows.strip_step, rows.row_step, 1))


def _some_rows(region: Region) -> PageRows:
    """Two short rows of each page: the kernel that reads slices is compiled for such."""
    step = region.strip_bytes // 32 * 16 or 8
    return replace(whole_rows(region), row_count=2, row_step=step, row_bytes=min(16, step))
