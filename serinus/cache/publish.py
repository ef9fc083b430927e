"""Publication: a request's own pages become the tree's, part by part; where the tree has a page already, it wins.

Knows leases and pages; the rule that rows are rewritten before duplicates are freed is its caller's (prefix.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serinus.cache.ledger import Owner, Pages
from serinus.cache.node import NO_PAGES, Lease, Node
from serinus.cache.results import PartPages
from serinus.cache.shelves import Shelves
from serinus.core.errors import InvariantError

__all__ = ["Published", "Publisher"]


@dataclass(slots=True)
class Published:
    """What came of it, in order of position."""

    anchor: Node
    """Where the sequence ends in the tree now."""
    pages: Pages
    """Canonical FULL pages."""
    duplicates: Pages
    """Own FULL pages that the tree did not need."""
    known: int
    """Pages that agreed with the tree, whoever's they are now."""
    swa_first: int
    """Index of the first of `swa_pages`."""
    swa_pages: Pages = field(default_factory=lambda: NO_PAGES)
    swa_duplicates: Pages = field(default_factory=lambda: NO_PAGES)
    nodes: list[Node] = field(default_factory=list)
    """Every node of the published stretch."""


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
    """Puts pages into the tree behind a lease."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._tree = shelves.tree

    def publish(self, lease: Lease, data: bytes, pages: PartPages, start: int, swa_first: int) -> Published:
        """`data` (whole pages of ids as bytes, from position `start`, the lease's end) is in the tree afterwards.

        `pages.full`: exactly its pages. `pages.swa`: own SWA pages from index `swa_first` on, exactly up to its end.
        """
        tree, shelves = self._tree, self._shelves
        found = tree.descend(lease.anchor, data, start)
        node, path = found.node, found.path
        if found.partial is not None:
            node = shelves.split(found.partial, found.end).upper
            path.append(node)
        own = pages.full
        size = tree.page_size
        known = (found.end - start) // size
        owner = shelves.device.ledger.request_owner(lease.rid)
        if shelves.plain:
            if known < len(own):
                node = shelves.grow(node, memoryview(data)[known * tree.key_bytes :], own[known:], owner)
            canonical = np.concatenate([*[each.pages for each in path], own[known:]]) if known else own
            return Published(node, canonical, own[:known], known, start // size + len(own))
        swa_owner = 0 if shelves.swa is None else shelves.swa.ledger.request_owner(lease.rid)
        merge = _Merge(own, pages.swa, start // size, swa_first, owner, swa_owner)
        nodes = self._merge(path, merge)
        if known < len(own):
            nodes += self._grow(node, data, known, merge)
            node = nodes[-1]
        return Published(
            node, _join(merge.canonical), _join(merge.duplicates), known, swa_first, _join(merge.swa_canonical),
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


def _join(arrays: list[Pages]) -> Pages:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else NO_PAGES
