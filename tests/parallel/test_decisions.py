"""The decision log: every decision exactly once, in order, on every rank; a rank with another log stops the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import InvariantError
from serinus.parallel import Decision, DecisionFollower, DecisionKind, DecisionLog, StepHeader


def _place(log: DecisionLog, rid: str, queue: str = "waiting") -> None:
    log.decide(DecisionKind.PLACE, rid, queue=queue)


def _headers(count: int) -> list[StepHeader]:
    log = DecisionLog()
    headers = []
    for step in range(1, count + 1):
        _place(log, f"r{step}a")
        _place(log, f"r{step}b")
        headers.append(log.header(step))
    return headers


def test_each_decision_is_applied_once_and_in_order() -> None:
    follower = DecisionFollower(1)
    applied = [decision.rid for header in _headers(3) for decision in follower.apply(header)]
    assert applied == ["r1a", "r1b", "r2a", "r2b", "r3a", "r3b"]
    assert follower.last == 6


def test_a_header_that_comes_again_changes_nothing() -> None:
    first, second = _headers(2)
    follower = DecisionFollower(1)
    follower.apply(first)
    digest = follower.digest
    assert follower.apply(first) == ()
    assert follower.digest == digest
    assert [decision.rid for decision in follower.apply(second)] == ["r2a", "r2b"]


def test_a_missing_header_stops_the_rank_before_it_acts() -> None:
    first, _, third = _headers(3)
    follower = DecisionFollower(2)
    follower.apply(first)
    with pytest.raises(InvariantError, match=r"rank 2 .*decision 5 came, expected 3"):
        follower.apply(third)
    assert follower.last == 2


def test_a_diverged_digest_shows_both_logs() -> None:
    first, second = _headers(2)
    follower = DecisionFollower(3)
    follower.apply(replace(first, decisions=first.decisions, digest=first.digest))
    forged = tuple(replace(decision, rid="other") for decision in second.decisions)
    with pytest.raises(InvariantError) as caught:
        follower.apply(replace(second, decisions=forged))
    text = str(caught.value)
    assert "rank 3 has another log" in text
    assert "1:place r1a queue=waiting" in text, "the log of the rank is not shown"
    assert "3:place other queue=waiting" in text, "what the leader sent is not shown"
    assert follower.last == 2, "something of a diverged header was applied"


def test_a_rank_of_another_history_is_found_at_the_next_header() -> None:
    """Numbers alone would not tell: the leader of a new life counts from 1 again."""
    old, new = DecisionLog(), DecisionLog()
    _place(old, "r1")
    _place(new, "r2")
    follower = DecisionFollower(1)
    follower.apply(old.header(1))
    new.header(1)
    _place(new, "r3")
    with pytest.raises(InvariantError, match="digest"):
        follower.apply(new.header(2))


def test_an_empty_header_confirms_that_the_logs_agree() -> None:
    log, follower = DecisionLog(), DecisionFollower(1)
    _place(log, "r1")
    follower.apply(log.header(1))
    assert follower.apply(log.header(2)) == ()
    assert follower.digest == log.digest
    with pytest.raises(InvariantError, match="digest"):
        follower.apply(StepHeader(step=3, decisions=(), digest=log.digest ^ 1))


def test_the_log_keeps_its_last_decisions_as_evidence() -> None:
    log = DecisionLog()
    for index in range(100):
        _place(log, f"r{index}")
    assert len(log.tail) == 64
    assert log.tail[-1].rid == "r99"
    assert log.pending
    log.header(1)
    assert not log.pending


def test_what_is_in_a_decision_is_in_its_digest() -> None:
    base = Decision(number=1, kind=DecisionKind.PLACE, rid="r", payload={"queue": "waiting", "n": 1})
    same = Decision(number=1, kind=DecisionKind.PLACE, rid="r", payload={"n": 1, "queue": "waiting"})
    assert same.folded(7) == base.folded(7)
    others = [
        replace(base, number=2), replace(base, rid="s"), replace(base, kind=DecisionKind.DROP),
        replace(base, payload={"queue": "running", "n": 1}),
    ]  # fmt: skip
    assert len({other.folded(7) for other in others} | {base.folded(7), base.folded(8)}) == 6


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=4), max_size=8), st.data())
def test_however_headers_repeat_every_rank_ends_with_the_log_of_its_leader(
    steps: list[list[str]], data: st.DataObject
) -> None:
    log, follower = DecisionLog(), DecisionFollower(1)
    sent: list[StepHeader] = []
    applied: list[str] = []
    for step, rids in enumerate(steps, 1):
        for rid in rids:
            _place(log, rid)
        sent.append(log.header(step))
        for header in [*data.draw(st.lists(st.sampled_from(sent), max_size=2)), sent[-1]]:
            applied += [decision.rid for decision in follower.apply(header)]
    assert applied == [rid for rids in steps for rid in rids]
    assert (follower.last, follower.digest) == (log.last, log.digest)
