"""What people see of an engine's ranks: what they hold, where their time goes, what it costs to lead them.

Ranks report it along with their answers; it is only copied here at a scrape. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.metrics import Metrics
from serinus.ranks.line import LeaderLine

_WINDOW_S = 1.0
"""Rates are taken over at least so much time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Totals at a moment."""

    at: float
    busy: float
    computed: tuple[float, ...]
    control: float
    steps: int


class RankMetrics:
    """Of all ranks of one engine, as their leader knows them."""

    def __init__(self, metrics: Metrics, line: LeaderLine, *, engine: str, role: str, now: float) -> None:
        """`metrics`: the leader's, with which those of the other ranks appear from now on."""
        mesh = line.mesh
        self._line = line
        self._metrics = metrics
        self._of_ranks = [metrics]
        for rank in range(1, mesh.size):
            place = {"tp_rank": mesh.tp_rank(rank), "pp_rank": mesh.pp_rank(rank)}
            self._of_ranks.append(Metrics(engine, role, mesh.name(rank), **place, beside=metrics))
        self._mark = self._totals(now)

    def _totals(self, now: float) -> _Mark:
        line = self._line
        return _Mark(
            at=now,
            busy=line.busy_seconds,
            computed=tuple(computed for computed, _ in line.rank_seconds),
            control=line.control_seconds,
            steps=line.steps,
        )

    def refresh(self, now: float) -> None:
        """Bring everything up to `now`, for a scrape."""
        line, metrics = self._line, self._metrics
        for rank, (own, (computed, waited)) in enumerate(zip(self._of_ranks, line.rank_seconds, strict=True)):
            own.set("rank_compute_seconds", computed)
            own.set("rank_wait_seconds", waited)
            for gauge, count in line.rank_holdings[rank].items():
                own.set(gauge, count)
        metrics.set("rank_steps", line.steps)
        metrics.set("control_bytes", line.control_bytes)
        metrics.set("control_headers", line.headers)
        totals = self._totals(now)
        if now - self._mark.at < _WINDOW_S:
            return
        before, self._mark = self._mark, totals
        busy, steps = totals.busy - before.busy, totals.steps - before.steps
        for own, computed, earlier in zip(self._of_ranks, totals.computed, before.computed, strict=True):
            own.set("pp_bubble_fraction", min(max(1 - (computed - earlier) / busy, 0.0), 1.0) if busy > 0 else 0.0)
        metrics.set("control_step_seconds", (totals.control - before.control) / steps if steps else 0.0)
