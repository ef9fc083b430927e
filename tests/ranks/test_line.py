"""The line between the ranks of one engine: order, hash, answers, and what happens when a rank got another line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serinus.core.clock import ManualClock
from serinus.core.errors import FrameError, InvariantError, PeerGone
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.core.plan import SeqResult, StepPlan, StepResult, WorkAhead
from serinus.parallel import Mesh
from serinus.ranks import (
    LeaderLine,
    LeaderLinks,
    LineReader,
    RankBody,
    RankLoop,
    RunStep,
    StepDone,
    Stop,
)
from serinus.ranks.body import Meanwhile
from serinus.ranks.codec import (
    Answers,
    decode_answers,
    decode_header,
    encode_answers,
    encode_header,
    fold,
    pack_commands,
)
from serinus.ranks.steps_ahead import StepsAhead
from serinus.ranks.tiers import CancelPages, CopyPages
from serinus.runner.flight import Flight
from serinus.wire import Parts
from tests.ranks.linked import CLOCK, Ranks, Runner, bodies_of, plan_of


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("l"), Mesh(tp=2, pp=2))
    yield found
    found.close()


# ---- order and answers --------------------------------------------------------------------------------------------


def test_every_rank_runs_every_plan_in_order_and_the_last_stage_answers(ranks: Ranks) -> None:
    ranks.start()
    results = [ranks.finish(plan_of(step, "a", "b")) for step in range(1, 6)]
    ranks.until(lambda: all(len(runner.plans) == 5 for runner in ranks.runners))
    assert [[seq.token for seq in result.seqs] for result in results] == [[1, 2]] * 5
    for runner in ranks.runners:
        assert [plan.step for plan in runner.plans] == [1, 2, 3, 4, 5]
    assert ranks.line.steps == 5
    assert ranks.line.control_bytes > 0


def test_one_rank_is_the_same_line_without_links() -> None:
    mesh = Mesh()
    (body,), (runner,) = bodies_of(mesh)
    line = LeaderLine(body, mesh, CLOCK)
    line.run(plan_of(1, "a"))
    assert runner.plans == [], "nothing is done before the line is flushed"
    line.flush()
    assert line.has_news
    finished = line.finished()
    assert finished is not None
    assert [seq.token for seq in finished.result.seqs] == [1]
    assert line.control_bytes == 0


class Device:
    """A runner that queues passes, and waits for what came of them."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def launch(self, plan: StepPlan, behind: object = None) -> Flight:
        self._done.append("queue")
        return Flight(step=plan.step)

    def write_tables(self, writes: object) -> None:
        pass

    def read(self, flight: Flight) -> StepResult:
        self._done.append("wait")
        return StepResult(step=flight.step, seqs=(SeqResult(token=1),))


def test_what_is_to_be_done_meanwhile_is_done_while_a_device_computes_and_before_a_host_does() -> None:
    mesh, done = Mesh(), list[str]()
    meanwhile = Meanwhile()
    ahead: Any = StepsAhead(Device(done), None, meanwhile)  # type: ignore[arg-type]
    near: Any = StepsAhead(Device(done), None)  # type: ignore[arg-type]
    for runner, aside in ((ahead, meanwhile), (near, None)):
        line = LeaderLine(RankBody(rank=0, mesh=mesh, runner=runner, clock=CLOCK, meanwhile=aside), mesh, CLOCK)
        line.run(plan_of(1, "a"))
        line.flush(lambda: done.append("tell"))
        line.flush(lambda: done.append("tell"))
    assert done == ["queue", "tell", "wait", "tell", "tell", "queue", "wait", "tell"]


