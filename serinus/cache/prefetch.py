"""Storage by page keys: pages that a waiting request needs are read into host pages, new host pages are written.

A prefetch goes QUERY -> (host pages) -> READ -> GRAFT, or CUT at a deadline, or MISS. Host pages that a read may still
fill stay in state COPY until the read is answered, even if the request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from serinus.cache.copies import CopyTable
from serinus.cache.coverage import window_start
from serinus.cache.host import HostTier
from serinus.cache.keys import HASH_BYTES
from serinus.cache.ledger import FREE_OWNER, Owner, Pages, copy_owner
from serinus.cache.node import FULL, NO_PAGES, TOKEN_BYTES, Node, Span, Tier
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.ports import PageStorage
from serinus.cache.results import PrefetchState
from serinus.core.errors import InvariantError
from serinus.core.moves import PageOrigin, StorageDone
from serinus.core.parts import PageSpan, Part

PREFETCHES_MAX = 64
_QUEUED_MIN = 64
"""Below it, nodes that have left the host while their write waited are not worth a sweep."""
HOLD = "storage"
"""Name of the holds on host pages that a storage write reads."""


@dataclass(slots=True)
class ReadBatch:
    """One read of consecutive pages of one part."""

    part: Part
    first: int
    """Index of its first page in the sequence."""
    pages: Pages
    good: int = -1
    """How many leading pages were read; -1 = the read is not answered."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """The prefetch of one waiting request."""

    rid: str
    namespace: str
    data: bytes
    """Tokens from position 0, whole pages, as bytes."""
    first: int
    """Index of the first page asked for."""
    keys: list[bytes]
    """Keys of the pages from `first` on."""
    before: bytes
    """The key before them."""
    owner: Owner
    """The owner of its host pages until they are grafted."""
    priority: int
    """The request's, of the nodes that it brings."""
    state: PrefetchState = PrefetchState.QUERY
    query: int = 0
    batches: dict[int, ReadBatch] = field(default_factory=dict)
    """The reads of this prefetch, by operation number."""
    refused_at: int | None = None
    """Index in the sequence of the first page that was condemned meanwhile; None = there is none."""
    grafted: int = 0
    """Pages that are nodes of the tree now."""
    wanted: bool = True
    """False = it has ended and only waits for the answers to its operations."""

    @property
    def claimed(self) -> int:
        """Host pages that it fills, at most, or has filled."""
        return self.grafted if self.state.over else len(self.keys)

    @property
    def open_ops(self) -> list[int]:
        """Operations that were not answered."""
        ops = [op for op, batch in self.batches.items() if batch.good < 0]
        return [*ops, self.query] if self.query else ops


