"""What people see of an engine's ranks: their queues, where their time goes, what it costs to lead them.

Everything was reported along with the steps; it is only copied here when somebody scrapes. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.clock import Clock
from serinus.core.metrics import Metrics
from serinus.engine.ranks import RankExecutor

__all__ = ["RankWatch"]

_WINDOW_S = 1.0
"""What is shown `lately` is of at least so much time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Totals at a moment."""

    at: float
    busy: float
    computed: tuple[float, ...]
    control: float
    steps: int


class RankWatch:
    """Of the leader."""

    def __init__(self, metrics: Metrics, executor: RankExecutor, *, engine: str, role: str, clock: Clock) -> None:
        """`metrics`: the leader's, with which those of the other ranks appear from now on."""
        mesh = executor.mesh
        self._executor = executor
        self._clock = clock
        self._metrics = metrics
        metrics.ranks = [
            Metrics(engine, role, mesh.name(rank), tp_rank=mesh.tp_rank(rank), pp_rank=mesh.pp_rank(rank), told=True)
            for rank in range(1, mesh.size)
        ]
        self._mark = self._totals()

    def _totals(self) -> _Mark:
        executor = self._executor
        return _Mark(
            at=self._clock.now(),
            busy=executor.busy_seconds,
            computed=tuple(computed for computed, _ in executor.rank_seconds),
            control=executor.control_seconds,
            steps=executor.steps,
        )

    def refresh(self) -> None:
        """Bring everything up to now, for a scrape."""
        executor, metrics = self._executor, self._metrics
        for rank, (own, (computed, waited)) in enumerate(
            zip((metrics, *metrics.ranks), executor.rank_seconds, strict=True)
        ):
            own.set("rank_compute_seconds", computed)
            own.set("rank_wait_seconds", waited)
            if rank:
                for gauge, count in executor.gauges(rank).items():
                    own.set(gauge, count)
        metrics.set("rank_steps", executor.steps)
        metrics.set("control_bytes", executor.control_bytes)
        metrics.set("control_headers", executor.headers)
        now = self._totals()
        if now.at - self._mark.at < _WINDOW_S:
            return
        before, self._mark = self._mark, now
        busy, steps = now.busy - before.busy, now.steps - before.steps
        for own, computed, earlier in zip((metrics, *metrics.ranks), now.computed, before.computed, strict=True):
            own.set("pp_bubble_fraction", min(max(1 - (computed - earlier) / busy, 0.0), 1.0) if busy > 0 else 0.0)
        metrics.set("control_step_seconds", (now.control - before.control) / steps if steps else 0.0)
