"""Room on the host: which of its pages are given up when others are needed.

Duplicates of what the device has go first where the host must make room; then unpinned nodes that are nowhere else.
"""

from __future__ import annotations

from serinus.cache.ledger import Owner, Pages
from serinus.cache.node import Node
from serinus.cache.shelves import Shelf, Shelves
from serinus.core.parts import Part

__all__ = ["HostTier"]


class HostTier:
    """Takes and gives up host pages."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self.evicted_pages = 0
        """Counter: FULL pages given up, duplicates included."""

    def take(self, shelf: Shelf, count: int, owner: Owner, *, must: bool) -> Pages | None:
        """`count` host pages for a copy, or None.

        must: False spares the duplicates, as trading one duplicate for another gains nothing.
        """
        if not self.make_room(shelf, count, must=must):
            return None
        return shelf.ledger.take(owner, count, "take for a copy")

    def make_room(self, shelf: Shelf, count: int, *, must: bool) -> bool:
        """Whether `count` pages are free now, after giving up others; without a trace if it is hopeless."""
        short = count - shelf.ledger.free_pages
        if short > 0:
            tree = self._tree
            if short > (tree.evictable_host if shelf.part is Part.FULL else tree.evictable_host_swa):
                return False
            self.evict(shelf, short, must=must)
        return shelf.ledger.free_pages >= count

    def evict(self, shelf: Shelf, enough: int, *, must: bool = True) -> int:
        """Give up host pages until `enough` more are free, or nothing may go; returns how many became free.

        Cost: O(log nodes) for each node that goes.
        """
        ledger, queues = shelf.ledger, self._tree.queues
        before = ledger.free_pages
        while ledger.free_pages - before < enough:
            if shelf.part is Part.SWA:
                node = queues.host_swa.first()
                if node is None:
                    break
                self._shelves.detach(shelf, node, "evict from host")
                continue
            node = queues.duplicates.first() if must else None
            if node is not None:
                self.give_up(node)
                continue
            leaf = queues.host.first()
            if leaf is None:
                break
            wanted = enough - (ledger.free_pages - before)
            if wanted < len(leaf.host):
                self._shelves.split(leaf, leaf.end - wanted * self._tree.page_size)
            self.drop(leaf)
        return ledger.free_pages - before

    def give_up(self, node: Node) -> None:
        """The host forgets a node; the device has it still, or the caller drops it."""
        assert self._shelves.host is not None, "cache: a host tier without host pages"
        if self._shelves.host_swa is not None:
            self._shelves.detach(self._shelves.host_swa, node, "evict from host")
        self.evicted_pages += self._shelves.detach(self._shelves.host, node, "evict from host")

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
