"""What the leader tells the canaries of its ranks to do, and what they answer. Plain data; it travels on the line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from serinus.canary.perturb import Injection, PerturbPlan
from serinus.canary.violation import Violation
from serinus.core.moves import PageOrigin
from serinus.core.parts import PageSpan, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOverflow:
    """One check found more violations than the ring has rows: of some of them no detail is known, so anything that it
    checked may be wrong."""

    step: int
    part: Part
    check: str
    """The name of the check, in words."""
    lost: int
    """Number of violations of which no detail is known."""
    rids: tuple[str, ...] = ()
    """The requests that it checked..."""
    pages: NDArray[np.int32]
    """...or the cached pages."""


Finding = Violation | Injection
"""What a rank reports with a step that it ran: a broken promise, or a fault that it planted on purpose. (And a
RingOverflow, where there were too many.)"""


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
class RowPages:
    """Pages of one request."""

    rid: str
    spans: tuple[PageSpan, ...]
    tokens: NDArray[np.int32]
    """The request's own, from position 0; positions behind them are not checked."""
    row: int = 0
    """The row of req_to_token that its steps read it by: the slots that this names are verified; 0 = the pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRows:
    """Verify all slots of these pages now, beside any step; answered with what was found."""

    number: int
    rows: tuple[RowPages, ...]
    is_arrival: bool = False
    """They came by handoff, and no step has read them; else their requests are about to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """Consecutive pages of the host tier."""

    part: Part
    pages: NDArray[np.int32]
    origin: PageOrigin
    """What they are the KV of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHost:
    """Verify these pages of the host tier now (host_check.py); answered with how many of each are sound."""

    number: int
    copies: tuple[HostPages, ...]


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


CanaryCommand = StartCanary | SweepSlots | CheckRows | CheckHost | TellCounts | CachedPages | PlantFaults
"""Any command that CanaryRank.obey takes."""
CANARY_COMMANDS: Final[tuple[type, ...]] = get_args(CanaryCommand)
"""The types of all commands that CanaryRank.obey takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCount:
    """How much one kind of check had to verify so far, and did, over all parts of a rank."""

    check: str
    """head, tail (around forward passes), arrival, end (of requests), sweep, stored (read back), host (of files)."""
    due: int
    """Slots that had to be verified."""
    checked: int
    """Equal; of K and V the lower number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFindings:
    """A rank's answer that comes by itself: pages of its host tier that are not what their stamps vouch for, found on
    their way to the storage or from it. Slots and pages are those of the host."""

    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """A rank's answer to CheckRows, CheckHost or TellCounts."""

    number: int
    """Number of the command that is answered."""
    violations: tuple[Violation, ...] = ()
    """Found since the last report of this rank."""
    overflows: tuple[RingOverflow, ...] = ()
    """Checks that found more since then."""
    injections: tuple[Injection, ...] = ()
    """Faults planted on purpose since then."""
    checked: list[list[int]] | None = None
    """To CheckRows: slots of each row that were verified, as CanaryRank.checked has them."""
    sound: tuple[int, ...] = ()
    """To CheckHost: of each of its copies, how many leading pages are sound."""
    slots_due: int = 0
    """To TellCounts, as what follows: slots that had to be verified so far."""
    slots_checked: int = 0
    """Slots that were verified so far."""
    checks: tuple[CheckCount, ...] = ()
    """The same check by check, the sweep included."""
    seconds: float = 0.0
    """That this rank has spent in calls of the canary so far."""
    total: int = 0
    """Violations so far, those whose details were lost to the ring's overflow included."""


def slots_checked(ranks: Iterable[list[list[int]] | None]) -> list[int]:
    """Slots of each sequence that were verified, over all parts: a slot counts where every rank that has the part
    verified its share of it. `ranks`: as CanaryRank.checked has them; empty where none tells."""
    told_by = [each for each in ranks if each is not None]
    by_part = [slots for slots in told_by[0] if slots] if len(told_by) == 1 else list[list[int]]()
    for of_ranks in zip(*told_by, strict=True) if len(told_by) > 1 else ():
        told = [slots for slots in of_ranks if slots]
        if told:
            by_part.append(told[0] if len(told) == 1 else list(map(min, *told)))
    return by_part[0] if len(by_part) == 1 else list(map(sum, zip(*by_part, strict=True)))


def by_check(answers: Iterable[CanaryAnswer]) -> dict[str, dict[str, int]]:
    """Slots due and checked of every kind of check, over all ranks."""
    found: dict[str, dict[str, int]] = {}
    for count in (count for answer in answers for count in answer.checks):
        both = found.setdefault(count.check, {"due": 0, "checked": 0})
        both["due"] += count.due
        both["checked"] += count.checked
    return found
