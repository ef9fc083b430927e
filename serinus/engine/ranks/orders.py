"""What every rank is told to do whatever the engine's role, and what it answers. Plain data; torch-free.

Orders of tiers, handoffs and the canary stand in their owners' files; codec.py lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.plan import StepPlan, StepResult

__all__ = ["RankCounts", "RunStep", "StepDone", "Stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Run this plan; answered by StepDone."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A rank has done its part of a step, and of all before it; only the rank that samples and those with a canary
    answer every one."""

    step: int
    """The plan's number."""
    result: StepResult | None = None
    """From the rank that samples; None from others."""
    seconds: float = 0.0
    """Spent in steps there since the last answer, `wait_seconds` included."""
    wait_seconds: float = 0.0
    """Spent waiting for other ranks."""
    findings: tuple[object, ...] = ()
    """What the rank's canary found, in types that codec.py knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """How many requests a rank has in each queue, told whenever that changed."""

    counts: tuple[int, ...]
    """In the order of parallel.QUEUES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The engine ends: let copies end, give everything back, answer no more."""

    reason: str = ""
