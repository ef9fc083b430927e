"""Which node goes first: eviction orders, and a lazy heap of nodes that may go.

Knows nothing of pages: it ranks nodes and finds the lowest one that may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from serinus.cache.node import FULL, Node, Tier
from serinus.core.eviction import EVICTION_POLICIES
from serinus.core.parts import Part

_KEPT_MIN = 64
"""Below it, entries of nodes that may not go are not worth a sweep."""


def _window(part: int) -> Callable[[Node], tuple[int, int]]:
    """The order of a part with a window, under any policy: the node that no window reached for longest goes first."""
    return lambda node: (node.window_use[part], node.id)


class EvictionQueue:
    """A heap with at most one entry per node, repaired when it is popped.

    A node that is used, or that may not go any more, keeps its old entry. Ranks only rise, so an old entry stands too
    far in front, never too far behind: when it is popped, the node's true rank is known, and the entry is pushed again
    at that rank, or dropped where the node may not go now (it is queued again when it may). No entry is searched for.
    A queue drops such entries by itself when it has doubled, so that it keeps no node for long that has left the tree.
    Cost: O(log nodes) per push and, amortised over uses, per `first`.
    """

    def __init__(
        self, name: str, tier: Tier, rank: Callable[[Node], tuple[int, int]], may_go: Callable[[Node], bool], bit: int
    ) -> None:
        self.name = name
        self.tier = tier
        """The tier that its nodes leave."""
        self.rank = rank
        self.may_go = may_go
        """Whether a node belongs here; dead nodes never do."""
        self.bit = bit
        """Its bit in `Node.queued`."""
        self._heap: list[tuple[int, int, int, Node]] = []
        """Ranks, each with a number that makes it distinct. Flat, as most of a push or pop is comparing entries."""
        self._sequence = 0
        self._sweep_at = _KEPT_MIN

    def push(self, node: Node) -> None:
        """`node` may go from now on. Does nothing if it still has an entry."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            self._sequence += 1
            heappush(self._heap, (*self.rank(node), self._sequence, node))
            if len(self._heap) >= self._sweep_at:
                self._sweep()

    def _sweep(self) -> None:
        """Drop the entries of nodes that may not go now."""
        for entry in self._heap:
            if not self.may_go(entry[3]):
                entry[3].queued &= ~self.bit
        self._heap = [entry for entry in self._heap if entry[3].queued & self.bit]
        heapify(self._heap)
        self._sweep_at = max(_KEPT_MIN, 2 * len(self._heap))

    def first(self) -> Node | None:
        """The node of lowest rank that may go, left in the queue; None if there is none."""
        heap = self._heap
        while heap:
            first, second, _, node = heap[0]
            if not self.may_go(node):
                self.pop()
                continue
            rank = self.rank(node)
            if rank == (first, second):
                return node
            self._sequence += 1
            heapreplace(heap, (*rank, self._sequence, node))
        return None

    def pop(self) -> None:
        """Take out what `first` returned."""
        heappop(self._heap)[3].queued &= ~self.bit

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
        """Drop all entries of this queue."""
        for entry in self._heap:
            entry[3].queued &= ~self.bit
        self._heap.clear()

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Node]]:
        """Entries, current and old, in no order; for `sanity_check`."""
        return (((first, second), node) for first, second, _, node in self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class Queues:
    """The queues of a tree: what may leave which tier. A cache of one tier and one part uses `device` alone."""

    def __init__(self, policy: str, windowed: Sequence[int] = (), *, tiered: bool = True) -> None:
        rank = EVICTION_POLICIES[policy]
        self.device = EvictionQueue("device", Tier.DEVICE, rank, _device_leaf, 1)
        """Unpinned nodes where FULL on the device ends."""
        self.host = EvictionQueue("host", Tier.HOST, rank, _host_leaf, 2)
        """Unpinned nodes without children that are on the host alone."""
        self.duplicates = EvictionQueue("host duplicates", Tier.HOST, rank, _duplicate, 4)
        """Nodes on both tiers: their host pages are optional."""
        self.window = {
            part: EvictionQueue(
                f"device {Part(part).name}", Tier.DEVICE, _window(part), _outside_windows(part), 8 << 2 * at
            )
            for at, part in enumerate(windowed)
        }
        """By part with a window: nodes that have it on the device outside every lease's window, leaf or not."""
        self.host_window = {
            part: EvictionQueue(f"host {Part(part).name}", Tier.HOST, _window(part), _loose_on_host(part), 16 << 2 * at)
            for at, part in enumerate(windowed)
        }
        """By part with a window: nodes whose pages of it on the host no copy and no lease needs."""
        self.all = (self.device, *self.window.values())
        if tiered:
            self.all += (self.host, self.duplicates, *self.host_window.values())

    def requeue(self, node: Node) -> None:
        """`node` stands in every queue where it belongs."""
        for queue in self.all:
            if not node.queued & queue.bit and queue.may_go(node):
                queue.push(node)

    def clear(self) -> None:
        """Drop all entries of all queues."""
        for queue in self.all:
            queue.clear()


def _device_leaf(node: Node) -> bool:
    return node.alive and not node.pins and not node.device_children and len(node.device[FULL]) > 0


def _outside_windows(part: int) -> Callable[[Node], bool]:
    return lambda node: node.alive and not node.window_pins[part] and len(node.device[part]) > 0


def _host_leaf(node: Node) -> bool:
    return _spare(node) and len(node.host[FULL]) > 0 and not (len(node.device[FULL]) or node.pins or node.children)


def _duplicate(node: Node) -> bool:
    return _spare(node) and len(node.host[FULL]) > 0 and len(node.device[FULL]) > 0


def _loose_on_host(part: int) -> Callable[[Node], bool]:
    return lambda node: len(node.host[part]) > 0 and _spare(node) and (len(node.device[FULL]) > 0 or not node.pins)


def _spare(node: Node) -> bool:
    """No copy, no plan and no storage write needs its host pages."""
    return node.alive and not node.busy and not node.storing
