"""Where each cached page stands in its sequence, so that a sweep over all of them is a few array operations.

One index per tier and part. A page's position never changes while it is cached; its predecessor changes only when a
neighbour node comes to this tier or leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import STATE_BITS, STATE_MASK, PageLedger, Pages, PageState
from serinus.cache.node import Node
from serinus.cache.results import ResidentSlots
from serinus.core.clock import Clock


class SweepIndex:
    """Position and previous page of every cached page; meaningless for the others."""

    def __init__(self, page_count: int, page_size: int) -> None:
        self.page_size = page_size
        self.position_P: NDArray[np.int64] = np.zeros(page_count, np.int64)
        """Position of the page's first token."""
        self.previous_P: NDArray[np.int32] = np.zeros(page_count, np.int32)
        """The page before it in its sequence; 0 for the first, and where that one is not on this tier and part."""
        self.clock: Clock | None = None
        """Where it is set, the times of `seen_P` are kept."""
        self.seen_P: NDArray[np.float64] = np.zeros(page_count)
        """When the page was cached or verified last (`seen`)."""

    def note(self, pages: Pages, start: int, previous: int) -> None:
        """`pages` hold the positions from `start` on, behind page `previous` (0 = none)."""
        self.position_P[pages] = np.arange(start, start + len(pages) * self.page_size, self.page_size)
        before = np.empty_like(pages)
        before[0] = previous
        before[1:] = pages[:-1]
        self.previous_P[pages] = before
        self.seen(pages)

    def seen(self, pages: Pages) -> None:
        """These pages are known to be sound now."""
        if self.clock is not None:
            self.seen_P[pages] = self.clock.now()

    def ages(self, ledger: PageLedger) -> NDArray[np.float64]:
        """Seconds since each cached page was seen last. Cost: O(pages); raises AssertionError without a clock."""
        assert self.clock is not None, "cache: no times are kept, expected a clock"
        cached_P = (ledger.owner_P & STATE_MASK) == PageState.TREE
        ages: NDArray[np.float64] = self.clock.now() - self.seen_P[cached_P]
        return ages

    def link(self, page: int, previous: int) -> None:
        """The page before `page` came or left."""
        self.previous_P[page] = previous

    def walk(
        self,
        ledger: PageLedger,
        cursor: int,
        budget: int,
        nodes: Mapping[int, Node],
        pins: Callable[[Node], int] | None = None,
    ) -> ResidentSlots:
        """The cached slots of budget / page_size pages from `cursor`; `nodes`: by id. Where `pins` of a node is given,
        without those of pinned nodes."""
        size = self.page_size
        start = max(cursor, 1)
        stop = min(ledger.page_count, start + max(1, budget // size))
        owner_P = ledger.owner_P[start:stop]
        pages = np.flatnonzero((owner_P & STATE_MASK) == PageState.TREE)
        ids, which = np.unique(owner_P[pages] >> STATE_BITS, return_inverse=True)
        owners = [nodes[node_id] for node_id in ids.tolist()]
        if pins is not None:
            loose = np.array([not pins(node) for node in owners], np.bool_)[which]
            pages, which = pages[loose], which[loose]
        pages += start
        offsets = np.arange(size)
        slots_PS = pages[:, None] * size + offsets
        positions_PS = self.position_P[pages][:, None] + offsets
        tokens_PS = np.empty(positions_PS.shape, np.int32)
        for index in np.unique(which).tolist():
            node, mine = owners[index], which == index
            tokens_PS[mine] = np.frombuffer(node.tokens, np.int32)[positions_PS[mine] - node.start]
        previous_PS = slots_PS - 1
        before = self.previous_P[pages].astype(np.int64)
        previous_PS[:, 0] = np.where(before > 0, before * size + size - 1, 0)
        return ResidentSlots(
            slots=slots_PS.ravel(),
            positions=positions_PS.ravel(),
            previous=previous_PS.ravel(),
            tokens=tokens_PS.ravel(),
            cursor=0 if stop == ledger.page_count else stop,
        )
