"""RankBody: one rank of an engine. It obeys commands in their order and answers; it decides nothing.

The leader's own rank is one too, also where the engine has no other. The command to run a step is known here; the
owners of the other commands (tiers, handoffs, canary) register what obeys them (`on`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError, OutOfMemory
from serinus.core.log import get_logger
from serinus.core.plan import SeqResult, StepPlan, StepResult
from serinus.parallel import Mesh
from serinus.ranks.commands import RankHoldings, RunStep, StepDone, Stop, describe

_TELL_STEPS: Final = 8
"""A rank that neither samples nor has a canary answers so many steps at once: each answer wakes the leader."""
_TAIL: Final = 32
"""Commands kept as evidence."""
_log = get_logger("engine")


class StepRunner(Protocol):
    """What computes the steps of a rank (runner.Runner)."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Run the step; None on a rank that does not sample."""


class AnswerSource(Protocol):
    """A part of a rank whose answers come later than the command."""

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come by itself."""

    @property
    def holdings(self) -> Mapping[str, int]:
        """What it holds now, by gauge."""

    def answers(self) -> Sequence[object]:
        """What ended since the last call. Never blocks."""


class StepCanary(Protocol):
    """The canary of one rank, around each step of it."""

    def begin(self, plan: StepPlan) -> None:
        """The runner is about to run this plan."""

    def returned(self, result: StepResult | None) -> StepResult | None:
        """The runner has run it; returns what the leader is to get."""

    def abandoned(self) -> None:
        """The runner broke it off: its KV is given up."""

    def found(self) -> tuple[object, ...]:
        """What was not sound, in types that the codec lists."""

    def checked(self) -> list[list[int]] | None:
        """How much of it was verified: CanaryRank.checked of the work of the plan. Called after `found`."""


class Meanwhile:
    """What the host is to do while its device computes a step; it is done once."""

    def __init__(self, job: Callable[[], object] | None = None) -> None:
        self._job = job

    def put(self, job: Callable[[], object]) -> None:
        """To be done by the next `do`."""
        self._job = job

    def do(self) -> None:
        """Do it, where it was not done."""
        job, self._job = self._job, None
        if job is not None:
            job()


def _no_wait() -> float:
    return 0.0


class RankBody:
    """One rank's runner, and what obeys the other commands there."""

    def __init__(
        self,
        *,
        rank: int,
        mesh: Mesh,
        runner: StepRunner,
        clock: Clock,
        canary: StepCanary | None = None,
        waited: Callable[[], float] = _no_wait,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """`waited`: seconds that this rank has spent waiting for others so far. `meanwhile`: the runner does it before
        it waits for its device; None = it waits for none."""
        self.rank = rank
        self.name = mesh.name(rank)
        self.steps = 0
        """Number of steps run so far."""
        self.stopped = False
        """Whether it was told to stop."""
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._untold: StepDone | None = None
        self._told: dict[str, int] = {}
        self._obeyed = True
        """Commands were obeyed since `news` looked last."""
        self._answers = rank == mesh.result_rank
        self._runner = runner
        self._clock = clock
        self._canary = canary
        self._waited = waited
        self._meanwhile = meanwhile
        self._acts: dict[type, Callable[[Any], Iterable[object] | None]] = {RunStep: self._run, Stop: self._stop}
        self._sources: list[AnswerSource] = []
        self._ends: list[Callable[[], object]] = []

    def on(self, command_type: type, act: Callable[[Any], Iterable[object] | None]) -> None:
        """Commands of this type are obeyed by `act`; what it returns are answers, sent at once."""
        assert command_type not in self._acts, f"ranks: {command_type.__name__} is obeyed twice, expected once"
        self._acts[command_type] = act

    def attend(self, source: AnswerSource) -> None:
        """Ask it for answers after every header, and often while it is busy."""
        self._sources.append(source)

    def at_end(self, end: Callable[[], object]) -> None:
        """Call this when the rank is closed."""
        self._ends.append(end)

    def close(self) -> None:
        """Give back what its parts hold for peers. May be called again."""
        ends, self._ends = self._ends, []
        for end in ends:
            end()

    @property
    def busy(self) -> bool:
        """Whether some answer is still to come by itself."""
        return any(source.busy for source in self._sources)

    def obey(self, commands: Sequence[object], meanwhile: Callable[[], object] | None = None) -> list[object]:
        """Do the commands in their order; returns the answers that are there now. `meanwhile`: called where the rank
        waits for a device, before it does so; else before the commands. Where it was not, as no step was run, the
        caller does it.

        Raises InvariantError: nothing on this rank obeys such a command; PeerGone: another rank fails this one.
        """
        self._obeyed = True
        if meanwhile is not None and self._meanwhile is not None:
            self._meanwhile.put(meanwhile)
        elif meanwhile is not None:
            meanwhile()
        answers: list[object] = []
        for command in commands:
            act = self._acts.get(type(command))
            if act is None:
                name = type(command).__name__
                raise InvariantError(f"ranks: rank {self.name} got {name}, expected a command that something obeys")
            self._tail.append(describe(command))
            answers += act(command) or ()
        return answers

    def news(self) -> list[object]:
        """Answers that came by themselves, and what the rank holds where that changed. Cost: next to nothing where no
        command was obeyed since the last call and no source is busy."""
        if not self._obeyed and not self.busy:
            return []
        self._obeyed = False
        answers = [answer for source in self._sources for answer in source.answers()]
        holdings = {name: count for source in self._sources for name, count in source.holdings.items()}
        if holdings != self._told:
            self._told = holdings
            answers.append(RankHoldings(counts=holdings))
            if self._untold is not None:
                answers.append(self._untold)
                self._untold = None
        return answers

    def command_tail(self) -> str:
        """The last commands it obeyed, as evidence."""
        return ", ".join(self._tail) or "nothing"

    def _run(self, command: RunStep) -> tuple[StepDone, ...]:
        plan, canary = command.plan, self._canary
        begun, waited = self._clock.now(), self._waited()
        if canary is not None:
            canary.begin(plan)
        result, failed = self._computed(plan)
        findings = canary.found() if canary is not None else ()
        checked = canary.checked() if canary is not None and not failed else None
        seconds, wait_seconds = self._clock.now() - begun, self._waited() - waited
        self.steps += 1
        if self._untold is not None:
            seconds += self._untold.seconds
            wait_seconds += self._untold.wait_seconds
        done = StepDone(
            step=plan.step, result=result, seconds=seconds, wait_seconds=wait_seconds, failed=failed,
            findings=findings, checked=checked,
        )  # fmt: skip
        if result is None and not failed and canary is None and self.steps % _TELL_STEPS:
            self._untold = done
            return ()
        self._untold = None
        return (done,)

    def _computed(self, plan: StepPlan) -> tuple[StepResult | None, str]:
        """What the runner found; or, where there is no memory for the step, nothing for each request, and why. None on
        a rank that does not sample."""
        try:
            result = self._runner.run(plan)
        except OutOfMemory as error:
            if self.rank:  # of its own rank the leader tells
                _log.error("engine: step %d: %s", plan.step, error, extra={"step": plan.step})
            if self._canary is not None:
                self._canary.abandoned()
            nothing = StepResult(step=plan.step, seqs=tuple(SeqResult() for _ in plan.work))
            return nothing if self._answers else None, str(error)
        return result if self._canary is None else self._canary.returned(result), ""

    def _stop(self, command: Stop) -> None:
        self.stopped = True
