"""Pages as the payload of the frame itself: between any two processes that can talk at all.

The sender's area keeps the bytes until the receiver has them (the socket sends from there without a copy, and a lost
frame is sent again from there); the receiver reads them from the arrived frame.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.pd.backends.base import Located, SpanAllocator, Staged
from serinus.pd.modes import Capabilities, Mode
from serinus.wire import Buffer

__all__ = ["TcpBackend"]


class TcpBackend:
    """Bytes travel in the frame."""

    name = "tcp"
    capabilities = Capabilities(mode=Mode.RECEIVER_CHECKED, can_recut=True)

    def __init__(self, staging_bytes: int = 256 << 20) -> None:
        """`staging_bytes`: of one connection, at most; memory that is never staged into is never touched."""
        self._staging_bytes = staging_bytes

    def sender(self) -> _TcpSender:
        return _TcpSender(self._staging_bytes)

    def receiver(self) -> _TcpReceiver:
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
