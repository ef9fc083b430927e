"""The interface of CUDA's driver by ctypes, in the context of one device. What torch does with streams and events costs
the host 3 to 10 times as much, and does not share memory by handles of 64 bytes.

Calls of microseconds keep the interpreter's lock. A thread that gives it up gets it back when others have, which took
75 us where eight threads read weights in a virtual machine; torch gives it up in most calls, six times for a copy with
an event. Where a stream's queue is full such a call waits with the lock: what queues a lot at once must know how much.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from serinus.core.errors import SerinusError

__all__ = ["CUDA_HANDLE_BYTES", "CudaFailed", "CudaFunction", "CudaLibrary", "CudaMark", "bound", "current_stream"]

CUDA_HANDLE_BYTES: Final = 64
"""Of memory that is shared."""
_LAZY_PEER_ACCESS: Final = 1
_WITHOUT_TIME: Final = 2
_SLEEPS: Final = 1
_NOT_READY: Final = 600


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * CUDA_HANDLE_BYTES),)


_P: Final = ctypes.c_void_p
"""An address on either side, a stream, an event, a context; or where a result goes."""
_ARGUMENTS: Final = {
    "cuStreamGetCtx": (_P, _P), "cuCtxGetCurrent": (_P,), "cuCtxPushCurrent_v2": (_P,), "cuCtxPopCurrent_v2": (_P,),
    "cuEventCreate": (_P, ctypes.c_uint), "cuEventDestroy_v2": (_P,), "cuEventRecord": (_P, _P), "cuEventQuery": (_P,),
    "cuEventSynchronize": (_P,), "cuEventElapsedTime": (_P, _P, _P),
    "cuStreamQuery": (_P,), "cuStreamWaitEvent": (_P, _P, ctypes.c_uint),
    "cuMemcpyHtoDAsync_v2": (_P, _P, ctypes.c_size_t, _P), "cuMemcpyDtoHAsync_v2": (_P, _P, ctypes.c_size_t, _P),
    "cuMemGetAddressRange_v2": (_P, _P, _P), "cuIpcGetMemHandle": (_P, _P), "cuIpcCloseMemHandle": (_P,),
    "cuIpcOpenMemHandle_v2": (_P, _Handle, ctypes.c_uint),
    "cuLaunchKernel": (_P, *[ctypes.c_uint] * 7, _P, _P, _P),
}  # fmt: skip
_WAIT: Final = frozenset({"cuEventSynchronize", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"})
"""Calls in which other threads run."""


class CudaFailed(SerinusError):
    """A call of the driver failed: which, and why, in its words."""


class CudaLibrary:
    """What is used of it. Calls are made inside `with`, which has the device's context for the thread, whichever it
    is; streams and events are handles. Each raises CudaFailed; that may be the error of what was queued before."""

    def __init__(self, stream: int, driver: Any = None) -> None:
        """`stream`: one of the device, not the default one. Raises OSError, AttributeError: there is no driver, or not
        all of it."""
        self._driver = driver or _driver()
        found = _P()
        self._driver.cuStreamGetCtx(stream, ctypes.byref(found))
        self._context = found.value
        self._marks: defaultdict[tuple[bool, bool], deque[int]] = defaultdict(deque)
        """Events whose marks are gone, by what they can do (timed, sleeps)."""

    def __enter__(self) -> CudaLibrary:
        self._driver.cuCtxPushCurrent_v2(self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(_P()))

    # ---- streams and events -----------------------------------------------------------------------------------------

    def is_idle(self, stream: int) -> bool:
        """Whether all that was queued has run."""
        return not self._driver.cuStreamQuery(stream)

    def event(self, *, timed: bool, sleeps: bool = False) -> int:
        """A new one, which has passed. `sleeps`: a thread that waits for it takes no core meanwhile."""
        found = _P()
        self._driver.cuEventCreate(ctypes.byref(found), (0 if timed else _WITHOUT_TIME) | (_SLEEPS if sleeps else 0))
        return int(found.value or 0)

    def mark(self, stream: int, *, timed: bool = False, sleeps: bool = False) -> CudaMark:
        """An event that passes when what is queued on the stream now has run; see `event`. When its mark is gone the
        event serves another one; waits that were queued for the first are still for that one."""
        idle = self._marks[timed, sleeps]
        try:
            event = idle.popleft()
        except IndexError:  # asking first whether there is one is a race between threads
            event = self.event(timed=timed, sleeps=sleeps)
        mark = CudaMark(event, idle)
        self.record(event, stream)
        return mark

    def destroy(self, event: int) -> None:
        """Give an event back, which has passed."""
        self._driver.cuEventDestroy_v2(event)

    def record(self, event: int, stream: int) -> None:
        """It passes when what is queued on the stream now has run."""
        self._driver.cuEventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on runs after the event's last record."""
        self._driver.cuStreamWaitEvent(stream, event, 0)

    def has_passed(self, event: int) -> bool:
        """Whether its last record has. Never waits."""
        return not self._driver.cuEventQuery(event)

    def synchronize(self, event: int) -> None:
        """Have the host wait for it."""
        self._driver.cuEventSynchronize(event)

    def seconds(self, begin: int, end: int) -> float:
        """Between two timed events that have passed."""
        found = ctypes.c_float()
        self._driver.cuEventElapsedTime(ctypes.byref(found), begin, end)
        return found.value / 1e3

    # ---- memory -----------------------------------------------------------------------------------------------------

    def send(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Queue a copy from pinned memory to the device."""
        self._driver.cuMemcpyHtoDAsync_v2(target, source, byte_count, stream)

    def fetch(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Queue a copy from the device to pinned memory."""
        self._driver.cuMemcpyDtoHAsync_v2(target, source, byte_count, stream)

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and bytes of the one that an address lies in."""
        start, byte_count = ctypes.c_uint64(), ctypes.c_size_t()
        self._driver.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(byte_count), address)
        return start.value, byte_count.value

    def share(self, start: int) -> bytes:
        """A handle by which other processes open an allocation."""
        handle = _Handle()
        self._driver.cuIpcGetMemHandle(ctypes.byref(handle), start)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map memory of another process."""
        address = ctypes.c_uint64()
        found = _Handle.from_buffer_copy(handle)
        self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), found, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap memory of another process."""
        self._driver.cuIpcCloseMemHandle(address)


class CudaMark:
    """An event, which is free for another mark when this object is gone. (torch's gives up the interpreter's lock to be
    recorded, and to be destroyed.)"""

    __slots__ = ("_idle", "event")

    def __init__(self, event: int, idle: deque[int]) -> None:
        self.event, self._idle = event, idle

    def __del__(self) -> None:
        self._idle.append(self.event)


def current_stream(device: int | None = None) -> int:
    """Of the calling thread, on its current device or this one: torch.cuda.current_stream takes ten times as long."""
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device is None else device))


class CudaFunction:
    """A compiled kernel, in the context that the thread has now."""

    def __init__(self, function: int, threads: int, shared: int) -> None:
        """`shared`: bytes of memory of a program."""
        self._driver, found = _driver(), _P()
        self._driver.cuCtxGetCurrent(ctypes.byref(found))
        self._context, self._function, self._threads, self._shared = found.value, function, threads, shared

    def launch(self, grid: tuple[int, int, int], stream: int, places: Any) -> None:
        """Queue it, on any thread. `places`: an array of the addresses of its arguments. Raises CudaFailed: the driver
        refuses it."""
        driver = self._driver
        driver.cuCtxPushCurrent_v2(self._context)
        try:
            driver.cuLaunchKernel(self._function, *grid, self._threads, 1, 1, self._shared, stream, places, None)
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(_P()))


@cache
def _driver() -> Any:
    return bound(ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1"))


def bound(held: Any, free: Any) -> SimpleNamespace:
    """The calls, with what they take. `held`, `free`: libcuda, which keeps the interpreter's lock and gives it up."""
    found = {}
    for name, types in _ARGUMENTS.items():
        found[name] = function = getattr(free if name in _WAIT else held, name)
        function.argtypes, function.errcheck = types, partial(_checked, held, name)
    return SimpleNamespace(**found)


def _checked(library: Any, name: str, code: int, *_: Any) -> int:
    if code in (0, _NOT_READY):
        return code
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    raise CudaFailed(f"{name}: {(text.value or b'').decode()} ({code})")
