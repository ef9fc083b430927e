"""KvGuard: the canary in an engine of one rank. It stands around each step and says who has to end.

The canary decides what is checked and names who had to do with a violation; here its word meets scheduler, cache and
metrics. Several ranks: ranks/canary.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serinus.cache import PrefixCache
from serinus.core.config import ServeConfig
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.engine.guard import Verdict
from serinus.engine.judge import CanaryCounts, Judge, PageKnowledge, count, view, words
from serinus.engine.own_canary import OwnCanary
from serinus.models import ForwardHook, ModelSpec
from serinus.pd import PageStore
from serinus.pool import DevicePool, HostPool, RequestTable
from serinus.sched import OwnPages, Scheduler

__all__ = ["KvGuard", "make_guard"]


class KvGuard:
    """A canary at work. `hook` goes around the forward pass, behind the gate of loads."""

    def __init__(
        self,
        config: ServeConfig,
        spec: ModelSpec,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        device: str,
        host: Mapping[Part, HostPool],
    ) -> None:
        """Raises ConfigError where the settings ask for what this model or this engine cannot do."""
        self._config = config
        self._facts = PageKnowledge()
        self._judge = Judge(self._facts, mode=config.canary.kv_canary)
        self._own = OwnCanary(
            config, spec, pools, tables, device, host, self._facts, host_pages=self._facts.host_pages
        )  # fmt: skip
        self.canary = self._own.canary
        self.perturber = self._own.perturber
        """Who plants faults, or nobody."""
        self.hook: ForwardHook = self._own.hook

    def bind(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        """Whom to ask about pages; once, before the first step that counts."""
        self._facts.cache, self._facts.scheduler = cache, scheduler

    def begin(self, plan: StepPlan) -> None:
        self.canary.begin(plan)

    def returned(self, result: StepResult) -> StepResult:
        return self.canary.returned(result)

    def judge(self) -> Sequence[Verdict]:
        violations = self.canary.end()
        self._own.tell()
        return self._judge.sentence(violations)

    def late(self) -> None:
        """All is judged in its step."""

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        if own is None:
            return ""
        violations = self.canary.arrived(rid, own.spans, len(own.tokens), own.tokens)
        self._judge.sentence(violations)
        return words(violations[0]) if violations and self._judge.raises else ""

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        return self._own.outgoing(pools)

    def view(self) -> dict[str, Any]:
        return view(self._config, self._counts(), self.canary.violations, self._injections())

    def refresh(self, metrics: Metrics) -> None:
        count(metrics, self._counts(), self.canary.violations, self._injections())

    def _counts(self) -> CanaryCounts:
        canary = self.canary
        return CanaryCounts(
            steps=canary.steps,
            sweep_passes=canary.sweep_passes,
            slots_due=sum(canary.due_slots.values()),
            slots_checked=canary.checked_slots(),
            violations=canary.violations.total,
        )

    def _injections(self) -> Sequence[Any]:
        return self.perturber.injections if self.perturber is not None else ()


def make_guard(
    config: ServeConfig,
    spec: ModelSpec,
    pools: Mapping[Part, DevicePool],
    tables: Mapping[Part, RequestTable],
    device: str,
    host: Mapping[Part, HostPool],
) -> KvGuard | None:
    """The guard that the settings ask for; None without a canary. Raises ConfigError."""
    if config.canary.kv_canary == "none":
        return None
    return KvGuard(config, spec, pools, tables, device, host)
