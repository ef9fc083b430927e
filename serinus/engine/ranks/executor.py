"""RankExecutor: an engine's plans are run by all its ranks. The leader's line: decisions and orders down, answers up.

One header leaves whenever there is something to say and somebody says `flush` (every plan does): the decisions since
the last one, then the orders, in the order in which they were given. The leader's own rank obeys it in this process, at
the same moment; whatever it has to compute for a step it computes there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError, PeerGone
from serinus.core.plan import StepPlan, StepResult
from serinus.engine.ranks.body import RankBody
from serinus.engine.ranks.group import Followers
from serinus.engine.ranks.orders import RankCounts, RunStep, StepDone, Stop
from serinus.engine.ranks.placements import Placements
from serinus.parallel import QUEUES, DecisionKind, DecisionLog, Mesh, OrderTo, Report, ReportKind
from serinus.wire import ZmqChannel

__all__ = ["RankExecutor"]


class _Step:
    """A step under way."""

    __slots__ = ("done", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.done: dict[int, StepDone] = {}


class RankExecutor:
    """Executor (engine/executor.py) and Line (line.py) of an engine of several ranks; the engine's thread owns it."""

    journals = True

    def __init__(
        self,
        group: Followers,
        body: RankBody,
        mesh: Mesh,
        clock: Clock,
        *,
        whole: bool = False,
        dismiss: Callable[[], object] = tuple,
        ends: Sequence[Callable[[], object]] = (),
    ) -> None:
        """
        Args:
            whole: a step's result is taken when all ranks are done with it (a canary judges them all), else when the
                rank that samples is.
            dismiss: called by `close`, before the ranks are told to stop; not where one was lost.
            ends: called by `close`, when they have been told.
        """
        self.mesh = mesh
        self.body = body
        self.log = DecisionLog()
        self.control_bytes = 0
        """Sent to followers."""
        self.control_seconds = 0.0
        """Spent on saying and hearing, without the waiting."""
        self.sound = True
        """Whether all ranks do their work, as far as this one knows; once they do not, nothing is asked of them."""
        self._broken = ""
        """Why not."""
        self.headers = 0
        """Headers sent."""
        self.steps = 0
        """Steps whose results were taken."""
        self.busy_seconds = 0.0
        """Time in which a step was under way, up to the last that was taken."""
        self._busy_since = 0.0
        self.rank_seconds = [(0.0, 0.0)] * mesh.size
        """Of each rank: seconds in steps without the waiting for others, and the waiting."""
        self.rank_counts = [(0,) * len(QUEUES)] * mesh.size
        """Of each rank: its requests in each of parallel.QUEUES."""
        self.findings: tuple[tuple[int, object], ...] = ()
        """What the canaries of ranks found in the step that was taken last, with the rank."""
        self._group = group
        self._clock = clock
        self._whole = whole
        self._dismiss, self._ends = dismiss, ends
        self._orders: list[object] = []
        self._open: deque[_Step] = deque()
        self._answers: list[tuple[int, object]] = []
        self._takers: dict[type, Callable[[int, Any], None]] = {}
        self._placements = Placements(self.log)
        self._closed = False

    # ---- Executor -----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self.mesh.pp

    @property
    def channels(self) -> Sequence[ZmqChannel]:
        return self._group.channels

    def record(self, moves: Sequence[tuple[str, str]], ungranted: Collection[str]) -> None:
        self._placements.take(moves, ungranted)

    def submit(self, plan: StepPlan) -> None:
        if len(self._open) >= self.depth:
            raise InvariantError(f"engine: step {plan.step} with {len(self._open)} under way, expected a free place")
        self.log.decide(DecisionKind.RUN, batch=[work.rid for work in plan.work])
        if not self._open:
            self._busy_since = self._clock.now()
        self._open.append(_Step(plan.step))
        self._orders.append(RunStep(plan=plan))
        self.flush()

    def take(self) -> StepResult | None:
        if not self._open:
            return None
        for answer in self.body.news():
            self._heard(0, answer)
        self._listen(0.0)
        self._hand_out()
        step = self._open[0]
        if not self._is_done(step):
            return None
        self._open.popleft()
        self.steps += 1
        now = self._clock.now()
        self.busy_seconds += now - self._busy_since
        self._busy_since = now
        self.findings = tuple((rank, found) for rank, done in sorted(step.done.items()) for found in done.findings)
        result = step.done[self.mesh.result_rank].result
        if result is None:
            name = self.mesh.name(self.mesh.result_rank)
            raise InvariantError(f"engine: rank {name} ended step {step.step} without a result, expected one")
        return result

    def flush(self) -> None:
        self._check()
        if not self._orders and not self.log.pending:
            return
        begun = self._clock.now()
        self.headers += 1
        orders, self._orders = tuple(self._orders), []
        header = self.log.header(self.headers, orders)
        try:
            self.control_bytes += self._group.announce(header)
            self.control_seconds += self._clock.now() - begun
            answers = self.body.obey(header)
        except PeerGone as error:  # in the middle of a step: who is lost, and why, others know
            self._break(self._group.why() or str(error))
            raise PeerGone(self._broken) from error
        except BaseException as error:
            self._break(_words(error))
            raise
        for answer in answers:
            self._heard(0, answer)

    def pump(self, wait_s: float = 0.0) -> None:
        self.flush()
        for answer in self.body.news():
            self._heard(0, answer)
        self._listen(0.0 if self._answers else wait_s)
        self._hand_out()

    def close(self) -> None:
        """Tell the ranks to stop. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self.sound:
            self._dismiss()
        self._orders.clear()  # what was ordered and has not left is not worth doing any more
        self._group.announce(self.log.header(self.headers + 1, (Stop(),)))
        self._group.close(None if self.sound else 0.0)
        for end in self._ends:
            end()

    # ---- Line ---------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.mesh.size

    def order(self, order: object, rank: int | None = None) -> None:
        """Append to the line; see Line."""
        self._orders.append(order if rank is None else OrderTo(rank=rank, order=order))

    def subscribe(self, body_type: type, take: Callable[[int, Any], None]) -> None:
        """Who gets answers of this type; see Line."""
        assert body_type not in self._takers, f"engine: two take {body_type.__name__}, expected one"
        self._takers[body_type] = take

    def gauges(self, rank: int) -> dict[str, int]:
        """What a rank counts of its requests, as it said last."""
        return dict(zip(QUEUES.values(), self.rank_counts[rank], strict=True))

    # ---- what ranks say -----------------------------------------------------------------------------------------

    def _listen(self, wait_s: float) -> None:
        """Take in what came from the followers."""
        self._check()
        try:
            reports = self._group.reports(wait_s)
        except BaseException as error:
            self._break(_words(error))
            raise
        begun = self._clock.now()
        for report in reports:
            if report.kind is ReportKind.FAILED:
                failed = self._failed(report)
                self._break(str(failed))
                raise failed
            self._heard(report.rank, report.body)
        self.control_seconds += self._clock.now() - begun

    def _heard(self, rank: int, answer: object) -> None:
        if isinstance(answer, RankCounts):
            self.rank_counts[rank] = answer.counts
            return
        if not isinstance(answer, StepDone):
            self._answers.append((rank, answer))
            return
        computed, waited = self.rank_seconds[rank]
        own = answer.seconds - answer.wait_seconds
        self.rank_seconds[rank] = (computed + own, waited + answer.wait_seconds)
        for step in self._open:
            if step.step == answer.step:
                step.done[rank] = answer

    def _hand_out(self) -> None:
        while self._answers:
            answers, self._answers = self._answers, []
            for rank, answer in answers:
                take = self._takers.get(type(answer))
                if take is None:
                    name = self.mesh.name(rank)
                    raise InvariantError(f"engine: rank {name} answers {type(answer).__name__}, which nobody takes")
                take(rank, answer)

    def _check(self) -> None:
        """Who has heard of the end once may ask again."""
        if not self.sound:
            raise PeerGone(self._broken)

    def _break(self, reason: str) -> None:
        self.sound, self._broken = False, reason

    def _is_done(self, step: _Step) -> bool:
        return len(step.done) == self.mesh.size if self._whole else self.mesh.result_rank in step.done

    def _failed(self, report: Report) -> InvariantError:
        tail = ", ".join(map(str, self.log.tail)) or "nothing"
        return InvariantError(
            f"engine: rank {self.mesh.name(report.rank)} stopped: {report.reason}; log of the leader: {tail}"
        )


def _words(error: BaseException) -> str:
    """Why the ranks of an engine are not in step any more."""
    if isinstance(error, PeerGone):
        return str(error)
    return f"engine: the leader of these ranks broke, or was interrupted: {type(error).__name__}: {error}"
