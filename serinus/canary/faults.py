"""LeadFaults: the leader's half of faults on purpose. It tells ranks what to plant, for how long, and what may be hit.

Faults of the settings are planted from the start to the end. Others are ordered while the engine runs (`order`), with
a bound and an end, where the settings allow it. What was planted, ranks report with their findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from serinus.cache import PrefixCache
from serinus.canary.commands import CachedPages, PlantFaults
from serinus.canary.perturb import PerturbPlan
from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.core.line import CommandLine
from serinus.core.settings import CanarySettings
from serinus.wire.fault_order import FaultOrder

PlansOf = Callable[[CanarySettings], Sequence[PerturbPlan | None]]
"""What each rank plants under these settings. Raises ConfigError: they could not happen, or could not be found."""
_ALL: Final = 1 << 40


class LeadFaults:
    """One for an engine. The engine's thread owns it."""

    def __init__(
        self, settings: CanarySettings, line: CommandLine, cache: PrefixCache, clock: Clock, plans_of: PlansOf
    ) -> None:
        """Raises ConfigError: the settings ask for faults that this engine cannot have."""
        self._settings = settings
        self._line = line
        self._cache = cache
        self._clock = clock
        self._plans_of = plans_of
        self._plans = plans_of(settings)
        self._order: FaultOrder | None = None
        self._steps = 0
        self._last_step = 0
        self._end_s = 0.0

    def begin(self, *, sweeps: bool) -> None:
        """Before each step: end an order that is over, and tell which cached pages may be damaged. `sweeps`: in it."""
        self._steps += 1
        self._expire()
        for rank, plan in enumerate(self._plans):
            if plan is None:
                continue
            part, wanted = plan.target, plan.probabilities
            if wanted.get("tier_bytes"):
                pages = self._cache.host_pages(part)
                self._line.command(CachedPages(part=part, pages=pages, is_host=True), rank)
            if wanted.get("foreign_page") or (sweeps and wanted.get("real_kv_unused_cache")):
                size, found = self._cache.page_size, self._cache.walk(0, _ALL, part=part, unlocked_only=True)
                pages = (found.slots[::size] // size).astype(np.int32)
                self._line.command(CachedPages(part=part, pages=pages, is_host=False), rank)

    def order(self, order: FaultOrder) -> None:
        """Plant by this order in place of what was planned so far.

        Raises ConfigError: the settings do not allow it, or the faults could not happen, or not be found.
        """
        if not self._settings.kv_canary_perturb_api:
            raise ConfigError(
                "canary: faults are planted in a running engine only if it was started with --kv-canary-perturb-api"
            )
        settings = replace(
            self._settings, kv_canary_perturb=order.words, kv_canary_perturb_target=order.target,
            kv_canary_perturb_rank=order.rank, kv_canary_perturb_seed=order.seed, kv_canary_perturb_warmup_steps=0,
        )  # fmt: skip
        plans = self._plans_of(settings)
        self._plant([None if plan is None else replace(plan, count_max=order.count) for plan in plans])
        self._order = order if order.perturb else None
        self._last_step = self._steps + (order.steps or 0)
        self._end_s = self._clock.now() + order.seconds

    def view(self) -> dict[str, Any]:
        """What is planted now, for `GET /canary/perturb`."""
        self._expire()
        order, planned = self._order, [plan for plan in self._plans if plan is not None]
        probabilities = {name: chance for plan in planned for name, chance in plan.probabilities.items()}
        found: dict[str, Any] = {
            "enabled": self._settings.kv_canary_perturb_api,
            "active": bool(probabilities),
            "perturb": probabilities,
            "ranks": [rank for rank, plan in enumerate(self._plans) if plan is not None],
        }
        if order is not None:
            left = None if order.steps is None else self._last_step - self._steps
            found |= {
                "target": planned[0].target.name.lower(), "seed": order.seed, "count": order.count, "steps_left": left,
                "seconds_left": round(self._end_s - self._clock.now(), 3),
            }  # fmt: skip
        return found

    def _expire(self) -> None:
        order = self._order
        if order is None:
            return
        if self._clock.now() >= self._end_s or (order.steps is not None and self._steps > self._last_step):
            self._plant([None] * len(self._plans))
            self._order = None

    def _plant(self, plans: Sequence[PerturbPlan | None]) -> None:
        self._plans = plans
        for rank, plan in enumerate(plans):
            self._line.command(PlantFaults(plan=plan or PerturbPlan()), rank)
