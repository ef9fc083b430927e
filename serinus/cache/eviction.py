"""Which node goes first: eviction orders, and a lazy heap of nodes that may go.

Knows nothing of pages: it ranks nodes and finds the lowest one that may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush, heapreplace

from serinus.cache.node import Node

__all__ = ["POLICIES", "EvictionQueue", "Queues", "Rank"]

Rank = Callable[[Node], tuple[int, int]]
"""Lowest goes first. The rank of a node never sinks while it lives."""


def _lru(node: Node) -> tuple[int, int]:
    return node.last_use, node.id


def _lfu(node: Node) -> tuple[int, int]:
    return node.hit_count, node.last_use


def _fifo(node: Node) -> tuple[int, int]:
    return node.born, node.id


def _priority(node: Node) -> tuple[int, int]:
    return node.priority, node.last_use


POLICIES: Mapping[str, Rank] = {"lru": _lru, "lfu": _lfu, "fifo": _fifo, "priority": _priority}
"""By name, the rank of a node."""


def _window(node: Node) -> tuple[int, int]:
    """The order of SWA under any policy: the node that no window reached for longest goes first."""
    return node.swa_use, node.id


class EvictionQueue:
    """A heap with at most one entry per node, repaired when it is popped.

    A node that is used, or that may not go any more, keeps its old entry. Ranks only rise, so an old entry stands too
    far in front, never too far behind: whoever pops it sees the node's true rank and puts it where it belongs, or
    drops it where the node may not go now (it is queued again when it may). No entry is ever searched for.
    Cost: O(log nodes) per push and, amortised over uses, per `first`.
    """

    def __init__(self, name: str, rank: Rank, may_go: Callable[[Node], bool], bit: int) -> None:
        self.name = name
        self.rank = rank
        self.may_go = may_go
        """Whether a node belongs here; dead nodes never do."""
        self.bit = bit
        """Its bit in `Node.queued`."""
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._sequence = 0

    def push(self, node: Node) -> None:
        """`node` may go from now on. Does nothing if it still has an entry."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            self._sequence += 1
            heappush(self._heap, (self.rank(node), self._sequence, node))

    def first(self) -> Node | None:
        """The node of lowest rank that may go, left in the queue; None if there is none."""
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if not self.may_go(node):
                heappop(heap)
                node.queued &= ~self.bit
                continue
            now = self.rank(node)
            if now == rank:
                return node
            self._sequence += 1
            heapreplace(heap, (now, self._sequence, node))
        return None

    def pop(self) -> None:
        """Take out what `first` returned."""
        heappop(self._heap)[2].queued &= ~self.bit

    def take(self, count: int) -> list[Node]:
        """Take out the `count` lowest, lowest first; push back those that stay."""
        taken: list[Node] = []
        while len(taken) < count:
            node = self.first()
            if node is None:
                break
            self.pop()
            taken.append(node)
        return taken

    def clear(self) -> None:
        """Forget all entries."""
        for _, _, node in self._heap:
            node.queued &= ~self.bit
        self._heap.clear()

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Node]]:
        """Entries, current and old, in no order; for `sanity_check`."""
        return ((rank, node) for rank, _, node in self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class Queues:
    """The queues of a tree: what may leave which tier. All cheap to keep; a device-only cache uses the first alone."""

    def __init__(self, policy: str) -> None:
        rank = POLICIES[policy]
        self.device = EvictionQueue("device", rank, _device_leaf, 1)
        """Unpinned nodes where FULL on the device ends."""
        self.swa = EvictionQueue("device SWA", _window, _loose_swa, 2)
        """Nodes with SWA on the device outside every lease's window, leaf or not."""
        self.host = EvictionQueue("host", rank, _host_leaf, 4)
        """Unpinned nodes without children that are on the host alone."""
        self.duplicates = EvictionQueue("host duplicates", rank, _duplicate, 8)
        """Nodes on both tiers: their host pages are optional."""
        self.host_swa = EvictionQueue("host SWA", _window, _loose_host_swa, 16)
        """Nodes whose SWA on the host no copy and no lease needs."""
        self.all = (self.device, self.swa, self.host, self.duplicates, self.host_swa)

    def requeue(self, node: Node) -> None:
        """`node` stands in every queue where it belongs."""
        for queue in self.all:
            if not node.queued & queue.bit and queue.may_go(node):
                queue.push(node)

    def clear(self) -> None:
        """Forget all entries."""
        for queue in self.all:
            queue.clear()


def _device_leaf(node: Node) -> bool:
    return node.alive and not node.pins and not node.device_children and len(node.pages) > 0


def _loose_swa(node: Node) -> bool:
    return node.alive and not node.swa_pins and len(node.swa) > 0


def _host_leaf(node: Node) -> bool:
    return _spare(node) and len(node.host) > 0 and not (len(node.pages) or node.pins or node.children)


def _duplicate(node: Node) -> bool:
    return _spare(node) and len(node.host) > 0 and len(node.pages) > 0


def _loose_host_swa(node: Node) -> bool:
    return _spare(node) and len(node.host_swa) > 0 and (len(node.pages) > 0 or not node.pins)


def _spare(node: Node) -> bool:
    """No copy, no plan and no storage write needs its host pages."""
    return node.alive and not node.busy and not node.storing
