"""A step that is planned and not committed: its requests, and the outcome as far as it is known. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from serinus.core.plan import StepPlan
from serinus.sched.request_state import ReqState
from serinus.sched.stats import Outcome


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A plan under way, with the requests it computes for."""

    plan: StepPlan
    states: list[ReqState | None]
    """The request of each `plan.work[i]`; None = the request was started again since, so its result is dropped."""
    loads: frozenset[int]
    """Copies from the host that the forward pass waits for: once it has ended, they have ended too."""
    planned_at: float
    """When it was planned."""
    outcome: Outcome
    """The part of the outcome that is known before the plan runs."""
    unloaded: set[str] = field(default_factory=set)
    """Requests of it whose KV never came from the host."""

    def forget(self, state: ReqState, *, unloaded: bool = False) -> None:
        """Drop what this step computes for a request: the KV that it reads is wrong, or (`unloaded`) never came."""
        if unloaded and state in self.states:
            self.unloaded.add(state.rid)
        self.states = [None if each is state else each for each in self.states]
