"""What the leader tells the canaries of its ranks to do, and what they answer. Plain data; it travels on the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.canary.perturb import Injection, PerturbPlan
from serinus.canary.violation import Violation
from serinus.core.parts import PageSpan, Part

__all__ = [
    "CANARY_COMMANDS",
    "CachedPages",
    "CanaryAnswer",
    "CanaryCommand",
    "CheckArrival",
    "CheckCount",
    "Finding",
    "PlantFaults",
    "StartCanary",
    "SweepSlots",
    "TellCounts",
]

Finding = Violation | Injection
"""What a rank reports with a step that it ran: a broken promise, or a fault that it planted on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCanary:
    """The warm-up is over: check every step from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSlots:
    """Verify cached slots that no request uses (see cache.ResidentSlots). What is found comes with the next step."""

    part: Part
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    previous: NDArray[np.int64]
    tokens: NDArray[np.int32]
    ends_pass: bool = False
    """Whether these are the last slots of a walk over the whole cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckArrival:
    """Verify pages that came by handoff, before a step reads them; answered with what was found."""

    number: int
    rid: str
    spans: tuple[PageSpan, ...]
    tokens: NDArray[np.int32]
    """The request's own, from position 0; positions behind them are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCounts:
    """Answer how much was checked so far."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPages:
    """These pages hold cached KV now, of the host tier all, of the device those that no request uses: what planned
    faults may damage."""

    part: Part
    pages: NDArray[np.int32]
    is_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantFaults:
    """Plant faults by this plan from now on; one without modes plants none."""

    plan: PerturbPlan


CanaryCommand = StartCanary | SweepSlots | CheckArrival | TellCounts | CachedPages | PlantFaults
"""Any command that CanaryRank.obey takes."""
CANARY_COMMANDS: Final[tuple[type, ...]] = (
    StartCanary,
    SweepSlots,
    CheckArrival,
    TellCounts,
    CachedPages,
    PlantFaults,
)
"""The types of all commands that CanaryRank.obey takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCount:
    """How much one kind of check had to verify so far, and did, over all parts of a rank."""

    check: str
    """head, tail (around forward passes), arrival or sweep."""
    due: int
    """Slots that had to be verified."""
    checked: int
    """Equal, unless a device is still at work; of K and V the lower number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """A rank's answer to CheckArrival or TellCounts."""

    number: int
    """Number of the command that is answered."""
    violations: tuple[Violation, ...] = ()
    """Found since the last report of this rank."""
    injections: tuple[Injection, ...] = ()
    """Faults planted on purpose since then."""
    slots_due: int = 0
    """Slots that had to be verified so far."""
    slots_checked: int = 0
    """Slots that were verified so far; equal, unless a device is still at work."""
    checks: tuple[CheckCount, ...] = ()
    """The same check by check, the sweep included."""
    total: int = 0
    """Violations so far, those whose details were lost to the ring's overflow included."""
