"""Who may touch which page: every read and write of a transfer is held against what the scheduler says at that moment.

I2: a page is written only while a request that is being filled from outside has it. I4: a page is read only while it
is held for a transfer. I6: what has landed is the KV of the prompt, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.pd import Region
from serinus.testing.world.ranks import Rank
from serinus.testing.world.toy import expected_kv

if TYPE_CHECKING:
    from serinus.sched import Scheduler
    from serinus.testing.world.engine import Engine

__all__ = ["GuardedStore", "check_landed", "fillable_pages"]


def fillable_pages(scheduler: Scheduler) -> set[int]:
    """Pages that somebody else may write now: those of requests in transfer beyond what they hold, and quarantine."""
    pages: set[int] = set()
    for state in scheduler._batch.transfer.values():
        pages.update(state.full.pages[state.held // scheduler.settings.page_size : state.full.end].tolist())
    return pages


def quarantined_pages(engine: Engine) -> set[int]:
    """Pages that are nobody's because somebody might still write them."""
    ledger = engine.cache.ledger
    return {page for page in np.flatnonzero(ledger.hold_P).tolist() if ledger.holds_of(page).get("quarantine")}


class GuardedStore:
    """The pages of one rank, as pd's PageStore."""

    def __init__(self, engine: Engine, rank: Rank) -> None:
        self._engine = engine
        self._rank = rank

    @property
    def page_bytes(self) -> int:
        return self._rank.page_bytes

    @property
    def region(self) -> Region:
        """For one-sided backends; those of the world find pages without addresses."""
        lanes = 2 * len(self._rank.layers)
        strip = self.page_bytes // lanes
        return Region(
            part=Part.FULL, address=4096, lane_count=lanes, lane_stride=strip * 1024, strip_bytes=strip,
            page_count=len(self._rank.bytes),
        )  # fmt: skip

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        if self._engine.shape.role == "prefill":
            self.check_read(pages)
        self._rank.read_pages(pages, out)

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.check_write(pages)
        self._rank.write_pages(pages, data)

    def check_read(self, pages: NDArray[np.integer]) -> None:
        """I4."""
        ledger = self._engine.cache.ledger
        loose = [page for page in pages.tolist() if not ledger.holds_of(page).get("transfer")]
        assert not loose, f"testing: I4: pages {loose} of {self._engine.name} are read, but not held for that"

    def check_write(self, pages: NDArray[np.integer]) -> None:
        """I2."""
        wild = set(pages.tolist()) - fillable_pages(self._engine.scheduler)
        if wild:
            wild -= quarantined_pages(self._engine)
        assert not wild, f"testing: I2: pages {sorted(wild)} of {self._engine.name} are written without a grant"


def check_landed(engine: Engine, rid: str) -> None:
    """I6, before the request runs: its pages hold the KV of its prompt, the part it had here itself included."""
    state = engine.scheduler._batch.transfer.get(rid)
    assert state is not None, f"testing: {rid} has landed in {engine.name}, but is not in transfer"
    slots = state.full.slots[: state.prompt_len]
    for rank in engine.ranks:
        expected = expected_kv(rank.lanes, state.request.prompt, rank.which)
        wrong = np.flatnonzero((rank.read(slots) != expected).any(axis=1))
        assert not len(wrong), (
            f"testing: I6: {rid} has landed in {engine.name}, but positions {wrong.tolist()} of rank {rank.number}"
            f" hold other KV (held {state.held}, slots {slots.tolist()})"
        )
