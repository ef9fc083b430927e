"""The line between the ranks of one engine: order, answers, and what happens when a rank has lived by another log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.core.clock import WallClock
from serinus.core.errors import FrameError, InvariantError, PeerGone
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.core.plan import SeqResult, SeqWork, StepPlan, StepResult
from serinus.engine import EngineCore
from serinus.engine.ranks import Follower, FollowerGroup, RankBody, RankExecutor, RankGroup, StepDone, Stop
from serinus.engine.ranks.crew import RankCrew
from serinus.engine.ranks.tiers import CancelPages, CopyPages
from serinus.parallel import Decision, DecisionKind, Mesh, Report, StepHeader
from serinus.wire import ZmqChannel, encode
from serinus.wire.messages import RankHello, Shutdown

CLOCK = WallClock()


class Runs:
    """A runner that answers with what it is told, on the rank that samples."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self.rank, self.mesh = rank, mesh
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult | None:
        self.plans.append(plan)
        if self.rank != self.mesh.result_rank:
            return None
        return StepResult(step=plan.step, seqs=tuple(SeqResult(token=work.row) for work in plan.work))


class Line:
    """A leader and its followers; followers live in threads once `start`ed."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group = RankGroup(f"ipc://{folder}/c", mesh=mesh, clock=CLOCK, token=b"t")
        self.bodies = [RankBody(rank=r, mesh=mesh, runner=Runs(r, mesh), clock=CLOCK) for r in range(mesh.size)]
        self.executor = RankExecutor(self.group, self.bodies[0], mesh, CLOCK)
        self.followers = [
            Follower(
                self.bodies[rank], FollowerGroup(self.group.address, mesh=mesh, rank=rank, clock=CLOCK, token=b"t")
            )
            for rank in range(1, mesh.size)
        ]
        self.threads = ThreadPoolExecutor(mesh.size)
        self.lives: list[Any] = []
        self.group.gather(lambda: None, 10.0)

    def start(self) -> None:
        """From now on followers obey."""
        self.lives = [self.threads.submit(self._live, follower) for follower in self.followers]

    @staticmethod
    def _live(follower: Follower) -> None:
        try:
            follower.run()
        finally:
            follower.close()

    def finish(self, plan: StepPlan) -> StepResult:
        """Submit and wait for the result."""
        self.executor.submit(plan)
        while (result := self.executor.take()) is None:
            self.executor.pump(1.0)
        return result

    @staticmethod
    def heard(follower: Follower, act: Callable[[], object]) -> list[StepHeader]:
        """What a follower that does not obey yet gets by an act of the leader."""
        act()
        found: list[StepHeader] = []
        while not found:
            found = follower._group.headers(1.0)
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """Pump until something is so."""
        for _ in range(1000):
            if condition():
                return
            self.executor.pump(0.05)
        raise AssertionError("it never came")

    def close(self) -> None:
        """End everything."""
        if not self.lives:
            for follower in self.followers:
                follower.close()
        self.executor.close()
        for life in self.lives:
            life.exception(timeout=10)
        self.threads.shutdown()


def plan_of(step: int, *rids: str) -> StepPlan:
    one, slot = np.array([7], np.int32), np.array([4], np.int64)
    return StepPlan(
        step=step,
        work=tuple(SeqWork(rid=rid, row=i + 1, start=0, tokens=one, slots=slot) for i, rid in enumerate(rids)),
    )


@pytest.fixture
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    found = Line(tmp_path_factory.mktemp("l"), Mesh(tp=2, pp=2))
    yield found
    found.close()


def test_every_rank_runs_every_plan_in_order_and_the_last_stage_answers(line: Line) -> None:
    line.start()
    line.executor.record((("a", "waiting"), ("b", "waiting"), ("a", "running"), ("b", "running")), ())
    results = [line.finish(plan_of(step, "a", "b")) for step in range(1, 6)]
    line.until(lambda: all(len(body._runner.plans) == 5 for body in line.bodies))  # type: ignore[attr-defined]
    assert [[seq.token for seq in result.seqs] for result in results] == [[1, 2]] * 5
    for body in line.bodies:
        assert [plan.step for plan in body._runner.plans] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert line.executor.steps == 5
    assert line.executor.control_bytes > 0


def test_no_more_than_depth_steps_are_under_way(line: Line) -> None:
    line.executor.record((("a", "running"),), ())
    line.executor.submit(plan_of(1, "a"))
    line.executor.submit(plan_of(2, "a"))
    assert line.executor.take() is None
    with pytest.raises(InvariantError, match="step 3 with 2 under way"):
        line.executor.submit(plan_of(3, "a"))
    line.start()
    line.until(lambda: line.executor.take() is not None)


def test_orders_are_obeyed_where_they_stand_in_the_line_and_answers_name_their_rank(line: Line) -> None:
    seen: list[list[str]] = [[] for _ in line.bodies]
    for rank, body in enumerate(line.bodies):

        def copy(order: CopyPages, rank: int = rank) -> list[MoveDone]:
            seen[rank].append(f"copy before step {len(line.bodies[rank]._runner.plans) + 1}")  # type: ignore[attr-defined]
            return [MoveDone(op=rank, ok=True)]

        body.on(CopyPages, copy)
        body.on(CancelPages, lambda order, rank=rank: seen[rank].append("alone"))
    told: dict[int, MoveDone] = {}
    line.executor.subscribe(MoveDone, lambda rank, done: told.setdefault(rank, done))
    line.start()
    line.executor.record((("a", "running"),), ())
    line.finish(plan_of(1, "a"))
    line.executor.order(CopyPages(moves=()))
    line.executor.order(CancelPages(op=3), rank=2)
    line.finish(plan_of(2, "a"))
    line.until(lambda: len(told) == 4)
    assert seen == [["copy before step 2"] + ["alone"] * (rank == 2) for rank in range(4)]
    assert {rank: done.op for rank, done in told.items()} == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_rank_that_lived_by_another_log_sends_it_and_stops_and_the_leader_stops_with_both(line: Line) -> None:
    """The third rank has applied a decision that nobody made: the next header shows it, before a batch runs."""
    wrong = line.bodies[3].follower
    wrong._digest = Decision(number=1, kind=DecisionKind.PLACE, rid="ghost").folded(0)
    line.start()
    line.executor.record((("a", "running"),), ())
    with pytest.raises(InvariantError, match="rank TP1 PP1 stopped") as caught:
        line.until(lambda: bool(line.finish(plan_of(1, "a"))) and False)
    words = str(caught.value)
    assert "has another log than its leader at step 1" in words
    assert "log of the leader: 1:place a queue=running, 2:run batch=['a']" in words
    assert "from the leader: 1:place a queue=running" in words
    assert line.bodies[3]._runner.plans == []  # type: ignore[attr-defined]
    assert isinstance(line.lives[2].exception(timeout=10), InvariantError)


def test_a_header_that_is_missing_stops_the_rank(line: Line) -> None:
    line.executor.headers += 1
    with pytest.raises(InvariantError, match="rank TP0 PP0 got header 2, expected 1"):
        line.executor.submit(plan_of(1, "a"))


class Copies:
    """Copies at a rank that have ended when the next step has: the step waited for them."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def begin(self, order: CopyPages) -> None:
        self._open += [move.op for move in order.moves]

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def answers(self) -> list[MoveDone]:
        ended, self._open = self._open, []
        return [MoveDone(op=op, ok=True) for op in ended]


