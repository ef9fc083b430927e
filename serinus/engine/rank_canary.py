"""RankCanary: the canary of one rank of several. It checks this rank's pools around each step, and what it is told to.

Who owns a page, who uses it and what follows is the leader's (ranks/canary.py); what is found goes up in answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.cache import ResidentSlots
from serinus.canary import Violation
from serinus.canary.perturb import Injection
from serinus.core.config import ServeConfig
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import StepPlan, StepResult
from serinus.engine.own_canary import OwnCanary
from serinus.models import ForwardHook, ModelSpec
from serinus.parallel import Shard
from serinus.pd import PageStore
from serinus.pool import DevicePool, HostPool, RequestTable

__all__ = [
    "CANARY_ORDERS",
    "CachedPages",
    "CanaryAnswer",
    "CheckArrival",
    "RankCanary",
    "SweepSlots",
    "TellCanary",
    "WakeCanary",
    "make_rank_canary",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeCanary:
    """The warm-up is over: check from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSlots:
    """Verify cached slots that nobody uses; see ResidentSlots. Answered with number 0."""

    part: Part
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    previous: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckArrival:
    """Verify pages that came by handoff; see Canary.arrived."""

    number: int
    rid: str
    spans: tuple[PageSpan, ...]
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCanary:
    """Say how much was checked so far."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPages:
    """These host pages hold cached KV now: what the fault tier_bytes may damage. Not answered."""

    part: Part
    pages: NDArray[np.int32]


CANARY_ORDERS: Final = (WakeCanary, SweepSlots, CheckArrival, TellCanary, CachedPages)
"""What a RankCanary obeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """What a rank found when it was told to look, and what it did so far."""

    number: int
    """Of the order; 0 = nobody waits for it."""
    violations: tuple[Violation, ...] = ()
    injections: tuple[Injection, ...] = ()
    """Faults that it planted meanwhile."""
    slots_due: int = 0
    slots_checked: int = 0
    total: int = 0
    """Violations ever, those without details included."""


class NobodyKnows:
    """PageFacts of a rank: the leader has them."""

    def owner(self, part: Part, page: int) -> str:
        """Unknown here."""
        return ""

    def users(self, part: Part, page: int) -> tuple[str, ...]:
        """Unknown here."""
        return ()

    def history(self, part: Part, page: int) -> str:
        """Unknown here."""
        return ""

    def walk(self, cursor: int, budget: int, part: Part) -> ResidentSlots:
        """The leader says which slots are swept."""
        raise AssertionError("engine: a rank walks over a cache, which is the leader's")


class RankCanary:
    """RankGuard (body.py) of one rank, and what obeys the canary's orders there."""

    def __init__(
        self,
        config: ServeConfig,
        spec: ModelSpec,
        shards: Sequence[Shard],
        rank: int,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        device: str,
        host: Mapping[Part, HostPool],
    ) -> None:
        """`spec`: the whole model; `shards`: what each rank has of it. Raises ConfigError as OwnCanary."""
        self._cached: dict[Part, NDArray[np.int32]] = {}
        self._own = OwnCanary(
            config, spec, pools, tables, device, host, NobodyKnows(), host_pages=self._cached_pages, shards=shards,
            rank=rank,
        )  # fmt: skip
        self._awake = False
        self._told = 0

    @property
    def hook(self) -> ForwardHook:
        """Around the forward pass, behind the gate of loads."""
        return self._own.hook

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """What a handoff may read pages from."""
        return self._own.outgoing(pools)

    def begin(self, plan: StepPlan) -> None:
        if self._awake:
            self._own.canary.begin(plan)

    def returned(self, result: StepResult | None) -> StepResult | None:
        return result if result is None or not self._awake else self._own.canary.returned(result)

    def found(self) -> tuple[object, ...]:
        if not self._awake:
            return ()
        self._own.tell()
        return (*self._own.canary.take(), *self._injections())

    def obey(self, order: object) -> tuple[CanaryAnswer, ...]:
        """Do what is ordered; the answer is there at once. Waits for the device, but in a sweep."""
        canary = self._own.canary
        match order:
            case WakeCanary():
                self._awake = True
            case CachedPages(part=part, pages=pages):
                self._cached[part] = pages
            case SweepSlots(part=part, slots=slots, positions=positions, previous=previous):
                canary.swept(part, ResidentSlots(slots=slots, positions=positions, previous=previous, cursor=0))
                return (self._answer(0, canary.take()),)
            case CheckArrival(number=number, rid=rid, spans=spans, tokens=tokens):
                return (self._answer(number, canary.arrived(rid, spans, len(tokens), tokens)),)
            case TellCanary(number=number):
                return (self._answer(number, ()),)
        return ()

    def _answer(self, number: int, violations: Sequence[Violation]) -> CanaryAnswer:
        canary = self._own.canary
        return CanaryAnswer(
            number=number,
            violations=tuple(violations),
            injections=self._injections(),
            slots_due=sum(canary.due_slots.values()) if number else 0,
            slots_checked=canary.checked_slots() if number else 0,
            total=canary.violations.total,
        )

    def _injections(self) -> tuple[Injection, ...]:
        """Those of which the leader has not heard."""
        if self._own.perturber is None:
            return ()
        new = tuple(self._own.perturber.injections[self._told :])
        self._told += len(new)
        return new

    def _cached_pages(self, part: Part) -> NDArray[np.int32]:
        return self._cached.get(part, np.empty(0, np.int32))


def make_rank_canary(
    config: ServeConfig,
    spec: ModelSpec,
    shards: Sequence[Shard],
    rank: int,
    pools: Mapping[Part, DevicePool],
    tables: Mapping[Part, RequestTable],
    device: str,
    host: Mapping[Part, HostPool],
) -> RankCanary | None:
    """The canary that the settings ask for; None without one. Raises ConfigError."""
    if config.canary.kv_canary == "none":
        return None
    return RankCanary(config, spec, shards, rank, pools, tables, device, host)
