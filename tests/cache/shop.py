"""A small shop around a PrefixCache for the stories of tiers: rows, a mover and a storage that end when told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serinus.cache import CacheGeometry, Lease, Match, Pages, PartPages, PrefixCache, RowView
from serinus.core.moves import Move, MoveDone, MoveKind, StorageDone
from serinus.core.parts import Part

SIZE = 4


def span(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


class HandMover:
    """Copies end when the test says so, or when somebody waits for them."""

    def __init__(self) -> None:
        self.open: dict[int, list[Move]] = {}
        self.fails: set[MoveKind] = set()
        self.waited: list[int] = []
        self._ended: list[MoveDone] = []

    def submit(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.open.setdefault(move.op, []).append(move)

    def end(self, *, ok: bool = True) -> None:
        """All open copies end."""
        for op, moves in self.open.items():
            self._ended.append(MoveDone(op=op, ok=ok and moves[0].kind not in self.fails, seconds=0.5))
        self.open.clear()

    def poll(self) -> list[MoveDone]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        self.waited += sorted(ops)
        for op in sorted(ops):
            moves = self.open.pop(op)
            self._ended.append(MoveDone(op=op, ok=moves[0].kind not in self.fails))
        return self.poll()


class HandStorage:
    """A dictionary of keys; answers come when the test says so."""

    def __init__(self) -> None:
        self.stored: set[tuple[Part, bytes]] = set()
        self.asked: list[tuple[str, int, tuple[Part, ...], list[bytes]]] = []
        self.cancelled: list[int] = []
        self._ended: list[StorageDone] = []

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        self.asked.append(("query", op, tuple(parts), list(keys)))

    def read(self, op: int, part: Part, keys: Sequence[bytes], pages: Pages) -> None:
        assert len(keys) == len(pages)
        self.asked.append(("read", op, (part,), list(keys)))

    def write(self, op: int, part: Part, keys: Sequence[bytes], pages: Pages) -> None:
        assert len(keys) == len(pages)
        self.asked.append(("write", op, (part,), list(keys)))

    def cancel(self, op: int) -> None:
        self.cancelled.append(op)

    def answer(self, kind: str, *, torn: int | None = None) -> int:
        """Everything of this kind is answered; a read brings `torn` pages at most. Returns how many."""
        mine = [entry for entry in self.asked if entry[0] == kind]
        self.asked = [entry for entry in self.asked if entry[0] != kind]
        for _, op, parts, keys in mine:
            present = tuple(np.array([(part, key) in self.stored for key in keys], np.bool_) for part in parts)
            good = len(keys) if torn is None else min(torn, len(keys))
            if kind == "write":
                self.stored |= {(parts[0], key) for key in keys}
            self._ended.append(StorageDone(op=op, present=present if kind == "query" else (), good=good))
        return len(mine)

    def poll(self) -> list[StorageDone]:
        ended, self._ended = self._ended, []
        return ended


@dataclass(slots=True, kw_only=True)
class Guest:
    """A running request."""

    rid: str
    tokens: np.ndarray
    match: Match
    row: Pages
    swa_first: int
    swa: Pages
    computed: int = field(default=0)

    @property
    def lease(self) -> Lease:
        return self.match.lease


class Shop:
    """A cache with hands: serve a prompt, keep a request seated, pass time."""

    def __init__(
        self, *, full: int = 33, swa: int = 0, window: int | None = None, host: int = 0, host_swa: int = 0,
        storage: bool = False, size: int = SIZE, **settings: Any,
    ) -> None:  # fmt: skip
        self.mover = HandMover()
        self.storage = HandStorage()
        geometry = CacheGeometry(
            page_size=size, full_pages=full, swa_pages=swa, window=window, host_full_pages=host, host_swa_pages=host_swa
        )
        self.cache = PrefixCache(
            geometry, mover=self.mover if host else None, storage=self.storage if storage else None, **settings
        )
        self.size = size

    def seat(
        self, rid: str, tokens: np.ndarray, namespace: str = "", *, load: bool = False, priority: int = 0
    ) -> Guest:
        """Match, load if asked for, allocate for the whole prompt."""
        cache = self.cache
        match = cache.match_prefix(namespace, tokens, len(tokens) - 1, priority=priority)
        row, swa_first, swa = match.pages, match.swa_first, match.swa_pages
        if load and match.load is not None:
            loaded = cache.load_back(rid, match.lease, match.load)
            assert loaded is not None, "no room to load"
            row, swa_first, swa = np.concatenate((row, loaded.pages)), loaded.swa_first, loaded.swa_pages
        count = -(-len(tokens) // self.size)
        windowed = cache.geometry.window is not None
        own = cache.allocate(rid, count - len(row), count - swa_first - len(swa) if windowed else 0)
        assert own is not None, "no room"
        return Guest(
            rid=rid, tokens=tokens, match=match, row=np.concatenate((row, own.full)), swa_first=swa_first,
            swa=np.concatenate((swa, own.swa)), computed=match.lease.end,
        )  # fmt: skip

    def publish(self, guest: Guest, computed: int) -> None:
        """Compute up to here and insert; rows are rewritten before the duplicates go."""
        start, size = guest.lease.end, self.size
        low = start // size
        first = max(guest.swa_first, low)
        own = PartPages(full=guest.row[low:], swa=guest.swa[first - guest.swa_first :])
        insertion = self.cache.insert(guest.lease, guest.tokens[start:computed], own, start, first)
        guest.row[low : low + len(insertion.pages)] = insertion.pages
        at = insertion.swa_first - guest.swa_first
        guest.swa[at : at + len(insertion.swa_pages)] = insertion.swa_pages
        self.cache.commit_row(insertion)
        guest.computed = computed

    def leave(self, guest: Guest, computed: int | None = None, *, park: bool = False) -> None:
        """The only exit."""
        end = len(guest.tokens) if computed is None else computed
        pages = PartPages(full=guest.row, swa=guest.swa)
        self.cache.finish(guest.rid, guest.lease, guest.tokens[:end], pages, guest.swa_first, park=park)

    def serve(self, rid: str, tokens: np.ndarray, namespace: str = "", *, load: bool = False) -> None:
        """A request from arrival to its end."""
        self.leave(self.seat(rid, tokens, namespace, load=load))

    def settle(self) -> None:
        """Poll until no copy is under way; storage answers stay the test's."""
        for _ in range(4):
            self.cache.poll()
            self.mover.end()
        self.cache.poll()

    def lengths(self, tokens: np.ndarray, namespace: str = "") -> tuple[int, int]:
        """What a probe says: device, total."""
        probe = self.cache.probe(namespace, tokens)
        return probe.device, probe.total

    def check(self, *guests: Guest) -> None:
        """All invariants, with the rows of all running requests."""
        self.cache.sanity_check(
            [RowView(rid=g.rid, lease=g.lease, pages=g.row, swa_first=g.swa_first, swa_pages=g.swa) for g in guests]
        )
