"""A tiny engine around a PrefixCache, with three oracles; the state machine and the mutants drive it.

Content addressing: every slot of the fake pool holds the hash of the whole prefix that ends there. Before each fake
forward every slot that a row names must hold its own prefix's hash, whoever owned the page before.
Residency: a flat set of the page prefixes that should be cached, with their last use, which also says what an
eviction must take next. Invariants: `sanity_check` with all rows, after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import CapacityError, InvariantError
from serinus.core.rng import splitmix64

Prefix = tuple[str, bytes]
"""A namespace and whole pages of int32 ids."""


def chain(namespace: str, tokens: list[int]) -> NDArray[np.uint64]:
    """What the slot of each token must hold: a hash of the namespace and of all tokens up to it."""
    return _chain(namespace, tuple(tokens))


@lru_cache(maxsize=10_000)
def _chain(namespace: str, tokens: tuple[int, ...]) -> NDArray[np.uint64]:
    state = 1
    for byte in namespace.encode():
        state = splitmix64(state ^ (byte << 8))
    out = []
    for token in tokens:
        state = splitmix64(state ^ (token + 1))
        out.append(state)
    return np.array(out, np.uint64)


@dataclass(slots=True, kw_only=True)
class Req:
    """One request of the tiny engine."""

    rid: str
    namespace: str
    tokens: list[int]
    prompt_len: int
    lease: Any = None
    row: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    computed: int = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.array(self.tokens, np.int32)


@dataclass(slots=True, kw_only=True)
class Held:
    """A hold, and what its pages held when it began."""

    name: str
    pages: NDArray[np.int32]
    content: NDArray[np.uint64]


@dataclass(slots=True, kw_only=True)
class Use:
    """What the model knows of one cached page prefix."""

    born: int
    last: int
    hits: int = 0

    def rank(self, policy: str) -> tuple[int, int]:
        """The lowest goes first."""
        return {"lru": (self.last, 0), "lfu": (self.hits, self.last), "fifo": (self.born, 0)}[policy]


class World:
    """Requests, rows, a pool of hashes, and the cache under test.

    `cache_room` is the module `serinus.cache`, or a mutant of it. `rewrite_rows=False` is the scheduler's own mutant.
    """

    def __init__(
        self, cache_room: ModuleType, *, page_size: int, page_count: int, policy: str = "lru", rewrite_rows: bool = True
    ) -> None:
        self.room = cache_room
        self.size = page_size
        self.cache = cache_room.PrefixCache(
            cache_room.CacheGeometry(page_size=page_size, full_pages=page_count), policy=policy
        )
        self.policy = policy
        self.rewrite_rows = rewrite_rows
        self.pool = np.zeros((page_count, page_size), np.uint64)
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.holds: list[Held] = []
        self.resident: dict[Prefix, Use] = {}
        self.now = 0
        self.arrived = 0

    # The life of a request

    def arrive(self, namespace: str, tokens: list[int]) -> None:
        """A new prompt waits; of too many the oldest gives up."""
        self.arrived += 1
        if len(self.waiting) >= 6:
            self.waiting.pop(0)
        rid = f"r{self.arrived}"
        self.waiting.append(Req(rid=rid, namespace=namespace, tokens=list(tokens), prompt_len=len(tokens)))

    def admit(self, which: int) -> None:
        """Match, lock and allocate for all known tokens, or leave it waiting and everything as it was."""
        req = self.waiting[which % len(self.waiting)]
        limit = len(req.tokens) - 1
        expected = self.longest(req.namespace, req.tokens, limit)
        assert self.cache.probe(req.namespace, req.ids[:limit]).device == expected, "K: probe differs from the model"
        match = self.cache.match_prefix(req.namespace, req.ids, limit)
        assert match.length == expected == match.lease.end, f"match of {match.length} tokens, expected {expected}"
        assert len(match.pages) * self.size == match.length, "a match has one page per page_size tokens"
        self.touch(req.namespace, req.tokens[: match.length], hit=True)
        own = self.allocate(req.rid, -(-len(req.tokens) // self.size) - len(match.pages), match.lease)
        if own is None:
            self.cache.release(match.lease)
            self.touch(req.namespace, req.tokens[: match.length])
            return
        self.waiting.remove(req)
        self.running.append(req)
        req.lease, req.computed = match.lease, match.length
        req.row = np.concatenate((match.pages, own))

    def allocate(self, rid: str, count: int, extra_lease: Any = None) -> NDArray[np.int32] | None:
        """Ask for pages, and check the answer against the model: None if and only if there is no room."""
        room = self.cache.free_pages + self.expected_evictable(extra_lease)
        short = count - self.cache.free_pages
        before = set(self.resident)
        given = self.cache.allocate(rid, count)
        pages: NDArray[np.int32] | None = None if given is None else given.full
        assert (pages is None) == (count > room), f"{count} pages asked, room for {room}, got {pages}"
        if pages is None:
            assert self.actual().keys() == before, "a refused allocation changed what is cached"
            return None
        assert len(pages) == count, f"{len(pages)} pages, expected {count}"
        self.check_eviction(max(0, short), extra_lease)
        for held in self.holds:
            assert not np.isin(pages, held.pages).any(), f"I1 a held page was handed out: {pages} and {held}"
        self.pool[pages] = 0
        return pages

    def forward(self, req: Req, count: int) -> None:
        """Compute `count` tokens: read all slots before them, write theirs."""
        hashes = chain(req.namespace, req.tokens)
        slots = self.pool[req.row].reshape(-1)
        wrong = np.flatnonzero(slots[: req.computed] != hashes[: req.computed])
        assert not len(wrong), f"K1 {req.rid} reads foreign KV at positions {wrong.tolist()}, row {req.row.tolist()}"
        end = req.computed + count
        for position in range(req.computed, end):
            self.pool[req.row[position // self.size], position % self.size] = hashes[position]
        req.computed = end

    def chunk(self, which: int, count: int, *, publish: bool = True) -> None:
        """Compute up to `count` more prompt tokens; publish the whole pages now, or leave that to a later step."""
        req = self.running[which % len(self.running)]
        count = min(count, req.prompt_len - req.computed)
        if count > 0:
            self.forward(req, count)
        if publish:
            self.publish(req)

    def publish(self, req: Req) -> None:
        """Insert, rewrite the row, commit: in this order."""
        start = req.lease.end
        low = start // self.size
        given = req.row[low : req.computed // self.size].copy()
        insertion = self.cache.insert(
            req.lease, req.ids[start : req.computed], self.room.PartPages(full=req.row[low:]), start
        )
        assert insertion.end == start + len(given) * self.size == req.lease.end, f"{insertion} of {given}"
        ledger = self.cache.ledger
        own = ledger.request_owner(req.rid)
        assert (ledger.owner_P[insertion.duplicates] == own).all(), "a duplicate was freed before the row was rewritten"
        try:
            self.cache.evict(0)
            raise AssertionError("an operation went through between insert and commit_row")
        except InvariantError:
            pass
        if self.rewrite_rows:
            req.row[low : low + len(insertion.pages)] = insertion.pages
        self.cache.commit_row(insertion)
        changed = given[given != insertion.pages]
        assert np.array_equal(np.sort(changed), np.sort(insertion.duplicates)), f"{insertion} of {given}"
        self.add(req.namespace, req.tokens[: insertion.end])

    def decode(self, which: int, token: int) -> None:
        """Append a token to a request whose known tokens are computed, and compute it."""
        req = self.running[which % len(self.running)]
        if req.computed < len(req.tokens):
            self.forward(req, len(req.tokens) - req.computed) if req.computed >= req.prompt_len else None
            return
        if req.computed == len(req.row) * self.size:
            page = self.allocate(req.rid, 1)
            if page is None:
                self.leave(req, retract=True)
                return
            req.row = np.concatenate((req.row, page))
        req.tokens.append(token)
        self.forward(req, 1)

    def end(self, which: int, *, retract: bool) -> None:
        """Finish, abort or retract, at whatever point it is."""
        self.leave(self.running[which % len(self.running)], retract=retract)

    def leave(self, req: Req, *, retract: bool) -> None:
        """The only exit; a retracted request waits again with all its tokens."""
        self.cache.finish(req.rid, req.lease, req.ids[: req.computed], self.room.PartPages(full=req.row))
        self.running.remove(req)
        self.add(req.namespace, req.tokens[: req.computed // self.size * self.size])
        if retract:
            again = Req(rid=req.rid, namespace=req.namespace, tokens=req.tokens, prompt_len=len(req.tokens))
            self.waiting.append(again)

    # Others who touch pages

    def hold(self, which: int, first: int, count: int, name: str) -> None:
        """A transfer begins to read some computed pages of a running request."""
        req = self.running[which % len(self.running)]
        computed = -(-req.computed // self.size)
        if computed:
            first %= computed
            pages = req.row[first : min(computed, first + count)].copy()
            self.cache.hold(name, pages)
            self.holds.append(Held(name=name, pages=pages, content=self.pool[pages].copy()))

    def unhold(self, which: int) -> None:
        """The transfer is over: what it held then, it must hold still (a request may have filled its last page on)."""
        held = self.holds.pop(which % len(self.holds))
        then = held.content != 0
        assert (self.pool[held.pages][then] == held.content[then]).all(), f"I5 {held} changed under its hold"
        self.cache.unhold(held.name, held.pages)

    def evict(self, enough: int) -> None:
        """An eviction from outside."""
        possible = self.expected_evictable()
        eviction = self.cache.evict(enough)
        assert eviction.freed >= min(enough, possible), f"{eviction}, expected {min(enough, possible)}"
        assert eviction.shortfall == max(0, enough - eviction.freed), f"{eviction} for {enough}"
        self.check_eviction(enough)

    def flush(self) -> None:
        """Empties an idle cache; refuses, and says why, otherwise."""
        busy = bool(self.running or self.holds)
        refusal = ""
        try:
            self.cache.reset()
        except CapacityError as error:
            refusal = str(error)
        assert bool(refusal) == busy, f"flush: busy is {busy}, the cache says {refusal!r}"
        if not busy:
            self.resident.clear()

    def drain(self) -> None:
        """End everything: only the tree is left, then nothing."""
        while self.running:
            self.end(0, retract=False)
        self.check()
        while self.holds:
            self.unhold(0)
        self.check()
        self.evict(self.cache.page_count)
        self.check()
        assert self.cache.free_pages == self.cache.page_count - 1, f"lost pages: {self.cache.stats()}"
        assert not self.cache.tree.arena, "nodes are left in an empty tree"
        assert not self.cache.tree.roots, "namespaces are left in an empty tree"
        assert not self.cache.ledger.request_ids, "requests are left in the ledger"

    # The residency model

    def prefixes(self, namespace: str, tokens: list[int]) -> list[Prefix]:
        """The whole-page prefixes of a sequence, shortest first."""
        data, step = np.array(tokens, np.int32).tobytes(), self.size * 4
        return [(namespace, data[:end]) for end in range(step, len(data) + 1, step)]

    def touch(self, namespace: str, tokens: list[int], *, hit: bool = False) -> None:
        """Something used this prefix now, or made it."""
        self.now += 1
        for prefix in self.prefixes(namespace, tokens):
            use = self.resident.setdefault(prefix, Use(born=self.now, last=self.now))
            use.last = self.now
            use.hits += hit

    add = touch
    """Publishing is using: the same bookkeeping."""

    def longest(self, namespace: str, tokens: list[int], limit: int) -> int:
        """Length of the longest resident prefix."""
        found = 0
        for prefix in self.prefixes(namespace, tokens[: max(0, limit)]):
            if prefix not in self.resident:
                break
            found = len(prefix[1]) // 4
        return found

    def pinned(self, extra_lease: Any = None) -> set[Prefix]:
        """Prefixes under a live lease."""
        found = {p for r in self.running for p in self.prefixes(r.namespace, r.tokens[: r.lease.end])}
        if extra_lease is not None:
            node = extra_lease.anchor
            parts: list[bytes] = []
            while node.parent is not None:
                parts.append(bytes(node.tokens))
                node = node.parent
            ids = np.frombuffer(b"".join(reversed(parts)), np.int32)
            found |= set(self.prefixes(node.key.decode(), ids.tolist()))
        return found

    def actual(self) -> dict[Prefix, int]:
        """What the tree really holds: prefix to page."""
        found: dict[Prefix, int] = {}
        pending = [(root, name, b"") for name, root in self.cache.tree.roots.items()]
        while pending:
            node, name, above = pending.pop()
            data = above + bytes(node.tokens)
            for at, page in enumerate(node.pages.tolist()):
                found[(name, data[: len(above) + (at + 1) * self.size * 4])] = page
            pending.extend((child, name, data) for child in node.children.values())
        return found

    def expected_evictable(self, extra_lease: Any = None) -> int:
        """Resident pages that no lease pins and nobody holds."""
        held = {page for h in self.holds for page in h.pages.tolist()}
        pinned = self.pinned(extra_lease)
        return sum(prefix not in pinned and page not in held for prefix, page in self.actual().items())

    def check_eviction(self, enough: int, extra_lease: Any = None) -> None:
        """What went is what the policy says; where holds blur that, it was at least allowed to go."""
        actual = self.actual()
        pinned = self.pinned(extra_lease)
        gone = self.resident.keys() - actual.keys()
        assert not gone & pinned, f"L1 a pinned prefix was evicted: {gone & pinned}"
        if not self.holds:
            for _ in range(enough):
                parents = {(name, data[: -self.size * 4]) for name, data in self.resident}
                leaves = [p for p in self.resident if p not in parents and p not in pinned]
                if leaves:
                    del self.resident[min(leaves, key=lambda p: self.resident[p].rank(self.policy))]
            assert self.resident.keys() == actual.keys(), "the eviction took other pages than the policy says"
        else:
            assert enough or not gone, "pages went without an eviction"
            self.resident = {p: t for p, t in self.resident.items() if p in actual}

    # After every step

    def check(self) -> None:
        """All oracles."""
        rows = [self.room.RowView(rid=r.rid, lease=r.lease, pages=r.row) for r in self.running]
        self.cache.sanity_check(rows)
        actual = self.actual()
        assert actual.keys() == self.resident.keys(), (
            f"cached but not in the model: {actual.keys() - self.resident.keys()},"
            f" in the model but not cached: {self.resident.keys() - actual.keys()}"
        )
        for (name, data), page in actual.items():
            hashes = chain(name, np.frombuffer(data, np.int32).tolist())[-self.size :]
            assert (self.pool[page] == hashes).all(), f"K1 cached page {page} does not hold its prefix"
        assert self.cache.evictable_pages == self.expected_evictable(), "evictable pages differ from the model"
        self.check_sweep(actual)

    def check_sweep(self, actual: dict[Prefix, int]) -> None:
        """A sweep sees every cached slot once, at its position, behind its predecessor."""
        cursor, seen = 0, 0
        positions = {page: len(data) // 4 - self.size for (_, data), page in actual.items()}
        while True:
            part = self.cache.walk(cursor, 3 * self.size)
            for slot, position, before in zip(part.slots, part.positions, part.previous, strict=True):
                offset = slot % self.size
                assert position == positions[slot // self.size] + offset, f"slot {slot} at position {position}"
                assert (before == 0) == (position == 0), f"slot {slot} at {position} comes after slot {before}"
                seen += 1
            cursor = part.cursor
            if not cursor:
                break
        assert seen == len(actual) * self.size, f"the sweep saw {seen} slots of {len(actual)} pages"
