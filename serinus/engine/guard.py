"""Guard: what an engine asks of its canary around each step and each handoff. NoGuard is the engine without one.

Torch-free: the canary itself stands in kv_guard.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.pd import PageStore
from serinus.sched import OwnPages

__all__ = ["Guard", "NoGuard", "Verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A request that must not go on, and why, in words."""

    rid: str
    reason: str


class Guard(Protocol):
    """What the engine's core asks around its steps."""

    def begin(self, plan: StepPlan) -> None:
        """The runner is about to run this plan."""
        ...

    def returned(self, result: StepResult) -> StepResult:
        """It ran; what the scheduler is to get."""
        ...

    def judge(self) -> Sequence[Verdict]:
        """Before the commit: the requests whose KV is not sound, in mode raise."""
        ...

    def late(self) -> None:
        """No step is under way: look after what was found since the last one."""
        ...

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        """The last pages of a prompt came by handoff: why they must not be used, or nothing."""
        ...

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """What a handoff may read pages from."""
        ...

    def view(self) -> dict[str, Any]:
        """For `GET /canary`."""
        ...

    def refresh(self, metrics: Metrics) -> None:
        """Bring counters up to now, for a scrape."""
        ...


class NoGuard:
    """No canary."""

    def begin(self, plan: StepPlan) -> None:
        """Nothing."""

    def returned(self, result: StepResult) -> StepResult:
        """What came."""
        return result

    def judge(self) -> Sequence[Verdict]:
        """Nobody."""
        return ()

    def late(self) -> None:
        """Nothing."""

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        """Nothing."""
        return ""

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """The pools."""
        return pools

    def view(self) -> dict[str, Any]:
        """That there is none."""
        return {"mode": "none"}

    def refresh(self, metrics: Metrics) -> None:
        """Nothing."""
