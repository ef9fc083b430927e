"""Commands that every rank obeys whatever its engine's role, and their answers. Plain data; torch-free.

Commands of tiers, handoffs and the canary stand in their owners' files; codec.py lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serinus.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Run this plan; answered by StepDone."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A rank has done its part of a step, and of all before it.

    The rank that samples and ranks with a canary answer every step, the others once in a few steps and where one fails.
    """

    step: int
    """Number of the plan that was run."""
    result: StepResult | None = None
    """From the rank that samples; None from others."""
    seconds: float = 0.0
    """Spent in steps there since the last answer, `wait_seconds` included."""
    wait_seconds: float = 0.0
    """Spent waiting for other ranks."""
    failed: str = ""
    """Why the step was not computed, where there was no memory for it: its requests fail."""
    findings: tuple[object, ...] = ()
    """What the rank's canary found, in types that codec.py lists."""
    checked: list[list[int]] | None = None
    """Slots that it verified of each work of the plan, as CanaryRank.checked has them; None = it has no canary, or the
    step failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHoldings:
    """What a rank itself counts of the work it holds; answered whenever a count changed."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """By the name of the gauge that shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The engine ends: give everything back, answer no more."""


def describe(command: object) -> str:
    """A command in a few words, as evidence in an error."""
    if isinstance(command, RunStep):
        return f"RunStep {command.plan.step} {[work.rid for work in command.plan.work]}"
    return type(command).__name__
