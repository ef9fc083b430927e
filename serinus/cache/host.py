"""Room on the host: which of its pages are given up when others are needed.

Duplicates of what the device has go first where the host must make room; then unpinned nodes that are nowhere else.
"""

from __future__ import annotations

from serinus.cache.ledger import Owner, Pages
from serinus.cache.node import Node
from serinus.cache.page_pools import PagePool, PagePools
from serinus.core.parts import Part


class HostTier:
    """Takes and gives up host pages."""

    def __init__(self, pools: PagePools) -> None:
        self._pools = pools
        self._tree = pools.tree
        self.evicted_pages = 0
        """Counter: FULL pages given up, duplicates included."""

    def take(self, pool: PagePool, count: int, owner: Owner, *, must: bool) -> Pages | None:
        """`count` host pages for a copy, or None.

        must: False spares the duplicates, as trading one duplicate for another gains nothing.
        """
        if not self.make_room(pool, count, must=must):
            return None
        return pool.ledger.take(owner, count, "take for a copy")

    def make_room(self, pool: PagePool, count: int, *, must: bool) -> bool:
        """Whether `count` pages are free now, after giving up others; without a trace if it is hopeless."""
        short = count - pool.ledger.free_pages
        if short > 0:
            if short > self._tree.evictable_host[pool.part]:
                return False
            self.evict(pool, short, must=must)
        return pool.ledger.free_pages >= count

    def evict(self, pool: PagePool, enough: int, *, must: bool = True) -> int:
        """Give up host pages until `enough` more are free, or nothing may go; returns how many became free.

        Cost: O(log nodes) for each node that goes.
        """
        ledger, queues = pool.ledger, self._tree.queues
        before = ledger.free_pages
        alone = queues.host_window.get(pool.part)
        while ledger.free_pages - before < enough:
            if alone is not None:
                node = alone.first()
                if node is None:
                    break
                self._pools.detach(pool, node, "evict from host")
                continue
            node = queues.duplicates.first() if must else None
            if node is not None:
                self.give_up(node)
                continue
            leaf = queues.host.first()
            if leaf is None:
                break
            wanted = enough - (ledger.free_pages - before)
            if wanted < len(pool.of(leaf)):
                self._pools.split(leaf, leaf.end - wanted * self._tree.page_size)
            self.drop(leaf)
        return ledger.free_pages - before

    def give_up(self, node: Node) -> None:
        """The host forgets a node; the device has it still, or the caller drops it."""
        for pool in self._pools.host.values():
            count = self._pools.detach(pool, node, "evict from host")
            self.evicted_pages += count if pool.part is Part.FULL else 0

    def drop(self, leaf: Node) -> None:
        """A childless node that is on the host alone is gone."""
        self.give_up(leaf)
        self._tree.drop(leaf)

    def drop_below(self, node: Node) -> None:
        """Everything below a node is gone; all of it is unpinned and on the host alone."""
        below: list[Node] = []
        pending = list(node.children.values())
        while pending:
            child = pending.pop()
            below.append(child)
            pending.extend(child.children.values())
        for child in reversed(below):
            self.drop(child)
