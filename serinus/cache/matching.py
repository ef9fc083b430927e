"""Matches where parts and tiers decide how much of a path is usable, and what the host could add to it."""

from __future__ import annotations

import numpy as np

from serinus.cache.coverage import cover
from serinus.cache.ledger import Pages
from serinus.cache.node import NO_PAGES, Lease, Node
from serinus.cache.results import LoadPlan, Match
from serinus.cache.shelves import Shelves
from serinus.cache.tiers import TierController
from serinus.cache.tree import Descent
from serinus.cache.window import Windows

__all__ = ["Matcher"]


class Matcher:
    """Turns a descent into a pinned match."""

    def __init__(self, shelves: Shelves, tiers: TierController, windows: Windows, window: int | None) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._tiers = tiers
        self._windows = windows
        self._window = window

    def match(self, root: Node, found: Descent, priority: int) -> Match:
        """Pin the longest prefix usable on the device; what the host could add stays too, until it is decided."""
        usable = cover(found, self._window)
        path = found.path
        if found.partial is not None and found.end in (usable.device, usable.total):
            path.append(self._shelves.split(found.partial, found.end).upper)
        ends = {node.end: node for node in path}
        for node in path:
            node.uses += 1
        if self._shelves.host is not None:
            self._tiers.backups.used(path)
        lease = self.lease(ends.get(usable.device, root), priority)
        device = [node for node in path if node.end <= usable.device]
        pages = np.concatenate([node.pages for node in device]) if device else NO_PAGES
        swa_first = self._windows.start(usable.device) // self._tree.page_size
        swa_pages = NO_PAGES if self._window is None else self._window_pages(lease, device, swa_first)
        load: LoadPlan | None = None
        if usable.total > usable.device:
            load = self._tiers.loads.plan(lease, ends[usable.total])
        return Match(
            lease=lease, length=usable.device, pages=pages, swa_first=swa_first, swa_pages=swa_pages, load=load
        )

    def lease(self, anchor: Node, priority: int) -> Lease:
        """A hit that ends with `anchor`."""
        lease = self._tree.lease(anchor, priority)
        self._tree.touch(anchor, hit=True, priority=priority)
        return lease

    def _window_pages(self, lease: Lease, device: list[Node], swa_first: int) -> Pages:
        """Pin the window of a match and give its SWA pages."""
        lease.swa_want = self._windows.start(lease.end)
        window = [node for node in device if node.end > lease.swa_want]
        pages = NO_PAGES
        if window:
            pages = np.concatenate([node.swa for node in window])[swa_first - window[0].start // self._tree.page_size :]
        self._windows.pin(lease, 0)
        return pages
