"""Publication: a request's own pages become the tree's, part by part; where the tree has a page already, it wins.

Knows leases and pages; the rule that rows are rewritten before duplicates are freed is its caller's (prefix.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import Owner, Pages
from serinus.cache.node import NO_PAGES, Lease, Node
from serinus.cache.results import Insertion, PartPages
from serinus.cache.shelves import Shelves
from serinus.cache.tiers import TierController
from serinus.cache.window import Windows
from serinus.core.errors import InvariantError
from serinus.core.parts import Part

__all__ = ["Publisher", "nothing", "token_bytes"]


@dataclass(slots=True)
class _Placed:
    """What came of it, in order of position."""

    anchor: Node
    """Where the sequence ends in the tree now."""
    pages: Pages
    """Canonical FULL pages."""
    duplicates: Pages
    """Own FULL pages that the tree did not need."""
    swa_pages: Pages = field(default_factory=lambda: NO_PAGES)
    swa_duplicates: Pages = field(default_factory=lambda: NO_PAGES)
    nodes: list[Node] = field(default_factory=list)
    """Every node of the published stretch; only where there is more than one tier or part."""


@dataclass(slots=True)
class _Merge:
    """A walk over the nodes that the tree has already."""

    own: Pages
    own_swa: Pages
    first: int
    """Index of the first page of `own`."""
    swa_first: int
    full_owner: Owner
    swa_owner: Owner
    canonical: list[Pages] = field(default_factory=list)
    duplicates: list[Pages] = field(default_factory=list)
    swa_canonical: list[Pages] = field(default_factory=list)
    swa_duplicates: list[Pages] = field(default_factory=list)


class Publisher:
    """Puts pages into the tree behind a lease, and lets the lease grow over them."""

    def __init__(self, shelves: Shelves, tiers: TierController, windows: Windows) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._tiers = tiers
        self._windows = windows

    def publish(
        self, lease: Lease, tokens: NDArray[np.int32], pages: PartPages, start: int, swa_first: int
    ) -> tuple[Insertion, Node | None]:
        """Put the whole pages behind the lease into the tree and grow the lease; duplicates stay the request's.

        `pages.full` from position `start`, the lease's end, on; `pages.swa` from page `swa_first` on. Also gives a
        node of the lease's window that has no SWA, if there is one: the caller broke its promise.
        """
        size = self._tree.page_size
        count = len(tokens) // size
        if len(pages.full) < count:
            raise InvariantError(f"cache: {len(pages.full)} pages for {len(tokens)} tokens, expected {count} or more")
        count = min(count, self._sound_count(pages, start // size, swa_first, count))
        if not count or lease.sound_end is not None:
            return nothing(lease, start, size), None
        if not lease.rid:
            lease.rid = self._shelves.device.ledger.owner_rid(int(pages.full[0]))
        low, high = start // size, start // size + count
        first = min(max(swa_first, low), high)
        swa = NO_PAGES
        if self._shelves.swa is not None:
            given = first - min(swa_first, first)
            swa = pages.swa[given : given + high - first].copy()
        own = PartPages(full=pages.full[:count].copy(), swa=swa)
        done = self._place(lease, token_bytes(tokens[: count * size]), own, start, first)
        if self._shelves.host is not None:
            self._tiers.backups.used(done.nodes)
        old = lease.anchor
        self._tree.pin(done.anchor)
        lease.anchor = done.anchor
        bare = self._windows.pin(lease, old.end)
        self._tree.unpin(old)
        self._tree.touch(done.anchor, hit=False, priority=lease.priority)
        insertion = Insertion(
            rid=lease.rid, from_pos=start, end=high * size, pages=done.pages, duplicates=done.duplicates, lease=lease,
            swa_first=first, swa_pages=done.swa_pages, swa_duplicates=done.swa_duplicates,
        )  # fmt: skip
        return insertion, bare

    def _sound_count(self, pages: PartPages, low: int, swa_first: int, count: int) -> int:
        """Of `count` pages, how many come before the first whose bytes were found wrong."""
        quarantine = self._tiers.quarantine
        sound = quarantine.sound_count(Part.FULL, pages.full[:count])
        if self._shelves.swa is not None and quarantine.banned[Part.SWA]:
            good = quarantine.sound_count(Part.SWA, pages.swa)
            if good < len(pages.swa):
                sound = min(sound, max(0, swa_first + good - low))
        return sound

    def _place(self, lease: Lease, data: bytes, own: PartPages, start: int, swa_first: int) -> _Placed:
        """`data` (whole pages of ids as bytes, from the lease's end on) is in the tree afterwards."""
        tree, shelves = self._tree, self._shelves
        found = tree.descend(lease.anchor, data, start)
        node, path = found.node, found.path
        if found.partial is not None:
            node = shelves.split(found.partial, found.end).upper
            path.append(node)
        full = own.full
        known = (found.end - start) // tree.page_size
        owner = shelves.device.ledger.request_owner(lease.rid)
        if shelves.plain:
            if known < len(full):
                node = shelves.grow(node, memoryview(data)[known * tree.key_bytes :], full[known:], owner)
            canonical = np.concatenate([*[each.pages for each in path], full[known:]]) if known else full
            return _Placed(node, canonical, full[:known])
        swa_owner = 0 if shelves.swa is None else shelves.swa.ledger.request_owner(lease.rid)
        merge = _Merge(full, own.swa, start // tree.page_size, swa_first, owner, swa_owner)
        nodes = self._merge(path, merge)
        if known < len(full):
            nodes += self._grow(node, data, known, merge)
            node = nodes[-1]
        return _Placed(
            node, _join(merge.canonical), _join(merge.duplicates), _join(merge.swa_canonical),
            _join(merge.swa_duplicates), nodes,
        )  # fmt: skip

    def _merge(self, path: list[Node], merge: _Merge) -> list[Node]:
        """What the tree has of it already: gaps take the request's pages (host-only nodes, tombstones)."""
        size, shelves, nodes = self._tree.page_size, self._shelves, list[Node]()
        for node in path:
            if shelves.swa is not None and not len(node.swa) and node.start < merge.swa_first * size < node.end:
                nodes.append(shelves.split(node, merge.swa_first * size).upper)
                self._merge_node(nodes[-1], merge)
            nodes.append(node)
            self._merge_node(node, merge)
            for each in nodes[-2:]:
                each.uses += 1
        return nodes

    def _merge_node(self, node: Node, merge: _Merge) -> None:
        size, shelves = self._tree.page_size, self._shelves
        low, high = node.start // size, node.end // size
        mine = merge.own[low - merge.first : high - merge.first]
        if len(node.pages):
            merge.duplicates.append(mine)
        else:
            shelves.attach(shelves.device, node, mine, merge.full_owner, "publish")
        merge.canonical.append(node.pages)
        if shelves.swa is None or high <= merge.swa_first:
            return
        at = max(low, merge.swa_first)
        mine = merge.own_swa[at - merge.swa_first : high - merge.swa_first]
        if len(node.swa):
            merge.swa_duplicates.append(mine)
        else:
            shelves.attach(shelves.swa, node, mine, merge.swa_owner, "publish")
        merge.swa_canonical.append(node.swa[at - low :])

    def _grow(self, node: Node, data: bytes, known: int, merge: _Merge) -> list[Node]:
        """New nodes for what the tree did not have: without SWA up to `swa_first`, with SWA from there on."""
        tree, shelves = self._tree, self._shelves
        count = len(merge.own)
        cut = count if shelves.swa is None else min(max(merge.swa_first - merge.first, known), count)
        grown: list[Node] = []
        for low, high in ((known, cut), (cut, count)):
            if low == high:
                continue
            tokens = memoryview(data)[low * tree.key_bytes : high * tree.key_bytes]
            node = shelves.grow(node, tokens, merge.own[low:high], merge.full_owner)
            merge.canonical.append(node.pages)
            grown.append(node)
            if shelves.swa is not None and low + merge.first >= merge.swa_first:
                at = low + merge.first - merge.swa_first
                mine = merge.own_swa[at : at + high - low]
                if len(mine) != high - low:
                    raise InvariantError(
                        f"cache: {len(merge.own_swa)} SWA pages from page {merge.swa_first} on, expected them up to"
                        f" page {merge.first + count}"
                    )
                shelves.attach(shelves.swa, node, mine, merge.swa_owner, "publish")
                merge.swa_canonical.append(node.swa)
        return grown


def nothing(lease: Lease, start: int, page_size: int) -> Insertion:
    """An insertion that published nothing."""
    return Insertion(
        rid=lease.rid, from_pos=start, end=start, pages=NO_PAGES, duplicates=NO_PAGES, lease=lease,
        swa_first=start // page_size,
    )  # fmt: skip


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """The ids as bytes, checked to be what the tree compares: a vector of int32."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvariantError(f"cache: tokens are {tokens.dtype}[{tokens.ndim}-d], expected a vector of int32")
    return tokens.tobytes()


def _join(arrays: list[Pages]) -> Pages:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else NO_PAGES
