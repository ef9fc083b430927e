"""Perturber: carries a PerturbPlan out around the steps of one rank, and notes every injection."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
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
from serinus.core.parts import PageStore, Part
from serinus.core.plan import StepResult
from serinus.core.rng import Rng
from serinus.models import ForwardBatch

__all__ = ["Perturber"]

_log = get_logger("canary")


class Perturber:
    """Plants faults by plan. All modes share one gate: nothing happens in the first `warmup_steps` steps."""

    def __init__(self, plan: PerturbPlan, *, host: Mapping[Part, NDArray[np.uint8]] | None = None) -> None:
        """`host`: this rank's host tier by part, [P, Y]; only the mode tier_bytes needs it."""
        self.plan = plan
        self.injections: list[Injection] = []
        """Everything planted so far, in order."""
        self.host_pages: dict[Part, NDArray[np.integer]] = {}
        """Pages of the host tier that hold cached KV now, as the leader says."""
        self._rngs = {name: Rng(plan.seed).split(name) for name in plan.probabilities}
        self._host = host or {}
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
        """Say what may be damaged; once, before the first step."""
        self._lanes = lanes

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Before the step is verified: rows, bytes that it reads, and pages of the host tier."""
        self._step, self._rids = checks.step, checks.rids
        if not self._open and checks.step > self.plan.warmup_steps:
            self._open = True
            _log.warning("kv_canary perturbation: the gate is open from step %d on", checks.step)
        target = self.plan.target
        lanes = self._lanes[target]
        if self._due("req_to_token"):
            self._note(req_to_token.run(self._rngs["req_to_token"], lanes, checks))
        if self._due("real_kv_used"):
            self._note(real_kv_used.run(self._rngs["real_kv_used"], lanes, checks))
        if target in self._host and self._due("tier_bytes"):
            rows, pages = self._host[target], self.host_pages.get(target, np.empty(0, np.int32))
            self._note(page_bytes.run("tier_bytes", self._rngs["tier_bytes"], rows, pages, target, self._step))

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """After the step was stamped: bytes that it wrote."""
        if self._due("real_kv_post_forward"):
            lanes = self._lanes[self.plan.target]
            self._note(real_kv_post_forward.run(self._rngs["real_kv_post_forward"], lanes, checks, batch))

    def returned(self, result: StepResult) -> StepResult:
        """The tokens as the leader gets them."""
        if not self._due("next_token_swap"):
            return result
        result, injection = next_token_swap.run(self._rngs["next_token_swap"], result, self._rids, self._step)
        self._note(injection)
        return result

    def sweep(self, lanes: PartLanes, slots: NDArray[np.int64], step: int) -> None:
        """These cached slots, which no request uses, are about to be swept; `step` reports what is found."""
        if lanes.part is self.plan.target and self._due("real_kv_unused_cache"):
            self._note(real_kv_unused_cache.run(self._rngs["real_kv_unused_cache"], lanes, slots, step))

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """The pools as a handoff reads them: with the mode transfer_bytes, pages are damaged on their way out."""
        if "transfer_bytes" not in self.plan.probabilities:
            return pools
        return {part: _TamperedStore(pool, part, self) for part, pool in pools.items()}

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


class _TamperedStore:
    """A pool whose pages may be damaged on their way out (PageStore)."""

    def __init__(self, pool: PageStore, part: Part, perturber: Perturber) -> None:
        self._pool, self._part, self._perturber = pool, part, perturber

    @property
    def page_bytes(self) -> int:
        return self._pool.page_bytes

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        self._pool.read_pages(pages, out)
        self._perturber.sent(self._part, out)
        return out

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self._pool.write_pages(pages, data)
