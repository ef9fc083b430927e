"""Publication: a request's own pages become the tree's, part by part; where the tree has a page already, it wins.

The one rule of publication: insert -> the caller rewrites its rows -> commit_row frees the duplicates -> others may
read the page ids. `finish` does all of it at once, as no row is left that could name a duplicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import Owner, Pages
from serinus.cache.node import FULL, Lease, Node
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.results import InsertedPart, Insertion, join
from serinus.cache.tiers import TierController
from serinus.cache.window import Windows
from serinus.core.errors import InvariantError
from serinus.core.parts import PageSpan


@dataclass(slots=True)
class _Merge(InsertedPart):
    """A request's own pages of one part, on their way into the tree."""

    pool: PagePool
    owner: Owner
    pages: Pages
    """Those that the request gives, from `first` on."""

    def between(self, low: int, high: int) -> Pages:
        """The pages of these indices. Raises InvariantError where the request did not give them."""
        pages = self.pages[low - self.first : high - self.first]
        if len(pages) != high - low:
            raise InvariantError(
                f"cache: {len(self.pages)} {self.part.name} pages from page {self.first} on, expected them up to"
                f" page {high}"
            )
        return pages


class Publisher:
    """Puts pages into the tree behind a lease, lets the lease grow over them, and frees what the tree did not need."""

    def __init__(self, pools: PagePools, tiers: TierController, windows: Windows, *, enabled: bool) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._tiers = tiers
        self._windows = windows
        self._enabled = enabled
        self.pending: Insertion | None = None
        """The last insertion, until its `commit`: nothing else may change the cache before."""
        self.duplicate_pages = 0
        """Counter: FULL pages that the tree held already."""

    def insert(self, lease: Lease, tokens: NDArray[np.int32], spans: Sequence[PageSpan]) -> Insertion:
        """Publish; see PrefixCache.insert. Raises InvariantError: the spans are not what the lease needs."""
        start = spans[0].first * self._tree.page_size
        if self._enabled and start != lease.end and lease.sound_end is None:
            raise InvariantError(f"cache: insert begins at {start}, expected the end of the lease, {lease.end}")
        if lease.plan is not None:
            self._tiers.loads.drop_plan(lease)
        insertion, lacks = self._publish(lease, tokens, spans)
        self.pending = insertion
        if lacks:
            raise InvariantError(
                f"cache: L3 {lacks}; expected own pages, got {[(span.part.name, span.first) for span in spans]}"
            )
        return insertion

    def commit(self, insertion: Insertion) -> None:
        """Free the duplicates. Raises InvariantError: it is not the insertion that waits for it."""
        if insertion is not self.pending:
            raise InvariantError(f"cache: {insertion} is committed, expected the pending one, {self.pending}")
        self.pending = None
        for each in insertion.parts:
            if each.duplicates:
                self.free_own(insertion.rid, each.part, join(each.duplicates), "free duplicates")

    def finish(self, rid: str, lease: Lease, tokens: NDArray[np.int32], spans: Sequence[PageSpan]) -> None:
        """Publish what is complete and free the rest; see PrefixCache.finish."""
        self._check_row(rid, lease, spans[0].pages)
        if lease.plan is not None:
            self._tiers.loads.drop_plan(lease)
        start, size = lease.end, self._tree.page_size
        low = start // size
        own = [_behind(span, low) for span in spans]
        insertion, _ = self._publish(lease, tokens[start:], own)
        done = insertion.end // size
        for span, inserted in zip(own, insertion.parts, strict=True):
            tail = span.pages[max(0, done - span.first) :]
            self.free_own(rid, span.part, join([*inserted.duplicates, tail]), "finish")
            self._pools.device[span.part].ledger.forget_request(rid)

    def free_own(self, rid: str, part: int, pages: Pages, verb: str) -> None:
        """A request gives up pages of its own."""
        if len(pages):
            pool = self._pools.device[part]
            self._tiers.quarantine.free_own(pool.part, pages, pool.ledger.request_owner(rid), verb)

    def _check_row(self, rid: str, lease: Lease, pages: Pages) -> None:
        """The lease is this request's, and the last leased page of the row is the canonical one."""
        if lease.rid not in ("", rid):
            raise InvariantError(f"cache: {rid} finishes with {lease}, expected its own lease")
        leased = lease.end // self._tree.page_size
        if lease.sound_end is not None or not leased:
            return
        canonical = int(lease.anchor.device[FULL][-1])
        if len(pages) < leased or pages[leased - 1] != canonical:
            at = int(pages[leased - 1]) if len(pages) >= leased else None
            raise InvariantError(
                f"cache: O5 the row of {lease} has page {at} at its end, expected the canonical"
                f" {canonical}: it was not rewritten after an insert"
            )

    def _publish(self, lease: Lease, tokens: NDArray[np.int32], spans: Sequence[PageSpan]) -> tuple[Insertion, str]:
        """Put the whole pages behind the lease into the tree and grow the lease; duplicates stay the request's.

        Also says what a window of the lease lacks on the device, if anything: then the caller broke its promise.
        """
        size, low, given = self._tree.page_size, spans[0].first, spans[0].pages
        count = len(tokens) // size
        if len(given) < count:
            raise InvariantError(f"cache: {len(given)} pages for {len(tokens)} tokens, expected {count} or more")
        count = self._sound_count(spans, count) if self._enabled and lease.sound_end is None else 0
        if not count:
            return Insertion(lease.rid, low * size, [InsertedPart(span.part, low, [], []) for span in spans], lease), ""
        if not lease.rid:
            lease.rid = self._pools.full.ledger.owner_rid(int(given[0]))
        merges = [self._merge_of(lease.rid, span, low, low + count) for span in spans]
        anchor, nodes = self._place(lease, token_bytes(tokens[: count * size]), merges)
        if self._pools.host:
            self._tiers.backups.used(nodes)
        old = lease.anchor
        self._tree.pin(anchor)
        lease.anchor = anchor
        lacks = self._windows.pin(lease, old.end)
        self._tree.unpin(old)
        self._tree.touch(anchor, priority=lease.priority)
        self.duplicate_pages += sum(map(len, merges[0].duplicates))
        return Insertion(lease.rid, (low + count) * size, merges, lease), lacks

    def _merge_of(self, rid: str, span: PageSpan, low: int, high: int) -> _Merge:
        """The pages [low, high) of one part, or those of them that the request gives: it keeps its own arrays."""
        pool, first, pages = self._pools.device[span.part], span.first, span.pages
        if first != low or len(pages) != high - low:
            if span.part in self._tree.whole and (first != low or len(pages) < high - low):
                raise InvariantError(f"cache: {pool.part.name} pages [{first}, {span.end}), expected [{low}, {high})")
            given, first = first, min(max(first, low), high)
            pages = pages[first - min(given, first) : max(0, high - given)]
        return _Merge(pool.part, first, [], [], pool, pool.ledger.request_owner(rid), pages.copy())

    def _sound_count(self, spans: Sequence[PageSpan], count: int) -> int:
        """Of `count` pages, how many come before the first with bytes that were found wrong, in any part."""
        quarantine, low, sound = self._tiers.quarantine, spans[0].first, count
        for span in spans:
            if quarantine.banned[span.part]:
                good = quarantine.sound_count(span.part, span.pages)
                if good < len(span.pages):
                    sound = min(sound, max(0, span.first + good - low))
        return sound

    def _place(self, lease: Lease, data: bytes, merges: list[_Merge]) -> tuple[Node, list[Node]]:
        """`data` (whole pages of ids as bytes, from the lease's end on) is in the tree afterwards.

        Returns the node where it ends, and every node of it (only where there is more than one tier or part).
        """
        tree, pools, full = self._tree, self._pools, merges[0]
        start = full.first * tree.page_size
        found = tree.descend(lease.anchor, data, start)
        node, path = found.node, found.path
        if found.partial is not None:
            node = pools.split(found.partial, found.end).upper
            path.append(node)
        known = (found.end - start) // tree.page_size
        if not pools.plain:
            nodes = self._merge(path, merges) if path else []
            if known < len(full.pages):
                nodes += self._grow(node, data, known, merges)
                node = nodes[-1]
            return node, nodes
        if known:
            full.canonical = [each.device[FULL] for each in path]
            full.duplicates.append(full.pages[:known])
        if known < len(full.pages):
            fresh = full.pages[known:]
            node = pools.grow(node, memoryview(data)[known * tree.key_bytes :], fresh, full.owner)
            full.canonical.append(fresh)
        return node, []

    def _merge(self, path: list[Node], merges: list[_Merge]) -> list[Node]:
        """What the tree has of it already: gaps take the request's pages (host-only nodes, tombstones)."""
        size, pools, nodes = self._tree.page_size, self._pools, list[Node]()
        late = [merge for merge in merges if merge.first > merges[0].first]
        late.sort(key=attrgetter("first"))
        for node in path:
            for merge in late:
                if node.start < merge.first * size < node.end and not len(node.device[merge.part]):
                    nodes.append(pools.split(node, merge.first * size).upper)
            nodes.append(node)
        for node in nodes:
            node.uses += 1
            low, high = node.start // size, node.end // size
            for merge in merges:
                at = max(low, merge.first)
                if at >= high:
                    continue
                mine = merge.between(at, high)
                if len(node.device[merge.part]):
                    merge.duplicates.append(mine)
                else:
                    pools.attach(merge.pool, node, mine, merge.owner, "publish")
                merge.canonical.append(node.device[merge.part][at - low :])
        return nodes

    def _grow(self, node: Node, data: bytes, known: int, merges: list[_Merge]) -> list[Node]:
        """New nodes for what the tree did not have, cut where the pages of a part begin."""
        stride, pools, full = self._tree.key_bytes, self._pools, merges[0]
        first, end = full.first + known, full.first + len(full.pages)
        grown: list[Node] = []
        for low, high in pairwise(sorted({first, end, *[m.first for m in merges if first < m.first < end]})):
            tokens = memoryview(data)[(low - full.first) * stride : (high - full.first) * stride]
            node = pools.grow(node, tokens, full.between(low, high), full.owner)
            full.canonical.append(node.device[FULL])
            grown.append(node)
            for merge in merges[1:]:
                if low >= merge.first:
                    pools.attach(merge.pool, node, merge.between(low, high), merge.owner, "publish")
                    merge.canonical.append(node.device[merge.part])
        return grown


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """The ids as bytes. Raises InvariantError unless they are what the tree compares: a vector of int32."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvariantError(f"cache: tokens are {tokens.dtype}[{tokens.ndim}-d], expected a vector of int32")
    return tokens.tobytes()


def _behind(span: PageSpan, low: int) -> PageSpan:
    """The pages of a span from index `low` on."""
    if span.first >= low:
        return span
    return PageSpan(span.part, low, span.pages[low - span.first :])
