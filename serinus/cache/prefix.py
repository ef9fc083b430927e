"""The face of the cache: match, load, allocate, insert, finish, evict, poll, over one tree and all tiers.

It decides which page holds what; it neither moves bytes nor knows requests beyond their ids. The one rule of
publication: insert -> the caller rewrites its rows -> commit_row frees the duplicates -> page ids may be read by others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.cache.coverage import cover, window_start
from serinus.cache.events import EventLog, KvEvent
from serinus.cache.eviction import POLICIES
from serinus.cache.keys import PageKeys
from serinus.cache.ledger import FREE_OWNER, STATE_MASK, PageLedger, Pages, PageState
from serinus.cache.node import NO_PAGES, Lease, Node, Tier
from serinus.cache.policy import WRITE_POLICIES
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.publish import Publisher
from serinus.cache.results import (
    CacheGeometry,
    CacheNews,
    CacheStats,
    Eviction,
    Insertion,
    Loaded,
    LoadPlan,
    Match,
    PartPages,
    PrefetchState,
    Probe,
    ResidentSlots,
    RowView,
    TreeView,
)
from serinus.cache.sanity import SanityChecks
from serinus.cache.shelves import Shelves
from serinus.cache.tiers import TierController
from serinus.cache.tree import Descent, RadixTree
from serinus.cache.view import CacheCounters, cache_stats, tree_view
from serinus.core.clock import Clock
from serinus.core.errors import CapacityError, ConfigError, InvariantError
from serinus.core.parts import Part

__all__ = ["PrefixCache"]


class PrefixCache:
    """What is kept where. Not thread safe: the scheduler owns it.

    Args:
        geometry: pages by tier and part.
        enable_prefix: False keeps nothing beyond its request: matches are empty and insertions publish nothing.
        policy: eviction order, one of POLICIES.
        write_policy: when the host gets its copy, one of WRITE_POLICIES.
        mover: carries copies between device and host; there exactly where there are host pages.
        storage: pages outside the engine; needs a host tier.
        namespace: all that shapes the bytes but the tokens: model and revision, dtype, layout, shard.
        kv_events: collect what routers are told.
        clock: measures how long evictions take, for metrics; decides nothing.
    Raises:
        ConfigError: a value is out of range, or a tier lacks what it needs.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        enable_prefix: bool = True,
        policy: str = "lru",
        write_policy: str = "write_through",
        mover: PageMover | None = None,
        storage: PageStorage | None = None,
        namespace: str = "",
        kv_events: bool = False,
        clock: Clock | None = None,
    ) -> None:
        _check_settings(geometry, policy, write_policy, mover, storage)
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.page_count = geometry.full_pages
        self.enable_prefix = enable_prefix
        self.policy = policy
        self.write_policy = write_policy
        self.tree = RadixTree(geometry.page_size, policy)
        keys = PageKeys(namespace, geometry.page_size)
        self.events = EventLog(keys, geometry.page_size) if kv_events else None
        self.shelves = Shelves(geometry, self.tree, keys, self.events)
        self.ledger = self.shelves.device.ledger
        self.ledgers: Mapping[tuple[Tier, Part], PageLedger] = {
            pool: shelf.ledger for pool, shelf in self.shelves.all.items()
        }
        self.tiers = TierController(self.shelves, WRITE_POLICIES[write_policy], geometry.window, mover, storage)
        self._publisher = Publisher(self.shelves)
        self._checks = SanityChecks(self.tree, self.shelves, self.tiers)
        self._tiered = mover is not None
        self._window = geometry.window
        self._clock = clock
        self._pending: Insertion | None = None
        self._counters = CacheCounters()

    # Counts

    @property
    def free_pages(self) -> int:
        """Device FULL pages that can be handed out without evicting."""
        return self.ledger.free_pages

    @property
    def evictable_pages(self) -> int:
        """Cached device FULL pages that eviction can make free now."""
        return self.tree.evictable_pages

    @property
    def available_pages(self) -> int:
        """free + evictable."""
        return self.ledger.free_pages + self.tree.evictable_pages

    @property
    def used_pages(self) -> int:
        """Device FULL pages that `allocate` cannot give now: of requests, pinned, held, in copies, or quarantined."""
        return self.page_count - 1 - self.available_pages

    @property
    def cached_pages(self) -> int:
        """Device FULL pages in the tree."""
        return self.tree.cached_pages

    def free(self, part: Part = Part.FULL) -> int:
        """Device pages of a part that can be handed out without evicting; 0 for a part that is not there."""
        ledger = self.ledgers.get((Tier.DEVICE, part))
        return 0 if ledger is None else ledger.free_pages

    def evictable(self, part: Part = Part.FULL) -> int:
        """Cached device pages of a part that eviction can make free now."""
        return self.tree.evictable_pages if part is Part.FULL else self.tree.evictable_swa

    def available(self, part: Part = Part.FULL) -> int:
        """free + evictable: `allocate` succeeds exactly up to here, in each part."""
        return self.free(part) + self.evictable(part)

    def swa_first_page(self, position: int) -> int:
        """Index of the first page whose SWA computing `position` reads; without that part, the page of `position`."""
        return window_start(position, self._window) // self.page_size

    # Looking up

    def probe(self, ns: str, tokens: NDArray[np.int32]) -> Probe:
        """Length of the cached prefix of `tokens`, page aligned. Changes nothing, pins nothing."""
        root = self.tree.roots.get(ns)
        if root is None or not self.enable_prefix:
            return Probe(device=0, total=0)
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(root, _token_bytes(tokens[:whole]), 0)
        if self.shelves.plain:
            return Probe(device=found.end, total=found.end)
        usable = cover(found, self._window)
        return Probe(device=usable.device, total=usable.total)

    def match_prefix(self, ns: str, tokens: NDArray[np.int32], max_len: int, *, priority: int = 0) -> Match:
        """Find and pin the longest prefix of `tokens` that is usable on the device, and what the host could add to it.

        At most `max_len` tokens, whole pages only: a caller that must compute something passes len(tokens) - 1.
        Splits nodes only at the boundaries that it returns. Cost: one look-up and one memcmp per node of the path.
        """
        self._check_committed()
        limit = max(0, min(len(tokens), max_len))
        limit -= limit % self.page_size
        root = self.tree.root(ns)
        found = self.tree.descend(root, _token_bytes(tokens[:limit]) if self.enable_prefix else b"", 0)
        self._counters.matched_tokens += len(tokens)
        if self.shelves.plain:
            anchor = found.node
            if found.partial is not None:
                anchor = self.shelves.split(found.partial, found.end).upper
                found.path.append(anchor)
            length = found.end
            lease = self._lease(anchor, priority)
            pages = np.concatenate([node.pages for node in found.path]) if found.path else NO_PAGES
            return Match(lease=lease, length=length, pages=pages, swa_first=len(pages))
        return self._match_parts(root, found, priority)

    def _match_parts(self, root: Node, found: Descent, priority: int) -> Match:
        """A match where parts and tiers decide how much of the path is usable."""
        usable = cover(found, self._window)
        path = found.path
        if found.partial is not None and found.end in (usable.device, usable.total):
            path.append(self.shelves.split(found.partial, found.end).upper)
        ends = {node.end: node for node in path}
        anchor = ends.get(usable.device, root)
        for node in path:
            node.uses += 1
        lease = self._lease(anchor, priority)
        if self._window is not None:
            lease.swa_want = window_start(usable.device, self._window)
            self.tree.pin_window(lease, 0)
        if self._tiered:
            self.tiers.backups.used(path)
        load = None
        if usable.total > usable.device:
            load = self.tiers.loads.plan(lease, ends[usable.total])
        device = [node for node in path if node.end <= usable.device]
        swa_first = self.swa_first_page(usable.device)
        swa_pages = NO_PAGES
        window = [node for node in device if node.end > lease.swa_want] if self._window is not None else []
        if window:
            swa_pages = np.concatenate([node.swa for node in window])[swa_first - window[0].start // self.page_size :]
        return Match(
            lease=lease,
            length=usable.device,
            pages=np.concatenate([node.pages for node in device]) if device else NO_PAGES,
            swa_first=swa_first,
            swa_pages=swa_pages,
            load=load,
        )

    def _lease(self, anchor: Node, priority: int) -> Lease:
        """A hit that ends with `anchor`."""
        lease = self.tree.lease(anchor, priority)
        self.tree.touch(anchor, hit=True, priority=priority)
        self._counters.hit_tokens += anchor.end
        return lease

    def load_back(self, rid: str, lease: Lease, load: LoadPlan) -> Loaded | None:
        """Load what the match found on the host, all or nothing; the lease grows to `load.end`.

        The pages may be read by forward passes that begin later. If the copy fails, `poll` names the lease. None =
        no room on the device, or nothing to trust any more: nothing changed but what was evicted; the plan stays.
        """
        self._check_committed()
        self._check_live(lease)
        if lease.plan is None or lease.plan.anchor.end != load.end:
            raise InvariantError(f"cache: {lease} has no plan to load up to {load.end}, expected one from its match")
        full, swa = self.tiers.loads.needs(lease)
        if full > self.available(Part.FULL) or swa > self.available(Part.SWA) or not lease.plan.anchor.alive:
            return None
        self._make_room(full, swa)
        if not lease.plan.anchor.alive:  # another load failed while eviction waited
            return None
        return self.tiers.load(rid, lease)

    def drop_load(self, lease: Lease) -> None:
        """The lease will not load: the host may do with these pages what it likes. Nothing to drop is fine."""
        self.tiers.loads.drop_plan(lease)

    # Pages of requests

    def allocate(self, rid: str, full: int, swa: int = 0) -> PartPages | None:
        """Give pages of both parts to request `rid`, evicting what nobody uses as needed.

        Returns None, with nothing changed, unless each part has as many: `available`.
        """
        self._check_committed()
        ledger = self.ledger
        if full > self.available_pages or swa > self.available(Part.SWA):
            return None
        if full > ledger.free_pages or swa:
            self._make_room(full, swa)
        pages = ledger.take(ledger.request_owner(rid), full, "allocate")
        if not swa:
            return PartPages(full=pages)
        swa_ledger = self.ledgers[Tier.DEVICE, Part.SWA]
        return PartPages(full=pages, swa=swa_ledger.take(swa_ledger.request_owner(rid), swa, "allocate"))

    def insert(
        self, lease: Lease, tokens: NDArray[np.int32], pages: PartPages, from_pos: int, swa_first: int | None = None
    ) -> Insertion:
        """Publish the whole pages of a sequence that lie behind its lease, and grow the lease over them.

        Args:
            lease: the request's.
            tokens: the sequence from position `from_pos` on, as far as its KV is computed (or will be, by the step in
                flight); a ragged last page is left alone.
            pages: the request's own pages for these tokens: FULL from position `from_pos`, SWA from page `swa_first`.
            from_pos: where the unpublished part begins; equal to `lease.end` (any value where prefixes are not kept).
            swa_first: index of the first own SWA page; None = that of `from_pos`. Positions before it become
                tombstones, unless the tree has them.
        Returns:
            canonical pages for [from_pos, end) and the duplicates. The caller writes them into its rows and then
            calls `commit_row`; until then every other operation raises InvariantError.
        Cost: O(end - from_pos), whatever the context.
        """
        self._check_committed()
        self._check_live(lease)
        if self.enable_prefix and from_pos != lease.end and lease.sound_end is None:
            raise InvariantError(f"cache: insert begins at {from_pos}, expected the end of the lease, {lease.end}")
        if lease.plan is not None:
            self.tiers.loads.drop_plan(lease)
        first = from_pos // self.page_size if swa_first is None else swa_first
        insertion, bare = self._publish(lease, tokens, pages, from_pos, first)
        self._pending = insertion
        if bare is not None:
            raise InvariantError(
                f"cache: L3 {lease} reads SWA from {lease.swa_want} on, and {bare} has none: expected own SWA pages"
                f" from page {lease.swa_want // self.page_size} on, got them from {first}"
            )
        return insertion

    def commit_row(self, insertion: Insertion) -> None:
        """The rows now hold the canonical pages: free the duplicates. Once per insertion, before anything else."""
        if insertion is not self._pending:
            raise InvariantError(f"cache: {_words(insertion)} is committed, expected the pending one, {self._pending}")
        self._pending = None
        self._free_own(insertion.rid, Part.FULL, insertion.duplicates, "free duplicates")
        self._free_own(insertion.rid, Part.SWA, insertion.swa_duplicates, "free duplicates")

    def advance(self, rid: str, lease: Lease, position: int, own_swa: Pages = NO_PAGES) -> None:
        """The request computes `position` next: what SWA lies before its window may go.

        own_swa: the request's own, unpublished SWA pages that it drops; freed. Published ones stay cached until
        somebody needs the room. Does nothing without that part.
        """
        self._check_committed()
        self._check_live(lease)
        if self._window is not None:
            self.tree.advance_window(lease, window_start(position, self._window))
            self._free_own(rid, Part.SWA, own_swa, "behind the window")

    def finish(
        self,
        rid: str,
        lease: Lease,
        tokens: NDArray[np.int32],
        pages: PartPages,
        swa_first: int = 0,
        *,
        park: bool = False,
    ) -> None:
        """The only exit of a request, for finish, abort, retract and preempt alike.

        Publishes what is complete, frees the rest, releases the lease and forgets the request and its prefetch.

        Args:
            rid: the request.
            lease: its lease, for the last time.
            tokens: the sequence from position 0, exactly as far as its KV is computed.
            pages: FULL: all pages of its row from position 0, also those not filled yet. SWA: its row's from page
                `swa_first` on, first those of the lease, then its own.
            park: it comes back later: what it leaves is copied to the host soon, whatever the write policy.
        Raises:
            InvariantError: the request still owns a page that `pages` does not list (it would be lost).
        """
        self._check_committed()
        size, start = self.page_size, lease.end
        self._check_row(rid, lease, pages.full)
        self.tiers.loads.drop_plan(lease)
        first = max(swa_first, start // size)
        own = PartPages(full=pages.full[start // size :], swa=pages.swa[max(0, first - swa_first) :])
        insertion, _ = self._publish(lease, tokens[start:], own, start, first)
        done = insertion.end // size
        tail, swa_tail = pages.full[done:], own.swa[max(0, done - first) :]
        self._free_own(rid, Part.FULL, _with(insertion.duplicates, tail), "finish")
        self._free_own(rid, Part.SWA, _with(insertion.swa_duplicates, swa_tail), "finish")
        for ledger in self.ledgers.values():
            ledger.forget_request(rid)
        if park and self._tiered and lease.sound_end is None:
            self.tiers.backups.park(lease.anchor)
        if self.tiers.prefetches is not None:
            self.tiers.prefetches.forget(rid)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Give a lease back, once, without a request: for a match whose pages nobody took (no room, no need)."""
        self._check_committed()
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is released again, expected once")
        if lease.plan is not None:
            self.tiers.loads.drop_plan(lease)
        self.tree.touch(lease.anchor, hit=False, priority=lease.priority)
        self.tree.end_lease(lease)
        if self.tiers.loads.condemned:
            self.tiers.loads.release_condemned()

    # Holds

    def hold(self, name: str, pages: Pages, part: Part = Part.FULL) -> None:
        """Hold distinct device `pages` under `name`, once more: none is handed out before the matching `unhold`.

        They may be freed or evicted meanwhile; their bytes stay. Raises InvariantError for a page without an owner.
        """
        self._check_committed()
        self._count_held(part, self.ledgers[Tier.DEVICE, part].hold(name, pages))

    def unhold(self, name: str, pages: Pages, part: Part = Part.FULL) -> None:
        """Drop one hold called `name` of each of distinct `pages`. Raises InvariantError where there is none."""
        self._check_committed()
        self._count_held(part, self.ledgers[Tier.DEVICE, part].unhold(name, pages))

    # Eviction, tiers, flush

    def evict(self, enough: int, tier: Tier = Tier.DEVICE, part: Part = Part.FULL) -> Eviction:
        """Evict until `enough` more pages of a tier and part are free, or nothing more may go: the only entry.

        What it reports as free is safe to overwrite: write-backs have ended. Never raises for lack of victims.
        """
        self._check_committed()
        shelf = self.shelves.all[tier, part]
        if tier is Tier.HOST:
            freed = self.tiers.host.evict(shelf, enough)
        else:
            freed = self._evict_device(enough, part)
        return Eviction(freed=freed, shortfall=max(0, enough - freed))

    def poll(self, *, settle: Collection[int] = ()) -> CacheNews:
        """Take the completions of copies and storage, then begin what waits: once per step, first thing.

        settle: numbers of loads that must have ended when it returns. The only place where completions change state,
        but for copies that an eviction waits for.
        """
        self._check_committed()
        return self.tiers.poll(settle)

    def prefetch(self, rid: str, ns: str, tokens: NDArray[np.int32]) -> bool:
        """Ask the storage for what device and host lack of `tokens`; False = nothing to ask, no storage, or too many.

        `poll` carries it on. Ends with `finish` or `release_aborted_request`.
        """
        self._check_committed()
        if self.tiers.prefetches is None or not self.enable_prefix:
            return False
        whole = len(tokens) - len(tokens) % self.page_size
        first = self.probe(ns, tokens[:whole]).total // self.page_size
        return self.tiers.prefetches.start(rid, ns, _token_bytes(tokens[:whole]), first)

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

    def busy(self) -> str:
        """What keeps the cache from being reset, in words; empty when it is idle."""
        return self._checks.busy()

    def reset(self) -> int:
        """Drop everything on device and host and say how many device FULL pages that were. Waits for backups.

        Raises CapacityError, with nothing changed, unless the cache is idle; the message says what is busy.
        """
        self._check_committed()
        busy = self.busy()
        if busy:
            raise CapacityError(f"cache: cannot be flushed now, busy with {busy}; expected no requests and no holds")
        self.tiers.wait_all()
        return self.shelves.clear()

    # Looking after itself

    def walk(
        self,
        cursor: int,
        budget: int,
        *,
        tier: Tier = Tier.DEVICE,
        part: Part = Part.FULL,
        unlocked_only: bool = False,
    ) -> ResidentSlots:
        """The cached slots of the next pages in page order, about `budget` slots; start with 0, go on with `.cursor`.

        Safe across any change in between: a page that stays cached is seen once per sweep. `unlocked_only` leaves
        out pages that a lease pins. Pages that a copy still fills are not seen. No Python per token or page.
        """
        shelf = self.shelves.all[tier, part]
        arena = self.tree.arena if unlocked_only else None
        return shelf.sweep.walk(shelf.ledger, arena, cursor, budget, window=part is Part.SWA)

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
        return cache_stats(self.page_size, self.tree, self.shelves, self.tiers, self._counters)

    def take_events(self) -> list[KvEvent]:
        """What routers are told, since the last call; empty unless `kv_events`."""
        return [] if self.events is None else self.events.take()

    def tree_view(self, limit: int) -> TreeView:
        """What is cached where, `limit` nodes at most."""
        return tree_view(self.tree, limit)

    # Inside

    def _check_committed(self) -> None:
        if self._pending is not None:
            raise InvariantError(
                f"cache: {_words(self._pending)} was dropped, expected commit_row before anything else"
            )

    def _check_live(self, lease: Lease) -> None:
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is used after its release")

    def _check_row(self, rid: str, lease: Lease, pages: Pages) -> None:
        """The lease is live and this request's, and the last leased page of the row is the canonical one."""
        self._check_live(lease)
        if lease.rid not in ("", rid):
            raise InvariantError(f"cache: {rid} finishes with {lease}, expected its own lease")
        leased = lease.end // self.page_size
        if lease.sound_end is not None:
            return
        if len(pages) < leased or (leased and pages[leased - 1] != lease.anchor.pages[-1]):
            at = int(pages[leased - 1]) if len(pages) >= leased else None
            raise InvariantError(
                f"cache: O5 the row of {lease} has page {at} at its end, expected the canonical"
                f" {int(lease.anchor.pages[-1])}: it was not rewritten after an insert"
            )

    def _publish(
        self, lease: Lease, tokens: NDArray[np.int32], pages: PartPages, start: int, swa_first: int
    ) -> tuple[Insertion, Node | None]:
        """Put the whole pages behind the lease into the tree and grow the lease; duplicates stay the request's.

        Also gives a node of the lease's window that has no SWA, if there is one: the caller broke its promise.
        """
        size = self.page_size
        count = len(tokens) // size
        if len(pages.full) < count:
            raise InvariantError(f"cache: {len(pages.full)} pages for {len(tokens)} tokens, expected {count} or more")
        if not count or not self.enable_prefix or lease.sound_end is not None:
            return Insertion(
                rid=lease.rid, from_pos=start, end=start, pages=NO_PAGES, duplicates=NO_PAGES, lease=lease,
                swa_first=start // size,
            ), None  # fmt: skip
        end = start + count * size
        if not lease.rid:
            lease.rid = self.ledger.owner_rid(int(pages.full[0]))
        first = min(max(swa_first, start // size), end // size)
        own = PartPages(
            full=pages.full[:count].copy(),
            swa=NO_PAGES
            if self._window is None
            else pages.swa[first - min(swa_first, first) :][: end // size - first].copy(),
        )
        done = self._publisher.publish(lease, _token_bytes(tokens[: count * size]), own, start, first)
        old = lease.anchor
        self.tree.pin(done.anchor)
        lease.anchor = done.anchor
        bare = None if self._window is None else self.tree.pin_window(lease, old.end)
        self.tree.unpin(old)
        self.tree.touch(done.anchor, hit=False, priority=lease.priority)
        if self._tiered:
            self.tiers.backups.used(done.nodes)
        self._counters.inserted_pages += count - len(done.duplicates)
        self._counters.duplicate_pages += len(done.duplicates)
        insertion = Insertion(
            rid=lease.rid, from_pos=start, end=end, pages=done.pages, duplicates=done.duplicates, lease=lease,
            swa_first=first, swa_pages=done.swa_pages, swa_duplicates=done.swa_duplicates,
        )  # fmt: skip
        return insertion, bare

    def _free_own(self, rid: str, part: Part, pages: Pages, verb: str) -> None:
        if len(pages):
            ledger = self.ledgers[Tier.DEVICE, part]
            ledger.move(pages, ledger.request_owner(rid), FREE_OWNER, verb)

    def _make_room(self, full: int, swa: int) -> None:
        """Evict until so many device pages are free; the caller knows that there are as many."""
        self._evict_device(full - self.ledger.free_pages, Part.FULL)
        if swa:
            self._evict_device(swa - self.free(Part.SWA), Part.SWA)

    def _evict_device(self, enough: int, part: Part) -> int:
        if enough <= 0:
            return 0
        began = self._clock.now() if self._clock is not None else 0.0
        if part is Part.SWA:
            freed = self.tiers.backups.evict_swa(enough)
        elif self._tiered:
            freed = self.tiers.backups.evict(enough)
        else:
            victims = self.tree.evict(enough)
            self._counters.evicted_pages += self.shelves.apply(victims)
            freed = victims.freed
        if self._clock is not None:
            self._counters.eviction_seconds += self._clock.now() - began
        return freed

    def _count_held(self, part: Part, pages: Pages) -> None:
        """The holds of these pages began or ended: nodes that list them count again."""
        if len(pages):
            shelf = self.shelves.all[Tier.DEVICE, part]
            loading = ((shelf.ledger.owner_P[pages] & STATE_MASK) == PageState.COPY).any()
            for node in (*self.shelves.nodes_of(shelf, pages), *(self.tiers.table.nodes() if loading else ())):
                self.shelves.recount(node)


def _check_settings(
    geometry: CacheGeometry, policy: str, write_policy: str, mover: PageMover | None, storage: PageStorage | None
) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"cache: eviction policy is {policy!r}, expected one of {', '.join(POLICIES)}")
    if write_policy not in WRITE_POLICIES:
        raise ConfigError(f"cache: write policy is {write_policy!r}, expected one of {', '.join(WRITE_POLICIES)}")
    if (mover is None) != (geometry.host_full_pages == 0):
        raise ConfigError(
            f"cache: {geometry.host_full_pages} host pages {'without' if mover is None else 'with'} a mover,"
            " expected both or neither"
        )
    if storage is not None and mover is None:
        raise ConfigError("cache: a storage without a host tier, expected host pages for it to fill")


def _token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """The ids as bytes, checked to be what the tree compares: a vector of int32."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvariantError(f"cache: tokens are {tokens.dtype}[{tokens.ndim}-d], expected a vector of int32")
    return tokens.tobytes()


def _with(pages: Pages, more: Pages) -> Pages:
    return np.concatenate((pages, more)) if len(pages) else more


def _words(insertion: Insertion) -> str:
    return f"insertion of {insertion.rid or 'nobody'} [{insertion.from_pos}, {insertion.end})"
