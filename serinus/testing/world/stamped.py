"""Worlds with a canary: ranks on real device pools with stamps and real tables, and the real Canary of each of them.

Stamps travel with the pages, through handoffs, tiers and storage. What the canaries find is judged and sentenced by the
engine's own code. Imported only where a world has a canary: it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.canary import Canary, CanarySettings, Violation
from serinus.core.plan import StepPlan
from serinus.core.request import TokenDelta
from serinus.engine.core import EngineCore
from serinus.engine.guard import NoGuard
from serinus.engine.judge import Judge, PageKnowledge, words
from serinus.kernels import AttentionBatch, load
from serinus.kernels.canary import load_canary
from serinus.models import ForwardBatch
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.sched import OwnPages
from serinus.testing.world.ranks import Rank, RankPart

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine

__all__ = ["Canaries", "StampedPart"]

_USED = 0xDDDD_DDDD_DDDD_DDDD
"""What memory holds at birth: of zeros a digest, which is linear, would not notice that they were never filled in."""
_SWEEP_EVERY = 3
"""Steps between two sweeps."""


class StampedPart(RankPart):
    """A part of a rank in a real pool with stamps; a word of the toy is one head of two float32."""

    def _allocate(self, pages: int, heads: int, rows: int, context: int) -> None:
        spec = PoolSpec(
            layer_count=len(self.layers), kv_head_count=heads, head_size=2, page_size=self.page_size, page_count=pages,
            dtype=torch.float32, stamped=True,
        )  # fmt: skip
        self.pool = DevicePool(spec, load("cpu"))
        self.table = RequestTable(rows, context)
        self.table_RC = self.table.table.numpy()
        self._strips: list[NDArray[np.uint64]] = [
            lane.numpy().view(np.uint64)[..., 0] for pair in self.pool.layers for lane in pair
        ]
        """[S, heads] of k and v of each layer."""
        for strip in self._strips:
            strip[self.page_size :] = _USED

    def put(self, slots: NDArray[np.integer[Any]], chain_T: NDArray[np.uint64]) -> None:
        words = (chain_T[:, None] * self._odd + self._salt).reshape(len(chain_T), len(self._strips), -1)
        for index, strip in enumerate(self._strips):
            strip[slots] = words[:, index]

    def read(self, slots: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        if not self._strips:
            return np.empty((len(slots), 0), np.uint64)
        return np.concatenate([strip[slots] for strip in self._strips], axis=1)

    def chain(self, slot: int) -> int:
        return self._lanes.chain(self._strips[0][slot, 0], int(self.which[0]))

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    @property
    def kv_bytes(self) -> int:
        return self.pool.spec.kv_bytes

    def read_pages(self, pages: NDArray[np.integer[Any]], out: NDArray[np.uint8]) -> None:
        self.pool.read_pages(pages, out)

    def write_pages(self, pages: NDArray[np.integer[Any]], data: NDArray[np.uint8]) -> None:
        self.pool.write_pages(pages, data)


class _Court:
    """What the engine's own sentences ask for."""

    convict: Any = EngineCore._convict
    give_condemned_back: Any = EngineCore._give_condemned_back

    def __init__(self, engine: Engine, leaving: Callable[[str], None]) -> None:
        self.scheduler = engine.scheduler
        self._cache = engine.cache
        self.leaving = leaving


class Canaries(NoGuard):
    """The canaries of all ranks of one life of one engine (engine's Guard)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        world, shape = engine.world, engine.shape
        facts = PageKnowledge()
        facts.cache, facts.scheduler = engine.cache, engine.scheduler
        self._judge = Judge(facts, mode="raise")
        self._court = _Court(engine, lambda rid: engine.role.aborted(rid, engine.timeline.now_s))
        settings = CanarySettings(
            page_size=shape.page_size, window=world.window or None, real_data=world.canary, sweep_interval=_SWEEP_EVERY
        )
        self._canaries = [
            Canary(
                settings, *_own(rank), {part: own.layers for part, own in rank.stores.items()}, load_canary("cpu"),
                facts, head_ids=rank.heads,
            )
            for rank in engine.ranks
        ]  # fmt: skip
        self._found: list[Violation] = []
        self.damaged: set[str] = set()
        """Handoffs that have landed with other KV than they should have, as the oracle says."""

    # ---- around a step ----------------------------------------------------------------------------------------------

    def enter(self, rank: Rank, plan: StepPlan) -> None:
        """The rows are written, nothing is computed."""
        canary = self._canaries[rank.number]
        canary.begin(plan)
        canary.hook.before(_batch(plan))
        canary.hook.before_layer(0)

    def leave(self, rank: Rank, plan: StepPlan) -> None:
        """It is computed."""
        canary = self._canaries[rank.number]
        canary.hook.after(_batch(plan))
        self._note(canary.end())

    def convict(self) -> list[TokenDelta]:
        """Before the commit: end whose KV is not sound; their last deltas."""
        found, self._found = self._found, []
        ended: list[TokenDelta] = self._court.convict(self._judge.sentence(found))
        return ended

    def look_around(self) -> None:
        """Nothing runs."""
        if not self._engine.scheduler.idle:
            self._court.give_condemned_back()

    # ---- handoffs (Guard) -------------------------------------------------------------------------------------------

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        if own is None:
            return ""
        found = [v for canary in self._canaries for v in canary.arrived(rid, own.spans, len(own.tokens), own.tokens)]
        if rid in self.damaged:
            self.damaged.discard(rid)
            assert found, f"testing: canary: {rid} has landed in {self._engine.name} with wrong KV, and it is silent"
        self._note(found)
        self._found.clear()
        self._judge.sentence(found)
        return words(found[0]) if found else ""

    def _note(self, found: Sequence[Violation]) -> None:
        if found and not self._engine.options.damages:
            lines = "; ".join(violation.line() for violation in found[:2])
            raise AssertionError(f"testing: canary: nothing was damaged in {self._engine.name}, but it says {lines}")
        self._found += found
        self._engine.network.sung += len(found)


def _own(rank: Rank) -> tuple[Any, Any]:
    """Pools and tables of a rank."""
    parts = {part: own for part, own in rank.stores.items() if isinstance(own, StampedPart)}
    return {part: own.pool for part, own in parts.items()}, {part: own.table for part, own in parts.items()}


def _batch(plan: StepPlan) -> ForwardBatch:
    work = plan.work
    counts = [len(each.tokens) for each in work]
    sliding = [each.swa_slots for each in work if each.swa_slots is not None]
    positions = [np.arange(each.start, each.start + len(each.tokens)) for each in work]
    return ForwardBatch(
        tokens_T=torch.from_numpy(np.concatenate([each.tokens for each in work]).astype(np.int64)),
        positions_T=torch.from_numpy(np.concatenate(positions)),
        slots_T=torch.from_numpy(np.concatenate([each.slots for each in work])),
        attention=AttentionBatch(
            rows_B=torch.tensor([each.row for each in work]),
            q_starts_B1=torch.tensor(np.cumsum([0, *counts])),
            context_B=torch.tensor([each.start + len(each.tokens) for each in work]),
        ),
        swa_slots_T=torch.from_numpy(np.concatenate(sliding)) if sliding else None,
    )
