"""A mover and a store that move numbers instead of KV; the test says when each copy ends, and how. Torch-free.

Content is one uint64 per token slot, in an array per tier and part; the device arrays belong to what computes (a
FakeRunner, a test's world). Whatever a copy is about to fill holds POISON until the bytes really came, so a page that
is read too early, reused too early or never filled shows itself by its content. Every page that a copy or a storage
operation reads or writes is watched: two that collide, or a source that changes under its copy, fail where it happens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import Move, MoveDone, MoveKind, PageOrigin, StorageDone
from serinus.core.parts import Part

Content = NDArray[np.uint64]
"""One number per token slot; pools are [page, offset]."""

StoredPages = dict[tuple[bytes, Part], Content]
"""What a storage keeps, by key and part: hand the same dict to the storage of a restarted engine."""

POISON = 1 << 63
"""Set in every slot of a page whose bytes have not come (or never will); the low bits tell which operation's."""


class PageUse:
    """Which pages operations in flight read and write, over all tiers: nothing else may touch them."""

    def __init__(self) -> None:
        self.readers: dict[tuple[str, Part, int], int] = {}
        """(tier, part, page) -> how many operations read it now."""
        self.writers: dict[tuple[str, Part, int], str] = {}
        """(tier, part, page) -> the operation that writes it now."""

    def begin(self, name: str, tier: str, part: Part, pages: NDArray[np.int32], *, write: bool) -> None:
        """`name` reads (or writes) these pages from now on."""
        listed = pages.tolist()
        assert 0 not in listed, f"testing: {name} touches the padding page of {tier} {part.name}: {listed}"
        assert not write or len(set(listed)) == len(listed), f"testing: {name} writes a page twice: {listed}"
        for page in listed:
            at = (tier, part, page)
            assert at not in self.writers, f"testing: C1 {name} touches {at}, which {self.writers[at]} writes"
            if write:
                assert at not in self.readers, f"testing: C1 {name} writes {at}, which {self.readers[at]} others read"
                self.writers[at] = name
            else:
                self.readers[at] = self.readers.get(at, 0) + 1

    def end(self, tier: str, part: Part, pages: NDArray[np.int32], *, write: bool) -> None:
        """The opposite of `begin`."""
        for page in pages.tolist():
            at = (tier, part, page)
            if write:
                del self.writers[at]
            elif self.readers[at] == 1:
                del self.readers[at]
            else:
                self.readers[at] -= 1

    def of(self, tier: str, part: Part) -> set[int]:
        """Pages of one pool that something in flight reads or writes."""
        return {page for t, p, page in (*self.readers, *self.writers) if t == tier and p == part}


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A copy in flight."""

    moves: tuple[Move, ...]
    then: tuple[Content, ...]
    """What its sources held when it was submitted."""
    landed: bool = False


_TIERS = {MoveKind.BACKUP: ("device", "host"), MoveKind.LOAD: ("host", "device")}


class FakeMover:
    """A PageMover over arrays of numbers.

    `pending` are the copies that have not ended, oldest first. `finish(op)` ends one, in any order; `fail(op)` makes it
    end badly whenever it does. `gate()` is what the layers of a forward pass do: every load submitted by then lands.

    Args:
        page_size: slots per page.
        device: content of the device pools by part, page_count * page_size contiguous numbers of any shape; written
            here.
        host_pages: pages of each host pool, page 0 (padding) included.
        auto: every copy ends by itself at the next `poll`: for tests that do not care for the order.
        early: bytes move when a copy is submitted, not when it ends (the cache must not see a difference).
    """

    def __init__(
        self,
        *,
        page_size: int,
        device: Mapping[Part, Content],
        host_pages: Mapping[Part, int],
        auto: bool = False,
        early: bool = False,
    ) -> None:
        host = {part: np.zeros((count, page_size), np.uint64) for part, count in host_pages.items()}
        flat = {part: pool.reshape(-1, page_size) for part, pool in device.items()}
        for part, pool in flat.items():
            assert np.shares_memory(pool, device[part]), f"testing: the device pool of {part.name} is not contiguous"
        self.pools: dict[str, dict[Part, Content]] = {"device": flat, "host": host}
        self.use = PageUse()
        self.auto = auto
        self.early = early
        self.pending: dict[int, _Copy] = {}
        self.failing: set[int] = set()
        """Copies that will end badly."""
        self.submitted: list[int] = []
        """Every copy there was, in order."""
        self.failed_pages: dict[int, tuple[Move, ...]] = {}
        """Loads that failed (or, of those past the gate, will fail): their targets hold POISON."""
        self._done: dict[int, MoveDone] = {}

    @property
    def host(self) -> dict[Part, Content]:
        """Content of the host pools."""
        return self.pools["host"]

    def submit(self, moves: Sequence[Move]) -> None:
        assert moves, "testing: a copy without moves"
        ops: dict[int, list[Move]] = {}
        for move in moves:
            ops.setdefault(move.op, []).append(move)
        for op, mine in ops.items():
            self._begin(op, mine)

    def _begin(self, op: int, moves: list[Move]) -> None:
        kind = moves[0].kind
        assert op > 0, f"testing: copy {op}, expected numbers from 1"
        assert op not in self.submitted, f"testing: number {op} is used twice"
        assert all(m.kind is kind for m in moves), f"testing: {moves} are not one copy"
        source, target = _TIERS[kind]
        then = []
        for move in moves:
            assert len(move.source) == len(move.target) > 0, f"testing: {move} has other sources than targets"
            self.use.begin(f"copy {op}", source, move.part, move.source, write=False)
            self.use.begin(f"copy {op}", target, move.part, move.target, write=True)
            then.append(self.pools[source][move.part][move.source])
            self.pools[target][move.part][move.target] = np.uint64(POISON | op)
        self.submitted.append(op)
        self.pending[op] = _Copy(moves=tuple(moves), then=tuple(then))
        if self.early and op not in self.failing:
            self._land(op)

    def fail(self, op: int) -> None:
        """Copy `op`, still pending, will end badly: part of its bytes came, or none."""
        copy = self.pending[op]
        self.failing.add(op)
        if copy.landed:
            self._spoil(op)

    def gate(self) -> None:
        """A forward pass begins: the bytes of every load submitted so far are there (or never will be)."""
        for op, copy in self.pending.items():
            if copy.moves[0].kind is not MoveKind.LOAD:
                continue
            if op in self.failing:
                self.failed_pages[op] = copy.moves
            elif not copy.landed:
                self._land(op)

    def finish(self, op: int) -> None:
        """Copy `op` ends now; the next `poll` tells."""
        copy = self.pending[op]
        ok = op not in self.failing
        if ok and not copy.landed:
            self._land(op)
        elif ok:
            self._check_sources(op)
        source, target = _TIERS[copy.moves[0].kind]
        if not ok:
            self._spoil(op)
            if copy.moves[0].kind is MoveKind.LOAD:
                self.failed_pages[op] = copy.moves
        for move in copy.moves:
            self.use.end(source, move.part, move.source, write=False)
            self.use.end(target, move.part, move.target, write=True)
        del self.pending[op]
        self.failing.discard(op)
        pages = sum(len(move.source) for move in copy.moves) if ok else 0
        self._done[op] = MoveDone(op=op, ok=ok, error="" if ok else "the test says so", byte_count=8 * pages)

    def poll(self) -> list[MoveDone]:
        if self.auto:
            for op in list(self.pending):
                self.finish(op)
        done = [self._done[op] for op in sorted(self._done, key=self.submitted.index)]
        self._done.clear()
        return done

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        """See PageMover: the copies asked for end now, as they must."""
        for op in sorted(ops):
            assert op in self.pending or op in self._done, f"testing: wait for copy {op}, which is not under way"
            if op in self.pending:
                self.finish(op)
        return self.poll()

    @property
    def unpolled(self) -> tuple[int, ...]:
        """Copies that ended and that no `poll` has told of."""
        return tuple(self._done)

    def _land(self, op: int) -> None:
        """The bytes move, all of them."""
        copy = self.pending[op]
        self._check_sources(op)
        source, target = _TIERS[copy.moves[0].kind]
        for move in copy.moves:
            self.pools[target][move.part][move.target] = self.pools[source][move.part][move.source]
        copy.landed = True

    def _spoil(self, op: int) -> None:
        """It fails half way: the first page of each move may have come, the others hold POISON."""
        copy = self.pending[op]
        _, target = _TIERS[copy.moves[0].kind]
        for move in copy.moves:
            self.pools[target][move.part][move.target[op % 2 :]] = np.uint64(POISON | op)

    def _check_sources(self, op: int) -> None:
        copy = self.pending[op]
        source, _ = _TIERS[copy.moves[0].kind]
        for move, then in zip(copy.moves, copy.then, strict=True):
            now = self.pools[source][move.part][move.source]
            # A backup may read a page whose load has not landed when it is submitted, and has when it reads.
            changed = (now != then) & (then < POISON)
            assert not changed.any(), (
                f"testing: source pages {move.source[changed.any(1)].tolist()} of copy {op} ({move.kind.value},"
                f" {move.part.name}) changed under it, expected them to be pinned"
            )


class StorageKind(Enum):
    """What a storage operation does."""

    QUERY = "query"
    READ = "read"
    WRITE = "write"
    REMOVE = "remove"


@dataclass(slots=True, kw_only=True)
class _StorageOp:
    """A storage operation in flight."""

    kind: StorageKind
    keys: tuple[bytes, ...]
    parts: tuple[Part, ...]
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    then: Content = field(default_factory=lambda: np.empty(0, np.uint64))
    cancelled: bool = False


class FakeStorage:
    """A PageStorage over a dict; `pending` operations end when `finish(op)` says so, well, partly, or with nothing.

    Args:
        stored: what is stored, by key and part; shared by the storages of engines that share it.
        host: content of the host pools by part ([page, offset]): FakeMover's `host`.
        use: FakeMover's `use`, so that copies and storage operations that collide are seen.
        auto: every operation ends by itself at the next `poll`.
    """

    def __init__(
        self, stored: StoredPages, *, host: Mapping[Part, Content], use: PageUse | None = None, auto: bool = False
    ) -> None:
        self.stored = stored
        self.host = host
        self.use = PageUse() if use is None else use
        self.auto = auto
        self.pending: dict[int, _StorageOp] = {}
        self.submitted: list[int] = []
        self.recalls: list[bytes] = []
        """What another engine is about to be known to have removed."""
        self._before: dict[bytes, bytes] = {}
        self._done: list[StorageDone] = []

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        self._begin(op, _StorageOp(kind=StorageKind.QUERY, keys=tuple(keys), parts=tuple(parts)))

    def read(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        assert len(keys) == len(pages) > 0, f"testing: {len(keys)} keys into {len(pages)} pages"
        self._begin(op, _StorageOp(kind=StorageKind.READ, keys=tuple(keys), parts=(part,), pages=pages.copy()))
        self.use.begin(f"storage read {op}", "host", part, pages, write=True)
        self.host[part][pages] = np.uint64(POISON | op)

    def write(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        assert len(keys) == len(pages) > 0, f"testing: {len(keys)} keys for {len(pages)} pages"
        if origin is not None:
            self._before.update(zip(keys, (origin.before, *keys), strict=False))
        work = _StorageOp(kind=StorageKind.WRITE, keys=tuple(keys), parts=(part,), pages=pages.copy())
        work.then = self.host[part][pages]
        self._begin(op, work)
        self.use.begin(f"storage write {op}", "host", part, pages, write=False)

    def remove(self, op: int, keys: Sequence[bytes]) -> None:
        self._begin(op, _StorageOp(kind=StorageKind.REMOVE, keys=tuple(keys), parts=()))

    def recalled(self) -> list[bytes]:
        found, self.recalls = self.recalls, []
        return found

    def cancel(self, op: int) -> None:
        """As PageStorage; the test decides how much sooner the operation ends."""
        if op in self.pending:
            self.pending[op].cancelled = True

    def poll(self) -> list[StorageDone]:
        if self.auto:
            for op in list(self.pending):
                self.finish(op)
        done, self._done = self._done, []
        return done

    @property
    def unpolled(self) -> int:
        """Operations that ended and that no `poll` has told of."""
        return len(self._done)

    def finish(self, op: int, good_max: int | None = None) -> None:
        """Operation `op` ends now, with `good_max` pages done at most: 0 = it is lost, None = all there are."""
        work = self.pending.pop(op)
        limit = len(work.keys) if good_max is None else min(good_max, len(work.keys))
        error = "" if limit == len(work.keys) else "the test says so"
        if work.kind is StorageKind.QUERY:
            found = tuple(
                np.array([i < limit and (key, part) in self.stored for i, key in enumerate(work.keys)], np.bool_)
                for part in work.parts
            )
            self._done.append(StorageDone(op=op, present=found, error=error))
            return
        if work.kind is StorageKind.REMOVE:
            gone = self._continuing(set(work.keys)) if limit else []
            self.lose(gone)
            self._done.append(StorageDone(op=op, good=len(gone), error=error))
            return
        reads = work.kind is StorageKind.READ
        good = self._read(work, limit) if reads else self._write(op, work, limit)
        self.use.end("host", work.parts[0], work.pages, write=reads)
        self._done.append(StorageDone(op=op, good=good, error=error, byte_count=8 * good))

    def lose(self, keys: Iterable[tuple[bytes, Part]]) -> None:
        """These pages are stored no more (a size bound, a torn file)."""
        for key in list(keys):
            self.stored.pop(key, None)

    def _continuing(self, keys: set[bytes]) -> list[tuple[bytes, Part]]:
        """What is stored of these keys and of all that come after one of them."""
        while more := {key for key, before in self._before.items() if before in keys} - keys:
            keys |= more
        return [entry for entry in self.stored if entry[0] in keys]

    def _begin(self, op: int, work: _StorageOp) -> None:
        assert op > 0, f"testing: storage operation {op}, expected numbers from 1"
        assert op not in self.submitted, f"testing: number {op} is used twice"
        assert work.keys, f"testing: {work} asks for nothing"
        assert all(len(key) == 16 for key in work.keys), f"testing: {work.keys}, expected keys of 16 bytes"
        assert len(set(work.keys)) == len(work.keys), f"testing: {work.kind.value} {op} names a key twice: {work.keys}"
        self.submitted.append(op)
        self.pending[op] = work

    def _read(self, work: _StorageOp, limit: int) -> int:
        part = work.parts[0]
        for good, (key, page) in enumerate(zip(work.keys, work.pages.tolist(), strict=True)):
            found = self.stored.get((key, part))
            if good >= limit or found is None:
                return good
            self.host[part][page] = found
        return len(work.keys)

    def _write(self, op: int, work: _StorageOp, limit: int) -> int:
        part = work.parts[0]
        now = self.host[part][work.pages]
        assert (now == work.then).all(), f"testing: pages {work.pages.tolist()} changed under storage write {op}"
        for key, content in zip(work.keys[:limit], now[:limit], strict=True):
            there = self.stored.get((key, part))
            assert there is None or (there == content).all(), (
                f"testing: key {key.hex()} ({part.name}) stands for two contents, {there} and {content}"
            )
            self.stored[key, part] = content.copy()
        return limit
