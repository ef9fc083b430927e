"""The face of the cache: match, load, allocate, insert, finish, evict, poll, over one tree and all tiers.

It decides which page holds what; it neither moves bytes nor knows requests beyond their ids. The one rule of
publication: insert -> the caller rewrites its rows -> commit_row frees the duplicates -> page ids may be
read by others.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from serinus.cache.body import CacheBody, words_of
from serinus.cache.ledger import STATE_MASK, Pages, PageState
from serinus.cache.node import NO_PAGES, Lease, Node, Tier
from serinus.cache.publish import nothing, token_bytes
from serinus.cache.results import (
    CacheNews,
    Eviction,
    Insertion,
    Loaded,
    LoadPlan,
    Match,
    PartPages,
    PrefetchState,
)
from serinus.core.errors import CapacityError, InvariantError
from serinus.core.parts import Part

__all__ = ["PrefixCache"]


class PrefixCache(CacheBody):
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

    # Looking up

    def match_prefix(self, ns: str, tokens: NDArray[np.int32], max_len: int, *, priority: int = 0) -> Match:
        """Find and pin the longest prefix of `tokens` that is usable on the device, and what the host could add to it.

        At most `max_len` tokens, whole pages only: a caller that must compute something passes len(tokens) - 1.
        Splits nodes only at the boundaries that it returns. Cost: one look-up and one memcmp per node of the path.
        """
        self._check_committed()
        limit = max(0, min(len(tokens), max_len))
        limit -= limit % self.page_size
        root = self.tree.root(ns)
        found = self.tree.descend(root, token_bytes(tokens[:limit]) if self.enable_prefix else b"", 0)
        counters = self._counters
        counters.matched_tokens += len(tokens)
        if not self.shelves.plain:
            match = self._matcher.match(root, found, priority)
            counters.hit_tokens += match.length
            return match
        anchor = found.node
        if found.partial is not None:
            anchor = self.shelves.split(found.partial, found.end).upper
            found.path.append(anchor)
        counters.hit_tokens += found.end
        pages = np.concatenate([node.pages for node in found.path]) if found.path else NO_PAGES
        lease = self._matcher.lease(anchor, priority)
        return Match(lease=lease, length=found.end, pages=pages, swa_first=len(pages))

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
        if not lease.plan.anchor.alive or full > self.free(Part.FULL) or swa > self.free(Part.SWA):
            return None  # another load failed while eviction waited for it
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
            if full > ledger.free_pages or swa > self.free(Part.SWA):  # a load failed while eviction waited for it
                return None
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
            raise InvariantError(
                f"cache: {words_of(insertion)} is committed, expected the pending one, {self._pending}"
            )
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
            self._windows.advance(lease, position)
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
        if self._window is not None:
            self._windows.release(lease)
        self.tree.end_lease(lease)
        self.tiers.quarantine.release()

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
        freed = self.tiers.host.evict(shelf, enough) if tier is Tier.HOST else self._evict_device(enough, part)
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
        return self.tiers.prefetches.start(rid, ns, token_bytes(tokens[:whole]), first)

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

    def condemn(self, part: Part, pages: Pages) -> int:
        """These device pages hold wrong KV: they are never handed out before `pardon`.

        Cached ones: their nodes from there on, and all below, are found by nobody any more, on no tier; who holds a
        lease on them keeps it, but publishes nothing behind it (`lease.sound_end`). A request's own: its `finish`
        publishes nothing from the first of them on. Free ones are left alone. Returns the tokens no longer found.
        """
        self._check_committed()
        loading = [node for node in self.tiers.table.nodes() if node.loading]
        return self.tiers.quarantine.condemn(part, pages, loading)

    def pardon(self, part: Part, pages: Pages) -> None:
        """Condemned pages may be handed out again, once nobody owns them. Harmless for others."""
        self._check_committed()
        self.tiers.quarantine.pardon(part, pages)

    def pardon_all(self) -> int:
        """The same for every condemned page; how many there were. Only while no request owns any."""
        self._check_committed()
        return self.tiers.quarantine.pardon_all()

    def reset(self) -> int:
        """Drop everything on device and host and say how many device FULL pages that were. Waits for backups.

        Condemned pages are pardoned: nothing of what they held is left. What storage has of it is still not read.
        Raises CapacityError, with nothing changed, unless the cache is idle; the message says what is busy.
        """
        self._check_committed()
        busy = self.busy()
        if busy:
            raise CapacityError(f"cache: cannot be flushed now, busy with {busy}; expected no requests and no holds")
        self.tiers.wait_all()
        dropped = self.shelves.clear()
        self.tiers.quarantine.pardon_all()
        return dropped

    # Inside

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
        if not self.enable_prefix:
            if len(pages.full) < len(tokens) // self.page_size:
                raise InvariantError(f"cache: {len(pages.full)} pages for {len(tokens)} tokens, expected more")
            return nothing(lease, start, self.page_size), None
        done = self._publisher.publish(lease, tokens, pages, start, swa_first)
        insertion = done[0]
        self._counters.inserted_pages += len(insertion.pages) - len(insertion.duplicates)
        self._counters.duplicate_pages += len(insertion.duplicates)
        return done

    def _free_own(self, rid: str, part: Part, pages: Pages, verb: str) -> None:
        if len(pages):
            owner = self.ledgers[Tier.DEVICE, part].request_owner(rid)
            self.tiers.quarantine.free_own(part, pages, owner, verb)

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


def _with(pages: Pages, more: Pages) -> Pages:
    return np.concatenate((pages, more)) if len(pages) else more
