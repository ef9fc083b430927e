"""A small shop around a PrefixCache for the stories of tiers: rows, a mover and a storage that end when told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serinus.cache import CacheGeometry, Lease, Match, Pages, PartGeometry, PrefixCache, RowView
from serinus.cache.keys import PageKeys
from serinus.core.moves import Move, MoveDone, MoveKind, PageOrigin, StorageDone
from serinus.core.parts import PageSpan, Part

SIZE = 4


def span(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


class HandMover:
    """Copies end when the test says so, or when the cache waits for them."""

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
        self.recalls: list[bytes] = []
        self._ended: list[StorageDone] = []

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        self.asked.append(("query", op, tuple(parts), list(keys)))

    def read(self, op: int, part: Part, keys: Sequence[bytes], pages: Pages, origin: PageOrigin | None = None) -> None:
        self.asked.append(("read", op, (part,), list(keys)))
        self._check(pages, keys, origin)

    def write(self, op: int, part: Part, keys: Sequence[bytes], pages: Pages, origin: PageOrigin | None = None) -> None:
        self.asked.append(("write", op, (part,), list(keys)))
        self._check(pages, keys, origin)

    def _check(self, pages: Pages, keys: Sequence[bytes], origin: PageOrigin | None) -> None:
        """What the cache says of the pages leads to their keys."""
        assert origin is not None
        assert len(keys) == len(pages)
        names = PageKeys("", len(origin.tokens) // len(keys))
        assert names.split(names.chain(origin.before, origin.tokens.tobytes())) == set(keys)
        assert origin.start or origin.before in {names.seed(ns) for ns in (b"", b"x", b"salt")}

    def remove(self, op: int, keys: Sequence[bytes]) -> None:
        self.asked.append(("remove", op, (), list(keys)))

    def recalled(self) -> Sequence[bytes]:
        found, self.recalls = self.recalls, []
        return found

    def cancel(self, op: int) -> None:
        self.cancelled.append(op)

    def fail(self, op: int) -> None:
        """This removal did not succeed."""
        self._ended.append(StorageDone(op=op, error="the test says so"))

    def answer(self, kind: str, *, torn: int | None = None, bad: tuple[int, ...] = ()) -> int:
        """Everything of this kind is answered; a read brings `torn` pages at most, `bad` pages of a write are not what
        their stamps vouch for. Returns how many."""
        mine = [entry for entry in self.asked if entry[0] == kind]
        self.asked = [entry for entry in self.asked if entry[0] != kind]
        for _, op, parts, keys in mine:
            present = tuple(np.array([(part, key) in self.stored for key in keys], np.bool_) for part in parts)
            good = len(keys) if torn is None else min(torn, len(keys))
            if kind == "write":
                good = min((good, *bad))
                self.stored |= {(parts[0], key) for key in keys[:good]}
            if kind == "remove":
                self.stored = {entry for entry in self.stored if entry[1] not in keys}
            self._ended.append(StorageDone(op=op, present=present if kind == "query" else (), good=good, bad=bad))
        return len(mine)

    def poll(self) -> list[StorageDone]:
        ended, self._ended = self._ended, []
        return ended


def full(first: int, pages: np.ndarray) -> tuple[PageSpan, ...]:
    """The pages of a cache that has FULL alone."""
    return (PageSpan(part=Part.FULL, first=first, pages=pages),)


@dataclass(slots=True, kw_only=True)
class Guest:
    """A running request with its lease."""

    rid: str
    tokens: np.ndarray
    match: Match
    rows: dict[Part, PageSpan]
    computed: int = field(default=0)

    @property
    def lease(self) -> Lease:
        return self.match.lease

    @property
    def row(self) -> Pages:
        """The FULL pages of its row."""
        return self.rows[Part.FULL].pages

    @property
    def swa(self) -> Pages:
        """The SWA pages of its row."""
        return self.rows[Part.SWA].pages

    @property
    def spans(self) -> tuple[PageSpan, ...]:
        return tuple(self.rows.values())

    def extend(self, given: Sequence[Pages]) -> None:
        """More pages of each part."""
        for span, pages in zip(self.spans, given, strict=True):
            whole = np.concatenate((span.pages, pages))
            self.rows[span.part] = PageSpan(part=span.part, first=span.first, pages=whole)

    def drop(self, part: Part, count: int) -> PageSpan:
        """Its first pages of a part are not its own any more; returns them."""
        span = self.rows[part]
        self.rows[part] = PageSpan(part=part, first=span.first + count, pages=span.pages[count:])
        return PageSpan(part=part, first=span.first, pages=span.pages[:count])


class Shop:
    """A cache driven by hand: serve a prompt, keep a request running, pass time."""

    def __init__(
        self, *, full: int = 33, swa: int = 0, window: int | None = None, host: int = 0, host_swa: int = 0,
        storage: bool = False, size: int = SIZE, **settings: Any,
    ) -> None:  # fmt: skip
        self.mover = HandMover()
        self.storage = HandStorage()
        parts = {Part.FULL: PartGeometry(pages=full, host_pages=host)}
        if swa:
            parts[Part.SWA] = PartGeometry(pages=swa, host_pages=host_swa, window=window)
        self.cache = PrefixCache(
            CacheGeometry(page_size=size, parts=parts), mover=self.mover if host else None,
            storage=self.storage if storage else None, **settings,
        )  # fmt: skip
        self.size = size

    def seat(
        self, rid: str, tokens: np.ndarray, namespace: str = "", *, load: bool = False, priority: int = 0
    ) -> Guest:
        """Match, load if asked for, allocate for the whole prompt."""
        cache = self.cache
        match = cache.match_prefix(namespace, tokens, len(tokens) - 1, priority=priority)
        cache.used(match.lease, match.length)
        rows = {span.part: span for span in match.spans}
        if load and match.load is not None:
            loaded = cache.load_back(rid, match.lease, match.load)
            assert loaded is not None, "no room to load"
            rows = {span.part: span for span in loaded.spans}
            rows[Part.FULL] = full(0, np.concatenate((match.pages, loaded.pages)))[0]
        guest = Guest(rid=rid, tokens=tokens, match=match, rows=rows, computed=match.lease.end)
        own = cache.allocate(rid, *[-(-len(tokens) // self.size) - span.end for span in guest.spans])
        assert own is not None, "no room"
        guest.extend(own)
        return guest

    def publish(self, guest: Guest, computed: int) -> None:
        """Compute up to here and insert; rows are rewritten before the duplicates go."""
        start = guest.lease.end
        low = start // self.size
        own = tuple(
            PageSpan(part=span.part, first=max(span.first, low), pages=span.pages[max(0, low - span.first) :])
            for span in guest.spans
        )
        insertion = self.cache.insert(guest.lease, guest.tokens[start:computed], own)
        for span in insertion.spans:
            at = span.first - guest.rows[span.part].first
            guest.rows[span.part].pages[at : at + len(span.pages)] = span.pages
        self.cache.commit_row(insertion)
        guest.computed = computed

    def leave(self, guest: Guest, computed: int | None = None, *, park: bool = False) -> None:
        """End a request: its computed tokens are published, its lease ends."""
        end = len(guest.tokens) if computed is None else computed
        self.cache.finish(guest.rid, guest.lease, guest.tokens[:end], guest.spans, park=park)

    def serve(self, rid: str, tokens: np.ndarray, namespace: str = "", *, load: bool = False) -> None:
        """A request from arrival to its end."""
        self.leave(self.seat(rid, tokens, namespace, load=load))

    def settle(self) -> None:
        """Poll until no copy is under way; storage answers stay the test's."""
        for _ in range(4):
            self.cache.poll()
            self.mover.end()
        self.cache.poll()

    def answer(self, kind: str, **how: Any) -> None:
        """The storage answers what it was asked of this kind, and the cache takes it."""
        self.storage.answer(kind, **how)
        self.cache.poll()

    def lengths(self, tokens: np.ndarray, namespace: str = "") -> tuple[int, int]:
        """What a probe says: device, total."""
        probe = self.cache.probe(namespace, tokens)
        return probe.device, probe.total

    def check(self, *guests: Guest) -> None:
        """All invariants, with the rows of all running requests."""
        self.cache.sanity_check([RowView(rid=g.rid, lease=g.lease, spans=g.spans) for g in guests])
