"""Matches where parts and tiers decide how much of a path is usable, and what the host could add to it."""

from __future__ import annotations

from serinus.cache.coverage import cover
from serinus.cache.effects import Descent
from serinus.cache.node import Lease, Node, Span
from serinus.cache.page_pools import PagePools
from serinus.cache.results import LoadPlan, Match
from serinus.cache.tiers import TierController
from serinus.cache.window import Windows


class Matcher:
    """Turns a descent into a pinned match."""

    def __init__(self, pools: PagePools, tiers: TierController, windows: Windows) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._tiers = tiers
        self._windows = windows

    def match(self, root: Node, found: Descent, priority: int) -> Match:
        """Pin the longest prefix usable on the device; what the host could add stays too, until it is decided."""
        usable = cover(found, self._pools.rules)
        path = found.path
        if found.partial is not None and found.end in (usable.device, usable.total):
            path.append(self._pools.split(found.partial, found.end).upper)
        nodes = path if usable.device == found.end else [node for node in path if node.end <= usable.device]
        lease = self.lease(nodes[-1] if nodes else root, priority)
        spans = self._pools.read(nodes, 0, usable.device)
        self._windows.begin(lease)  # may cut one of the nodes
        load: LoadPlan | None = None
        if usable.total > usable.device:
            load = self._tiers.loads.plan(lease, next(node for node in path if node.end == usable.total))
        return Match(lease, usable.device, spans, load)

    def lease(self, anchor: Node, priority: int) -> Lease:
        """One that ends with `anchor`, which is touched."""
        lease = self._tree.lease(anchor, priority)
        self._tree.touch(anchor, priority=priority)
        return lease

    def used(self, lease: Lease) -> None:
        """A request was placed on what the lease covers: one hit, and one more use of each of its nodes."""
        lease.anchor.hit_count += 1
        if self._pools.plain:
            return
        path = Span(lease.anchor, 0).nodes()[::-1]
        for node in path:
            node.uses += 1
        if self._pools.host:
            self._tiers.backups.used(path)
