"""Removal of condemned pages from the storage: by this engine, and by others that share it.

A key that was condemned is read no more until the storage has answered that its pages are gone; what is recomputed
under the key afterwards is stored and read like any other page. Which pages are wrong is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection

from serinus.cache.copies import CopyTable
from serinus.cache.ports import PageStorage
from serinus.cache.prefetch import Prefetches
from serinus.core.log import get_logger
from serinus.core.moves import StorageDone

_log = get_logger("cache")


class StorageRemovals:
    """The removals of one engine."""

    def __init__(self, table: CopyTable, storage: PageStorage, prefetches: Prefetches, banned: set[bytes]) -> None:
        """`banned`: keys that must not be read: what others add here is removed, and taken out when it is gone."""
        self._table, self._storage, self._prefetches = table, storage, prefetches
        self._banned = banned
        self._told: set[bytes] = set()
        """Of them, those of which the storage was told."""
        self._by_op: dict[int, frozenset[bytes]] = {}
        self.pages = 0
        """Counter: stored pages that were removed, those that continued condemned ones included."""

    @property
    def in_flight(self) -> int:
        """Removals that are not answered."""
        return len(self._by_op)

    def drain(self) -> None:
        """Have the storage remove what was banned since the last call. Cost: nothing where that is nothing."""
        if len(self._banned) == len(self._told):
            return
        keys = self._banned - self._told
        self._told |= keys
        self._prefetches.refuse(keys)
        op = self._table.take_op()
        self._by_op[op] = frozenset(keys)
        self._storage.remove(op, sorted(keys))

    def done(self, done: StorageDone) -> bool:
        """A removal was answered; False if it is not one of these. Where it failed the keys stay banned."""
        keys = self._by_op.pop(done.op, None)
        if keys is None:
            return False
        self.pages += done.good
        if done.error:
            _log.warning(
                "cache: %d condemned pages may still be stored, and are not read by this engine: %s",
                len(keys), done.error,
            )  # fmt: skip
            return True
        self._banned -= keys
        self._told -= keys
        return True

    def recalled(self) -> Collection[bytes]:
        """Keys that another engine removed since the last call; nothing that was read under them becomes a node."""
        keys = self._storage.recalled()
        if keys:
            self._prefetches.refuse(set(keys))
        return keys