def test_what_is_to_be_done_meanwhile_is_done_though_the_step_fails_and_though_the_line_is_broken() -> None:
    class Broken(Device):
        def launch(self, plan: StepPlan, behind: object = None) -> Flight:
            raise ValueError("no such kernel")

    mesh, done, meanwhile = Mesh(), list[str](), Meanwhile()
    runner: Any = StepsAhead(Broken(done), None, meanwhile)  # type: ignore[arg-type]
    line = LeaderLine(RankBody(rank=0, mesh=mesh, runner=runner, clock=CLOCK, meanwhile=meanwhile), mesh, CLOCK)
    line.run(plan_of(1, "a"))
    with pytest.raises(ValueError, match="no such kernel"):
        line.flush(lambda: done.append("tell"))
    with pytest.raises(PeerGone, match="no such kernel"):
        line.flush(lambda: done.append("tell again"))
    assert done == ["tell", "tell again"]


def test_no_more_than_depth_steps_are_under_way(ranks: Ranks) -> None:
    ranks.line.run(plan_of(1, "a"))
    ranks.line.run(plan_of(2, "a"))
    ranks.line.pump()
    assert ranks.line.finished() is None
    with pytest.raises(InvariantError, match="step 3 with 2 under way"):
        ranks.line.run(plan_of(3, "a"))
    ranks.start()
    ranks.until(lambda: ranks.line.finished() is not None)