def test_what_a_step_waited_for_is_told_before_the_next_step_is_done(line: Line) -> None:
    """The leader needs it to commit that step; two of them may have come to the rank together."""
    body, follower, said = line.bodies[2], line.followers[1], list[object]()
    copies = Copies()
    for each in line.bodies:
        each.on(CopyPages, copies.begin if each is body else lambda order: ())
    body.attend(copies)
    one = np.array([1], np.int32)
    line.executor.record((("a", "running"),), ())
    line.executor.order(CopyPages(moves=(Move(op=1, kind=MoveKind.LOAD, part=Part.FULL, source=one, target=one),)))
    headers = [*line.heard(follower, lambda: line.executor.submit(plan_of(1, "a")))]
    headers += line.heard(follower, lambda: line.executor.submit(plan_of(2, "a")))
    follower._group.headers = lambda wait_s: headers  # type: ignore[method-assign]
    follower._group.report = lambda report: said.append(report.body)  # type: ignore[method-assign]
    follower.turn(0.0)
    steps = [each.step for each in said if isinstance(each, StepDone)]
    moved = next(index for index, each in enumerate(said) if isinstance(each, MoveDone))
    assert steps == [1, 2]
    assert moved < next(index for index, each in enumerate(said) if isinstance(each, StepDone) and each.step == 2)


