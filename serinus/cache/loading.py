"""Loads: host pages back to the device, all or nothing, and what a load that failed leaves behind.

A load's pages can be matched as soon as it is submitted: forward passes that begin later wait for each layer. If it
fails, all that hangs below them leaves the tree at once; its pages go when the last request that names them is gone.
"""

from __future__ import annotations

import numpy as np

from serinus.cache.copies import Copy, CopyTable
from serinus.cache.coverage import lacking
from serinus.cache.node import Lease, Node, Span
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.quarantine import PageQuarantine
from serinus.cache.results import Loaded, LoadPlan
from serinus.cache.window import Windows
from serinus.core.moves import MoveKind


class Loads:
    """Plans, begins and ends loads."""

    def __init__(self, pools: PagePools, table: CopyTable, quarantine: PageQuarantine, windows: Windows) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._table = table
        self._windows = windows
        self._quarantine = quarantine

    # Plans

    def plan(self, lease: Lease, anchor: Node) -> LoadPlan:
        """What it takes to make the path to `anchor` usable; it stays as it is until the plan is used or dropped."""
        path = Span(anchor, 0).nodes()
        lacking_nodes = lacking(path, anchor.end, self._pools.rules)
        starts = [nodes[-1].start for nodes in lacking_nodes if nodes]  # paths run towards the root
        for window in self._windows.all:
            first = window.start(anchor.end)
            starts += [node.start for node in path if node.end > first][-1:]
        lease.plan = Span(anchor, min(starts))
        self._tree.pin(anchor)
        self._tree.set_plan(lease.plan, 1)
        return LoadPlan(anchor.end, self._counts(lacking_nodes), anchor.end - lease.end)

    def drop_plan(self, lease: Lease) -> None:
        """The lease will not load."""
        plan, lease.plan = lease.plan, None
        if plan is not None:
            self._tree.set_plan(plan, -1)
            self._tree.unpin(plan.anchor)

    def needs(self, lease: Lease) -> tuple[int, ...]:
        """Device pages, of each part, that the lease's plan needs now."""
        assert lease.plan is not None, f"cache: {lease} has no plan to load"
        anchor = lease.plan.anchor
        return self._counts(lacking(Span(anchor, 0).nodes(), anchor.end, self._pools.rules))

    def _counts(self, lacking_nodes: list[list[Node]]) -> tuple[int, ...]:
        parts = zip(self._tree.parts, lacking_nodes, strict=True)
        return tuple([sum([len(node.host[part]) for node in nodes]) for part, nodes in parts])

    # Loads

    def begin(self, rid: str, lease: Lease) -> tuple[Loaded, Copy | None]:
        """Take the free device pages, let the lease grow to the plan's end; the caller submits the copy.

        No copy where other requests have loaded everything meanwhile.
        """
        plan = lease.plan
        assert plan is not None, f"cache: {lease} has no plan to load"
        path = Span(plan.anchor, 0).nodes()[::-1]
        lacking_nodes = lacking(path, plan.anchor.end, self._pools.rules)
        starts = [nodes[0].start for nodes in lacking_nodes if nodes]
        if not starts:
            return self._grow(rid, lease, path, 0), None
        copy = Copy(self._table.take_op(), MoveKind.LOAD, Span(plan.anchor, min(starts)))
        self._table.begin(copy)
        for part, nodes in zip(self._tree.parts, lacking_nodes, strict=True):
            if nodes:
                self._fill(self._pools.device[part], nodes, copy)
        return self._grow(rid, lease, path, copy.op), copy

    def _fill(self, pool: PagePool, nodes: list[Node], copy: Copy) -> None:
        """Give `nodes` the device pages that the host's are copied to."""
        sources = [node.host[pool.part] for node in nodes]
        source = np.concatenate(sources)
        target = pool.ledger.take(copy.owner, len(source), "take for a load")
        at = 0
        for node, pages in zip(nodes, sources, strict=True):
            self._pools.attach(pool, node, target[at : at + len(pages)], None, "load")
            at += len(pages)
        self._table.add(copy, pool.part, source, target)

    def _grow(self, rid: str, lease: Lease, path: list[Node], op: int) -> Loaded:
        """The lease ends where its plan does; the plan is used up."""
        plan, old = lease.plan, lease.anchor
        assert plan is not None, f"cache: {lease} has no plan to load"
        end, old_end = plan.anchor.end, old.end
        spans = self._pools.read(path, old_end, end)
        self._tree.pin(plan.anchor)
        self._windows.advance(lease, end)
        lease.anchor = plan.anchor
        self._windows.pin(lease, old_end)
        self._tree.unpin(old)
        self.drop_plan(lease)
        lease.rid = rid
        return Loaded(length=end, spans=spans, op=op)

    def end(self, copy: Copy, *, ok: bool) -> None:
        """A load has ended: its pages are the tree's, or its nodes leave the tree."""
        nodes = copy.span.nodes()
        if ok:
            for node in nodes:
                for pool in self._pools.device.values():
                    if node.loading & 1 << pool.part and self._fills(copy, pool, node):
                        self._pools.settle(pool, node, copy.owner)
        else:
            top = nodes[-1]
            if top.alive:
                self._quarantine.cut(top, tell=True)
        self._table.end(copy)
        self._quarantine.release()

    def _fills(self, copy: Copy, pool: PagePool, node: Node) -> bool:
        """Whether it is this copy that fills the node's pages."""
        return int(pool.ledger.owner_P[pool.of(node)[0]]) == copy.owner
