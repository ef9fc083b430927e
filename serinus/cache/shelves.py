"""The shelves: pages of one tier and part, with their ledger, their sweep index, and their place in a node.

Applies the tree's effects to the ledgers: what a node gets, loses or splits. Knows no requests and no copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serinus.cache.events import EventLog
from serinus.cache.keys import PageKeys
from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, Owner, PageLedger, Pages, PageState, tree_owner
from serinus.cache.node import NO_PAGES, Node, Tier
from serinus.cache.results import CacheGeometry
from serinus.cache.sweep import SweepIndex
from serinus.cache.tree import RadixTree, Split, Victims
from serinus.core.parts import Part

__all__ = ["SLOTS", "Shelf", "Shelves"]

SLOTS = {
    (Tier.DEVICE, Part.FULL): "pages",
    (Tier.DEVICE, Part.SWA): "swa",
    (Tier.HOST, Part.FULL): "host",
    (Tier.HOST, Part.SWA): "host_swa",
}
"""Under which name a node keeps its pages of a tier and part."""


@dataclass(slots=True)
class Shelf:
    """The pages of one tier and part."""

    tier: Tier
    part: Part
    slot: str
    """Name of the node's field."""
    ledger: PageLedger
    sweep: SweepIndex

    def of(self, node: Node) -> Pages:
        """What `node` has here."""
        pages: Pages = getattr(node, self.slot)
        return pages


