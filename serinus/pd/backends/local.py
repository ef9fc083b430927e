"""Pages between two engines of one process: the receiver reads the very bytes the sender staged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.pd.backends.base import Located, Staged
from serinus.pd.modes import Capabilities, Mode
from serinus.wire import Buffer

_NAME = "local"


class LocalBackend:
    """One object, given to both engines."""

    name = "local"
    capabilities = Capabilities(mode=Mode.RECEIVER_CHECKED, recut=Mode.RECEIVER_CHECKED)

    def __init__(self, staging_bytes: int = 256 << 20) -> None:
        """`staging_bytes`: what one connection may have staged at once."""
        self._staging_bytes = staging_bytes
        self._staged: dict[int, NDArray[np.uint8]] = {}
        self._last_key = 0

    @property
    def staged_count(self) -> int:
        """Parts staged now, over all connections."""
        return len(self._staged)

    def sender(self) -> _LocalSender:
        return _LocalSender(self)

    def receiver(self) -> _LocalReceiver:
        return _LocalReceiver(self._staged)

    def put(self, byte_count: int) -> tuple[int, NDArray[np.uint8]]:
        """A new buffer and its name."""
        self._last_key += 1
        room = self._staged[self._last_key] = np.empty(byte_count, dtype=np.uint8)
        return self._last_key, room

    def drop(self, key: int) -> None:
        """Forget a staged buffer; later fetches of it fail."""
        del self._staged[key]

    @property
    def staging_bytes(self) -> int:
        """What one connection may have staged at once."""
        return self._staging_bytes


class _LocalSender:
    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._sizes: dict[int, int] = {}

    def stage(self, byte_count: int) -> Staged | None:
        if sum(self._sizes.values()) + byte_count > self._backend.staging_bytes:
            return None
        key, room = self._backend.put(byte_count)
        self._sizes[key] = byte_count
        return Staged(key=key, room=room, shm_name=_NAME, shm_offset=key)

    def release(self, key: int) -> None:
        del self._sizes[key]
        self._backend.drop(key)

    def close(self) -> None:
        for key in list(self._sizes):
            self.release(key)


class _LocalReceiver:
    def __init__(self, staged: dict[int, NDArray[np.uint8]]) -> None:
        self._staged = staged

    def fetch(self, data: Located, payload: Buffer) -> NDArray[np.uint8]:
        room = self._staged.get(data.shm_offset) if data.shm_name == _NAME else None
        if room is None or room.nbytes != data.byte_count:
            raise TransferFailed(f"pd: nothing of {data.byte_count} bytes is staged under {data.shm_offset}")
        return room

    def close(self) -> None:
        """Nothing is mapped, so nothing is given back."""
