"""The face of the cache: match, load, allocate, insert, finish, evict, poll, over one tree, all tiers and all parts.

It decides which page holds what; it neither moves bytes nor knows requests beyond their ids. Pages are told as spans,
one for each part of the geometry, in the order of the parts: FULL first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from serinus.cache.coverage import cover
from serinus.cache.events import EventLog, KvEvent
from serinus.cache.kept_copies import CheckedCopies
from serinus.cache.keys import PageKeys
from serinus.cache.ledger import STATE_MASK, PageLedger, Pages, PageState
from serinus.cache.matching import Matcher
from serinus.cache.node import FULL, NO_PAGES, Lease, Tier
from serinus.cache.page_pools import PagePools
from serinus.cache.policy import WRITE_POLICIES, check_settings
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.publish import Publisher, token_bytes
from serinus.cache.results import (
    CacheGeometry,
    CacheNews,
    CacheStats,
    Condemned,
    Insertion,
    Loaded,
    LoadPlan,
    Match,
    PrefetchState,
    Probe,
    ResidentSlots,
    RowView,
    TreeView,
)
from serinus.cache.room import DeviceRoom
from serinus.cache.sanity import SanityChecks
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.cache.view import CacheCounters, cache_stats, tree_view
from serinus.cache.window import Windows
from serinus.core.clock import Clock
from serinus.core.errors import CapacityError, InvariantError
from serinus.core.handoff import PageTrace
from serinus.core.moves import MoveKind
from serinus.core.parts import PageSpan, Part
from serinus.core.stamps import ChainHashes


class PrefixCache:
    """What is kept where. Not thread safe: the scheduler owns it.

    Args:
        geometry: the parts, and their pages by tier.
        enable_prefix: False keeps nothing beyond its request: matches are empty and insertions publish nothing.
        policy: eviction order, one of EVICTION_POLICIES.
        write_policy: when the host gets its copy, one of WRITE_POLICIES.
        mover: carries copies between device and host; there exactly where there are host pages.
        storage: pages outside the engine; needs a host tier.
        namespace: all that shapes the bytes but the tokens: model and revision, dtype, layout, shard.
        kv_events: collect what routers are told. chain_hashes: tells the storage whose pages it gets, for a canary.
        clock: measures how long evictions take, for metrics; decides nothing.
    Raises:
        ConfigError: a value is out of range, or a tier lacks what it needs.

    Every operation that changes something raises InvariantError while an insertion waits for `commit_row`.
    """

    def __init__(
        self, geometry: CacheGeometry, *, enable_prefix: bool = True, policy: str = "lru",
        write_policy: str = "write_through", mover: PageMover | None = None, storage: PageStorage | None = None,
        namespace: str = "", kv_events: bool = False, clock: Clock | None = None,
        chain_hashes: ChainHashes | None = None,
    ) -> None:  # fmt: skip
        check_settings(geometry, policy, write_policy, mover, storage)
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.page_count = geometry.full.pages
        """Device FULL pages, the padding page included."""
        self.enable_prefix = enable_prefix
        self.policy = policy
        self.write_policy = write_policy
        self.tree = RadixTree(geometry.page_size, policy, geometry.rules, geometry.tiered)
        keys = PageKeys(namespace, geometry.page_size, chain_hashes)
        self.events = EventLog(keys, geometry.page_size) if kv_events else None
        self.pools = PagePools(geometry, self.tree, keys, self.events)
        self.ledger = self.pools.full.ledger
        self.ledgers: Mapping[tuple[Tier, Part], PageLedger] = {key: p.ledger for key, p in self.pools.all.items()}
        self._windows = Windows(self.pools)
        self.tiers = TierController(self.pools, WRITE_POLICIES[write_policy], self._windows, mover, storage)
        self._room = DeviceRoom(self.pools, self.tiers, clock)
        self._matcher = Matcher(self.pools, self.tiers, self._windows)
        self._publisher = Publisher(self.pools, self.tiers, self._windows, enabled=enable_prefix)
        self._checks = SanityChecks(self.tree, self.pools, self.tiers)
        self._counters = CacheCounters()

    def _check_committed(self) -> None:
        if (pending := self._publisher.pending) is not None:
            raise InvariantError(f"cache: {pending} was dropped, expected commit_row before anything else")

    # Counts

    def free(self, part: Part = Part.FULL) -> int:
        """Device pages of a part that can be handed out without evicting; 0 for a part that is not there."""
        return self._room.free(part)

    def evictable(self, part: Part = Part.FULL) -> int:
        """Cached device pages of a part that eviction can make free now; 0 for a part that is not there."""
        return self.tree.evictable[part] if part in self.pools.device else 0

    def available(self, part: Part = Part.FULL) -> int:
        """free + evictable: `allocate` succeeds exactly up to here, in each part."""
        return self._room.available(part)

    def first_page(self, part: Part, position: int) -> int:
        """Index of the first page of a part that computing `position` reads: 0 unless the part has a window."""
        window = self._windows.by_part.get(part)
        return 0 if window is None else window.start(position) // self.page_size

    def pin_pages_max(self, part: Part) -> int:
        """Pages of a part with a window that a lease keeps at most once it was advanced.

        Raises KeyError for a part without a window.
        """
        return self._windows.by_part[part].pin_pages_max

    def host_pages(self, part: Part = Part.FULL) -> Pages:
        """Host pages of a part that are cached now. Cost: O(host pages)."""
        owner_P = self.ledgers[Tier.HOST, part].owner_P
        return np.flatnonzero((owner_P & STATE_MASK) == PageState.TREE).astype(np.int32)

    # Looking up

    def probe(self, ns: str, tokens: NDArray[np.int32]) -> Probe:
        """Length of the cached prefix of `tokens`, page aligned. Changes nothing, pins nothing."""
        root = self.tree.roots.get(ns)
        if root is None or not self.enable_prefix:
            return Probe(device=0, total=0)
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(root, token_bytes(tokens[:whole]), 0)
        if self.pools.plain:
            return Probe(device=found.end, total=found.end)
        usable = cover(found, self.pools.rules)
        return Probe(device=usable.device, total=usable.total)

    def loads_over(self, lease: Lease, tokens: NDArray[np.int32]) -> frozenset[int]:
        """Loads under way that fill pages which `tokens`, from the end of the lease on, would find in the tree: a
        request that publishes them takes those pages for its own before it is known whether their KV comes. Changes
        nothing."""
        if not len(self.tiers.table) or not self.enable_prefix or lease.sound_end is not None:
            return frozenset()
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(lease.anchor, token_bytes(tokens[:whole]), lease.end)
        filled = [node for node in (*found.path, found.partial) if node is not None and node.loading]
        copies = map(self.tiers.table.get, self.tiers.table.over(filled) if filled else ())
        return frozenset(copy.op for copy in copies if copy.kind is MoveKind.LOAD)

    def match_prefix(self, ns: str, tokens: NDArray[np.int32], max_len: int, *, priority: int = 0) -> Match:
        """Find and pin the longest prefix of `tokens` that is usable on the device, and what the host could add to it.

        At most `max_len` tokens, whole pages only: a caller that must compute something passes len(tokens) - 1. It
        counts as no hit before `used`.
        Splits nodes only at the boundaries that it returns. Cost: one look-up and one memcmp per node of the path.
        """
        self._check_committed()
        limit = max(0, min(len(tokens), max_len))
        limit -= limit % self.page_size
        root = self.tree.root(ns)
        found = self.tree.descend(root, token_bytes(tokens[:limit]) if self.enable_prefix else b"", 0)
        if not self.pools.plain:
            return self._matcher.match(root, found, priority)
        anchor = found.node
        if found.partial is not None:
            anchor = self.pools.split(found.partial, found.end).upper
            found.path.append(anchor)
        pages = np.concatenate([node.device[FULL] for node in found.path]) if found.path else NO_PAGES
        lease = self._matcher.lease(anchor, priority)
        return Match(lease, found.end, (PageSpan(self.pools.full.part, 0, pages),))

    def used(self, lease: Lease, hit_tokens: int) -> None:
        """The request of a match was placed on it, once: what eviction and write policies rank by counts it, and
        `hit_tokens` were on the device. A match that is given back (`release`) counts for nothing."""
        self._check_committed()
        _check_live(lease)
        self._counters.hit_tokens += hit_tokens
        self._matcher.used(lease)

    def load_back(self, rid: str, lease: Lease, load: LoadPlan) -> Loaded | None:
        """Load what the match found on the host, all or nothing; the lease grows to `load.end`.

        The pages may be read by forward passes that begin later. If the copy fails, `poll` names the lease. None =
        no room on the device, or nothing to trust any more: nothing changed but what was evicted; the plan stays.
        Raises InvariantError for a lease that has no such plan, or was released.
        """
        self._check_committed()
        _check_live(lease)
        if lease.plan is None or lease.plan.anchor.end != load.end:
            raise InvariantError(f"cache: {lease} has no plan to load up to {load.end}, expected one from its match")
        counts = self.tiers.loads.needs(lease)
        if not lease.plan.anchor.alive or not self._room.make(counts) or not lease.plan.anchor.alive:
            return None  # the last: another load failed while eviction waited for it
        return self.tiers.load(rid, lease)

    def drop_load(self, lease: Lease) -> None:
        """The lease will not load: the host may do with these pages what it likes. Nothing to drop is fine."""
        self.tiers.loads.drop_plan(lease)

    # Pages of requests

    def allocate(self, rid: str, *counts: int) -> tuple[Pages, ...] | None:
        """Give pages of each part to request `rid`, evicting what is not in use as needed.

        counts: for each part in order; parts without one get none. Returns None, with nothing given, unless each part
        has as many: `available`.
        """
        return self.allocate_each([rid], [[count] for count in counts])

    def allocate_each(self, rids: Sequence[str], counts: Sequence[Sequence[int]]) -> tuple[Pages, ...] | None:
        """The same for several requests, all or none. counts: part by part, those of each request. Returns part by
        part the pages of all: the first request's, then the second's, and on. Cost: hardly more than for one."""
        self._check_committed()
        return self._room.allocate(rids, counts)

    def insert(self, lease: Lease, tokens: NDArray[np.int32], spans: Sequence[PageSpan]) -> Insertion:
        """Publish the whole pages of a sequence that lie behind its lease, and grow the lease over them.

        Args:
            lease: the request's.
            tokens: the sequence from where its lease ends, as far as its KV is computed (or will be, by the step in
                flight); a ragged last page is left alone.
            spans: the request's own pages of these tokens, one span for each part. FULL, and any part that covers whole
                prefixes, from the end of the lease on (anywhere where prefixes are not kept). A part with a window may
                begin later: positions before that become tombstones, unless the tree has them.
        Returns:
            the canonical pages and the duplicates. The caller writes them into its rows and then calls `commit_row`;
            until then every other operation raises InvariantError.
        Raises:
            InvariantError: the lease is over, or the spans lack pages that it needs.
        Cost: O(tokens), whatever the context.
        """
        self._check_committed()
        _check_live(lease)
        return self._publisher.insert(lease, tokens, spans)

    def commit_row(self, insertion: Insertion) -> None:
        """The rows now hold the canonical pages: free the duplicates. Once per insertion, before anything else.

        Raises InvariantError for another insertion than the last.
        """
        self._publisher.commit(insertion)

    def advance(self, rid: str, lease: Lease, position: int, own: Sequence[PageSpan] = ()) -> None:
        """The request computes `position` next: what lies before its windows may go.

        own: the request's own, unpublished pages of parts with a window that it drops; freed. Published ones stay
        cached until the room is needed.
        """
        self._check_committed()
        _check_live(lease)
        self._windows.advance(lease, position)
        for span in own:
            self._publisher.free_own(rid, span.part, span.pages, "behind the window")

    def finish(
        self, rid: str, lease: Lease, tokens: NDArray[np.int32], spans: Sequence[PageSpan], *, park: bool = False
    ) -> None:
        """The only exit of a request, for finish, abort, retract and preempt alike.

        Publishes what is complete, frees the rest, releases the lease and forgets the request and its prefetch.

        Args:
            rid: the request.
            lease: its lease, for the last time.
            tokens: the sequence from position 0, exactly as far as its KV is computed.
            spans: all pages of its row, one span for each part, those of the lease and those not filled yet included.
            park: it comes back later: what it leaves is copied to the host soon, whatever the write policy.
        Raises:
            InvariantError: the request still owns a page that `spans` do not list (it would be lost), or the row was
                not rewritten after an insertion.
        """
        self._check_committed()
        _check_live(lease)
        self._publisher.finish(rid, lease, tokens, spans)
        if park and self.pools.host and lease.sound_end is None:
            self.tiers.backups.park(lease.anchor)
        self.release_aborted_request(rid)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Give a lease back, once, without a request: for a match whose pages were not taken (no room, no need).
        Raises InvariantError the second time."""
        self._check_committed()
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is released again, expected once")
        if lease.plan is not None:
            self.tiers.loads.drop_plan(lease)
        self.tree.touch(lease.anchor, priority=lease.priority)
        if lease.windows:
            self._windows.release(lease)
        self.tree.end_lease(lease)
        self.tiers.quarantine.release()

    def hold(self, name: str, pages: Pages, part: Part = Part.FULL) -> None:
        """Hold distinct device `pages` under `name`, once more: none is handed out before the matching `unhold`.

        They may be freed or evicted meanwhile; their bytes stay. Raises InvariantError for a page without an owner.
        """
        self._check_committed()
        self._room.hold(name, pages, part)

    def trace(self, traces: Iterable[PageTrace]) -> None:
        """Device pages that a handoff has filled, or has been sent: their histories tell it."""
        for trace in traces:
            self.ledgers[Tier.DEVICE, trace.span.part].trace(trace)

    def unhold(self, name: str, pages: Pages, part: Part = Part.FULL) -> None:
        """Drop one hold called `name` of each of distinct `pages`. Raises InvariantError where there is none."""
        self._check_committed()
        self._room.unhold(name, pages, part)

    # Eviction, tiers, flush

    def evict(self, enough: int, tier: Tier = Tier.DEVICE, part: Part = Part.FULL) -> int:
        """Evict until `enough` more pages of a tier and part are free, or nothing more may go: the only entry.

        Returns how many became free; these are safe to overwrite: write-backs have ended. Never raises for lack of
        victims.
        """
        self._check_committed()
        pool = self.pools.all[tier, part]
        return self.tiers.host.evict(pool, enough) if tier else self._room.evict(pool, enough)

    def poll(self, *, settle: Collection[int] = ()) -> CacheNews:
        """Take the completions of copies and storage, then begin what waits: once per step, first thing.

        settle: numbers of loads that must have ended when it returns. The only place where completions change state,
        but for copies that an eviction waits for.
        """
        self._check_committed()
        return self.tiers.poll(settle)

    def prefetch(self, rid: str, ns: str, tokens: NDArray[np.int32], *, priority: int = 0) -> bool:
        """Ask the storage for what device and host lack of `tokens`; False = nothing to ask, no storage, or too many.
        `poll` carries it on. Ends with `finish` or `release_aborted_request`."""
        self._check_committed()
        if self.tiers.prefetches is None or not self.enable_prefix:
            return False
        whole = len(tokens) - len(tokens) % self.page_size
        first = self.probe(ns, tokens[:whole]).total // self.page_size
        data, root = token_bytes(tokens[:whole]), self.tree.roots.get(ns)
        started = self.tiers.prefetches.start(rid, ns, data, first, priority)
        if started and root is not None:  # what it goes on from is not what makes room for it
            found = self.tree.descend(root, data, 0)
            self.tree.touch(found.partial or found.node, priority=priority)
        return started

    def prefetches_full(self, tokens: int = 0) -> bool:
        """Whether a prefetch is not to be asked for now: too many are active or, with `tokens`, the host has not the
        room for so many more beside what it keeps for requests with a prefetch. That ends as those are released.
        Cost: O(prefetches)."""
        return self.tiers.prefetches is not None and self.tiers.prefetches.is_full(tokens // self.page_size)

    def prefetch_state(self, rid: str) -> PrefetchState:
        """How far a request's prefetch is."""
        return PrefetchState.NONE if self.tiers.prefetches is None else self.tiers.prefetches.state(rid)

    def prefetch_cut(self, rid: str) -> int:
        """The deadline: graft what has come, let the rest go. Returns the tokens grafted; harmless once it is over."""
        self._check_committed()
        return 0 if self.tiers.prefetches is None else self.tiers.prefetches.cut(rid)

    def prefetched_tokens(self, rid: str) -> int:
        """Tokens that the request's prefetch brought to the host."""
        return 0 if self.tiers.prefetches is None else self.tiers.prefetches.tokens_of(rid)

    def release_aborted_request(self, rid: str) -> None:
        """A request that never ran is gone: its prefetch ends safely, in any state. Harmless without one."""
        if self.tiers.prefetches is not None:
            self.tiers.prefetches.forget(rid)

    def condemn(
        self, part: Part, pages: Pages, *, counts: bool = True, checked: CheckedCopies | None = None
    ) -> Condemned:
        """These device pages hold wrong KV: they are not handed out before `release_quarantined`, and never again where
        it is their second failure (`counts`: it is their own).

        Cached ones: no request finds their nodes from there on, or anything below, on any tier but for sound copies
        (`checked`); a request with a lease on them publishes nothing behind it (`lease.sound_end`). A request's own:
        its `finish` publishes nothing from the first of them on. Free ones are left alone.
        """
        self._check_committed()
        loading = [node for node in self.tiers.table.nodes() if node.loading]
        return self.tiers.quarantine.condemn(part, pages, loading, counts=counts, checked=checked)

    def release_quarantined(self, part: Part, pages: Pages) -> None:
        """Quarantined pages may be handed out again, once nothing owns them. Harmless for others."""
        self._check_committed()
        self.tiers.quarantine.release_quarantined(part, pages)

    def release_all_quarantined(self) -> int:
        """The same for every quarantined page; how many there were. Only while no request owns any."""
        self._check_committed()
        return self.tiers.quarantine.release_all_quarantined()

    def reset(self) -> int:
        """Drop everything on device and host and say how many device FULL pages that were. Waits for backups.

        Quarantined pages are released (retired ones are not). Storage goes on removing its pages of them. Raises
        CapacityError, with nothing changed, unless the cache is idle; the message says what is busy.
        """
        self._check_committed()
        if busy := self.busy():
            raise CapacityError(f"cache: cannot be flushed now, busy with {busy}; expected no requests and no holds")
        self.tiers.wait_all()
        dropped = self.pools.clear()
        self.tiers.quarantine.release_all_quarantined()
        return dropped

    # Checks and views

    def busy(self) -> str:
        """What keeps the cache from being reset, in words; empty when it is idle."""
        return self._checks.busy()

    def walk(
        self, cursor: int, budget: int, *, tier: Tier = Tier.DEVICE, part: Part = Part.FULL, unlocked_only: bool = False
    ) -> ResidentSlots:
        """The cached slots of the next pages in page order, about `budget` slots; start with 0, go on with `.cursor`.

        Safe across any change in between: a page that stays cached is seen once per sweep. `unlocked_only` leaves
        out pages that a lease pins. Pages that a copy still fills are not seen. Cost: a few microseconds a node.
        """
        pool = self.pools.all[tier, part]
        tree = self.tree
        pins = (lambda node: tree.pins_of(node, part)) if unlocked_only else None
        return pool.sweep.walk(pool.ledger, cursor, budget, tree.arena, pins)

    def keep_times(self, clock: Clock) -> None:
        """Remember from now on when each cached device page was seen to be sound: `seen`, `ages`."""
        for pool in self.pools.device.values():
            pool.sweep.clock = clock
            pool.sweep.seen(np.arange(pool.ledger.page_count, dtype=np.int32))

    def seen(self, part: Part, pages: Pages) -> None:
        """These device pages were verified now; what is cached newly counts as seen."""
        self.pools.device[part].sweep.seen(pages)

    def ages(self) -> NDArray[np.float64]:
        """Seconds since each cached device page was seen last, all parts. Cost: O(pages). Only after `keep_times`."""
        return np.concatenate([pool.sweep.ages(pool.ledger) for pool in self.pools.device.values()])

    def sanity_check(self, rows: Iterable[RowView] | None = None) -> None:
        """Check every invariant that holds between operations; with `rows` also those between rows and pages.

        `rows` are all running requests, or None to leave O3 and O5 out. Cost: O(pages + nodes): when idle and in tests.
        Raises InvariantError naming the invariant.
        """
        self._check_committed()
        self._checks.complete(rows)
        self._counters.sanity_checks += 1

    def sanity_step(self, budget: int) -> int:
        """Check the next `budget` nodes alone, going round for ever; returns how many. Cheap enough for production.

        Raises InvariantError naming the invariant. Cost: a few microseconds a node.
        """
        checked = self._checks.step(budget)
        self._counters.sanity_steps += checked
        return checked

    def stats(self) -> CacheStats:
        """Gauges and counters, for metrics and log lines. Cost: O(tiers and parts)."""
        return cache_stats(self.pools, self.tiers, self._room, self._publisher, self._counters)

    def take_events(self) -> list[KvEvent]:
        """What routers are told, since the last call; empty unless `kv_events`."""
        return [] if self.events is None else self.events.take()

    def tree_view(self, limit: int) -> TreeView:
        """What is cached where, `limit` nodes at most."""
        return tree_view(self.tree, limit)


def _check_live(lease: Lease) -> None:
    if not lease.live:
        raise InvariantError(f"cache: L5 {lease} is used after its release")
