"""MemoryStorage: pages in a dictionary, for tests and for engines of one process that share it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.pool.host import HostPool
from serinus.pool.storage.io import QueuedStorage, ShelfCounts
from serinus.pool.workers import ThreadWorkers, Workers

__all__ = ["MemoryStorage", "PageDict"]


class PageDict:
    """The shelf: one dictionary, which outlives the storage that writes it."""

    def __init__(self, pages: dict[tuple[Part, bytes], bytes]) -> None:
        self._pages = pages

    def has(self, part: Part, key: bytes) -> bool:
        return (part, key) in self._pages

    def load(self, part: Part, key: bytes, into: NDArray[np.uint8]) -> bool:
        data = self._pages.get((part, key))
        if data is None or len(data) != into.nbytes:
            return False
        into[:] = np.frombuffer(data, np.uint8)
        return True

    def save(self, part: Part, key: bytes, data: NDArray[np.uint8]) -> None:
        self._pages.setdefault((part, key), data.tobytes())

    def counts(self) -> ShelfCounts:
        held = list(self._pages.values())
        return ShelfCounts(pages=len(held), byte_count=sum(map(len, held)))

    def close(self) -> None:
        """Nothing to give back."""


class MemoryStorage(QueuedStorage):
    """A PageStorage over a dictionary."""

    def __init__(
        self,
        pages: dict[tuple[Part, bytes], bytes] | None = None,
        *,
        host: Mapping[Part, HostPool],
        clock: Clock,
        workers: Workers | None = None,
    ) -> None:
        """`pages`: the dictionary, None = a new one; `host`: where reads go and writes come from."""
        super().__init__(
            PageDict({} if pages is None else pages),
            host=host,
            clock=clock,
            workers=workers or ThreadWorkers("serinus-storage"),
        )
