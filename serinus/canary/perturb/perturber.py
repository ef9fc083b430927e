"""Perturber: carries a PerturbPlan out around the steps of one engine, and notes every injection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.canary.hook import PartLanes, StepChecks
from serinus.canary.perturb import (
    next_token_swap,
    page_bytes,
    real_kv_post_forward,
    real_kv_unused_cache,
    real_kv_used,
    req_to_token,
)
from serinus.canary.perturb.plan import Injection, PerturbPlan
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.core.plan import StepResult
from serinus.core.rng import Rng
from serinus.models import ForwardBatch

__all__ = ["HostPages", "Perturber"]

_log = get_logger("canary")

HostPages = Callable[[Part], tuple[NDArray[np.uint8], NDArray[np.integer]]]
"""Of a part: the host tier's buffer [P, Y] and the pages of it that hold cached KV now."""


class Perturber:
    """Faults (hook.py) by plan. All modes share one gate: nothing happens in the first `warmup_steps` steps."""

    def __init__(self, plan: PerturbPlan, *, host_pages: HostPages | None = None) -> None:
        self.plan = plan
        self.injections: list[Injection] = []
        """Everything planted so far, in order."""
        self._rngs = {name: Rng(plan.seed).split(name) for name in plan.probabilities}
        self._host_pages = host_pages
        self._lanes: Mapping[Part, PartLanes] = {}
        self._step = 0
        self._rids: tuple[str, ...] = ()
        self._open = False
        if any(plan.probabilities.values()):
            _log.warning(
                "kv_canary perturbation is on: %s; gate closed for %d steps",
                dict(plan.probabilities),
                plan.warmup_steps,
            )

    def attach(self, lanes: Mapping[Part, PartLanes]) -> None:
        """What may be damaged; once, before the first step."""
        self._lanes = lanes

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        self._step, self._rids = checks.step, checks.rids
        if not self._open and checks.step > self.plan.warmup_steps:
            self._open = True
            _log.warning("kv_canary perturbation: the gate is open from step %d on", checks.step)
        lanes = self._lanes[self.plan.target]
        if self._due("req_to_token"):
            self._note(req_to_token.run(self._rngs["req_to_token"], lanes, checks))
        if self._due("real_kv_used"):
            self._note(real_kv_used.run(self._rngs["real_kv_used"], lanes, checks))
        if self._host_pages is not None and self._due("tier_bytes"):
            rows, pages = self._host_pages(self.plan.target)
            rng = self._rngs["tier_bytes"]
            self._note(page_bytes.run("tier_bytes", rng, rows, pages, self.plan.target, self._step))

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        if self._due("real_kv_post_forward"):
            lanes = self._lanes[self.plan.target]
            self._note(real_kv_post_forward.run(self._rngs["real_kv_post_forward"], lanes, checks, batch))

    def returned(self, result: StepResult) -> StepResult:
        if not self._due("next_token_swap"):
            return result
        result, injection = next_token_swap.run(self._rngs["next_token_swap"], result, self._rids, self._step)
        self._note(injection)
        return result

    def sweep(self, lanes: PartLanes, slots: NDArray[np.int64]) -> None:
        if lanes.part is self.plan.target and self._due("real_kv_unused_cache"):
            self._note(real_kv_unused_cache.run(self._rngs["real_kv_unused_cache"], lanes, slots, self._step))

    def sent(self, part: Part, pages_GY: NDArray[np.uint8]) -> None:
        """These bytes are about to leave for another engine."""
        if part is self.plan.target and self._due("transfer_bytes"):
            rng = self._rngs["transfer_bytes"]
            self._note(page_bytes.run("transfer_bytes", rng, pages_GY, np.arange(len(pages_GY)), part, self._step))

    def _due(self, name: str) -> bool:
        rng = self._rngs.get(name)
        if rng is None or not self._open:
            return False
        if self.plan.count_max and sum(done.mode == name for done in self.injections) >= self.plan.count_max:
            return False
        return rng.random() < self.plan.probabilities[name]

    def _note(self, injection: Injection | None) -> None:
        if injection is not None:
            self.injections.append(injection)
            _log.warning("%s", injection.line())
