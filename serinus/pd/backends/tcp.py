"""Pages as the payload of the frame itself: between any two processes that can talk at all.

The sender's area keeps the bytes until the receiver has them (the socket sends from there without a copy, and a lost
frame is sent again from there); the receiver reads them from the arrived frame.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.pd.backends.base import Located, SpanAllocator, Staged
from serinus.pd.modes import Capabilities, Mode
from serinus.wire import Buffer

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt in glibc."""
_KEPT_BYTES_MAX: Final = 64 << 20
"""Free at the end of each of glibc's heaps."""
_BLOCK_BYTES_MAX: Final = 32 << 20
"""Blocks up to this come from a heap; glibc allows no more."""


class TcpBackend:
    """Bytes travel in the frame."""

    name = "tcp"
    capabilities = Capabilities(mode=Mode.RECEIVER_CHECKED, recut=Mode.RECEIVER_CHECKED)

    def __init__(self, staging_bytes: int = 256 << 20) -> None:
        """`staging_bytes`: of one connection, at most; memory that is never staged into is never touched."""
        self._staging_bytes = staging_bytes

    def sender(self) -> _TcpSender:
        return _TcpSender(self._staging_bytes)

    def receiver(self) -> _TcpReceiver:
        _keep_freed_memory()
        return _TcpReceiver()


class _TcpSender:
    def __init__(self, staging_bytes: int) -> None:
        self._spans = SpanAllocator(staging_bytes)
        self._area: NDArray[np.uint8] = np.empty(staging_bytes, dtype=np.uint8)

    def stage(self, byte_count: int) -> Staged | None:
        taken = self._spans.take(byte_count)
        if taken is None:
            return None
        key, start = taken
        return Staged(key=key, room=self._area[start : start + byte_count], inline=True)

    def release(self, key: int) -> None:
        self._spans.give(key)

    def close(self) -> None:
        """The area lives as long as a frame that is still being sent from it."""
        self._area = np.empty(0, dtype=np.uint8)


class _TcpReceiver:
    def fetch(self, data: Located, payload: Buffer) -> NDArray[np.uint8]:
        found = np.frombuffer(payload, dtype=np.uint8)
        if len(found) != data.byte_count or data.shm_name:
            raise TransferFailed(f"pd: {len(found)} bytes came with the frame, expected {data.byte_count}")
        return found

    def close(self) -> None:
        """Nothing is mapped, so nothing is given back."""


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory: an arrived frame is in memory of its own, and what was given back to the system
    costs a page fault for every 4 KiB of the next one.

    For the whole process; no effect with another C library. Costs up to _KEPT_BYTES_MAX for each thread that receives.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES_MAX)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES_MAX)
