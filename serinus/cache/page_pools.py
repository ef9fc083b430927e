"""Page pools: the pages of one tier and part, with their ledger, their sweep index, and their place in a node.

Applies the tree's effects to the ledgers: what a node gets, loses or splits. Knows no requests and no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serinus.cache.coverage import window_start
from serinus.cache.effects import Split, Victims
from serinus.cache.events import EventLog
from serinus.cache.keys import PageKeys
from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, Owner, PageLedger, Pages, PageState, tree_owner
from serinus.cache.node import FULL, NO_PAGES, WHOLE, Node, Tier
from serinus.cache.results import CacheGeometry
from serinus.cache.sweep import SweepIndex
from serinus.cache.tree import RadixTree
from serinus.core.parts import PageSpan, Part


@dataclass(slots=True)
class PagePool:
    """The pages of one tier and part."""

    tier: Tier
    part: Part
    ledger: PageLedger
    sweep: SweepIndex

    def of(self, node: Node) -> Pages:
        """What `node` has here."""
        return (node.host if self.tier else node.device)[self.part]

    def __str__(self) -> str:
        return f"{self.tier.name.lower()} {self.part.name} pages"


class PagePools:
    """All pools of a cache, and the effects on them."""

    def __init__(self, geometry: CacheGeometry, tree: RadixTree, keys: PageKeys, events: EventLog | None) -> None:
        self.tree = tree
        self.keys = keys
        self.events = events
        self.rules = geometry.rules
        """The parts, FULL first, each with its window, or WHOLE."""
        self.read_batch_pages = geometry.read_batch_pages
        """Pages of one storage read at most."""
        self.all = {
            (tier, part): PagePool(tier, part, PageLedger(count), SweepIndex(count, geometry.page_size))
            for (tier, part), count in geometry.pools().items()
        }
        self.device: dict[int, PagePool] = {part: pool for (tier, part), pool in self.all.items() if not tier}
        """The device's pools by part."""
        self.host: dict[int, PagePool] = {part: pool for (tier, part), pool in self.all.items() if tier}
        """By part; empty without a host tier."""
        self._no_spans = tuple([PageSpan(pool.part, 0, NO_PAGES) for pool in self.device.values()])
        self.full = self.device[FULL]
        """FULL on the device: the pool that the tree is built on."""
        self.plain = len(self.all) == 1
        """One tier and one part: the short way everywhere."""

    def __iter__(self) -> Iterator[PagePool]:
        return iter(self.all.values())

    def read(self, nodes: Sequence[Node], low: int, end: int) -> tuple[PageSpan, ...]:
        """The device pages of a path up to `end`, of each part from position `low` on; of a part with a window those
        that computing position `end` reads."""
        if not nodes:
            return self._no_spans
        spans, size = [], self.tree.page_size
        for part, window in self.rules:
            start = low if window == WHOLE else window_start(end, window)
            found = [node.device[part] for node in nodes if node.end > start]
            first, pages = start // size, np.concatenate(found) if found else NO_PAGES
            if window != WHOLE:  # it may begin within a node
                pages = pages[len(pages) - end // size + first :]
            spans.append(PageSpan(self.device[part].part, first, pages))
        return tuple(spans)

    def grow(self, parent: Node, tokens: memoryview, fresh: Pages, owner: Owner) -> Node:
        """A new leaf with device FULL pages that `owner` gives."""
        leaf = self.tree.grow(parent, tokens, fresh)
        pool, above = self.full, parent.device[FULL]
        pool.ledger.move(fresh, owner, tree_owner(leaf.id), "publish")
        pool.sweep.note(fresh, leaf.start, int(above[-1]) if len(above) else 0)
        if pool.ledger.held_count:
            self.recount(leaf)
        if self.events is not None:
            self.events.stored(leaf, Tier.DEVICE)
        return leaf

    def attach(self, pool: PagePool, node: Node, pages: Pages, owner: Owner | None, verb: str) -> None:
        """`node` has these pages in `pool` from now on: `owner` gives them (None: they stay with the copy that fills
        them, until `settle`)."""
        self.tree.put(node, pool.tier, pool.part, pages)
        if owner is not None:
            pool.ledger.move(pages, owner, tree_owner(node.id), verb)
        else:
            node.loading |= 1 << pool.part
        self._link(pool, node, pages)
        if pool.ledger.held_count and pool.tier is Tier.DEVICE:
            self.recount(node)
        if self.events is not None and pool.part is Part.FULL:
            self.events.stored(node, pool.tier)
        self.tree.requeue(node)

    def settle(self, pool: PagePool, node: Node, owner: Owner) -> None:
        """The copy that filled a node's pages is done: they are the tree's."""
        pool.ledger.move(pool.of(node), owner, tree_owner(node.id), "loaded")
        node.loading &= ~(1 << pool.part)

    def detach(self, pool: PagePool, node: Node, verb: str) -> int:
        """What `node` has in `pool` is freed; returns how many pages that were."""
        pages = self.unlink(pool, node)
        if len(pages):
            pool.ledger.move(pages, tree_owner(node.id), FREE_OWNER, verb)
        return len(pages)

    def unlink(self, pool: PagePool, node: Node) -> Pages:
        """Take a node's pages out of the tree; the caller tells their ledger."""
        pages = pool.of(node)
        if not len(pages):
            return pages
        self.tree.put(node, pool.tier, pool.part, NO_PAGES)
        if pool.tier is Tier.DEVICE and any(node.held):
            self.recount(node)
        if pool is not self.full:
            for child in node.children.values():
                below = pool.of(child)
                if len(below):
                    pool.sweep.link(int(below[0]), 0)
        if self.events is not None and pool.part is Part.FULL:
            self.events.removed(self.keys.of(node), pool.tier)
        return pages

    def _link(self, pool: PagePool, node: Node, pages: Pages) -> None:
        above = pool.of(node.parent) if node.parent is not None else NO_PAGES
        pool.sweep.note(pages, node.start, int(above[-1]) if len(above) else 0)
        if pool is not self.full:  # a device child needs its parent there first: none is waiting for this node
            for child in node.children.values():
                below = pool.of(child)
                if len(below):
                    pool.sweep.link(int(below[0]), int(pages[-1]))

    def split(self, node: Node, position: int) -> Split:
        """Cut `node` at `position`; the shorter half's pages change their name in every ledger."""
        split = self.tree.split(node, position)
        moved = split.moved
        source, target = split.old_id << STATE_BITS | PageState.TREE, tree_owner(moved.id)
        for pool in self.all.values():
            pages = pool.of(moved)
            if len(pages) and (pool.tier or not moved.loading & 1 << pool.part):
                pool.ledger.move(pages, source, target, "split")
        if any(node.held):
            self.recount(split.upper)
            self.recount(split.lower)
        if not self.plain:
            self.tree.requeue(split.upper)
        return split

    def recount(self, node: Node) -> None:
        """Holds on a node's device pages began or ended."""
        held = [0] * len(node.device)
        for part, pool in self.device.items():
            held[part] = int(np.count_nonzero(pool.ledger.hold_P[node.device[part]]))
        self.tree.set_held(node, tuple(held))

    def apply(self, victims: Victims) -> None:
        """Free what an eviction took from a cache without a host tier."""
        for part, pool in self.device.items():
            pool.ledger.evict([(node_id, pages[part]) for node_id, pages in victims.taken])
        if self.events is not None:
            for hashes in victims.hashes:
                self.events.removed(hashes, Tier.DEVICE)

    def clear(self) -> int:
        """Everything leaves the tree and is free; returns how many device FULL pages that were."""
        nodes = self.tree.clear()
        for pool in self.all.values():
            pool.ledger.evict([(node.id, pool.of(node)) for node in nodes])
        if self.events is not None:
            self.events.cleared()
        return sum(len(node.device[FULL]) for node in nodes)

    def nodes_of(self, pool: PagePool, pages: Pages) -> list[Node]:
        """The nodes that list some of these pages."""
        owners = pool.ledger.owner_P[pages]
        cached = owners[(owners & STATE_MASK) == PageState.TREE] >> STATE_BITS
        return [self.tree.arena[node_id] for node_id in np.unique(cached).tolist()]
