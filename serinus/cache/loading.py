"""Loads: host pages back to the device, all or nothing, and what a load that failed leaves behind.

A load's pages can be matched as soon as it is submitted: forward passes that begin later wait for each layer. If it
fails, whatever hangs below them leaves the tree at once; its pages go when the last request that names them is gone.
"""

from __future__ import annotations

import numpy as np

from serinus.cache.copies import Copy, CopyTable
from serinus.cache.coverage import lacking, window_start
from serinus.cache.ledger import Pages, copy_owner
from serinus.cache.node import NO_PAGES, Lease, Node, Span
from serinus.cache.quarantine import Quarantine
from serinus.cache.results import Loaded, LoadPlan
from serinus.cache.shelves import Shelf, Shelves
from serinus.cache.window import Windows
from serinus.core.moves import MoveKind

__all__ = ["Loads"]


class Loads:
    """Plans, begins and ends loads."""

    def __init__(
        self, shelves: Shelves, table: CopyTable, quarantine: Quarantine, windows: Windows, window: int | None
    ) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._table = table
        self._windows = windows
        self._window = window
        self._quarantine = quarantine

    # Plans

    def plan(self, lease: Lease, anchor: Node) -> LoadPlan:
        """What it takes to make the path to `anchor` usable; it stays as it is until the plan is used or dropped."""
        full, swa = lacking(Span(anchor, 0).nodes(), anchor.end, self._window)
        start = min(node.start for node in (*full, *swa))
        if self._window is not None:
            first = window_start(anchor.end, self._window)
            start = min([start, *(node.start for node in Span(anchor, 0).nodes() if node.end > first)])
        lease.plan = Span(anchor, start)
        self._tree.pin(anchor)
        self._tree.set_plan(lease.plan, 1)
        return LoadPlan(
            end=anchor.end,
            full=sum(len(node.host) for node in full),
            swa=sum(len(node.host_swa) for node in swa),
            tokens=anchor.end - lease.end,
        )

    def drop_plan(self, lease: Lease) -> None:
        """The lease will not load."""
        plan, lease.plan = lease.plan, None
        if plan is not None:
            self._tree.set_plan(plan, -1)
            self._tree.unpin(plan.anchor)

    def needs(self, lease: Lease) -> tuple[int, int]:
        """Device pages of FULL and SWA that the lease's plan needs now."""
        assert lease.plan is not None, f"cache: {lease} has no plan to load"
        anchor = lease.plan.anchor
        full, swa = lacking(Span(anchor, 0).nodes(), anchor.end, self._window)
        return sum(len(node.host) for node in full), sum(len(node.host_swa) for node in swa)

    # Loads

    def begin(self, rid: str, lease: Lease) -> tuple[Loaded, Copy | None]:
        """Take the free device pages, let the lease grow to the plan's end; the caller submits the copy.

        No copy where others have loaded everything meanwhile.
        """
        plan = lease.plan
        assert plan is not None, f"cache: {lease} has no plan to load"
        path = Span(plan.anchor, 0).nodes()[::-1]
        full, swa = lacking(path, plan.anchor.end, self._window)
        op = self._table.take_op()
        copy = Copy(op, MoveKind.LOAD, Span(plan.anchor, min((n.start for n in (*full, *swa)), default=0)))
        if full:
            copy.full_source, copy.full = self._fill(self._shelves.device, "host", full, op)
        if swa:
            assert self._shelves.swa is not None, "cache: SWA to load without that part"
            copy.swa_source, copy.swa = self._fill(self._shelves.swa, "host_swa", swa, op)
        if full or swa:
            self._table.begin(copy)
        submitted = bool(full or swa)
        return self._grow(rid, lease, path, op if submitted else 0), copy if submitted else None

    def _fill(self, shelf: Shelf, slot: str, nodes: list[Node], op: int) -> tuple[Pages, Pages]:
        """Give `nodes` the device pages that the host's are copied to: (sources, targets)."""
        sources: list[Pages] = [getattr(node, slot) for node in nodes]
        source = np.concatenate(sources)
        target = shelf.ledger.take(copy_owner(op), len(source), "take for a load")
        at = 0
        for node, pages in zip(nodes, sources, strict=True):
            self._shelves.attach(shelf, node, target[at : at + len(pages)], None, "load")
            at += len(pages)
        return source, target

    def _grow(self, rid: str, lease: Lease, path: list[Node], op: int) -> Loaded:
        """The lease ends where its plan does; the plan is used up."""
        plan, old, size = lease.plan, lease.anchor, self._tree.page_size
        assert plan is not None, f"cache: {lease} has no plan to load"
        end, old_end = plan.anchor.end, old.end
        want = window_start(end, self._window)
        swa_first = want // size
        new = [node.pages for node in path if node.start >= old_end]
        window = [] if self._window is None else [node for node in path if node.end > want]
        swa_pages = NO_PAGES
        if window:
            swa_pages = np.concatenate([node.swa for node in window])[swa_first - window[0].start // size :]
        self._tree.pin(plan.anchor)
        self._windows.advance(lease, end)
        lease.anchor = plan.anchor
        self._windows.pin(lease, old_end)
        self._tree.unpin(old)
        self.drop_plan(lease)
        lease.rid = rid
        return Loaded(
            length=end,
            first=old_end // size,
            pages=np.concatenate(new) if new else NO_PAGES,
            swa_first=swa_first,
            swa_pages=swa_pages,
            op=op,
        )

    def end(self, copy: Copy, *, ok: bool) -> None:
        """A load has ended: its pages are the tree's, or condemned."""
        nodes = copy.span.nodes()
        if ok:
            for node in nodes:
                for shelf in (self._shelves.device, self._shelves.swa):
                    if shelf is not None and node.loading & 1 << shelf.part and self._fills(copy, shelf, node):
                        self._shelves.settle(shelf, node, copy.owner)
        else:
            top = nodes[-1]
            if top.alive:
                self._quarantine.cut(top, tell=True)
        self._table.end(copy)
        self._quarantine.release()

    def _fills(self, copy: Copy, shelf: Shelf, node: Node) -> bool:
        """Whether it is this copy that fills the node's pages."""
        return int(shelf.ledger.owner_P[shelf.of(node)[0]]) == copy.owner