def test_commands_are_obeyed_where_they_stand_in_the_line_and_answers_name_their_rank(ranks: Ranks) -> None:
    seen: list[list[str]] = [[] for _ in ranks.bodies]
    for rank, body in enumerate(ranks.bodies):

        def copy(command: CopyPages, rank: int = rank) -> list[MoveDone]:
            seen[rank].append(f"copy before step {len(ranks.runners[rank].plans) + 1}")
            return [MoveDone(op=rank, ok=True)]

        body.on(CopyPages, copy)
        body.on(CancelPages, lambda command, rank=rank: seen[rank].append("alone"))
    told: dict[int, MoveDone] = {}
    ranks.line.subscribe(MoveDone, lambda rank, done: told.setdefault(rank, done))
    ranks.start()
    ranks.finish(plan_of(1, "a"))
    ranks.line.command(CopyPages(moves=()))
    ranks.line.command(CancelPages(op=3), rank=2)
    ranks.finish(plan_of(2, "a"))
    ranks.until(lambda: len(told) == 4)
    assert seen == [["copy before step 2"] + ["alone"] * (rank == 2) for rank in range(4)]
    assert {rank: done.op for rank, done in told.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    ranks.finish(plan_of(3, "a"))


class Copies:
    """Copies at a rank that have ended when the next step has: the step waited for them."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def begin(self, command: CopyPages) -> None:
        self._open += [move.op for move in command.moves]

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def holdings(self) -> dict[str, int]:
        return {"copies": len(self._open)}

    def answers(self) -> list[MoveDone]:
        ended, self._open = self._open, []
        return [MoveDone(op=op, ok=True) for op in ended]


def test_what_a_step_waited_for_is_told_before_the_next_step_is_done() -> None:
    """The leader needs it to commit that step; both steps may have come to the rank together."""
    mesh = Mesh(pp=2)
    body = RankBody(rank=1, mesh=mesh, runner=Runner(1, mesh), clock=CLOCK)
    copies = Copies()
    body.on(CopyPages, copies.begin)
    body.attend(copies)
    one = np.array([1], np.int32)
    copy = CopyPages(moves=(Move(op=1, kind=MoveKind.LOAD, part=Part.FULL, source=one, target=one),))
    lines = Recorded()
    for commands in ([copy, RunStep(plan=plan_of(1, "a"))], [RunStep(plan=plan_of(2, "a"))]):
        lines.send(commands)
    link = Scripted(lines.sent)
    RankLoop(body, link).turn(0.0)
    steps = [each.step for each in link.said if isinstance(each, StepDone)]
    moved = next(index for index, each in enumerate(link.said) if isinstance(each, MoveDone))
    assert steps == [1, 2]
    assert moved < next(i for i, each in enumerate(link.said) if isinstance(each, StepDone) and each.step == 2)


def test_work_that_a_plan_takes_of_the_one_before_travels_once_and_its_tokens_behind_it() -> None:
    """Requests a, b and c are ahead, with unknown tokens; b has ended when the next plan is made. Behind that
    goes c alone."""
    mesh = Mesh(tp=2)
    runner = Runner(1, mesh)
    body, lines = RankBody(rank=1, mesh=mesh, runner=runner, clock=CLOCK), Recorded()
    none, ahead, later = np.zeros(0, np.int64), plan_of(2, "a", "b", "c").work, plan_of(3, "c").work
    taken = tuple(replace(ahead[number], tokens=np.array([40 + number], np.int32)) for number in (2, 0))
    last = (replace(later[0], tokens=np.array([50], np.int32)),)
    for plan in (
        replace(plan_of(1, "a", "b", "c"), ahead=WorkAhead(work=ahead, follows=none)),
        StepPlan(step=2, work=taken, takes=np.array([2, 0]), ahead=WorkAhead(work=later, follows=none)),
        StepPlan(step=3, work=last, takes=np.array([0])),
    ):
        lines.send([RunStep(plan=plan)])
    RankLoop(body, Scripted(lines.sent)).turn(0.0)
    found = [[(work.rid, work.row, work.tokens.tolist()) for work in plan.work] for plan in runner.plans]
    assert found == [[("a", 1, [7]), ("b", 2, [7]), ("c", 3, [7])], [("c", 3, [42]), ("a", 1, [40])], [("c", 1, [50])]]


def test_a_plan_that_takes_work_that_was_never_ahead_stops_the_rank() -> None:
    mesh, lines = Mesh(tp=2), Recorded()
    body = RankBody(rank=1, mesh=mesh, runner=Runner(1, mesh), clock=CLOCK)
    lines.send([RunStep(plan=plan_of(1, "a"))])
    lines.send([RunStep(plan=replace(plan_of(2, "a"), takes=np.array([0])))])
    with pytest.raises(InvariantError, match=r"a plan takes \[0\] of the work ahead, expected numbers below 0"):
        RankLoop(body, Scripted(lines.sent)).run()


def test_a_rank_tells_what_it_holds_whenever_that_changed() -> None:
    mesh = Mesh()
    (body,), _ = bodies_of(mesh)
    copies = Copies()
    body.on(CopyPages, copies.begin)
    body.attend(copies)
    line = LeaderLine(body, mesh, CLOCK)
    line.subscribe(MoveDone, lambda rank, done: None)
    line.pump()
    assert line.rank_holdings == [{"copies": 0}]


def test_a_line_ends_all_there_is_to_end_whatever_one_end_raises() -> None:
    (body,), _ = bodies_of(Mesh())
    ended: list[str] = []

    def broken() -> None:
        ended.append("steps")
        raise RuntimeError("a graph that cannot be destroyed")

    body.at_end(lambda: ended.append("body"))
    line = LeaderLine(body, Mesh(), CLOCK, ends=(broken, lambda: ended.append("ranks")))
    with pytest.raises(RuntimeError, match="cannot be destroyed"):
        line.close()
    assert ended == ["steps", "ranks", "body"]


# ---- the hash of the line -----------------------------------------------------------------------------------------


class Recorded:
    """A leader's headers for one rank, as frames."""

    def __init__(self) -> None:
        self.sent: list[Parts] = []
        self._digest = 0

    def send(self, commands: Sequence[object]) -> None:
        packed = pack_commands(commands)
        self._digest = fold(self._digest, len(self.sent) + 1, packed.content)
        self.sent.append(encode_header(len(self.sent) + 1, self._digest, packed))


class Scripted:
    """A rank's end that brings these headers and keeps what the rank says."""

    def __init__(self, sent: Sequence[Parts]) -> None:
        self._sent = list(sent)
        self.said: list[object] = []
        self.failures: list[str] = []

    def headers(self, wait_s: float) -> list[Parts]:
        sent, self._sent = self._sent, []
        return sent

    def send(self, parts: Parts) -> None:
        came = decode_answers(parts)
        self.said += came.answers
        self.failures += [came.failure] if came.failure else []


STEPS = [RunStep(plan=plan_of(step, "a")) for step in range(1, 6)]


def altered(sent: list[Parts]) -> list[Parts]:
    """The second header brings another plan than the leader's, under the leader's digest."""
    said = decode_header(sent[1])
    return [sent[0], encode_header(2, said.digest, pack_commands([RunStep(plan=plan_of(2, "b"))])), *sent[2:]]


def lost(sent: list[Parts]) -> list[Parts]:
    return [sent[0], *sent[2:]]


def renumbered(sent: list[Parts]) -> list[Parts]:
    """The second header is lost, and the third says that it is the second."""
    third = decode_header(sent[2])
    return [sent[0], encode_header(2, third.digest, pack_commands(third.commands)), *sent[3:]]


def repeated(sent: list[Parts]) -> list[Parts]:
    return [sent[0], sent[0], *sent[1:]]


def reordered(sent: list[Parts]) -> list[Parts]:
    return [sent[0], sent[2], sent[1], *sent[3:]]


def command_lost(sent: list[Parts]) -> list[Parts]:
    said = decode_header(sent[1])
    return [sent[0], encode_header(2, said.digest, pack_commands(said.commands[1:])), *sent[2:]]


def command_repeated(sent: list[Parts]) -> list[Parts]:
    said = decode_header(sent[1])
    return [sent[0], encode_header(2, said.digest, pack_commands(said.commands * 2)), *sent[2:]]


@pytest.mark.parametrize(
    "damage", [altered, lost, renumbered, repeated, reordered, command_lost, command_repeated], ids=lambda f: f.__name__
)
def test_a_line_that_is_not_the_leaders_stops_the_rank_at_the_header_that_shows_it(
    damage: Callable[[list[Parts]], list[Parts]],
) -> None:
    mesh = Mesh(tp=2)
    runner = Runner(1, mesh)
    body = RankBody(rank=1, mesh=mesh, runner=runner, clock=CLOCK)
    lines = Recorded()
    for step in STEPS:
        lines.send([step])
    link = Scripted(damage(lines.sent))
    with pytest.raises(InvariantError, match="rank TP1 PP0 has another line than its leader at header"):
        RankLoop(body, link).run()
    assert [plan.step for plan in runner.plans] == [1], "nothing of the wrong header was obeyed"
    (failure,) = link.failures
    assert "commands of the rank: RunStep 1 ['a']" in failure


def test_an_undamaged_line_is_obeyed_to_its_end() -> None:
    reader, lines = LineReader("TP1 PP0"), Recorded()
    for step in STEPS:
        lines.send([step, Stop()])
    found = [reader.take(decode_header(parts)) for parts in lines.sent]
    assert [type(command) for commands in found for command in commands] == [RunStep, Stop] * 5


class Altering:
    """Links on which one rank gets another plan than the leader decided, from some header on."""

    def __init__(self, links: LeaderLinks, rank: int, number: int) -> None:
        self._links, self._rank, self._number = links, rank, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def send(self, rank: int, parts: Parts) -> None:
        header = decode_header(parts)
        if rank == self._rank and header.number == self._number:
            other = tuple(RunStep(plan=replace(c.plan, step=99)) for c in header.commands if isinstance(c, RunStep))
            parts = encode_header(header.number, header.digest, pack_commands(other))
        self._links.send(rank, parts)


def test_an_altered_command_stops_the_rank_and_the_leader_stops_with_both_logs(ranks: Ranks) -> None:
    ranks.line._links = Altering(ranks.links, 3, 2)
    ranks.start()
    ranks.finish(plan_of(1, "a"))
    with pytest.raises(InvariantError, match="rank TP1 PP1 stopped") as caught:
        ranks.until(lambda: bool(ranks.finish(plan_of(2, "a"))) and False)
    text = str(caught.value)
    assert "has another line than its leader at header 2" in text
    assert "the header brings RunStep 99 ['a']" in text
    assert "commands of the rank: RunStep 1 ['a']" in text
    assert "commands of the leader: RunStep 1 ['a'], RunStep 2 ['a']" in text
    assert [plan.step for plan in ranks.runners[3].plans] == [1]
    assert isinstance(ranks.running[2].exception(timeout=60), InvariantError)


# ---- failures -----------------------------------------------------------------------------------------------------


def test_after_a_command_that_cannot_travel_the_line_is_broken(ranks: Ranks) -> None:
    """Its header is lost, and no rank obeys what comes after a gap: closing must not count on answers."""
    ranks.line.command(object())
    with pytest.raises(FrameError, match="object, expected one of the types that the codec lists"):
        ranks.line.flush()
    assert not ranks.line.sound
    with pytest.raises(PeerGone, match="the leader of these ranks broke"):
        ranks.line.flush()


def test_a_rank_that_is_gone_ends_the_leader_with_its_name(ranks: Ranks) -> None:
    ranks.ends[1].close()
    for _ in range(2):
        with pytest.raises(PeerGone, match="rank TP0 PP1 is gone"):
            ranks.until(lambda: False)
    ranks.line.run(plan_of(1, "a"))
    with pytest.raises(PeerGone, match="rank TP0 PP1 is gone"):
        ranks.line.flush()


def test_the_reason_of_a_loss_is_told_where_the_supervisor_knows_it(ranks: Ranks) -> None:
    ranks.reason = "engine: rank TP0 PP1 (pid 7) died of SIGKILL"
    ranks.ends[1].close()
    with pytest.raises(PeerGone, match="died of SIGKILL"):
        ranks.until(lambda: False)


def test_a_leader_that_is_gone_ends_its_ranks(ranks: Ranks) -> None:
    ranks.start()
    ranks.links.close(0.0)
    for each in ranks.running:
        assert isinstance(each.exception(timeout=60), PeerGone)


def test_a_command_that_nothing_obeys_is_an_error_on_the_rank_that_got_it(ranks: Ranks) -> None:
    ranks.start()
    ranks.line.command(CancelPages(op=1), rank=1)
    with pytest.raises(InvariantError, match="rank TP1 PP0 got CancelPages, expected a command that something obeys"):
        ranks.until(lambda: False)


def test_an_answer_that_nothing_takes_is_an_error_of_the_leader() -> None:
    mesh = Mesh()
    (body,), _ = bodies_of(mesh)
    body.on(CancelPages, lambda command: [MoveDone(op=1, ok=True)])
    line = LeaderLine(body, mesh, ManualClock())
    line.command(CancelPages(op=1))
    with pytest.raises(InvariantError, match="rank TP0 PP0 answers MoveDone"):
        line.pump()


def test_a_result_is_due_from_the_rank_that_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    mesh = Mesh()
    body = RankBody(rank=0, mesh=mesh, runner=Runner(5, mesh), clock=CLOCK)
    line = LeaderLine(body, mesh, CLOCK)
    for step in range(1, 9):  # a rank that does not sample tells of some steps at once
        line._open.clear()
        line.run(plan_of(step, "a"))
        line.flush()
    with pytest.raises(InvariantError, match="ended step 8 without a result"):
        line.finished()


def test_the_supervisor_knows_of_the_end_before_the_ranks_do(ranks: Ranks) -> None:
    """Else the first rank that ends is taken for one that is lost."""
    ranks.start()
    ranks.line.close()
    assert ranks.alive_when_dismissed == [True]
    assert [each.exception(timeout=60) for each in ranks.running] == [None] * 3


def test_a_rank_that_is_told_to_stop_returns(ranks: Ranks) -> None:
    ranks.start()
    ranks.line.command(Stop())
    ranks.line.flush()
    for each in ranks.running:
        assert each.exception(timeout=60) is None
    assert all(body.stopped for body in ranks.bodies)


def test_a_failure_that_a_rank_told_says_more_than_the_end_of_its_connection(ranks: Ranks) -> None:
    ranks.ends[0].send(encode_answers((), "it broke"))
    ranks.ends[0].close()
    with pytest.raises(InvariantError, match="rank TP1 PP0 stopped: it broke"):
        ranks.until(lambda: False)
    assert Answers(failure="it broke").answers == ()
