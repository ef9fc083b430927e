"""What the worlds of this room share: pools of hashes, the cache under test, and the oracles.

Content: every slot holds a hash of all that shapes its KV (model.py). Residency: after each operation the lists of the
tree are compared with what they were: only the changes that this operation may make are allowed, and those it must make
are required. Invariants: `sanity_check` with all rows, after every step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import CapacityError
from serinus.core.parts import PageSpan, Part
from serinus.testing.fake_mover import POISON, FakeMover, FakeStorage, StoredPages
from tests.cache.model import (
    DEVICE_FULL,
    HOST_FULL,
    POOLS,
    Change,
    Order,
    Pool,
    Prefix,
    Shape,
    Snapshot,
    compare,
    page_content,
    prefixes,
    take_snapshot,
    words,
)

NONE: NDArray[np.int32] = np.empty(0, np.int32)
HOST_GAINS = tuple(("gained", pool) for pool in POOLS if pool[0] == "host")
HOST_LOSSES = tuple(("lost", pool) for pool in POOLS if pool[0] == "host")
DEVICE_GAINS = tuple(("gained", pool) for pool in POOLS if pool[0] == "device")
DEVICE_LOSSES = tuple(("lost", pool) for pool in POOLS if pool[0] == "device")
EVICTION = (*DEVICE_LOSSES, *HOST_GAINS, *HOST_LOSSES)
"""What making room on the device may change."""
READ_BATCH_PAGES = 2
"""So few that a prefetch reads in several batches although the pools are small."""
SWEEP_EVERY = 4
"""Checks between two complete sweeps of a pool; they take the pools in turn."""


@dataclass(slots=True, kw_only=True)
class Req:
    """One request of the tiny engine."""

    rid: str
    namespace: str
    tokens: list[int]
    prompt_len: int
    priority: int = 0
    lazy: bool = False
    """Whether it takes the pages of parts with a window chunk by chunk."""
    lease: Any = None
    rows: dict[Part, PageSpan] = field(default_factory=dict)
    """Its pages, by part; of one with a window from the first that it keeps."""
    computed: int = 0
    plan_end: int = 0
    """How far a plan to load reaches that its lease has not used, dropped or lost by publishing."""
    bad: bool = False
    """It has read a page whose load failed: what it computes is wrong, and it must be told."""

    @property
    def row(self) -> NDArray[np.int32]:
        """The FULL pages of its row."""
        return self.rows[Part.FULL].pages

    @property
    def spans(self) -> tuple[PageSpan, ...]:
        """Its pages as the cache takes them."""
        return tuple(self.rows.values())

    def extend(self, part: Part, pages: NDArray[np.int32]) -> None:
        """More pages behind those of a part."""
        span = self.rows[part]
        self.rows[part] = PageSpan(part=part, first=span.first, pages=np.concatenate((span.pages, pages)))

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.array(self.tokens, np.int32)


@dataclass(slots=True, kw_only=True)
class Held:
    """A hold, and what its pages held when it began."""

    name: str
    part: Part
    pages: NDArray[np.int32]
    content: NDArray[np.uint64]


class Base:
    """Pools, requests and holds around one PrefixCache, and what is checked about them.

    `cache_room` is the module `serinus.cache`, or a mutant of it. `rewrite_rows=False` is the scheduler's own mutant.
    `early`: bytes of copies move when they are submitted, not when they end. `stored`: what the storage has.
    `engine`: the engine's namespace (model, revision, dtype, layout).
    """

    def __init__(
        self,
        cache_room: ModuleType,
        shape: Shape,
        *,
        rewrite_rows: bool = True,
        early: bool = False,
        stored: StoredPages | None = None,
        engine: str = "bf16",
    ) -> None:
        self.room = cache_room
        self.shape = shape
        self.size = shape.page_size
        self.rewrite_rows = rewrite_rows
        self.early = early
        self.stored: StoredPages = {} if stored is None else stored
        self.engine = engine
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.holds: list[Held] = []
        self.arrived = 0
        self.boot()

    def boot(self) -> None:
        """A new engine process over the same storage: nothing else survives."""
        shape = self.shape
        self.pool = {part: np.zeros((shape.pages(("device", part)), self.size), np.uint64) for part in shape.parts}
        host = {part: shape.pages(("host", part)) for part in shape.parts} if shape.tiered else {}
        self.mover = FakeMover(page_size=self.size, device=self.pool, host_pages=host, early=self.early)
        self.storage = FakeStorage(self.stored, host=self.mover.host, use=self.mover.use) if shape.storage else None
        self.cache = self.new_cache(self.mover if shape.tiered else None, self.storage)
        self.order = Order(shape)
        self.seen = Snapshot()

    def new_cache(self, mover: Any, storage: Any) -> Any:
        """A cache of this shape over these ports."""
        shape, room = self.shape, self.room
        parts = {
            part: room.PartGeometry(pages=each.pages, host_pages=each.host_pages, window=each.window)
            for part, each in shape.parts.items()
        }
        geometry = room.CacheGeometry(page_size=self.size, parts=parts, read_batch_pages=READ_BATCH_PAGES)
        return room.PrefixCache(
            geometry, policy=shape.policy, write_policy=shape.write_policy, mover=mover, storage=storage,
            namespace=self.engine,
        )  # fmt: skip

    # What is there

    def path(self, req: Req, end: int | None = None) -> list[Prefix]:
        """The whole-page prefixes of a request's tokens up to `end`."""
        return prefixes(req.namespace, req.tokens[:end], self.size)

    def changed(self) -> Change:
        """What happened since the last look."""
        before, self.seen = self.seen, take_snapshot(self.cache, self.size)
        return compare(before, self.seen)

    def pinned(self, extra: list[Prefix] | None = None) -> set[Prefix]:
        """FULL that live leases keep on the device."""
        found = {prefix for req in self.running for prefix in self.path(req, max(req.lease.end, req.plan_end))}
        return found | set(extra or ())

    def window_pinned(self, part: Part, extra: list[Prefix] | None = None) -> set[Prefix]:
        """What running requests still read of a part with a window. `extra`: the path of one more lease."""
        found = {prefix for r in self.running for prefix in self.path(r, r.lease.end)[r.rows[part].first :]}
        return found | set(() if extra is None else extra[self.shape.first(part, len(extra) * self.size) :])

    def held(self, part: Part) -> set[int]:
        """Device pages with holds."""
        return {page for h in self.holds if h.part == part for page in h.pages.tolist()}

    def ledger(self, pool: Pool) -> Any:
        """The ledger of one pool."""
        tier = self.room.Tier.DEVICE if pool[0] == "device" else self.room.Tier.HOST
        return self.cache.ledgers[tier, pool[1]]

    @property
    def quiet(self) -> bool:
        """Nothing is under way, and nothing that ended is untold."""
        storage = self.storage
        return not (
            self.mover.pending or self.mover.unpolled or (storage is not None and (storage.pending or storage.unpolled))
        )

    # Transfers that touch pages

    def hold(self, which: int, first: int, count: int, name: str, part: Part = Part.FULL) -> None:
        """A transfer begins to read some computed pages of a running request."""
        req = self.running[which % len(self.running)]
        span = req.rows[part]
        computed = -(-req.computed // self.size) - span.first
        if computed > 0 and not req.bad:
            first %= computed
            pages = span.pages[first : min(computed, first + count)].copy()
            self.mover.gate()
            self.cache.hold(name, pages, part)
            self.holds.append(Held(name=name, part=part, pages=pages, content=self.pool[part][pages].copy()))
            self.changed().only()

    def unhold(self, which: int) -> None:
        """The transfer is over: what it held then, it must hold still, unless the load that was to bring it failed.

        A request may have filled its last page on.
        """
        held = self.holds.pop(which % len(self.holds))
        now = self.pool[held.part][held.pages]
        same = (now == held.content) | (held.content == 0) | (held.content >= POISON) | (now >= POISON)
        assert same.all(), f"I5 {held} changed under its hold to {now}"
        self.cache.unhold(held.name, held.pages, held.part)
        self.changed().only()

    # Eviction and flush

    def evict(self, enough: int, pool: Pool = DEVICE_FULL) -> None:
        """An eviction from outside."""
        device = pool[0] == "device"
        tier = self.room.Tier.DEVICE if device else self.room.Tier.HOST
        possible = self.cache.evictable(pool[1]) if device else 0
        free = self.ledger(pool).free_pages
        told = self.cache.evict(enough, tier, pool[1])
        change = self.changed()
        freed = self.ledger(pool).free_pages - free
        assert told == freed >= min(enough, possible), f"{told} told, {freed} came free, {possible} could"
        if device:
            known = {DEVICE_FULL: enough} | {("device", part): 0 for part in self.shape.windows}
            self.check_eviction(change, known.get(pool))
        else:
            change.only(*HOST_LOSSES)
            self.failures += any(change.lost[pool] for _, pool in HOST_LOSSES)

    def check_eviction(
        self,
        change: Change,
        enough: int | None,
        pins: list[Prefix] | None = None,
        window_pins: list[Prefix] | None = None,
    ) -> None:
        """What went might go; where nothing blurs it, it is what the policy says.

        enough: FULL pages that had to go; None = unknown. Pins: the path of a lease whose request does not run yet.
        """
        change.only(*EVICTION)
        if self.untold:
            return
        gone = change.lost[DEVICE_FULL].keys()
        pinned = gone & self.pinned(pins)
        assert not pinned, f"L1 pinned prefixes were evicted: {words(pinned)}"
        for part in self.shape.windows:
            pinned = change.lost["device", part].keys() & self.window_pinned(part, window_pins)
            assert not pinned, f"L2 {part.name} that a window still reads was evicted: {words(pinned)}"
        if not self.shape.tiered and enough is not None and not self.holds:
            expected = set(self.order.victims(enough, self.pinned(pins)))
            assert gone == expected, f"the eviction took {words(gone)}, the policy says {words(expected)}"
        self.order.keep(self.seen.where[DEVICE_FULL])
        self.check_dropped(change)

    def check_dropped(self, change: Change) -> None:
        """Under write_back nothing leaves the device without its copy while the host has room for it."""
        if self.shape.write_policy != "write_back" or not self.shape.tiered:
            return
        dropped = [p for p in change.lost[DEVICE_FULL] if p not in self.seen.where[HOST_FULL]]
        if dropped and not self.failures:
            room = min(self.ledger(("host", part)).free_pages for part in self.shape.parts)
            assert room < len(dropped), f"dropped with {room} host pages free: {words(dropped)}"

    looks = 0
    """How many checks of the host ran so far."""
    failures = 0
    """What kept the host from having what it should have: copies that failed, pages that it was told to give up."""

    def flush(self) -> None:
        """Empties an idle cache; refuses, and says why, otherwise."""
        busy, quiet = bool(self.running or self.holds), self.quiet
        refusal = ""
        try:
            self.cache.reset()
        except CapacityError as error:
            refusal = str(error)
        if busy or quiet:
            assert bool(refusal) == busy, f"flush: busy is {busy}, the cache says {refusal!r}"
        change = self.changed()
        if refusal:
            change.only()
        else:
            assert not any(self.seen.where.values()), "a flushed cache is not empty"
            self.order.keep([])

    # After every step

    def check(self) -> None:
        """Compare the cache with all oracles."""
        rows = [self.room.RowView(rid=r.rid, lease=r.lease, spans=r.spans) for r in self.running]
        self.cache.sanity_check(rows)
        self.changed().only()
        for pool in self.shape.pools:
            self.check_content(pool)
            self.check_in_flight(pool)
        self.check_shape_of_residency()
        self.check_evictable()
        self.check_stored()
        self.looks += 1
        if self.looks % SWEEP_EVERY == 0:
            self.check_sweep(self.shape.pools[self.looks // SWEEP_EVERY % len(self.shape.pools)])

    def check_content(self, pool: Pool) -> None:
        """K1: every cached page holds its own prefix, or is about to be loaded, or belongs to a load that failed."""
        where = self.seen.where[pool]
        if not where:
            return
        tier, part = pool
        pages = np.fromiter(where.values(), np.int32, len(where))
        assert len(set(where.values())) == len(where), f"D1 two prefixes share a page of {pool}"
        expected = np.stack([page_content(self.engine, part, prefix, self.size) for prefix in where])
        wrong = (self.mover.pools[tier][part][pages] != expected).any(1)
        if not wrong.any():
            return
        poison = (self.mover.pools[tier][part][pages] >= POISON).any(1)
        loading = self.seen.loading[part] if tier == "device" else set()
        for at in np.flatnonzero(wrong).tolist():
            prefix = list(where)[at]
            excused = poison[at] and (prefix in loading or bool(self.mover.failed_pages))
            assert excused, f"K1 {pool} page {pages[at]} does not hold {words([prefix])}"

    def check_in_flight(self, pool: Pool) -> None:
        """C1: no page that a copy or the storage touches is free; what is being written belongs to its copy."""
        if not self.mover.use.readers and not self.mover.use.writers:
            return
        ledger = self.ledger(pool)
        busy = np.array(sorted(self.mover.use.of(*pool)), np.intp)
        loose = busy[(ledger.owner_P[busy] & 7 == self.room.PageState.FREE) & (ledger.hold_P[busy] == 0)]
        assert not len(loose), f"C1 pages {loose} of {pool} are free, and something in flight touches them"
        written = [page for tier, part, page in self.mover.use.writers if (tier, part) == pool]
        states = ledger.owner_P[written] & 7
        ours = (states == self.room.PageState.COPY) | (states == self.room.PageState.QUARANTINED)
        assert ours.all(), f"C1 {pool} pages {written} are being filled, in {states}"

    def check_shape_of_residency(self) -> None:
        """D3: FULL is on the device first, on the host alone afterwards; no other part without FULL."""
        where, step = self.seen.where, self.size * 4
        for name, data in where[DEVICE_FULL]:
            assert len(data) == step or (name, data[:-step]) in where[DEVICE_FULL], f"D3 {words([(name, data)])}"
        for prefix in where[HOST_FULL]:
            name, data = prefix
            if prefix not in where[DEVICE_FULL] and len(data) > step:
                above = (name, data[:-step])
                assert above in where[DEVICE_FULL] or above in where[HOST_FULL], f"D3 {words([prefix])} has no parent"
        for part, shape in self.shape.parts.items():
            full, mine = where[DEVICE_FULL].keys(), where["device", part].keys()
            assert mine <= full, f"D4 {part.name} on the device without FULL there"
            assert shape.window is not None or mine == full, f"D4 FULL on the device without {part.name} there"
            assert where["host", part].keys() <= where[HOST_FULL].keys() | full, f"D4 {part.name} without FULL"

    @property
    def untold(self) -> bool:
        """Whether a load failed, and ended while something waited: until the next poll leases stand on what is gone."""
        return any(op not in self.mover.pending for op in self.mover.failed_pages)

    def check_evictable(self) -> None:
        """Exactly what no lease pins and nothing holds: whole prefixes, or of a part with a window that and a slack.

        The slack of a lease is an eighth of its window, one page at least.
        """
        if self.untold:
            return
        pinned = self.pinned()
        planned = {p for r in self.running if r.plan_end for p in self.path(r, r.plan_end)}
        for part, shape in self.shape.parts.items():
            held, where = self.held(part), self.seen.where["device", part]
            needed = pinned if shape.window is None else self.window_pinned(part)
            loose = {p for p, page in where.items() if p not in needed and page not in held}
            spared = len(loose & self.seen.loading[part])
            if shape.window is not None:
                slack = max(1, -(-shape.window // self.size) // 8)
                spared = len(loose & (planned | self.seen.loading[part])) + slack * len(self.running)
            found, most = self.cache.evictable(part), len(loose)
            assert most - spared <= found <= most, f"L4 {found} {part.name} evictable, expected {most} (-{spared})"

    def check_stored(self) -> None:
        """What is stored is never the content of a load or a copy that failed."""
        if self.storage is not None:
            for (key, part), content in self.stored.items():
                assert (content < POISON).all(), f"K1 {part.name} {key.hex()} in the storage never held KV: {content}"

    def check_sweep(self, pool: Pool) -> None:
        """A sweep sees every cached slot once, at its position, with its token, behind its predecessor."""
        tier = self.room.Tier.DEVICE if pool[0] == "device" else self.room.Tier.HOST
        where, size = self.seen.where[pool], self.size
        loading = self.seen.loading[pool[1]] if pool[0] == "device" else set()
        cursor, seen = 0, 0
        pages = {page: prefix for prefix, page in where.items()}
        while True:
            part = self.cache.walk(cursor, 3 * size, tier=tier, part=pool[1])
            found = zip(part.slots, part.positions, part.previous, part.tokens, strict=True)
            for slot, position, before, token in found:
                name, data = pages[slot // size]
                own = int.from_bytes(data[4 * position : 4 * position + 4], sys.byteorder)
                assert token == own, f"slot {slot} of {pool} has token {token}, expected {own}"
                assert position == len(data) // 4 - size + slot % size, f"slot {slot} at position {position}"
                above = where.get((name, data[: -size * 4]), 0)
                expected = slot - 1 if slot % size else (above * size + size - 1 if above else 0)
                assert before == expected, f"slot {slot} of {pool} comes after {before}, expected {expected}"
                seen += 1
            cursor = part.cursor
            if not cursor:
                break
        there = sum(prefix not in loading for prefix in where)
        assert there * size <= seen <= len(where) * size, f"the sweep saw {seen} slots of {len(where)} pages of {pool}"
