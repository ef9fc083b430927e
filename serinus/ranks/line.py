"""LeaderLine: the leader's end of the one ordered line to all ranks of its engine; commands down, answers up.

Commands gather, and leave as one numbered header when `flush` is called: to the other ranks over `links`, and at the
same moment to the leader's own rank, which obeys in this process by a direct call. An engine of one rank has no links;
everything else is the same. Each rank's headers carry a rolling digest of all commands it was ever given, so a rank
that missed, repeated or was given another command stops at that header (`LineReader`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from serinus.canary import slots_checked
from serinus.core.clock import Clock
from serinus.core.errors import FrameError, InvariantError, PeerGone
from serinus.core.plan import StepPlan, StepResult
from serinus.parallel import Mesh
from serinus.ranks.body import Meanwhile, RankBody
from serinus.ranks.codec import Answers, Header, decode_answers, encode_header, fold, make_reader, pack_commands
from serinus.ranks.commands import RankHoldings, RunStep, StepDone, Stop, describe
from serinus.wire import Frame, Parts, ZmqChannel, wait_any

_TAIL: Final = 64
"""Commands kept as evidence."""


class RankLinks(Protocol):
    """The leader's connections to the other ranks of its engine: ranks 1 to n - 1."""

    def send(self, rank: int, parts: Parts) -> None:
        """Send a header to one rank, behind all that was sent to it before."""

    def answers(self, wait_s: float) -> Sequence[tuple[int, Frame | Parts]]:
        """What has come, with its rank, in order for each rank; waits up to `wait_s` for the first. Raises PeerGone: a
        rank is lost."""

    def wait_any(self, others: Sequence[ZmqChannel], wait_s: float) -> None:
        """Sleep until there are answers or one of these channels has something, for `wait_s` seconds at most."""

    def why(self) -> str:
        """Why a rank was lost, in words; empty = unknown."""

    def close(self, wait_s: float | None = None) -> None:
        """Hang up once the other ranks have; waits for that up to `wait_s`, None = as long as is fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """What came of the oldest step under way."""

    step: int
    result: StepResult
    failed: str = ""
    """Why it was not computed; the result is then empty."""
    findings: tuple[tuple[int, object], ...]
    """What the canaries of ranks found in it, with the rank."""
    checked: Sequence[int] = ()
    """Slots that all of them verified of each work of the plan; empty without a canary."""


@dataclass(slots=True)
class _OpenStep:
    step: int
    done: dict[int, StepDone] = field(default_factory=dict)


class LineReader:
    """A rank's check of its line: each header is the next one, and says what its leader said. Pure."""

    def __init__(self, name: str) -> None:
        """`name`: of the rank, for errors."""
        self._name = name
        self._digest = 0
        self.number = 0
        """Of the last header."""

    def take(self, header: Header) -> tuple[object, ...]:
        """The commands to obey now.

        Raises InvariantError: a header or a command is missing, repeated, altered or out of order; nothing of it may
        be obeyed.
        """
        if header.number != self.number + 1:
            raise self._diverged(header, f"header {header.number} came, expected {self.number + 1}")
        digest = fold(self._digest, header.number, header.content)
        if digest != header.digest:
            raise self._diverged(header, f"its digest is {digest:016x}, expected the leader's {header.digest:016x}")
        self._digest, self.number = digest, header.number
        return header.commands

    def _diverged(self, header: Header, what: str) -> InvariantError:
        came = ", ".join(map(describe, header.commands)) or "nothing"
        return InvariantError(
            f"ranks: rank {self._name} has another line than its leader at header {header.number}: {what};"
            f" the header brings {came}"
        )


