"""The face of the cache: match, allocate, insert, finish, hold, evict, over one tree and one ledger.

Device tier, FULL part. It decides which page holds what; it neither moves bytes nor knows requests beyond their ids.
The one rule of publication: insert -> the caller rewrites its row -> commit_row frees the duplicates -> page ids may
be read by others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from serinus.cache.eviction import POLICIES
from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, PageLedger, Pages, PageState, tree_owner
from serinus.cache.node import NO_PAGES, Lease, Node
from serinus.cache.results import (
    CacheGeometry,
    CacheStats,
    Eviction,
    Insertion,
    Match,
    PartPages,
    Probe,
    ResidentSlots,
    RowView,
)
from serinus.cache.sanity import check_cache, check_rows
from serinus.cache.sweep import SweepIndex
from serinus.cache.tree import RadixTree, Victims
from serinus.core.errors import CapacityError, ConfigError, InvariantError

__all__ = ["PrefixCache"]


class PrefixCache:
    """What is kept where. Not thread safe: the scheduler owns it.

    Args:
        geometry: pages by tier and part.
        enable_prefix: False keeps nothing beyond its request: matches are empty and insertions publish nothing.
        policy: eviction order, one of POLICIES.
    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, geometry: CacheGeometry, *, enable_prefix: bool = True, policy: str = "lru") -> None:
        page_count, page_size = geometry.full_pages, geometry.page_size
        if policy not in POLICIES:
            raise ConfigError(f"cache: eviction policy is {policy!r}, expected one of {', '.join(POLICIES)}")
        self.geometry = geometry
        self.page_count = page_count
        self.page_size = page_size
        self.enable_prefix = enable_prefix
        self.policy = policy
        self.ledger = PageLedger(page_count)
        self.tree = RadixTree(page_size, policy)
        self._sweep = SweepIndex(page_count, page_size)
        self._pending: Insertion | None = None
        self._matched_tokens = 0
        self._hit_tokens = 0
        self._inserted_pages = 0
        self._duplicate_pages = 0
        self._evicted_pages = 0
        self._sanity_checks = 0

    # Counts

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out without evicting."""
        return self.ledger.free_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages that eviction can make free now: `allocate` succeeds up to free + evictable."""
        return self.tree.evictable_pages

    @property
    def available_pages(self) -> int:
        """free + evictable."""
        return self.ledger.free_pages + self.tree.evictable_pages

    @property
    def used_pages(self) -> int:
        """Pages that `allocate` cannot give now: of requests, pinned, held, in copies, or quarantined."""
        return self.page_count - 1 - self.available_pages

    @property
    def cached_pages(self) -> int:
        """Pages in the tree."""
        return self.tree.cached_pages

    # Looking up

    def probe(self, ns: str, tokens: NDArray[np.int32]) -> Probe:
        """Length of the cached prefix of `tokens` in tokens, page aligned. Changes nothing, pins nothing."""
        root = self.tree.roots.get(ns)
        if root is None:
            return Probe(device=0, total=0)
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(root, _token_bytes(tokens[:whole]), 0).end
        return Probe(device=found, total=found)

    def match_prefix(self, ns: str, tokens: NDArray[np.int32], max_len: int, *, priority: int = 0) -> Match:
        """Find and pin the longest cached prefix of `tokens`, at most `max_len` tokens, whole pages only.

        A caller that must compute something passes max_len = len(tokens) - 1. Splits a node only at the boundary that
        it returns. Cost: one look-up and one memcmp per node of the path.
        """
        self._check_committed()
        limit = max(0, min(len(tokens), max_len))
        limit -= limit % self.page_size
        root = self.tree.root(ns)
        found = self.tree.descend(root, _token_bytes(tokens[:limit]) if self.enable_prefix else b"", 0)
        anchor = found.node
        if found.partial is not None:
            anchor = self._split(found.partial, found.end)
            found.path.append(anchor.pages)
        self.tree.pin(anchor)
        self.tree.touch(anchor, hit=True)
        self._matched_tokens += len(tokens)
        self._hit_tokens += found.end
        pages = np.concatenate(found.path) if found.path else NO_PAGES
        return Match(lease=Lease(anchor), length=found.end, pages=pages, swa_first=len(pages))

    # Pages of requests

    def allocate(self, rid: str, full: int, swa: int = 0) -> PartPages | None:
        """Give `full` pages to request `rid`, evicting unpinned leaves as needed.

        Returns None, with nothing changed, if free + evictable pages do not suffice.
        """
        self._check_committed()
        ledger = self.ledger
        short = full - ledger.free_pages
        if short > 0:
            if short > self.tree.evictable_pages:
                return None
            self._apply(self.tree.evict(short))
        return PartPages(full=ledger.take(ledger.request_owner(rid), full, "allocate"))

    def insert(
        self, lease: Lease, tokens: NDArray[np.int32], pages: PartPages, from_pos: int, swa_first: int | None = None
    ) -> Insertion:
        """Publish the whole pages of a sequence that lie behind its lease, and grow the lease over them.

        Args:
            lease: the request's.
            tokens: the sequence from position `from_pos` on, as far as its KV is computed (or will be, by the step in
                flight); a ragged last page is left alone.
            pages: the request's own pages for these tokens, the first of them for position `from_pos`.
            from_pos: where the unpublished part begins; equal to `lease.end` (any value where prefixes are not kept).
        Returns:
            canonical pages for [from_pos, end) and the duplicates. The caller writes `pages` into its row and then
            calls `commit_row`; until then every other operation raises InvariantError.
        Cost: O(end - from_pos), whatever the context.
        """
        self._check_committed()
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is used after its release")
        if self.enable_prefix and from_pos != lease.end:
            raise InvariantError(f"cache: insert begins at {from_pos}, expected the end of the lease, {lease.end}")
        insertion = self._publish(lease, tokens, pages.full, from_pos)
        self._pending = insertion
        return insertion

    def commit_row(self, insertion: Insertion) -> None:
        """The row now holds the canonical pages: free the duplicates. Once per insertion, before anything else."""
        if insertion is not self._pending:
            raise InvariantError(f"cache: {_words(insertion)} is committed, expected the pending one, {self._pending}")
        self._pending = None
        self._free_own(insertion.rid, insertion.duplicates, "free duplicates")

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

        Publishes what is complete, frees the rest, releases the lease and forgets the request.

        Args:
            rid: the request.
            lease: its lease, for the last time.
            tokens: the sequence from position 0, exactly as far as its KV is computed.
            pages: all pages of its row from position 0, also those not filled yet.
        Raises:
            InvariantError: the request still owns a page that `pages` does not list (it would be lost).
        """
        self._check_committed()
        start = lease.end
        row = pages.full
        self._check_row(rid, lease, row)
        insertion = self._publish(lease, tokens[start:], row[start // self.page_size :], start)
        tail = row[insertion.end // self.page_size :]
        self._free_own(rid, np.concatenate((insertion.duplicates, tail)) if insertion.changed else tail, "finish")
        self.ledger.forget_request(rid)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Give a lease back, once, without a request: for a match whose pages nobody took (no room, no need)."""
        self._check_committed()
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is released again, expected once")
        lease.live = False
        self.tree.touch(lease.anchor, hit=False)
        self.tree.unpin(lease.anchor)

    # Holds

    def hold(self, name: str, pages: Pages) -> None:
        """Hold distinct `pages` under `name`, once more: none of them is handed out before the matching `unhold`.

        They may be freed or evicted meanwhile; their bytes stay. Raises InvariantError for a page without an owner.
        """
        self._check_committed()
        fresh = self.ledger.hold(name, pages)
        self._count_held(fresh, 1)

    def unhold(self, name: str, pages: Pages) -> None:
        """Drop one hold called `name` of each of distinct `pages`. Raises InvariantError where there is none."""
        self._check_committed()
        bare = self.ledger.unhold(name, pages)
        self._count_held(bare, -1)

    # Eviction and flush

    def evict(self, enough: int) -> Eviction:
        """Evict unpinned leaves until `enough` pages came free, or nothing more can go."""
        self._check_committed()
        victims = self.tree.evict(enough)
        self._apply(victims)
        return Eviction(freed=victims.freed, shortfall=max(0, enough - victims.freed))

    def busy(self) -> str:
        """What keeps the cache from being reset, in words; empty when it is idle."""
        leases = sum(node.leases for node in self.tree.nodes())
        counts = self.ledger.counts()
        reasons = {
            f"{leases} leases": leases,
            f"{counts.request} pages of requests {', '.join(self.ledger.request_ids[:8])}": counts.request,
            f"{self.ledger.held_count} pages held by {', '.join(self.ledger.hold_names)}": self.ledger.held_count,
            f"{counts.copy} pages in copies": counts.copy,
        }
        return "; ".join(words for words, count in reasons.items() if count)

    def reset(self) -> int:
        """Drop everything cached and say how many pages that were.

        Raises CapacityError, with nothing changed, unless the cache is idle; the message says what is busy.
        """
        self._check_committed()
        busy = self.busy()
        if busy:
            raise CapacityError(f"cache: cannot be flushed now, busy with {busy}; expected no requests and no holds")
        victims = self.tree.clear()
        self._apply(victims)
        return sum(victims.lengths)

    # Looking after itself

    def walk(self, cursor: int, budget: int, *, unlocked_only: bool = False) -> ResidentSlots:
        """The cached slots of the next pages in page order, about `budget` slots; start with 0, go on with `.cursor`.

        Safe across any change in between: a page that stays cached is seen once per sweep. `unlocked_only` leaves
        out pages that a lease pins. No Python per token or page.
        """
        arena = self.tree.arena
        return self._sweep.walk(self.ledger, arena if unlocked_only else None, cursor, budget)

    def sanity_check(self, rows: Iterable[RowView] | None = None) -> None:
        """Check every invariant that holds between operations; with `rows` also those between rows and pages.

        `rows` are all running requests, or None to leave O3 and O5 out. Cost: O(pages + nodes): when idle and in tests.
        Raises InvariantError naming the invariant.
        """
        self._check_committed()
        self.ledger.check()
        check_cache(self.tree, self.ledger, self._sweep)
        if rows is not None:
            check_rows(rows, self.ledger, self.page_size)
        self._sanity_checks += 1

    def stats(self) -> CacheStats:
        """Gauges and counters, for metrics and log lines."""
        counts = self.ledger.counts()
        return CacheStats(
            page_count=self.page_count - 1,
            page_size=self.page_size,
            pages=counts,
            evictable_pages=self.tree.evictable_pages,
            protected_pages=counts.tree - self.tree.evictable_pages,
            held_pages=self.ledger.held_count,
            node_count=len(self.tree.arena),
            matched_tokens=self._matched_tokens,
            hit_tokens=self._hit_tokens,
            inserted_pages=self._inserted_pages,
            duplicate_pages=self._duplicate_pages,
            evicted_pages=self._evicted_pages,
            sanity_checks=self._sanity_checks,
        )

    # Inside

    def _check_committed(self) -> None:
        if self._pending is not None:
            raise InvariantError(
                f"cache: {_words(self._pending)} was dropped, expected commit_row before anything else"
            )

    def _check_row(self, rid: str, lease: Lease, pages: Pages) -> None:
        """The lease is live and this request's, and the last leased page of the row is the canonical one."""
        if not lease.live:
            raise InvariantError(f"cache: L5 {lease} is used after its release")
        if lease.rid not in ("", rid):
            raise InvariantError(f"cache: {rid} finishes with {lease}, expected its own lease")
        leased = lease.end // self.page_size
        if len(pages) < leased or (leased and pages[leased - 1] != lease.anchor.pages[-1]):
            at = int(pages[leased - 1]) if len(pages) >= leased else None
            raise InvariantError(
                f"cache: O5 the row of {lease} has page {at} at its end, expected the canonical"
                f" {int(lease.anchor.pages[-1])}: it was not rewritten after an insert"
            )

    def _publish(self, lease: Lease, tokens: NDArray[np.int32], pages: Pages, start: int) -> Insertion:
        """Put the whole pages behind the lease into the tree and grow the lease; duplicates stay the request's."""
        size = self.page_size
        count = len(tokens) // size
        if len(pages) < count:
            raise InvariantError(f"cache: {len(pages)} pages for {len(tokens)} tokens, expected {count} or more")
        if not count or not self.enable_prefix:
            return Insertion(rid=lease.rid, from_pos=start, end=start, pages=NO_PAGES, duplicates=NO_PAGES, lease=lease)
        end = start + count * size
        own: Pages = pages[:count].copy()
        owner = self._bind(lease, own)
        data = _token_bytes(tokens[: count * size])
        found = self.tree.descend(lease.anchor, data, start)
        node = found.node
        if found.partial is not None:
            node = self._split(found.partial, found.end)
            found.path.append(node.pages)
        known = (found.end - start) // size
        if found.end < end:
            node = self._grow(node, data, own, known, owner)
        self.tree.pin(node)
        self.tree.unpin(lease.anchor)
        lease.anchor = node
        self.tree.touch(node, hit=False)
        self._inserted_pages += len(own) - known
        self._duplicate_pages += known
        duplicates: Pages = own[:known]
        canonical = np.concatenate((*found.path, own[known:])) if known else own
        return Insertion(rid=lease.rid, from_pos=start, end=end, pages=canonical, duplicates=duplicates, lease=lease)

    def _bind(self, lease: Lease, own: Pages) -> int:
        """The owner code of the request that the lease serves; the first insert finds it by the pages."""
        if not lease.rid:
            lease.rid = self.ledger.owner_rid(int(own[0]))
        return self.ledger.request_owner(lease.rid)

    def _grow(self, node: Node, data: bytes, own: Pages, known: int, owner: int) -> Node:
        """A new leaf below `node` for own[known:]."""
        fresh = own[known:]
        tokens = memoryview(data[known * self.tree.key_bytes :])
        leaf = self.tree.grow(node, tokens, fresh)
        self.ledger.move(fresh, owner, tree_owner(leaf.id), "publish")
        self._sweep.note(fresh, leaf.start, int(node.pages[-1]) if len(node.pages) else 0)
        if self.ledger.held_count:
            held = int(np.count_nonzero(self.ledger.hold_P[fresh]))
            if held:
                self.tree.count_held(leaf.id, held)
        return leaf

    def _split(self, node: Node, position: int) -> Node:
        split = self.tree.split(node, position)
        self.ledger.move(split.pages, tree_owner(split.old_id), tree_owner(split.new_id), "split")
        if node.held:
            upper_held = int(np.count_nonzero(self.ledger.hold_P[split.upper.pages]))
            split.upper.held = upper_held
            node.held -= upper_held
        return split.upper

    def _free_own(self, rid: str, pages: Pages, verb: str) -> None:
        if len(pages):
            self.ledger.move(pages, self.ledger.request_owner(rid), FREE_OWNER, verb)

    def _apply(self, victims: Victims) -> None:
        if victims.pages:
            pages = victims.pages[0] if len(victims.pages) == 1 else np.concatenate(victims.pages)
            self.ledger.evict(pages, victims.node_ids, victims.lengths)
            self._evicted_pages += len(pages)

    def _count_held(self, pages: Pages, sign: int) -> None:
        """The holds of `pages` began (1) or ended (-1): those that are in the tree change their nodes' counts."""
        if not len(pages):
            return
        owners = self.ledger.owner_P[pages]
        cached = owners[(owners & STATE_MASK) == PageState.TREE] >> STATE_BITS
        for node_id, count in zip(*(a.tolist() for a in np.unique(cached, return_counts=True)), strict=True):
            self.tree.count_held(node_id, sign * count)


def _token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """The ids as bytes, checked to be what the tree compares: a vector of int32."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvariantError(f"cache: tokens are {tokens.dtype}[{tokens.ndim}-d], expected a vector of int32")
    return tokens.tobytes()


def _words(insertion: Insertion) -> str:
    return f"insertion of {insertion.rid or 'nobody'} [{insertion.from_pos}, {insertion.end})"
