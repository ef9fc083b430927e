"""Storage: reading what a waiting request needs into host pages, writing what the host has got, by page keys.

A prefetch goes QUERY -> (host pages) -> READ -> GRAFT, or CUT at a deadline, or MISS. Host pages that a reader may
still fill stay in state COPY until its answer came, whatever became of the request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from serinus.cache.copies import CopyTable
from serinus.cache.coverage import window_start
from serinus.cache.host import HostTier
from serinus.cache.keys import HASH_BYTES
from serinus.cache.ledger import FREE_OWNER, Owner, Pages, copy_owner
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, Node, Span, Tier
from serinus.cache.ports import PageStorage
from serinus.cache.results import PrefetchState
from serinus.cache.shelves import Shelf, Shelves
from serinus.core.errors import InvariantError
from serinus.core.moves import StorageDone
from serinus.core.parts import Part

__all__ = ["Prefetches", "StorageWrites"]

PREFETCHES_MAX = 64
HOLD = "storage"
"""Name of the holds on host pages that a storage write reads."""


@dataclass(slots=True)
class Batch:
    """One read of consecutive pages of one part."""

    part: Part
    first: int
    """Index of its first page in the sequence."""
    pages: Pages
    good: int = -1
    """How many leading pages came; -1 = the reader has not answered."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """What a request wants from the storage."""

    rid: str
    namespace: str
    data: bytes
    """Tokens from position 0, whole pages, as bytes."""
    first: int
    """Index of the first page asked for."""
    keys: list[bytes]
    """Of the pages from `first` on."""
    owner: Owner
    """Whose its host pages are."""
    state: PrefetchState = PrefetchState.QUERY
    query: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    """By op."""
    grafted: int = 0
    """Pages that hang in the tree now."""
    wanted: bool = True
    """False: only waits for its readers."""

    @property
    def open_ops(self) -> list[int]:
        """Operations that were not answered."""
        ops = [op for op, batch in self.batches.items() if batch.good < 0]
        return [*ops, self.query] if self.query else ops


class Prefetches:
    """The prefetches of waiting requests."""

    def __init__(
        self,
        shelves: Shelves,
        table: CopyTable,
        host: HostTier,
        storage: PageStorage,
        window: int | None,
        banned: set[bytes],
    ) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._table = table
        self._host = host
        self._storage = storage
        self._window = window
        assert shelves.host is not None, "cache: storage without a host tier"
        self._host_shelf = shelves.host
        self._banned = banned
        """Keys that must not be read."""
        self._pages_max = max(1, shelves.host.ledger.page_count // 2)
        self._by_rid: dict[str, Prefetch] = {}
        self._by_op: dict[int, Prefetch] = {}
        self.ended: list[str] = []
        """Requests whose prefetch came to an end since somebody asked."""
        self.tokens = 0
        """Counter: tokens grafted."""

    @property
    def in_flight(self) -> int:
        """Operations that were not answered."""
        return len(self._by_op)

    @property
    def active(self) -> int:
        """Prefetches that requests wait for."""
        return sum(not each.state.over for each in self._by_rid.values())

    @property
    def owners(self) -> set[Owner]:
        """Whose host pages in state COPY are prefetches'; for `sanity_check`."""
        return {each.owner for each in (*self._by_op.values(), *self._by_rid.values())}

    def start(self, rid: str, namespace: str, data: bytes, first: int) -> bool:
        """Ask the storage for the pages of `data` from page `first` on. False: nothing to ask, or too many ask."""
        stride = self._tree.page_size * TOKEN_BYTES
        count = min(len(data) // stride - first, self._pages_max)
        if count <= 0 or self.active >= PREFETCHES_MAX or rid in self._by_rid:
            return False
        data = data[: (first + count) * stride]
        names = self._shelves.keys
        chained = names.chain(names.seed(namespace.encode()), data)[first * HASH_BYTES :]
        keys = [chained[at : at + HASH_BYTES] for at in range(0, len(chained), HASH_BYTES)]
        op = self._table.take_op()
        prefetch = Prefetch(rid, namespace, data, first, keys, copy_owner(op), query=op)
        self._by_rid[rid] = self._by_op[op] = prefetch
        self._storage.query(op, keys, self._parts)
        return True

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (Part.FULL,) if self._window is None else (Part.FULL, Part.SWA)

    def state(self, rid: str) -> PrefetchState:
        """How far it is."""
        prefetch = self._by_rid.get(rid)
        return PrefetchState.NONE if prefetch is None else prefetch.state

    def tokens_of(self, rid: str) -> int:
        """Tokens that a request's prefetch brought to the host."""
        prefetch = self._by_rid.get(rid)
        return 0 if prefetch is None else prefetch.grafted * self._tree.page_size

    def cut(self, rid: str) -> int:
        """The deadline: what has come is grafted, the rest is let go. Returns the tokens grafted in all."""
        prefetch = self._by_rid.get(rid)
        if prefetch is None:
            return 0
        if not prefetch.state.over:
            self._graft(prefetch)
            prefetch.state = PrefetchState.CUT
            self._abandon(prefetch)
        return self.tokens_of(rid)

    def forget(self, rid: str) -> None:
        """The request is gone, or needs its prefetch no more; readers that are under way keep their pages."""
        prefetch = self._by_rid.pop(rid, None)
        if prefetch is not None and not prefetch.state.over:
            prefetch.state = PrefetchState.CUT
            self._abandon(prefetch)

    def _abandon(self, prefetch: Prefetch) -> None:
        """Nobody wants the rest: cancel what was not answered, free what was."""
        prefetch.wanted = False
        for op in prefetch.open_ops:
            self._storage.cancel(op)
        self._free_answered(prefetch)

    def done(self, done: StorageDone) -> bool:
        """An operation was answered; False if it is none of these."""
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
        """The storage said what it has: take host pages for what is usable of it, as many as there are, and read."""
        count = _leading(done.present[0]) if done.present else 0
        if self._banned:
            count = next((at for at, key in enumerate(prefetch.keys[:count]) if key in self._banned), count)
        swa_present = done.present[1] if self._window is not None and len(done.present) > 1 else None
        count = self._usable(prefetch.first, count, swa_present)
        if count:
            host = self._host_shelf
            if not self._host.make_room(host, count, must=True):
                self._host.evict(host, count - host.ledger.free_pages)
                count = self._usable(prefetch.first, min(count, host.ledger.free_pages), swa_present)
        swa_first = self._swa_first(prefetch.first, count)
        swa_count = prefetch.first + count - swa_first if self._window is not None else 0
        if swa_count and not self._swa_room(swa_count):
            count = 0
        if not count:
            self._end(prefetch, PrefetchState.MISS)
            return
        prefetch.state = PrefetchState.READ
        reads = [(Part.FULL, prefetch.first, count, self._host_shelf)]
        if swa_count and self._shelves.host_swa is not None:
            reads.insert(0, (Part.SWA, swa_first, swa_count, self._shelves.host_swa))
        for part, first, size, shelf in reads:
            self._read(prefetch, part, first, shelf.ledger.take(prefetch.owner, size, "take for a prefetch"))

    def _read(self, prefetch: Prefetch, part: Part, first: int, pages: Pages) -> None:
        step = self._shelves.read_batch_pages
        for at in range(0, len(pages), step):
            batch = Batch(part, first + at, pages[at : at + step])
            op = self._table.take_op()
            prefetch.batches[op] = batch
            self._by_op[op] = prefetch
            low = batch.first - prefetch.first
            self._storage.read(op, part, prefetch.keys[low : low + len(batch.pages)], batch.pages)

    def _swa_room(self, count: int) -> bool:
        shelf = self._shelves.host_swa
        return shelf is not None and self._host.make_room(shelf, count, must=True)

    def _swa_first(self, first: int, count: int) -> int:
        """Index of the first page whose SWA a prefix of first + count pages needs, of those that are asked for."""
        size = self._tree.page_size
        return max(first, window_start((first + count) * size, self._window) // size)

    def _usable(self, first: int, count: int, swa_present: NDArray[np.bool_] | None) -> int:
        """Of `count` pages found, how many are of use: with SWA, up to where the window before it was found too."""
        if self._window is None or not count:
            return count
        if swa_present is None:
            return 0
        size = self._tree.page_size
        index = np.arange(count)
        gap = np.maximum.accumulate(np.where(swa_present[:count], -1, index))
        need = np.maximum(0, ((first + index + 1) * size - self._window + 1) // size - first)
        good = np.flatnonzero((gap < need) | (need > index))
        return int(good[-1]) + 1 if len(good) else 0

    # READ -> the tree

    def _graft(self, prefetch: Prefetch) -> None:
        """Hang what came, from the front without a gap, into the tree: nodes that are on the host alone."""
        size = self._tree.page_size
        full = self._arrived(prefetch, Part.FULL)
        first, end = prefetch.first, prefetch.first + len(full)
        if not len(full) or prefetch.grafted:
            return
        root = self._tree.roots.get(prefetch.namespace)
        if root is None and first:
            return
        root = self._tree.root(prefetch.namespace)
        data = prefetch.data[: end * size * TOKEN_BYTES]
        found = self._tree.descend(root, data, 0)
        at = found.end // size
        if at < first or at >= end:  # the prefix before it is gone, or somebody computed it meanwhile
            return
        parent = found.node if found.partial is None else self._shelves.split(found.partial, found.end).upper
        swa, swa_first = self._arrived(prefetch, Part.SWA), self._first_of(prefetch, Part.SWA)
        cuts = sorted({at, end, *(min(max(cut, at), end) for cut in (swa_first, swa_first + len(swa)))})
        for low, high in pairwise(cuts):
            window = swa[low - swa_first : high - swa_first] if swa_first <= low < swa_first + len(swa) else NO_PAGES
            parent = self._hang(prefetch, parent, low, full[low - first : high - first], window)
        prefetch.grafted = end - at
        self.tokens += prefetch.grafted * size

    def _first_of(self, prefetch: Prefetch, part: Part) -> int:
        """Index of the first page of `part` that was asked for; 0 if none was."""
        return next((batch.first for batch in prefetch.batches.values() if batch.part is part), 0)

    def _hang(self, prefetch: Prefetch, parent: Node, low: int, full: Pages, swa: Pages) -> Node:
        stride = self._tree.page_size * TOKEN_BYTES
        tokens = memoryview(prefetch.data[low * stride : (low + len(full)) * stride])
        node = self._tree.grow(parent, tokens, NO_PAGES)
        node.hashes = b"".join(prefetch.keys[low - prefetch.first : low - prefetch.first + len(full)])
        self._shelves.attach(self._host_shelf, node, full, prefetch.owner, "graft")
        if len(swa) and self._shelves.host_swa is not None:
            self._shelves.attach(self._shelves.host_swa, node, swa, prefetch.owner, "graft")
        return node

    def _arrived(self, prefetch: Prefetch, part: Part) -> Pages:
        """The pages of one part that came, in order, up to the first that did not."""
        pages: list[Pages] = []
        for batch in prefetch.batches.values():
            if batch.part is part:
                pages.append(batch.pages[: max(0, batch.good)])
                if batch.good < len(batch.pages):
                    break
        return np.concatenate(pages) if pages else NO_PAGES

    def _free_answered(self, prefetch: Prefetch) -> None:
        """Pages of answered reads that were not grafted are free."""
        for batch in prefetch.batches.values():
            if batch.good >= 0 and len(batch.pages):
                shelf = self._shelves.all[Tier.HOST, batch.part]
                mine: Pages = batch.pages[shelf.ledger.owner_P[batch.pages] == prefetch.owner]
                shelf.ledger.move(mine, prefetch.owner, FREE_OWNER, "prefetch is over")
                batch.pages = NO_PAGES
                batch.good = 0


class StorageWrites:
    """Write-through of what the host has got. Host pages are held while a write reads them."""

    def __init__(self, shelves: Shelves, table: CopyTable, storage: PageStorage) -> None:
        self._shelves = shelves
        self._table = table
        self._storage = storage
        assert shelves.host is not None, "cache: storage without a host tier"
        self._pages_max = max(64, shelves.host.ledger.page_count // 8)
        self._pages = 0
        self._queue: deque[Node] = deque()
        self._by_op: dict[int, tuple[Shelf, Pages, Span]] = {}
        self.tokens = 0
        """Counter: tokens stored."""

    @property
    def in_flight(self) -> int:
        """Writes that were not answered, or not begun."""
        return len(self._by_op) + len(self._queue)

    def saved(self, nodes: list[Node]) -> None:
        """The host has got these nodes."""
        self._queue.extend(nodes)

    def drain(self) -> None:
        """Begin writes, as far as the budget allows; what has left the host meanwhile is not written."""
        while self._queue and self._pages < self._pages_max:
            node = self._queue.popleft()
            if not node.alive:
                continue
            keys = self._shelves.keys.of(node)
            named = [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]
            for shelf in (self._shelves.host, self._shelves.host_swa):
                pages = NO_PAGES if shelf is None else shelf.of(node)
                if shelf is not None and len(pages):
                    op = self._table.take_op()
                    shelf.ledger.hold(HOLD, pages)
                    span = Span(node, node.start)
                    self._shelves.tree.set_storing(span, 1)
                    self._pages += len(pages)
                    self._by_op[op] = (shelf, pages, span)
                    self._storage.write(op, shelf.part, named, pages)

    def done(self, done: StorageDone) -> bool:
        """A write was answered; False if it is none of these."""
        entry = self._by_op.pop(done.op, None)
        if entry is None:
            return False
        shelf, pages, span = entry
        shelf.ledger.unhold(HOLD, pages)
        self._shelves.tree.set_storing(span, -1)
        node = span.anchor
        self._pages -= len(pages)
        if shelf.part is Part.FULL:
            size = self._shelves.tree.page_size
            self.tokens += done.good * size
            whole = node.alive and done.good * size == node.end - node.start
            if whole and self._shelves.events is not None:
                self._shelves.events.stored(node, Tier.STORAGE)
        return True


def _leading(present: NDArray[np.bool_]) -> int:
    """How many of the first are there without a gap."""
    return len(present) if present.all() else int(present.argmin())
