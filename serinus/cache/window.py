"""Which SWA pages a lease keeps: those of the nodes that its request's window still reaches.

Nodes keep or lose SWA as a whole, so a node that reaches far out of the window is cut where the window begins.
"""

from __future__ import annotations

from serinus.cache.coverage import window_start
from serinus.cache.node import FAR, Lease, Node
from serinus.cache.shelves import Shelves

__all__ = ["Windows"]


class Windows:
    """SWA pins of leases; does nothing in a model without that part."""

    def __init__(self, shelves: Shelves, window: int | None) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._window = window
        size = self._tree.page_size
        pages = 0 if window is None else -(-window // size)
        slack = max(1, pages // 8)
        self._slack_tokens = slack * size
        self.pin_pages_max = 0 if window is None else pages + slack
        """So many SWA pages a lease pins at most once its window moved on, beside what is filled in since."""

    def start(self, position: int) -> int:
        """First position whose SWA computing `position` reads."""
        return window_start(position, self._window)

    def pin(self, lease: Lease, old_end: int) -> Node | None:
        """The lease grew from `old_end` to its anchor: pin the new nodes that reach beyond `swa_want`.

        Returns one of them that has no device SWA, if there is one: the caller promised that there is none.
        Cost: those nodes.
        """
        if self._window is None:
            return None
        node, tree = lease.anchor, self._tree
        first, edge, bare = node.end, FAR, None
        while node.parent is not None and node.start >= old_end and node.end > lease.swa_want:
            if not node.swa_pins:
                tree.evictable_swa -= len(node.swa) - node.swa_held
            node.swa_pins += 1
            node.swa_use = tree.clock
            if not len(node.swa):
                bare = node
            first, edge = node.start, node.end
            node = node.parent
        if lease.swa_from >= old_end:
            lease.swa_from, lease.swa_edge = first, edge
        if bare is None:
            self._fit(lease)
        return bare

    def advance(self, lease: Lease, position: int) -> None:
        """The lease's request computes `position` next. Cost: nothing until a node is passed, then the window's."""
        if self._window is None:
            return
        lease.swa_want = max(lease.swa_want, self.start(position))
        if lease.swa_want >= lease.swa_edge:
            self._unpin(lease, lease.swa_want)
        self._fit(lease)

    def release(self, lease: Lease) -> None:
        """The lease ends: it pins no SWA any more."""
        if lease.swa_from < lease.anchor.end:
            self._unpin(lease, FAR)

    def _unpin(self, lease: Lease, want: int) -> None:
        """Take the pins off the nodes that end at or before `want`."""
        node, tree = lease.anchor, self._tree
        first, edge = node.end, FAR
        while node.parent is not None and node.start >= lease.swa_from:
            if node.end > want:
                first, edge = node.start, node.end
            else:
                node.swa_pins -= 1
                node.swa_use = tree.clock
                if not node.swa_pins and len(node.swa):
                    tree.evictable_swa += len(node.swa) - node.swa_held
                    tree.swa_queue.push(node)
            node = node.parent
        lease.swa_from, lease.swa_edge = first, edge

    def _fit(self, lease: Lease) -> None:
        """Cut the node in which the window begins, where much of it lies before: that half may go."""
        if lease.swa_want - lease.swa_from < self._slack_tokens or lease.swa_edge == FAR:
            return
        node = lease.anchor
        while node.start > lease.swa_want and node.parent is not None:
            node = node.parent
        position = lease.swa_want - lease.swa_want % self._tree.page_size
        if node.start < position < node.end and node.alive:
            self._shelves.split(node, position)
        self._unpin(lease, lease.swa_want)  # others may have cut it there before: the edge does not know
