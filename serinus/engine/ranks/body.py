"""RankBody: one rank of an engine. It does what the headers say, in their order, and answers; it decides nothing.

The leader's own rank is one too. Who obeys which order is said at birth (`on`): the runner's is known here, those of
tiers, handoffs and the canary are their owners'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.plan import StepPlan, StepResult
from serinus.engine.executor import Runs
from serinus.engine.ranks.orders import RankCounts, RunStep, StepDone, Stop
from serinus.parallel import DecisionFollower, Mesh, RankTable, StepHeader

__all__ = ["AnswerSource", "RankBody", "RankGuard"]


_TELL_STEPS: Final = 8
"""A rank that does not sample, and has no canary, tells of so many steps at once: each answer wakes the leader."""


class AnswerSource(Protocol):
    """Something at a rank whose answers come later than the order."""

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come: look again soon."""
        ...

    def answers(self) -> Sequence[object]:
        """What ended since the last call. Never blocks."""
        ...


class RankGuard(Protocol):
    """The canary of one rank, around each step of it."""

    def begin(self, plan: StepPlan) -> None:
        """The runner is about to run this plan."""
        ...

    def returned(self, result: StepResult | None) -> StepResult | None:
        """It ran; what the leader is to get."""
        ...

    def found(self) -> tuple[object, ...]:
        """What was not sound, in types that the codec knows."""
        ...


class _NoTable:
    """Nothing is begun for a request at a rank by itself."""

    def placed(self, rid: str, queue: str) -> None:
        """Counted by the table."""

    def dropped(self, rid: str, code: str) -> None:
        """Forgotten by the table."""


def _never() -> float:
    return 0.0


class RankBody:
    """One rank's runner, request table, and whoever obeys orders there."""

    def __init__(
        self,
        *,
        rank: int,
        mesh: Mesh,
        runner: Runs,
        clock: Clock,
        guard: RankGuard | None = None,
        waited: Callable[[], float] = _never,
    ) -> None:
        """`waited`: seconds that this rank has spent waiting for others so far."""
        self.rank = rank
        self.name = mesh.name(rank)
        self.follower = DecisionFollower(rank)
        self.table = RankTable(_NoTable())
        self.steps = 0
        """Steps run."""
        self.seconds = 0.0
        """Spent in steps, `wait_seconds` included."""
        self.wait_seconds = 0.0
        """Spent in steps waiting for other ranks."""
        self.stopped = False
        """Told to stop."""
        self._headers = 0
        self._untold: StepDone | None = None
        self._told = self.table.counts
        self._runner = runner
        self._clock = clock
        self._guard = guard
        self._waited = waited
        self._acts: dict[type, Callable[[Any], Iterable[object] | None]] = {RunStep: self._run, Stop: self._stop}
        self._sources: list[AnswerSource] = []

    def on(self, order_type: type, act: Callable[[Any], Iterable[object] | None]) -> None:
        """Orders of this type are `act`'s; what it returns are answers, sent up at once."""
        assert order_type not in self._acts, f"engine: two obey {order_type.__name__}, expected one"
        self._acts[order_type] = act

    def attend(self, source: AnswerSource) -> None:
        """Ask it for answers after every header, and often while it is busy."""
        self._sources.append(source)

    @property
    def busy(self) -> bool:
        """Whether some answer is still to come by itself."""
        return any(source.busy for source in self._sources)

    def obey(self, header: StepHeader) -> list[object]:
        """Apply the header's decisions, then do its orders; the answers that are there now.

        Raises InvariantError: this rank has lived by another log, or a header is missing; nothing of it is done then.
        """
        if header.step != self._headers + 1:
            raise InvariantError(f"engine: rank {self.name} got header {header.step}, expected {self._headers + 1}")
        for decision in self.follower.apply(header):
            self.table.apply(decision)
        self._headers = header.step
        answers: list[object] = []
        for order in header.orders_of(self.rank):
            act = self._acts.get(type(order))
            if act is None:
                raise InvariantError(f"engine: rank {self.name} got {type(order).__name__}, which nobody obeys there")
            answers += act(order) or ()
        if self.table.counts != self._told:
            self._told = self.table.counts
            answers.append(RankCounts(counts=self._told))
            answers += self._tell()
        return answers

    def news(self) -> list[object]:
        """Answers that came by themselves."""
        return [answer for source in self._sources for answer in source.answers()]

    def stats(self) -> dict[str, float]:
        """Gauges of its requests, and where its time went."""
        own = {"compute_seconds": self.seconds - self.wait_seconds, "wait_seconds": self.wait_seconds}
        return {**self.table.gauges(), **own, "steps": float(self.steps)}

    def log_tail(self) -> str:
        """The last decisions it applied, as evidence."""
        return ", ".join(map(str, self.follower.tail)) or "nothing"

    def _tell(self) -> tuple[StepDone, ...]:
        """The steps that were not worth a frame each."""
        untold, self._untold = self._untold, None
        return () if untold is None else (untold,)

    def _run(self, order: RunStep) -> tuple[StepDone, ...]:
        plan = order.plan
        batch, rids = self.table.take_batch(), tuple(work.rid for work in plan.work)
        if batch != rids:
            raise InvariantError(
                f"engine: rank {self.name} was told to run {list(batch)}, its plan {plan.step} says {list(rids)}"
            )
        begun, waited = self._clock.now(), self._waited()
        if self._guard is not None:
            self._guard.begin(plan)
        result = self._runner.run(plan)
        findings: tuple[object, ...] = ()
        if self._guard is not None:
            result = self._guard.returned(result)
            findings = self._guard.found()
        seconds, wait_seconds = self._clock.now() - begun, self._waited() - waited
        self.steps += 1
        self.seconds += seconds
        self.wait_seconds += wait_seconds
        if self._untold is not None:
            seconds += self._untold.seconds
            wait_seconds += self._untold.wait_seconds
        done = StepDone(step=plan.step, result=result, seconds=seconds, wait_seconds=wait_seconds, findings=findings)
        if result is None and self._guard is None and self.steps % _TELL_STEPS:
            self._untold = done
            return ()
        self._untold = None
        return (done,)

    def _stop(self, order: Stop) -> None:
        self.stopped = True
