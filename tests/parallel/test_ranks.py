"""Ranks of one engine: reports fold, decisions act, nothing is forgotten on any rank. Tests own the order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from serinus.core.errors import InvariantError
from serinus.parallel import (
    QUEUES,
    DecisionFollower,
    DecisionKind,
    DecisionLog,
    LocalGroup,
    RankTable,
    Report,
    ReportFold,
    ReportKind,
)


@dataclass
class Rank:
    """A rank that prefetches from storage while a request is bootstrapping, and remembers what it ran."""

    number: int
    group: LocalGroup
    prefetches: set[str] = field(default_factory=set)
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.follower = DecisionFollower(self.number)
        self.table = RankTable(self)

    def placed(self, rid: str, queue: str) -> None:
        if queue == "bootstrap":
            self.prefetches.add(rid)

    def dropped(self, rid: str, code: str) -> None:
        self.prefetches.discard(rid)
        self.group.report(Report(rank=self.number, kind=ReportKind.DRAINED, key=rid))

    def sees(self, kind: ReportKind, rid: str, reason: str = "") -> None:
        """It observes something, and only says so."""
        self.group.report(Report(rank=self.number, kind=kind, key=rid, reason=reason))

    def turn(self) -> None:
        for header in self.group.headers(self.number):
            for decision in self.follower.apply(header):
                self.table.apply(decision)
        while self.table.batches:
            self.ran.append(self.table.take_batch())


class Engine:
    """A leader and its ranks, as the loop of a real engine would drive them."""

    def __init__(self, ranks: int = 4) -> None:
        self.group = LocalGroup(ranks)
        self.ranks = [Rank(number, self.group) for number in range(ranks)]
        self.log, self.fold = DecisionLog(), ReportFold(ranks)
        self.steps = 0
        self.bootstrapping: set[str] = set()
        self.ready: list[str] = []
        self.dropping: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.counted: Counter[str] = Counter()

    def add(self, rid: str) -> None:
        self.fold.expect(rid)
        self.bootstrapping.add(rid)
        self.log.decide(DecisionKind.PLACE, rid, queue="bootstrap")

    def abort(self, rid: str, reason: str) -> None:
        """In whatever state it is. The client gets its error now; the ranks are told with the next header."""
        if rid in self.dropping or rid in self.errors:
            return
        if rid in self.bootstrapping:
            self.counted["bootstrap_failed"] += 1
            self.bootstrapping.discard(rid)
        self.ready = [other for other in self.ready if other != rid]
        self.errors[rid] = reason
        self.dropping[rid] = reason
        self.log.decide(DecisionKind.DROP, rid, code="aborted")

    def step(self) -> tuple[str, ...]:
        """Fold what came, decide, tell everybody; returns the batch."""
        for report in self.group.reports():
            self.fold.take(report)
        for rid in sorted(self.bootstrapping):
            failed = self.fold.failed(rid)
            if failed:
                self.abort(rid, failed)
            elif self.fold.everywhere(rid, ReportKind.GRANTED):
                self.bootstrapping.discard(rid)
                self.ready.append(rid)
                self.log.decide(DecisionKind.PLACE, rid, queue="running")
        for rid in list(self.dropping):
            if self.fold.everywhere(rid, ReportKind.DRAINED):
                self.fold.forget(rid)
                del self.dropping[rid]
        batch = tuple(self.ready)
        if batch:
            self.log.decide(DecisionKind.RUN, batch=list(batch))
        self.steps += 1
        self.group.announce(self.log.header(self.steps))
        return batch

    def turns(self, *numbers: int) -> None:
        for number in numbers or range(len(self.ranks)):
            self.ranks[number].turn()

    def assert_empty(self) -> None:
        for rank in self.ranks:
            assert rank.table.gauges() == dict.fromkeys(QUEUES.values(), 0), f"rank {rank.number} is not empty"
            assert not rank.prefetches, f"rank {rank.number} still prefetches {rank.prefetches}"
            assert (rank.follower.last, rank.follower.digest) == (self.log.last, self.log.digest)
        assert not self.dropping
        assert not len(self.fold)


def test_a_request_runs_when_all_ranks_have_reported_and_not_before() -> None:
    engine = Engine()
    engine.add("r")
    engine.step()
    engine.turns()
    for rank in engine.ranks[:3]:
        rank.sees(ReportKind.GRANTED, "r")
    assert engine.step() == ()
    engine.ranks[3].sees(ReportKind.GRANTED, "r")
    assert engine.step() == ("r",)
    engine.turns()
    assert [rank.ran for rank in engine.ranks] == [[("r",)]] * 4


def test_an_abort_between_report_and_decision_never_makes_ranks_run_different_batches() -> None:
    """All ranks have seen the grant and said so; the abort comes before the leader has decided anything."""
    engine = Engine()
    engine.add("r")
    engine.add("s")
    engine.step()
    engine.turns()
    for rank in engine.ranks:
        rank.sees(ReportKind.GRANTED, "r")
        rank.sees(ReportKind.GRANTED, "s")
    engine.abort("r", "the client left")
    engine.group.held = {2, 3}  # the later stage hears everything late
    assert engine.step() == ()  # reports of ranks 2 and 3 are not here yet
    engine.turns(0, 1)
    engine.group.held = set()
    assert engine.step() == ("s",)
    engine.turns()
    assert [rank.ran for rank in engine.ranks] == [[("s",)]] * 4, "ranks ran different batches"
    engine.abort("s", "over")
    engine.step()
    engine.turns()
    engine.step()
    engine.turns()
    engine.assert_empty()


def test_an_abort_after_the_decision_lets_every_rank_run_the_batch_that_was_decided() -> None:
    engine = Engine(2)
    engine.add("r")
    engine.step()
    engine.turns()
    for rank in engine.ranks:
        rank.sees(ReportKind.GRANTED, "r")
    engine.step()
    engine.turns(0)  # the first stage runs it already
    engine.abort("r", "the client left")
    engine.step()
    engine.turns(1)
    engine.turns(0)
    assert [rank.ran for rank in engine.ranks] == [[("r",)]] * 2
    engine.step()
    engine.turns()
    engine.assert_empty()


def test_a_request_aborted_while_it_only_bootstraps_on_a_later_stage_is_drained_there() -> None:
    """Stage 0 is through with its bootstrap, stage 1 is not: there the request still waits, and prefetches."""
    engine = Engine()
    engine.add("r")
    engine.step()
    engine.turns()
    for rank in engine.ranks[:2]:
        rank.sees(ReportKind.GRANTED, "r")
    engine.step()
    engine.turns()
    later = engine.ranks[2:]
    assert all(rank.prefetches == {"r"} for rank in later)
    assert all(rank.table.gauges()["num_prefill_bootstrap_queue_reqs"] == 1 for rank in later)
    engine.abort("r", "the client left")
    engine.abort("r", "and once more")
    engine.step()
    engine.turns()
    engine.step()
    engine.turns()
    assert engine.errors == {"r": "the client left"}
    assert engine.counted["bootstrap_failed"] == 1
    engine.assert_empty()


def test_a_failure_that_only_one_rank_sees_ends_the_request_everywhere_and_once() -> None:
    engine = Engine()
    engine.add("r")
    engine.step()
    engine.turns()
    for rank in engine.ranks[:3]:
        rank.sees(ReportKind.GRANTED, "r")
    engine.ranks[3].sees(ReportKind.FAILED, "r", "no connection")
    engine.ranks[1].sees(ReportKind.FAILED, "r", "me too")
    engine.step()
    engine.turns()
    engine.step()
    engine.turns()
    assert engine.counted["bootstrap_failed"] == 1
    assert len(engine.errors) == 1
    assert [rank.ran for rank in engine.ranks] == [[]] * 4
    engine.assert_empty()


def test_what_is_dropped_is_kept_in_mind_until_the_last_rank_has_drained() -> None:
    engine = Engine(3)
    engine.add("r")
    engine.step()
    engine.turns()
    engine.abort("r", "over")
    engine.step()
    engine.group.held = {2}
    engine.turns(0, 1)
    engine.step()
    assert engine.dropping == {"r": "over"}
    engine.group.held = set()
    engine.turns()
    engine.step()
    engine.turns()
    assert not engine.dropping
    engine.assert_empty()


def test_reports_about_what_is_over_or_from_nowhere_change_only_a_counter() -> None:
    fold = ReportFold(2)
    assert not fold.take(Report(rank=0, kind=ReportKind.SENT, key="gone"))
    fold.expect("r")
    assert not fold.take(Report(rank=2, kind=ReportKind.SENT, key="r"))
    assert fold.rejects == Counter(unknown_key=1, unknown_rank=1)
    assert fold.take(Report(rank=0, kind=ReportKind.SENT, key="r"))
    assert fold.take(Report(rank=0, kind=ReportKind.SENT, key="r"))
    assert not fold.everywhere("r", ReportKind.SENT), "one rank counted twice"
    fold.forget("r")
    fold.forget("r")
    assert not fold.everywhere("r", ReportKind.SENT)
    assert fold.failed("r") == ""


def test_a_batch_with_a_stranger_or_no_decision_at_all_stops_the_rank() -> None:
    log = DecisionLog()
    rank = Rank(0, LocalGroup(1))
    with pytest.raises(InvariantError, match="expected requests that are here"):
        rank.table.apply(log.decide(DecisionKind.RUN, batch=["r"]))
    with pytest.raises(InvariantError, match="expected a decision for it"):
        rank.table.take_batch()
    with pytest.raises(InvariantError, match="names queue 'nowhere'"):
        rank.table.apply(log.decide(DecisionKind.PLACE, "r", queue="nowhere"))


def test_a_drop_of_what_never_came_here_is_no_drop() -> None:
    log, group = DecisionLog(), LocalGroup(1)
    rank = Rank(0, group)
    rank.table.apply(log.decide(DecisionKind.DROP, "r", code="aborted"))
    assert group.reports() == []
    assert "r" not in rank.table
