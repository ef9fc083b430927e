"""Who may touch which page: every read and write of a transfer is held against what the scheduler says at that moment.

I2: a page is written only while a request that is being filled from outside has it. I4: a page is read only while it
is held for a transfer. I6: what has landed is the KV of the prompt, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.cache.node import Tier
from serinus.core.parts import Part
from serinus.pd import Region
from serinus.testing.world.ranks import RankPart
from serinus.testing.world.toy import expected_kv

if TYPE_CHECKING:
    from serinus.sched import Scheduler
    from serinus.testing.world.engine import Engine

__all__ = ["GuardedStore", "OwnStore", "check_landed", "fillable_pages"]


def fillable_pages(scheduler: Scheduler, part: Part = Part.FULL) -> set[int]:
    """Pages of a part that somebody else may write now: those of requests in transfer beyond what they hold."""
    pages: set[int] = set()
    for state in scheduler._batch.transfer.values():
        row = state.full if part is Part.FULL else state.swa
        assert row is not None, f"testing: {state.rid} has no part {part.name}"
        first = max(row.first, state.held // scheduler.settings.page_size)
        pages.update(row.pages[first : row.end].tolist())
    return pages


def quarantined_pages(engine: Engine, part: Part = Part.FULL) -> set[int]:
    """Pages of a part that are nobody's because somebody might still write them."""
    ledger = engine.cache.ledgers[Tier.DEVICE, part]
    return {page for page in np.flatnonzero(ledger.hold_P).tolist() if ledger.holds_of(page).get("quarantine")}


class OwnStore:
    """The pages of one part of one rank, as pd's PageStore; on their way out to a peer a bit may flip."""

    def __init__(self, engine: Engine, part: Part, own: RankPart) -> None:
        self._engine = engine
        self._part = part
        self._own = own

    @property
    def page_bytes(self) -> int:
        return self._own.page_bytes

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        self._own.read_pages(pages, out)
        engine = self._engine
        chance = 0.0 if engine.calm or engine.canaries is None else engine.options.flip
        if chance and engine.shape.role == "prefill" and engine.rng.random() < chance:
            row, at = engine.rng.randrange(len(out)), engine.rng.randrange(self._own.kv_bytes)
            out[row, at] ^= 1 << engine.rng.randrange(8)
            engine.network.damaged += 1

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self._own.write_pages(pages, data)


class GuardedStore(OwnStore):
    """The same, where every access is checked."""

    @property
    def region(self) -> Region:
        """For one-sided backends; those of the world find pages without addresses."""
        lanes = 2 * len(self._own.layers)
        strip = self.page_bytes // lanes
        return Region(
            part=self._part, address=4096, lane_count=lanes, lane_stride=strip * 1024, strip_bytes=strip,
            page_count=self._own.page_count,
        )  # fmt: skip

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        if self._engine.shape.role == "prefill":
            self.check_read(pages)
        super().read_pages(pages, out)

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.check_write(pages)
        super().write_pages(pages, data)

    def check_read(self, pages: NDArray[np.integer]) -> None:
        """I4."""
        ledger = self._engine.cache.ledgers[Tier.DEVICE, self._part]
        loose = [page for page in pages.tolist() if not ledger.holds_of(page).get("transfer")]
        name = f"{self._engine.name} ({self._part.name})"
        assert not loose, f"testing: I4: pages {loose} of {name} are read, but not held for that"

    def check_write(self, pages: NDArray[np.integer]) -> None:
        """I2."""
        wild = set(pages.tolist()) - fillable_pages(self._engine.scheduler, self._part)
        if wild:
            wild -= quarantined_pages(self._engine, self._part)
        name = f"{self._engine.name} ({self._part.name})"
        assert not wild, f"testing: I2: pages {sorted(wild)} of {name} are written without a grant"


def check_landed(engine: Engine, rid: str) -> None:
    """I6, before the request runs: its pages hold the KV of its prompt, the part it had here itself included."""
    state = engine.scheduler._batch.transfer.get(rid)
    assert state is not None, f"testing: {rid} has landed in {engine.name}, but is not in transfer"
    for part, row in ((Part.FULL, state.full), (Part.SWA, state.swa)):
        if row is None:
            continue
        first = 0
        if part is Part.SWA:
            first = max(0, state.prompt_len + 1 - engine.world.window)
            assert row.first * row.page_size <= first, f"testing: I6: {rid} has SWA pages from {row.first} on only"
        slots = row.slots[first : state.prompt_len]
        for rank in engine.ranks:
            own = rank.parts[part]
            expected = expected_kv(rank.lanes, state.request.prompt, own.which)[first:]
            wrong = np.flatnonzero((own.read(slots) != expected).any(axis=1)) + first
            if len(wrong) and engine.canaries is not None and engine.options.damages:
                engine.canaries.damaged.add(rid)
                continue
            assert not len(wrong), (
                f"testing: I6: {rid} has landed in {engine.name}, but positions {wrong.tolist()} of part {part.name} on"
                f" rank {rank.number} hold other KV (held {state.held}, slots {slots.tolist()})"
            )
