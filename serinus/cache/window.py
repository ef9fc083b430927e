"""Which pages of a part with a sliding window a lease keeps: those of the nodes that its window still reaches.

Nodes keep or lose such a part as a whole, so a node that reaches far out of the window is cut where the window begins.
"""

from __future__ import annotations

from serinus.cache.coverage import window_start
from serinus.cache.node import FAR, WHOLE, Lease, LeaseWindow, Node
from serinus.cache.page_pools import PagePools


class Windows:
    """The windows of all parts that have one; a loop over nothing in a model without."""

    def __init__(self, pools: PagePools) -> None:
        windowed = [(part, window) for part, window in pools.rules if window != WHOLE]
        self.all = tuple(PartWindow(pools, part, window, place) for place, (part, window) in enumerate(windowed))
        self.by_part = {window.part: window for window in self.all}

    def begin(self, lease: Lease) -> None:
        """A new lease: pin what computing the position behind it reads."""
        for window in self.all:
            lease.windows += (LeaseWindow(window.start(lease.anchor.end)),)
            window.pin(lease, 0)

    def pin(self, lease: Lease, old_end: int) -> str:
        """The lease grew from `old_end` to its anchor: pin the new nodes that its windows reach.

        Returns, in words, what a window lacks on the device, empty if nothing: the caller promised that it is there.
        Cost: those nodes.
        """
        lacks = ""
        for window in self.all:
            lacks = window.pin(lease, old_end) or lacks
        return lacks

    def advance(self, lease: Lease, position: int) -> None:
        """The lease's request computes `position` next. Cost: nothing until a node is passed, then the window's."""
        for window in self.all:
            window.advance(lease, position)

    def release(self, lease: Lease) -> None:
        """The lease ends: its windows pin nothing any more."""
        for window in self.all:
            window.release(lease)


class PartWindow:
    """Window pins of leases in one part."""

    def __init__(self, pools: PagePools, part: int, window: int, place: int) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._place = place
        self.part = part
        self.positions = window
        size = self._tree.page_size
        pages = -(-window // size)
        slack = max(1, pages // 8)
        self._slack_tokens = slack * size
        self.pin_pages_max = pages + slack
        """Pages that a lease pins at most once its window moved on, beside what is filled in since."""

    def start(self, position: int) -> int:
        """First position whose KV computing `position` reads."""
        return window_start(position, self.positions)

    def pin(self, lease: Lease, old_end: int) -> str:
        """Pin the nodes behind `old_end` that reach beyond what is wanted; see Windows."""
        mine, tree, part = lease.windows[self._place], self._tree, self.part
        node, lacks = lease.anchor, ""
        first, edge = node.end, FAR
        while node.parent is not None and node.start >= old_end and node.end > mine.want:
            tree.pin_window(node, part)
            node.window_use[part] = tree.clock
            if not len(node.device[part]):
                name = self._pools.device[part].part.name
                lacks = f"{lease} reads {name} from {mine.want} on, and {node} has none"
            first, edge = node.start, node.end
            node = node.parent
        if mine.first >= old_end:
            mine.first, mine.edge = first, edge
        if not lacks:
            self._fit(lease, mine)
        return lacks

    def advance(self, lease: Lease, position: int) -> None:
        """Take the pins off the nodes that the window has left behind."""
        mine = lease.windows[self._place]
        mine.want = max(mine.want, self.start(position))
        if mine.want >= mine.edge:
            self._unpin(lease, mine, mine.want)
        self._fit(lease, mine)

    def release(self, lease: Lease) -> None:
        """Take off all pins of the lease."""
        mine = lease.windows[self._place]
        if mine.first < lease.anchor.end:
            self._unpin(lease, mine, FAR)

    def _unpin(self, lease: Lease, mine: LeaseWindow, want: int) -> None:
        """Take the pins off the nodes that end at or before `want`."""
        node, tree, part = lease.anchor, self._tree, self.part
        first, edge = node.end, FAR
        while node.parent is not None and node.start >= mine.first:
            if node.end > want:
                first, edge = node.start, node.end
            else:
                node.window_use[part] = tree.clock
                tree.unpin_window(node, part)
            node = node.parent
        mine.first, mine.edge = first, edge

    def _fit(self, lease: Lease, mine: LeaseWindow) -> None:
        """Cut the node in which the window begins, where much of it lies before: that half may go."""
        if mine.want - mine.first < self._slack_tokens or mine.edge == FAR:
            return
        node: Node = lease.anchor
        while node.start > mine.want and node.parent is not None:
            node = node.parent
        position = mine.want - mine.want % self._tree.page_size
        if node.start < position < node.end and node.alive:
            self._pools.split(node, position)
        self._unpin(lease, mine, mine.want)  # another lease may have cut it there before: the edge does not know
