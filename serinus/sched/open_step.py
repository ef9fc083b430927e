"""A step that is planned and not committed: who is in it, and what to tell of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.plan import StepPlan
from serinus.sched.request_state import ReqState
from serinus.sched.stats import Outcome

__all__ = ["OpenStep"]


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """One plan under way."""

    plan: StepPlan
    states: list[ReqState | None]
    """Whose work is `plan.work[i]`; None = it began once more since: what comes of this work is nobody's."""
    loads: frozenset[int]
    """Copies from the host that its forward pass waits for: they have ended when it has."""
    outcome: Outcome
    """What is known of it before it runs."""

    def forget(self, state: ReqState) -> None:
        """The KV it computes on never came."""
        self.states = [None if each is state else each for each in self.states]