class Shelves:
    """All shelves of a cache, and the effects on them."""

    def __init__(self, geometry: CacheGeometry, tree: RadixTree, keys: PageKeys, events: EventLog | None) -> None:
        self.tree = tree
        self.keys = keys
        self.events = events
        self.read_batch_pages = geometry.read_batch_pages
        """Pages of one storage read at most."""
        size = geometry.page_size
        self.all = {
            (tier, part): Shelf(tier, part, SLOTS[tier, part], PageLedger(count), SweepIndex(count, size))
            for (tier, part), count in geometry.pools().items()
        }
        self.device = self.all[Tier.DEVICE, Part.FULL]
        self.swa = self.all.get((Tier.DEVICE, Part.SWA))
        self.host = self.all.get((Tier.HOST, Part.FULL))
        self.host_swa = self.all.get((Tier.HOST, Part.SWA))
        self.plain = len(self.all) == 1
        """One tier and one part: the short way everywhere."""

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self.all.values())

    def grow(self, parent: Node, tokens: memoryview, fresh: Pages, owner: Owner) -> Node:
        """A new leaf with device FULL pages that `owner` gives."""
        leaf = self.tree.grow(parent, tokens, fresh)
        ledger = self.device.ledger
        ledger.move(fresh, owner, tree_owner(leaf.id), "publish")
        self.device.sweep.note(fresh, leaf.start, int(parent.pages[-1]) if len(parent.pages) else 0)
        if ledger.held_count:
            held = int(np.count_nonzero(ledger.hold_P[fresh]))
            if held:
                self.tree.recount_held(leaf, held, 0)
        if self.events is not None:
            self.events.stored(leaf, Tier.DEVICE)
        return leaf

    def attach(self, shelf: Shelf, node: Node, pages: Pages, owner: Owner | None, verb: str) -> None:
        """`node` has these pages on `shelf` from now on: `owner` gives them (None: they stay with the copy that fills
        them, until `settle`)."""
        self.tree.put(node, shelf.slot, pages)
        if owner is not None:
            shelf.ledger.move(pages, owner, tree_owner(node.id), verb)
        else:
            node.loading |= 1 << shelf.part
        self._link(shelf, node, pages)
        if shelf.ledger.held_count and shelf.tier is Tier.DEVICE:
            self.recount(node)
        if self.events is not None and shelf.part is Part.FULL:
            self.events.stored(node, shelf.tier)
        self.tree.requeue(node)

    def settle(self, shelf: Shelf, node: Node, owner: Owner) -> None:
        """The copy that filled a node's pages is done: they are the tree's."""
        shelf.ledger.move(shelf.of(node), owner, tree_owner(node.id), "loaded")
        node.loading &= ~(1 << shelf.part)

    def detach(self, shelf: Shelf, node: Node, verb: str) -> int:
        """What `node` has on `shelf` is freed; returns how many pages that were."""
        pages = self.unlink(shelf, node)
        if len(pages):
            shelf.ledger.move(pages, tree_owner(node.id), FREE_OWNER, verb)
        return len(pages)

    def unlink(self, shelf: Shelf, node: Node) -> Pages:
        """Take a node's pages out of the tree; their ledger is the caller's to tell."""
        pages = shelf.of(node)
        if not len(pages):
            return pages
        self.tree.put(node, shelf.slot, NO_PAGES)
        if shelf.tier is Tier.DEVICE and (node.held or node.swa_held):
            self.recount(node)
        if shelf is not self.device:
            for child in node.children.values():
                below = shelf.of(child)
                if len(below):
                    shelf.sweep.link(int(below[0]), 0)
        if self.events is not None and shelf.part is Part.FULL:
            self.events.removed(self.keys.of(node), shelf.tier)
        return pages

    def _link(self, shelf: Shelf, node: Node, pages: Pages) -> None:
        above = shelf.of(node.parent) if node.parent is not None else NO_PAGES
        shelf.sweep.note(pages, node.start, int(above[-1]) if len(above) else 0)
        if shelf is not self.device:  # a device child needs its parent there first: none is waiting for this node
            for child in node.children.values():
                below = shelf.of(child)
                if len(below):
                    shelf.sweep.link(int(below[0]), int(pages[-1]))

    def split(self, node: Node, position: int) -> Split:
        """Cut `node` at `position`; the shorter half's pages change their name in every ledger."""
        split = self.tree.split(node, position)
        moved = split.moved
        source, target = split.old_id << STATE_BITS | PageState.TREE, tree_owner(moved.id)
        self.device.ledger.move(NO_PAGES if moved.loading & 1 << Part.FULL else moved.pages, source, target, "split")
        if node.held or node.swa_held:
            node.held = node.swa_held = 0
            self._recount_split(split)
        if not self.plain:
            for shelf in self.all.values():
                loading = shelf.tier is Tier.DEVICE and moved.loading & 1 << shelf.part
                if shelf is not self.device and not loading:
                    shelf.ledger.move(shelf.of(moved), source, target, "split")
            self.tree.requeue(split.upper)
        return split

    def _recount_split(self, split: Split) -> None:
        """Both halves together count as many held pages as before: no total changes."""
        for half in (split.upper, split.lower):
            half.held = int(np.count_nonzero(self.device.ledger.hold_P[half.pages]))
            if self.swa is not None:
                half.swa_held = int(np.count_nonzero(self.swa.ledger.hold_P[half.swa]))

    def recount(self, node: Node) -> None:
        """Holds on a node's device pages began or ended."""
        swa_held = 0 if self.swa is None else int(np.count_nonzero(self.swa.ledger.hold_P[node.swa]))
        self.tree.recount_held(node, int(np.count_nonzero(self.device.ledger.hold_P[node.pages])), swa_held)

    def apply(self, victims: Victims) -> int:
        """Free what an eviction took from a cache without a host tier; returns how many FULL pages that were."""
        if not victims.pages:
            return 0
        pages = victims.pages[0] if len(victims.pages) == 1 else np.concatenate(victims.pages)
        self.device.ledger.evict(pages, victims.node_ids, victims.lengths)
        if victims.swa:
            assert self.swa is not None, "cache: SWA pages without that part"
            self.swa.ledger.evict(np.concatenate(victims.swa), victims.swa_ids, victims.swa_lengths)
        if self.events is not None:
            for hashes in victims.hashes:
                self.events.removed(hashes, Tier.DEVICE)
        return len(pages)

    def clear(self) -> int:
        """Everything leaves the tree and is free; returns how many device FULL pages that were."""
        nodes = self.tree.clear()
        for shelf in self.all.values():
            there = [node for node in nodes if len(shelf.of(node))]
            if there:
                pages = [shelf.of(node) for node in there]
                shelf.ledger.evict(np.concatenate(pages), [n.id for n in there], [len(each) for each in pages])
        if self.events is not None:
            self.events.cleared()
        return sum(len(node.pages) for node in nodes)

    def nodes_of(self, shelf: Shelf, pages: Pages) -> list[Node]:
        """The nodes that list some of these pages."""
        owners = shelf.ledger.owner_P[pages]
        cached = owners[(owners & STATE_MASK) == PageState.TREE] >> STATE_BITS
        return [self.tree.arena[node_id] for node_id in np.unique(cached).tolist()]