class LeaderLine:
    """core.line.CommandLine of an engine, and the plans under way on it. The engine's thread owns it."""

    def __init__(
        self,
        body: RankBody,
        mesh: Mesh,
        clock: Clock,
        links: RankLinks | None = None,
        *,
        whole: bool = False,
        dismiss: Callable[[], object] = tuple,
        ends: Sequence[Callable[[], object]] = (),
    ) -> None:
        """
        Args:
            body: the leader's own rank.
            links: to the other ranks; None = there are none.
            whole: a step is finished when all ranks are done with it (their canaries check it), else when the rank that
                samples is.
            dismiss: called by `close` before the ranks are told to stop; not where one was lost.
            ends: called by `close` after that.
        """
        self.mesh = mesh
        self.body = body
        self.size = mesh.size
        """Number of ranks of the engine."""
        self.depth = mesh.pp
        """Plans that may be under way at once."""
        self.sound = True
        """Whether all ranks do their work, as far as the leader knows; once they do not, nothing is asked of them."""
        self.control_bytes = 0
        """Sent to other ranks."""
        self.control_seconds = 0.0
        """Spent on sending and reading, without the waiting."""
        self.headers = 0
        """Number of headers sent so far."""
        self.steps = 0
        """Number of steps finished so far."""
        self.busy_seconds = 0.0
        """Time in which a step was under way, up to the last that finished."""
        self.rank_seconds = [(0.0, 0.0)] * mesh.size
        """Of each rank: seconds in steps without the waiting for others, and the waiting."""
        self.rank_holdings: list[Mapping[str, int]] = [{} for _ in range(mesh.size)]
        """Of each rank: what it said last that it holds, by gauge."""
        self._links = links
        self._reader = make_reader()
        self._clock = clock
        self._whole = whole
        self._dismiss, self._ends = dismiss, ends
        self._digests = [0] * mesh.size
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._broken = ""
        self._busy_since = 0.0
        self._pending: list[tuple[int | None, object]] = []
        self._open: deque[_OpenStep] = deque()
        self._answers: list[tuple[int, object]] = []
        self._takers: dict[type, Callable[[int, Any], None]] = {}
        self._closed = False

    @property
    def under_way(self) -> int:
        """Steps begun and not finished."""
        return len(self._open)

    @property
    def has_news(self) -> bool:
        """Whether a pump would hand something out, or a step is finished: do not sleep."""
        return bool(self._answers) or (bool(self._open) and self._is_done(self._open[0]))

    # ---- commands -----------------------------------------------------------------------------------------------

    def command(self, command: object, rank: int | None = None) -> None:
        """Append a command for all ranks, or for one; see CommandLine."""
        self._pending.append((rank, command))

    def run(self, plan: StepPlan) -> None:
        """Append a step. Raises InvariantError: `depth` steps are under way already."""
        if len(self._open) >= self.depth:
            raise InvariantError(f"ranks: step {plan.step} with {len(self._open)} under way, expected a free place")
        if not self._open:
            self._busy_since = self._clock.now()
        self._open.append(_OpenStep(plan.step))
        self.command(RunStep(plan=plan))

    def flush(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Send what waits as one header; the leader's own rank obeys it here. No effect where nothing waits.

        meanwhile: called once, whatever happens: while the own rank's device computes, where that waits for one; else
        before it begins.
        Raises PeerGone: a rank is lost; FrameError: a command cannot travel; and whatever breaks the own rank, or what
        is done meanwhile. The line is broken then.
        """
        aside = Meanwhile(meanwhile)
        try:
            self._flush(aside)
        finally:
            aside.do()

    def _flush(self, aside: Meanwhile) -> None:
        self.check()
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self.headers += 1
        try:
            begun = self._clock.now()
            self._send(pending)
            self.control_seconds += self._clock.now() - begun
            self._tail.extend(describe(command) for _, command in pending)
            answers = self.body.obey([command for rank, command in pending if not rank], aside.do)
        except PeerGone as error:  # in the middle of a step: the supervisor knows which rank was lost, and why
            self._break((self._links.why() if self._links is not None else "") or str(error))
            raise PeerGone(self._broken) from error
        except BaseException as error:
            self._break(_reason(error, self.size))
            raise
        for answer in (*answers, *self.body.news()):
            self._heard(0, answer)

    def _send(self, pending: Sequence[tuple[int | None, object]]) -> None:
        """One header to each other rank; those that get the same bytes share them."""
        if self._links is None:
            return
        is_shared = all(rank is None for rank, _ in pending)
        packed = pack_commands([command for _, command in pending]) if is_shared else None
        encoded: dict[int, Parts] = {}
        for rank in range(1, self.size):
            own = packed or pack_commands([command for to, command in pending if to is None or to == rank])
            digest = self._digests[rank] = fold(self._digests[rank], self.headers, own.content)
            parts = encoded.get(digest)
            if parts is None:
                parts = encoded[digest] = encode_header(self.headers, digest, own)
            self._links.send(rank, parts)
            self.control_bytes += sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)

    # ---- answers ------------------------------------------------------------------------------------------------

    def subscribe(self, answer_type: type, take: Callable[[int, Any], None]) -> None:
        """Hand answers of this type to `take`; see CommandLine."""
        assert answer_type not in self._takers, f"ranks: {answer_type.__name__} has two takers, expected one"
        self._takers[answer_type] = take

    def pump(self, wait_s: float = 0.0) -> None:
        """Send what waits and hand out what has come; see CommandLine.

        Raises PeerGone: a rank is lost; InvariantError: a rank has failed, or answers what nothing takes.
        """
        self.flush()
        for answer in self.body.news():
            self._heard(0, answer)
        self._listen(0.0 if self._answers else wait_s)
        while self._answers:
            answers, self._answers = self._answers, []
            for rank, answer in answers:
                take = self._takers.get(type(answer))
                if take is None:
                    name = self.mesh.name(rank)
                    raise InvariantError(
                        f"ranks: rank {name} answers {type(answer).__name__}, expected an answer that something takes"
                    )
                take(rank, answer)

    def finished(self) -> FinishedStep | None:
        """The oldest step under way, once it is done; None = it is not. Call `pump` before; never blocks.

        Raises InvariantError: the rank that samples gave no result.
        """
        if not self._open or not self._is_done(self._open[0]):
            return None
        step = self._open.popleft()
        self.steps += 1
        now = self._clock.now()
        self.busy_seconds += now - self._busy_since
        self._busy_since = now
        done = step.done[self.mesh.result_rank]
        result = done.result
        if result is None:
            name = self.mesh.name(self.mesh.result_rank)
            raise InvariantError(f"ranks: rank {name} ended step {step.step} without a result, expected one")
        failed = done.failed or next((each.failed for each in step.done.values() if each.failed), "")
        findings = tuple((rank, found) for rank, done in sorted(step.done.items()) for found in done.findings)
        checked = slots_checked(each.checked for each in step.done.values())
        return FinishedStep(step=step.step, result=result, failed=failed, findings=findings, checked=checked)

    def wait_any(self, others: Sequence[ZmqChannel], wait_s: float) -> None:
        """Sleep until another rank answers or one of these channels has something, for `wait_s` seconds at most."""
        if self._links is None:
            wait_any(others, wait_s)
        else:
            self._links.wait_any(others, wait_s)

    def _listen(self, wait_s: float) -> None:
        """Take in what came from other ranks."""
        self.check()
        if self._links is None:
            return
        try:
            came = [(rank, self._opened(rank, parts)) for rank, parts in self._links.answers(wait_s)]
        except BaseException as error:
            self._break(_reason(error, self.size))
            raise
        begun = self._clock.now()
        for rank, answers in came:
            if answers.failure:
                tail = ", ".join(self._tail) or "nothing"
                failed = InvariantError(
                    f"ranks: rank {self.mesh.name(rank)} stopped: {answers.failure}; commands of the leader: {tail}"
                )
                self._break(str(failed))
                raise failed
            for answer in answers.answers:
                self._heard(rank, answer)
        self.control_seconds += self._clock.now() - begun

    def _opened(self, rank: int, came: Frame | Parts) -> Answers:
        try:
            return decode_answers(came, self._reader)
        except FrameError as error:
            raise InvariantError(f"ranks: rank {self.mesh.name(rank)} sent what cannot be read: {error}") from None

    def _heard(self, rank: int, answer: object) -> None:
        if isinstance(answer, RankHoldings):
            self.rank_holdings[rank] = answer.counts
        elif isinstance(answer, StepDone):
            computed, waited = self.rank_seconds[rank]
            own = answer.seconds - answer.wait_seconds
            self.rank_seconds[rank] = (computed + own, waited + answer.wait_seconds)
            for step in self._open:
                if step.step == answer.step:
                    step.done[rank] = answer
        else:
            self._answers.append((rank, answer))

    def _is_done(self, step: _OpenStep) -> bool:
        return len(step.done) == self.size if self._whole else self.mesh.result_rank in step.done

    # ---- ends ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell the ranks to stop, and hang up. May be called again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:  # all of them, from the last one on, whatever one of them raises
            ends.callback(self.give_up, PeerGone("engine: it was closed, expected one that was not"))
            ends.callback(self.body.close)
            if self._links is not None:
                ends.callback(lambda links: links.close(None if self.sound else 0.0), self._links)
            for end in reversed(self._ends):
                ends.callback(end)
            self._pending = []  # what waits is not worth doing any more
            if self.sound:
                self._dismiss()
            if self._links is not None:
                self.headers += 1
                self._send([(None, Stop())])

    def give_up(self, error: BaseException) -> None:
        """Something broke, or was interrupted, where what is under way is not known any more: nothing is begun from now
        on. No effect where an earlier error said so."""
        if self.sound:
            self._break(_reason(error, self.size))

    def check(self) -> None:
        """Raises PeerGone: nothing can be begun any more, and why."""
        if not self.sound:
            raise PeerGone(self._broken)

    def _break(self, reason: str) -> None:
        self.sound, self._broken = False, reason


def _reason(error: BaseException, size: int) -> str:
    """Why the ranks of an engine are not in step any more."""
    if isinstance(error, PeerGone):
        return str(error)
    if size == 1:
        return f"engine: it broke, or was interrupted, in the middle of a step: {type(error).__name__}: {error}"
    return f"engine: the leader of these ranks broke, or was interrupted: {type(error).__name__}: {error}"