class Prefetches:
    """The prefetches of waiting requests."""

    def __init__(
        self,
        pools: PagePools,
        table: CopyTable,
        host: HostTier,
        storage: PageStorage,
        banned: set[bytes],
    ) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._table = table
        self._host = host
        self._storage = storage
        assert pools.host, "cache: storage without a host tier"
        self._parts = tuple(pool.part for pool in pools.host.values())
        self._rules = pools.rules
        self._banned = banned
        """Keys that must not be read."""
        self._pages_max = max(1, pools.host[FULL].ledger.page_count // 2)
        self._by_rid: dict[str, Prefetch] = {}
        self._by_op: dict[int, Prefetch] = {}
        self.ended: list[str] = []
        """Requests whose prefetch has ended since this list was last taken."""
        self.tokens = 0
        """Counter: tokens of prefetched pages that became nodes."""

    @property
    def in_flight(self) -> int:
        """Operations that were not answered."""
        return len(self._by_op)

    @property
    def active(self) -> int:
        """Prefetches that requests wait for."""
        return sum(not each.state.over for each in self._by_rid.values())

    def is_full(self, count: int) -> bool:
        """Whether PREFETCHES_MAX are active or, where requests have prefetches that are not forgotten, `count` pages
        more are beyond half of the host."""
        if self.active >= PREFETCHES_MAX:
            return True
        claimed = sum(each.claimed for each in self._by_rid.values())
        return claimed > 0 and count > 0 and claimed + count > self._pages_max

    @property
    def owners(self) -> set[Owner]:
        """Owners of the host pages in state COPY that prefetches took; for `sanity_check`."""
        return {each.owner for each in (*self._by_op.values(), *self._by_rid.values())}

    def start(self, rid: str, namespace: str, data: bytes, first: int, priority: int) -> bool:
        """Ask the storage for the pages of `data` from page `first` on. False = there is no such page, the request
        has a prefetch already, or PREFETCHES_MAX are active."""
        stride = self._tree.page_size * TOKEN_BYTES
        count = min(len(data) // stride - first, self._pages_max)
        if count <= 0 or self.active >= PREFETCHES_MAX or rid in self._by_rid:
            return False
        data = data[: (first + count) * stride]
        names = self._pools.keys
        chained = names.seed(namespace.encode())
        chained += names.chain(chained, data)
        before, *keys = (chained[at : at + HASH_BYTES] for at in range(first * HASH_BYTES, len(chained), HASH_BYTES))
        op = self._table.take_op()
        prefetch = Prefetch(rid, namespace, data, first, keys, before, copy_owner(op), priority, query=op)
        self._by_rid[rid] = self._by_op[op] = prefetch
        self._storage.query(op, keys, self._parts)
        return True

    def state(self, rid: str) -> PrefetchState:
        """State of a request's prefetch."""
        prefetch = self._by_rid.get(rid)
        return PrefetchState.NONE if prefetch is None else prefetch.state

    def tokens_of(self, rid: str) -> int:
        """Tokens that a request's prefetch brought to the host."""
        prefetch = self._by_rid.get(rid)
        return 0 if prefetch is None else prefetch.grafted * self._tree.page_size

    def cut(self, rid: str) -> int:
        """End a prefetch at its deadline: graft the pages that were read, drop the rest. Returns all tokens grafted."""
        prefetch = self._by_rid.get(rid)
        if prefetch is None:
            return 0
        if not prefetch.state.over:
            self._graft(prefetch)
            prefetch.state = PrefetchState.CUT
            self._abandon(prefetch)
        return self.tokens_of(rid)

    def forget(self, rid: str) -> None:
        """The request has ended or needs no prefetch any more; reads that are under way keep their pages."""
        prefetch = self._by_rid.pop(rid, None)
        if prefetch is not None and not prefetch.state.over:
            prefetch.state = PrefetchState.CUT
            self._abandon(prefetch)

    def _abandon(self, prefetch: Prefetch) -> None:
        """Cancel the operations that are not answered, and free the pages of those that are."""
        prefetch.wanted = False
        for op in prefetch.open_ops:
            self._storage.cancel(op)
        self._free_answered(prefetch)

    def refuse(self, keys: Set[bytes]) -> None:
        """Pages of these keys were condemned: what was read of them, or will be, becomes no node."""
        for prefetch in self._by_rid.values():
            bad = next((at for at, key in enumerate(prefetch.keys, prefetch.first) if key in keys), None)
            if bad is not None and prefetch.wanted:
                prefetch.refused_at = min(bad, bad if prefetch.refused_at is None else prefetch.refused_at)

    def done(self, done: StorageDone) -> bool:
        """An operation was answered; False if it does not belong to a prefetch.

        Raises InvariantError where a read brought more pages than it asked for."""
        prefetch = self._by_op.pop(done.op, None)
        if prefetch is None:
            return False
        if prefetch.query == done.op:
            prefetch.query = 0
            if prefetch.wanted:
                self._found(prefetch, done)
            return True
        batch = prefetch.batches[done.op]
        if not 0 <= done.good <= len(batch.pages):
            raise InvariantError(f"cache: a read of {len(batch.pages)} pages brought {done.good}, expected no more")
        batch.good = done.good
        if not prefetch.wanted:
            self._free_answered(prefetch)
        elif not prefetch.open_ops:
            self._graft(prefetch)
            self._free_answered(prefetch)
            self._end(prefetch, PrefetchState.GRAFT if prefetch.grafted else PrefetchState.MISS)
        return True

    def _end(self, prefetch: Prefetch, state: PrefetchState) -> None:
        prefetch.state = state
        prefetch.wanted = False
        self.ended.append(prefetch.rid)

    # QUERY -> READ

    def _found(self, prefetch: Prefetch, done: StorageDone) -> None:
        """The query was answered: take host pages for the usable pages that the storage has, as far as there is room,
        and read them."""
        count = _leading(done.present[0]) if done.present else 0
        if self._banned:
            count = next((at for at, key in enumerate(prefetch.keys[:count]) if key in self._banned), count)
        first = prefetch.first
        count = self._usable(first, count, done.present)
        full = self._pools.host[FULL]
        if count and not self._host.make_room(full, count, must=True):
            self._host.evict(full, count - full.ledger.free_pages)
            count = self._usable(first, min(count, full.ledger.free_pages), done.present)
        needed = [(self._pools.host[part], self._first_needed(first, count, window)) for part, window in self._rules]
        if not count or not all(self._host.make_room(pool, first + count - low, must=True) for pool, low in needed):
            self._end(prefetch, PrefetchState.MISS)
            return
        prefetch.state = PrefetchState.READ
        for pool, low in reversed(needed):  # FULL last: what it brings is of use with the windows at its end alone
            if first + count > low:
                pages = pool.ledger.take(prefetch.owner, first + count - low, "take for a prefetch")
                self._read(prefetch, pool.part, low, pages)

    def _read(self, prefetch: Prefetch, part: Part, first: int, pages: Pages) -> None:
        step, size = self._pools.read_batch_pages, self._tree.page_size
        tokens = np.frombuffer(prefetch.data, np.int32)
        chain = self._pools.keys.chain_of(tokens[: first * size])
        for at in range(0, len(pages), step):
            batch = ReadBatch(part, first + at, pages[at : at + step])
            op = self._table.take_op()
            prefetch.batches[op] = batch
            self._by_op[op] = prefetch
            low, count = batch.first - prefetch.first, len(batch.pages)
            own = tokens[batch.first * size : (batch.first + count) * size]
            origin = PageOrigin(
                before=prefetch.keys[low - 1] if low else prefetch.before, start=batch.first * size, tokens=own,
                chain=chain,
            )  # fmt: skip
            chain = self._pools.keys.chain_after(own, origin.start, chain)
            self._storage.read(op, part, prefetch.keys[low : low + count], batch.pages, origin)

    def _first_needed(self, first: int, count: int, window: int) -> int:
        """Index of the first page to read of a part whose window is `window`, for a prefix of first + count pages."""
        size = self._tree.page_size
        return max(first, window_start((first + count) * size, window) // size)

    def _usable(self, first: int, count: int, present: Sequence[NDArray[np.bool_]]) -> int:
        """How many of the `count` pages found are usable: a prefix may end only where the storage also has the pages of
        each part's window before its end."""
        if not count or len(present) < len(self._rules):
            return 0
        size, index = self._tree.page_size, np.arange(count)
        usable = np.ones(count, np.bool_)
        for (_, window), found in zip(self._rules, present, strict=True):
            gap = np.maximum.accumulate(np.where(found[:count], -1, index))
            need = np.maximum(0, np.maximum(0, (first + index + 1) * size - window + 1) // size - first)
            usable &= (gap < need) | (need > index)
        good = np.flatnonzero(usable)
        return int(good[-1]) + 1 if len(good) else 0

    # READ -> the tree

    def _graft(self, prefetch: Prefetch) -> None:
        """Add the pages that were read, up to the first gap, to the tree as nodes that only the host has."""
        size = self._tree.page_size
        spans = [self._arrived(prefetch, Part(part)) for part, _ in self._rules]
        full = spans[0]
        first, end = prefetch.first, prefetch.first + len(full.pages)
        if prefetch.refused_at is not None:
            end = min(end, prefetch.refused_at)
        if end <= first or prefetch.grafted:
            return
        root = self._tree.roots.get(prefetch.namespace)
        if root is None and first:
            return
        root = self._tree.root(prefetch.namespace)
        data = prefetch.data[: end * size * TOKEN_BYTES]
        found = self._tree.descend(root, data, 0)
        at = found.end // size
        if at < first or at >= end:  # the prefix before it is gone, or a request computed it meanwhile
            return
        parent = found.node if found.partial is None else self._pools.split(found.partial, found.end).upper
        cuts = {min(max(cut, at), end) for span in spans for cut in (span.first, span.end)}
        for low, high in pairwise(sorted({at, end, *cuts})):
            parent = self._hang(prefetch, parent, low, high, spans)
        prefetch.grafted = end - at
        self.tokens += prefetch.grafted * size

    def _hang(self, prefetch: Prefetch, parent: Node, low: int, high: int, spans: list[PageSpan]) -> Node:
        """Add one node of the pages [low, high), with the pages of each part that were read."""
        stride, first = self._tree.page_size * TOKEN_BYTES, prefetch.first
        node = self._tree.grow(parent, memoryview(prefetch.data[low * stride : high * stride]), NO_PAGES)
        node.hashes, node.priority = b"".join(prefetch.keys[low - first : high - first]), prefetch.priority
        for span in spans:
            if span.first <= low < span.end:
                pages = span.pages[low - span.first : high - span.first]
                self._pools.attach(self._pools.host[span.part], node, pages, prefetch.owner, "graft")
        return node

    def _arrived(self, prefetch: Prefetch, part: Part) -> PageSpan:
        """The pages of one part that were read, in order, up to the first that failed."""
        batches = [batch for batch in prefetch.batches.values() if batch.part is part]
        pages: list[Pages] = []
        for batch in batches:
            pages.append(batch.pages[: max(0, batch.good)])
            if batch.good < len(batch.pages):
                break
        first = batches[0].first if batches else 0
        return PageSpan(part=part, first=first, pages=np.concatenate(pages) if pages else NO_PAGES)

    def _free_answered(self, prefetch: Prefetch) -> None:
        """Free the pages of answered reads that were not grafted."""
        for batch in prefetch.batches.values():
            if batch.good >= 0 and len(batch.pages):
                pool = self._pools.host[batch.part]
                mine: Pages = batch.pages[pool.ledger.owner_P[batch.pages] == prefetch.owner]
                pool.ledger.move(mine, prefetch.owner, FREE_OWNER, "prefetch is over")
                batch.pages = NO_PAGES
                batch.good = 0


class StorageWrites:
    """Write-through of host pages to the storage. Host pages are held while a write reads them."""

    def __init__(self, pools: PagePools, table: CopyTable, storage: PageStorage) -> None:
        self._pools = pools
        self._table = table
        self._storage = storage
        assert pools.host, "cache: storage without a host tier"
        self._pages_max = max(64, pools.host[FULL].ledger.page_count // 8)
        self._pages = 0
        self._queue: deque[Span] = deque()
        self._sweep_at = _QUEUED_MIN
        self._by_op: dict[int, tuple[PagePool, Pages, Span]] = {}
        self.tokens = 0
        """Counter: tokens written to the storage."""
        self.wrong: list[tuple[Span, int]] = []
        """Spans whose copies on the host are not what their stamps vouch for, from a position on; the caller takes
        them."""

    @property
    def in_flight(self) -> int:
        """Writes that are not answered, and spans whose writes have not begun."""
        return len(self._by_op) + len(self._queue)

    def saved(self, nodes: list[Node]) -> None:
        """Queue nodes that were copied to the host. However slow the storage is, no more wait than twice as many as
        the host has: a queue that has doubled drops those that left it meanwhile."""
        self._queue.extend(Span(node, node.start) for node in nodes)
        if len(self._queue) >= self._sweep_at:
            waiting = {(id(span.anchor), span.start): span for span in self._queue if _is_on_host(span)}
            self._queue = deque(waiting.values())
            self._sweep_at = max(_QUEUED_MIN, 2 * len(waiting))

    def drain(self) -> None:
        """Begin writes, as far as the budget allows; nodes that were removed meanwhile are not written."""
        while self._queue and self._pages < self._pages_max:
            for node in reversed(self._queue.popleft().nodes()):
                if node.alive:
                    self._begin(node)

    def _begin(self, node: Node) -> None:
        """Write what the host has of a node."""
        names = self._pools.keys
        keys = names.of(node)
        named = [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]
        origin = PageOrigin(
            before=names.before(node), start=node.start, tokens=node.token_ids(), chain=names.chain_before(node)
        )
        for pool in self._pools.host.values():
            pages = pool.of(node)
            if len(pages):
                op = self._table.take_op()
                pool.ledger.hold(HOLD, pages)
                span = Span(node, node.start)
                self._pools.tree.set_storing(span, 1)
                self._pages += len(pages)
                self._by_op[op] = (pool, pages, span)
                self._storage.write(op, pool.part, named, pages, origin)

    def done(self, done: StorageDone) -> bool:
        """A write was answered; False if it is not one of these writes."""
        entry = self._by_op.pop(done.op, None)
        if entry is None:
            return False
        pool, pages, span = entry
        pool.ledger.unhold(HOLD, pages)
        self._pools.tree.set_storing(span, -1)
        node = span.anchor
        self._pages -= len(pages)
        size = self._pools.tree.page_size
        if done.bad:
            self.wrong.append((span, span.start + min(done.bad) * size))
        if pool.part is Part.FULL:
            self.tokens += done.good * size
            whole = node.alive and done.good * size == node.end - node.start
            if whole and self._pools.events is not None:
                self._pools.events.stored(node, Tier.STORAGE)
        return True


def _is_on_host(span: Span) -> bool:
    """Whether the host still has some of it."""
    return any(node.alive and len(node.host[FULL]) for node in span.nodes())


def _leading(present: NDArray[np.bool_]) -> int:
    """How many leading pages are present."""
    return len(present) if present.all() else int(present.argmin())
