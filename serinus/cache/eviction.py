"""Which leaf goes first: eviction orders, and a lazy heap of evictable leaves.

Knows nothing of pages: it ranks nodes and finds the lowest one that may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush, heapreplace

from serinus.cache.node import Node

__all__ = ["POLICIES", "EvictionQueue"]


def _lru(node: Node) -> tuple[int, int]:
    return node.last_use, node.id


def _lfu(node: Node) -> tuple[int, int]:
    return node.hit_count, node.last_use


def _fifo(node: Node) -> tuple[int, int]:
    return node.born, node.id


POLICIES: Mapping[str, Callable[[Node], tuple[int, int]]] = {"lru": _lru, "lfu": _lfu, "fifo": _fifo}
"""By name, the rank of a node: the lowest goes first. A rank never sinks while its node lives."""


class EvictionQueue:
    """A heap with at most one entry per node, repaired when it is popped.

    A node that is used, pinned or given a child keeps its old entry. Ranks only rise, so an old entry stands too far
    in front, never too far behind: whoever pops it sees the node's true rank and puts it where it belongs, or drops
    it where the node may not go now (it is queued again when it may). No entry is ever searched for.
    Cost: O(log nodes) per push and, amortised over uses, per `first`.
    """

    def __init__(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._sequence = 0

    def push(self, node: Node) -> None:
        """`node` is an evictable leaf from now on. Does nothing if it still has an entry."""
        if not node.queued:
            node.queued = True
            self._sequence += 1
            heappush(self._heap, (self.rank(node), self._sequence, node))

    def first(self) -> Node | None:
        """The evictable leaf of lowest rank, left in the queue; None if there is none."""
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if node.pins or node.children or not node.alive:
                heappop(heap)
                node.queued = False
                continue
            now = self.rank(node)
            if now == rank:
                return node
            self._sequence += 1
            heapreplace(heap, (now, self._sequence, node))
        return None

    def pop(self) -> None:
        """Take out what `first` returned."""
        heappop(self._heap)[2].queued = False

    def clear(self) -> None:
        """Forget all entries."""
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Node]]:
        """Entries, current and old, in no order; for `sanity_check`."""
        return ((rank, node) for rank, _, node in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
