"""What the scheduler journals and who waits for a grant, as decisions that every rank can count by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.engine.ranks.placements import Placements
from serinus.parallel import DecisionLog, RankTable


class Nobody:
    def placed(self, rid: str, queue: str) -> None:
        """Nothing."""

    def dropped(self, rid: str, code: str) -> None:
        """Nothing."""


class Told:
    """A leader's placements and a rank that lives by them."""

    def __init__(self) -> None:
        self.log = DecisionLog()
        self.placements = Placements(self.log)
        self.table = RankTable(Nobody())

    def take(self, moves: Sequence[tuple[str, str]], ungranted: Collection[str] = ()) -> dict[str, int]:
        """One turn; the queues that are not empty."""
        self.placements.take(moves, ungranted)
        for decision in self.log.header(1).decisions:
            self.table.apply(decision)
        gauges = self.table.gauges()
        return {gauge.removeprefix("num_").removesuffix("_reqs"): n for gauge, n in gauges.items() if n}


def test_a_request_that_waits_for_its_grant_bootstraps_until_it_has_it() -> None:
    told = Told()
    assert told.take([("x", "waiting")], {"x"}) == {"prefill_bootstrap_queue": 1}
    assert told.take([("x", "running")], {"x"}) == {"prefill_bootstrap_queue": 1}
    assert told.take([]) == {"running": 1}
    assert told.take([("x", "inflight")]) == {"prefill_inflight_queue": 1}
    assert told.take([("x", "")]) == {}


def test_a_request_that_ends_without_a_grant_is_gone() -> None:
    told = Told()
    told.take([("x", "waiting")], {"x"})
    assert told.take([("x", "")], {"x"}) == {}
    assert told.take([], {"x"}) == {}, "the handoff machine may name it a little longer"
    assert len(told.table) == 0


def test_what_came_and_went_between_two_headers_leaves_nothing() -> None:
    told = Told()
    assert told.take([("x", "waiting"), ("x", "running"), ("x", ""), ("y", "waiting")]) == {"queue": 1}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.sampled_from("abc"), st.sampled_from(["waiting", "running", "inflight", ""])), max_size=4
            ),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=8,
    )
)
def test_every_rank_counts_what_the_scheduler_has(turns: list[tuple[list[tuple[str, str]], set[str]]]) -> None:
    told, queues = Told(), dict[str, str]()
    for moves, ungranted in turns:
        for rid, queue in moves:
            queues.pop(rid, None)
            if queue:
                queues[rid] = queue
        told.take(moves, ungranted)
        expected = {rid: "bootstrap" if rid in ungranted else queue for rid, queue in queues.items()}
        assert told.table._queue_of == expected