def test_after_an_order_that_cannot_travel_the_ranks_are_not_in_step_any_more(line: Line) -> None:
    """Its header is lost, and what comes after a gap nobody obeys: closing must not count on answers."""
    line.executor.order(object())
    with pytest.raises(FrameError, match="object is no order"):
        line.executor.flush()
    assert not line.executor.sound


def test_a_batch_that_is_not_the_plans_is_not_run(line: Line) -> None:
    line.executor.record((("a", "running"), ("b", "running")), ())
    line.executor.log.decide(DecisionKind.RUN, batch=["b"])
    with pytest.raises(InvariantError, match=r"told to run \['b'\], its plan 1 says \['a'\]"):
        line.executor.submit(plan_of(1, "a"))


def test_a_rank_that_is_gone_ends_the_leader_with_its_name(line: Line) -> None:
    line.followers[1].close()
    for _ in range(2):
        with pytest.raises(PeerGone, match="rank TP0 PP1 is gone"):
            line.until(lambda: False)
    with pytest.raises(PeerGone, match="rank TP0 PP1 is gone"):
        line.executor.submit(plan_of(1, "a"))


def test_the_reason_is_told_where_somebody_knows_it(line: Line) -> None:
    line.group.why = lambda: "engine: rank TP0 PP1 (pid 7) died of SIGKILL"
    line.followers[1].close()
    with pytest.raises(PeerGone, match="died of SIGKILL"):
        line.until(lambda: False)


class Tiers:
    """A cache that hears of a loss when it asks how its copies are, and the tiers behind it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.closed = False

    def poll(self) -> None:
        self._line.executor.pump()

    def close(self) -> None:
        self.closed = True


def test_a_leader_closes_in_peace_though_it_loses_a_rank_meanwhile(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks in closing would take the place of the reason for it, and of the exit code."""

    def lost(wait_s: float) -> list[Report]:
        raise PeerGone("engine: rank TP0 PP1 is gone")

    monkeypatch.setattr(line.group, "reports", lost)
    tiers: Any = Tiers(line)
    nobody: Any = None
    core = EngineCore(scheduler=nobody, executor=line.executor, watch=nobody, clock=CLOCK, cache=tiers, tiers=tiers)
    RankCrew(line.executor).close()
    core.close()
    assert (tiers.closed, line.executor.sound) == (True, False)


def test_a_leader_that_is_gone_ends_its_followers(line: Line) -> None:
    line.start()
    line.group.close(0.0)
    for life in line.lives:
        assert isinstance(life.exception(timeout=10), PeerGone)


def test_what_nobody_obeys_is_an_error_on_the_rank_that_got_it(line: Line) -> None:
    line.start()
    line.executor.order(CancelPages(op=1), rank=1)
    with pytest.raises(InvariantError, match="rank TP1 PP0 got CancelPages, which nobody obeys there"):
        line.until(lambda: False)


def test_strangers_on_the_line_are_sent_away(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A wrong token, a rank that there is not, one that is there already, or nonsense: none of them is heard."""
    mesh = Mesh(tp=2)
    group = RankGroup(f"ipc://{tmp_path_factory.mktemp('l')}/c", mesh=mesh, clock=CLOCK, token=b"right")
    strangers = ZmqChannel(clock=CLOCK)
    strange = [RankHello(rank=1, token=b"wrong"), RankHello(rank=9, token=b"right"), Shutdown()]
    hellos = [*strange, RankHello(rank=0, token=b"right")]
    for index, hello in enumerate(hellos):
        strangers.connect(f"s{index}", group.address)
        strangers.send(f"s{index}", encode(hello))
    with pytest.raises(PeerGone, match="no word from rank TP1 PP0"):
        group.gather(lambda: None, 0.2)
    right = FollowerGroup(group.address, mesh=mesh, rank=1, clock=CLOCK, token=b"right")
    group.gather(lambda: None, 10.0)
    assert group.missing == []
    for end in (right, strangers, group):
        end.close()


def test_whoever_watches_the_ranks_knows_of_their_end_before_they_do(line: Line) -> None:
    """Else the first that ends is taken for one that is lost."""
    alive: list[bool] = []
    line.executor._dismiss = lambda: alive.append(not any(life.done() for life in line.lives))
    line.start()
    line.executor.close()
    assert alive == [True]
    assert [life.exception(timeout=10) for life in line.lives] == [None] * 3


def test_a_follower_that_is_told_to_stop_returns(line: Line) -> None:
    line.start()
    line.executor.order(Stop())
    line.executor.flush()
    for life in line.lives:
        assert life.exception(timeout=10) is None
    assert all(body.stopped for body in line.bodies)
