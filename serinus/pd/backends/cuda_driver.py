"""CUDA as backends use it: handles of memory by the driver's interface (cuda_ipc), gathers and sums of pages by the
kernels, on streams.

The driver, not torch's own sharing of tensors: a handle is 64 bytes that any process of the machine opens, with no file
and no counter beside it that a killed process leaves behind.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.kernels import load
from serinus.pd.backends.cuda_ipc import SharedAllocation
from serinus.pd.backends.one_sided import PageRows, Region, whole_rows
from serinus.pd.backends.shm import host_identity

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_HIGH_PRIORITY: Final = -1
"""Of streams; the model's is 0, which is the lowest there is."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class DevicePull:
    """A gather on a stream, between two events, and its sums in pinned memory once they are read."""

    def __init__(self, sums_GK: Tensor, begin: Any, end: Any, read: Any) -> None:
        self._sums_GK, self._begin, self._end, self._read = sums_GK, begin, end, read

    def done(self) -> bool:
        return bool(self._read.query())

    def sums(self) -> bytes:
        self._read.synchronize()
        return self._sums_GK.numpy().astype("<i8").tobytes()

    @property
    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


class CudaDriver:
    """pd's IpcLibrary and PoolDevice, on one device."""

    def __init__(self, device: str = "cuda") -> None:
        """`device`: that the pools are on.

        Raises ConfigError: there is no driver of CUDA, or no device.
        """
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"pd: memory of a GPU is to be reached, the pools are on {device!r}; expected shm or tcp")
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"pd: pages on a GPU need the driver of CUDA: {error}") from None
        self._kernels = load("cuda")
        self._device = torch.device(device, torch.cuda.current_device())
        index = self.index = self._device.index
        self.device = _uuid(index)
        others = range(torch.cuda.device_count())
        reached = [i for i in others if i == index or torch.cuda.can_device_access_peer(index, i)]
        self.reachable = tuple(_uuid(i) for i in reached)
        self.process = f"{host_identity()}/{os.getpid()}"
        self._pulls = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        self._own = torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._reads = torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    @property
    def has_atomics(self) -> bool:
        """Whether atomics of this GPU work in the memory of all others here, as over NVLink. Over PCIe few do."""
        found, index = ctypes.c_int(), self._device.index
        others = [i for i in range(torch.cuda.device_count()) if i != index]
        told = [(self._call("cuDeviceGetP2PAttribute", ctypes.byref(found), 3, index, i), found.value) for i in others]
        return all(not error and value for error, value in told)

    def _call(self, name: str, *arguments: Any) -> str:
        """Call the driver; what went wrong, in words; empty = nothing. The calling thread has a context of torch."""
        torch.cuda.current_stream(self._device).query()
        code = getattr(self._cuda, name)(*arguments)
        if not code:
            return ""
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{name}: {(text.value or b'').decode()} ({code})"

    def warm(self, regions: Sequence[Region]) -> None:
        """Have the kernels compiled. Raises ConfigError: a page that is read twice has two sums."""
        torch.cuda.current_stream(self._device).synchronize()  # what fills the pool, and steps that were tried
        padding = np.zeros(1, np.int32)
        for rows in [rows for region in regions for rows in (whole_rows(region), _some_rows(region))]:
            expected = self.sums(((rows,),), padding, 0)
            if self.pull([(rows, rows)], padding, padding, 0).sums() != expected:
                raise ConfigError("pd: a page read twice has two sums, expected a device that works")

    # ---- memory -----------------------------------------------------------------------------------------------------

    def share(self, address: int) -> SharedAllocation:
        """The allocation that an address lies in. Raises ConfigError: it cannot be shared."""
        start, byte_count, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        here = ctypes.c_uint64(address)
        error = self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(byte_count), here)
        error = error or self._call("cuIpcGetMemHandle", ctypes.byref(handle), start)
        if error:
            raise ConfigError(
                f"pd: memory of the pool cannot be shared by CUDA IPC: {error}; expected memory of cudaMalloc"
                " (PYTORCH_CUDA_ALLOC_CONF without expandable_segments), or shm or tcp"
            )
        return SharedAllocation(handle=bytes(handle.reserved), address=start.value, byte_count=byte_count.value)

    def open(self, memory: SharedAllocation) -> int:
        """Map memory of another process. Raises TransferFailed."""
        if len(memory.handle) != _HANDLE_BYTES:
            raise TransferFailed(f"pd: a handle of {len(memory.handle)} bytes, expected {_HANDLE_BYTES}")
        address = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(memory.handle)
        error = self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        if error:
            raise TransferFailed(f"pd: memory of the peer cannot be opened: {error}")
        found, start = ctypes.c_size_t(), ctypes.c_uint64()
        error = self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(found), address)
        if error or found.value < memory.byte_count:
            self.close(address.value)
            raise TransferFailed(f"pd: the peer shares {found.value} bytes, expected {memory.byte_count} {error}")
        return address.value

    def close(self, address: int) -> None:
        """Unmap it. Raises InvariantError: it was not open."""
        _lane.cache_clear()
        error = self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        if error:
            raise InvariantError(f"pd: memory of a peer cannot be closed: {error}, expected it to be open")

    # ---- pages ------------------------------------------------------------------------------------------------------

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int,
    ) -> DevicePull:  # fmt: skip
        """Queue a gather behind what is queued for the model now; it shares the device with what comes later."""
        self._pulls.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._pulls):
            begin = _event()
            ours, theirs = ([_lane(rows) for rows in side] for side in zip(*pairs, strict=True))
            return self._read(self._kernels.pull_pages(ours, _ids(pages), seed, theirs, _ids(sources)), begin)

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        """Of own pages, which are whole when what is queued for the model now has run: the host need not have waited
        for a step that chose no token. Waits for the device."""
        self._own.wait_stream(torch.cuda.current_stream(self._device))
        return self.begin_sums(rows, pages, seed).sums()

    def begin_sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> DevicePull:
        """Queue sums of own pages, which are whole, beside what is queued for the model."""
        with torch.cuda.stream(self._own):
            begin, lanes = _event(), [_lane(each) for group in rows for each in group]
            counts = [len(group) for group in rows]
            return self._read(self._kernels.pull_pages(lanes, _ids(pages), seed, (), None, counts), begin)

    def behind_queue(self) -> Callable[[], bool]:
        """Asks, without waiting, whether all that is queued for the model now has run."""
        stream = torch.cuda.current_stream(self._device)
        if stream.query():
            return lambda: True
        queued: Callable[[], bool] = stream.record_event().query
        return queued

    def settle(self) -> None:
        """Wait for all that this process has queued on the device, by any library."""
        torch.cuda.synchronize(self._device)

    def _read(self, sums_GK: Tensor, begin: Any) -> DevicePull:
        """Have them copied to the host behind the current stream, which goes on meanwhile."""
        end, read_GK = _event(), torch.empty(sums_GK.shape, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._reads):
            self._reads.wait_event(end)
            read_GK.copy_(sums_GK, non_blocking=True)
            sums_GK.record_stream(self._reads)
            return DevicePull(read_GK, begin, end, _event())


def _event() -> Any:
    """Now, on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _ids(pages: NDArray[np.int32]) -> NDArray[np.int64]:
    return pages.astype(np.int64)


class _Memory:
    """Memory of the device, for torch to look at."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_count,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


@lru_cache(maxsize=256)
def _lane(rows: PageRows) -> Tensor:
    """Them in every page, uint8 [P, S, R, W]."""
    steps = rows.page_step, rows.strip_step, rows.row_step
    shape = rows.page_count, *rows.shape
    byte_count = rows.row_bytes + sum((size - 1) * step for size, step in zip(shape, steps, strict=False))
    memory: Tensor = torch.as_tensor(_Memory(rows.address, byte_count))
    return memory.as_strided(shape, (*steps, 1))


def _some_rows(region: Region) -> PageRows:
    """Two short rows of each page: the kernel that reads slices is compiled for such."""
    step = region.strip_bytes // 32 * 16 or 8
    return replace(whole_rows(region), row_count=2, row_step=step, row_bytes=min(16, step))
