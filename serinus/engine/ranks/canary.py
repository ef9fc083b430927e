"""RanksGuard: the canary of an engine of several ranks, as its leader sees it.

Each rank checks its own pools (rank_canary.py). Sweeps and arrivals are ordered; what ranks find gets its owner, users
and history here, and a verdict. A result is taken when all ranks are done with its step, so that no token leaves before
every rank's verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from serinus.cache import PrefixCache
from serinus.canary import CanarySettings, Violation, ViolationLog
from serinus.canary.perturb import Injection
from serinus.core.config import ServeConfig
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.engine.guard import Verdict
from serinus.engine.judge import CanaryCounts, Judge, PageKnowledge, count, view, words
from serinus.engine.own_canary import fault_plan, fault_rank
from serinus.engine.rank_canary import (
    CANARY_ORDERS,
    CachedPages,
    CanaryAnswer,
    CheckArrival,
    RankCanary,
    SweepSlots,
    TellCanary,
    WakeCanary,
)
from serinus.engine.ranks.line import Line
from serinus.models import ModelSpec
from serinus.parallel import Shard
from serinus.pd import PageStore
from serinus.sched import OwnPages, Scheduler

if TYPE_CHECKING:
    from serinus.engine.ranks.body import RankBody

__all__ = ["RanksGuard", "attach_canary"]

_LOOK_S: Final = 0.05


def attach_canary(body: RankBody, canary: RankCanary | None) -> None:
    """Let a rank obey the canary's orders; nothing where there is none."""
    if canary is not None:
        for order in CANARY_ORDERS:
            body.on(order, canary.obey)


class RanksGuard:
    """Guard (guard.py) of an engine of several ranks."""

    def __init__(
        self,
        config: ServeConfig,
        spec: ModelSpec,
        shards: Sequence[Shard],
        line: Line,
        findings: Callable[[], Sequence[tuple[int, object]]],
    ) -> None:
        """
        Args:
            spec: the whole model; shards: what each rank has of it.
            findings: what the ranks said of the step that was taken last, with the rank.
        """
        self._config = config
        self._line, self._findings = line, findings
        self._names = [shard.name for shard in shards]
        self._facts = PageKnowledge()
        self._judge = Judge(self._facts, mode=config.canary.kv_canary)
        self._parts = sorted(part for part in spec.parts if spec.layers_of(part))
        self._cursor = dict.fromkeys(self._parts, 0)
        self._slots = CanarySettings(page_size=config.memory.page_size).sweep_slots
        self._sweeps = 0
        """Answers to sweeps that have not come."""
        self._log = ViolationLog()
        self.injections: list[Injection] = []
        """Faults that ranks planted on purpose."""
        self._late: list[Violation] = []
        self._numbers = 0
        self._heard: dict[int, dict[int, CanaryAnswer]] = {}
        self._steps = 0
        self._passes = 0
        self._victim: tuple[int, Part] | None = None
        plan = fault_plan(config, spec, has_host=config.cache.enable_hierarchical_cache)
        if plan is not None and plan.probabilities.get("tier_bytes"):
            self._victim = fault_rank(config, spec, shards, plan.target), plan.target
        line.subscribe(CanaryAnswer, self._take)

    def bind(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        """Whom to ask about pages; the ranks check from now on."""
        self._facts.cache, self._facts.scheduler = cache, scheduler
        self._line.order(WakeCanary())

    # ---- Guard --------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        if self._victim is not None:
            rank, part = self._victim
            self._line.order(CachedPages(part=part, pages=self._facts.host_pages(part)), rank)

    def returned(self, result: StepResult) -> StepResult:
        return result

    def judge(self) -> Sequence[Verdict]:
        self._steps += 1
        found = self._take_late()
        for rank, finding in self._findings():
            if isinstance(finding, Violation):
                found.append(self._known(rank, finding))
            elif isinstance(finding, Injection):
                self.injections.append(replace(finding, rank=self._names[rank]))
        interval = self._config.canary.kv_canary_sweep_interval
        if interval and self._steps % interval == 0:
            self._sweep()
        return self._judge.sentence(found)

    def late(self) -> None:
        if self._sweeps:
            self._line.pump()
        self._judge.sentence(self._take_late())

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        if own is None:
            return ""
        number = self._number()
        order = CheckArrival(number=number, rid=rid, spans=tuple(own.spans), tokens=own.tokens)
        found = [self._known(rank, each) for rank, answer in self._ask(order) for each in answer.violations]
        self._judge.sentence(found)
        return words(found[0]) if found and self._judge.raises else ""

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        return pools  # each rank's hand reads through its own canary

    def view(self) -> dict[str, Any]:
        answers = self._ask(TellCanary(number=self._number()))
        whole = view(self._config, self._counts(answers), self._log, self.injections)
        ranks = [
            {"rank": self._names[rank], "slots_due": each.slots_due, "slots_checked": each.slots_checked,
             "violations": each.total}
            for rank, each in answers
        ]  # fmt: skip
        return {**whole, "ranks": ranks}

    def refresh(self, metrics: Metrics) -> None:
        answers = self._ask(TellCanary(number=self._number()))
        count(metrics, self._counts(answers), self._log, self.injections)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Have all ranks verify the next cached slots that nobody uses."""
        for part in self._parts:
            found = self._facts.walk(self._cursor[part], self._slots, part)
            self._cursor[part] = found.cursor
            self._passes += found.cursor == 0
            self._sweeps += self._line.size
            self._line.order(
                SweepSlots(part=part, slots=found.slots, positions=found.positions, previous=found.previous)
            )

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, order: CheckArrival | TellCanary) -> list[tuple[int, CanaryAnswer]]:
        """What every rank answers, by rank. Waits until all have obeyed what was ordered before."""
        heard = self._heard[order.number] = {}
        self._line.order(order)
        self._line.pump()
        while len(heard) < self._line.size:
            self._line.pump(_LOOK_S)
        return sorted(self._heard.pop(order.number).items())

    def _take(self, rank: int, answer: CanaryAnswer) -> None:
        """An answer came; nothing is judged here, as it may come in the midst of anything."""
        self.injections += (replace(each, rank=self._names[rank]) for each in answer.injections)
        if answer.number:
            self._heard[answer.number][rank] = answer
            return
        self._sweeps -= 1
        self._late += (replace(each, rank=self._names[rank]) for each in answer.violations)

    def _take_late(self) -> list[Violation]:
        """What sweeps found since somebody looked."""
        late, self._late = self._late, []
        return [self._known(self._names.index(each.rank), each) for each in late]

    def _known(self, rank: int, violation: Violation) -> Violation:
        """With what the leader knows of the page; filed."""
        part, page, facts = violation.part, violation.page, self._facts
        known = replace(
            violation,
            rank=self._names[rank],
            owner=facts.owner(part, page),
            users=facts.users(part, page),
            history=facts.history(part, page),
        )
        self._log.add(known)
        return known

    def _counts(self, answers: Sequence[tuple[int, CanaryAnswer]]) -> CanaryCounts:
        return CanaryCounts(
            steps=self._steps,
            sweep_passes=self._passes,
            slots_due=sum(each.slots_due for _, each in answers),
            slots_checked=sum(each.slots_checked for _, each in answers),
            violations=sum(each.total for _, each in answers),
        )
