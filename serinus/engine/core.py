"""One step of one engine: plan, run, commit. What the loop, the offline LLM and the benchmarks all share.

Knows neither sockets nor processes: requests come in through `scheduler`, results leave through the Outcome.
"""

from __future__ import annotations

from serinus.core.clock import Clock
from serinus.engine.watch import StepWatch
from serinus.runner import Runner
from serinus.sched import Outcome, Scheduler

__all__ = ["EngineCore"]


class EngineCore:
    """Decide, do, commit."""

    def __init__(self, *, scheduler: Scheduler, runner: Runner, watch: StepWatch, clock: Clock) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.watch = watch
        self._clock = clock
        self.turns = 0
        """Calls of `step`."""

    def step(self) -> Outcome | None:
        """Run one step; None = nobody could be worked for (idle, or everybody waits for pages in transit)."""
        self.turns += 1
        start = self._clock.now()
        plan = self.scheduler.plan(start)
        if plan is None:
            return None
        result = self.runner.run(plan)
        end = self._clock.now()
        outcome = self.scheduler.commit(plan, result, end)
        self.watch.stepped(outcome, end - start, self.scheduler)
        return outcome
