"""The planner: one look after the other, and what it makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.scale import Bounds, Decision, Memory, RoleSeen, ScalePace, Seen, plan
from tests.scale.day import Figures, run_day

WIDE = Bounds(low=1, high=16)
CALM = RoleSeen(wanted=2, ready=2)


def watch(
    seconds: int, *, prefill: RoleSeen = CALM, decode: RoleSeen = CALM, begin: int = 0, memory: Memory | None = None,
    bounds: Bounds = WIDE, **pace: Any,
) -> Decision:  # fmt: skip
    """The last of the decisions on the same look every 5 s."""
    memory = memory or Memory()
    for at_s in range(begin, begin + seconds + 1, 5):
        seen = Seen(at_s=float(at_s), prefill=prefill, decode=decode)
        made = plan(seen, memory, prefill=bounds, decode=bounds, pace=ScalePace(**pace))
        memory = made.memory
    return made


def full(**more: Any) -> RoleSeen:
    return replace(RoleSeen(wanted=2, ready=2, running_reqs=20, usage=0.9, busy=0.5), **more)


def test_engines_that_are_nearly_full_get_another_one_and_the_reason_is_said() -> None:
    made = watch(15, decode=full(), prefill=full(usage=0.0, busy=0.65))
    assert (made.prefill, made.decode) == (2, 3)
    assert made.why == ("decode 2 -> 3: load 1.80 engines, 0 waiting, usage 90%, busy 50%",)


def test_a_moment_of_load_changes_nothing() -> None:
    before = watch(300, decode=full(usage=0.7))
    moment = watch(0, decode=full(usage=1.0), begin=305, memory=before.memory)
    assert moment.decode == 2
    assert watch(15, decode=full(usage=1.0), begin=310, memory=moment.memory).decode == 3


def test_requests_that_wait_are_as_large_as_those_that_run() -> None:
    """20 requests fill 1.8 engines: 20 more would fill 3.6, which is under three quarters of 5."""
    assert watch(15, decode=full(queue_reqs=10)).decode == 4
    assert watch(15, decode=full(queue_reqs=10, wanted=4)).decode == 4, "two have been asked for already"


def test_a_long_queue_asks_for_no_more_than_twice_what_is_ready() -> None:
    assert watch(15, decode=full(queue_reqs=500)).decode == 4
    assert watch(15, prefill=full(busy=1.0, queue_reqs=500), decode=full(usage=0.7)).prefill == 4


def test_idle_engines_leave_after_five_minutes_and_the_fewest_stay() -> None:
    assert watch(295).decode == 2
    gone = watch(305)
    assert (gone.prefill, gone.decode) == (1, 1)
    kept = watch(305, bounds=Bounds(low=2, high=4))
    assert (kept.prefill, kept.decode) == (2, 2)


def test_one_busy_look_in_five_minutes_keeps_the_engines() -> None:
    memory = watch(200).memory
    memory = watch(0, decode=full(), begin=205, memory=memory).memory
    assert watch(250, begin=210, memory=memory).decode == 2
    assert watch(305, begin=210, memory=memory).decode == 1


def test_an_engine_leaves_at_once_where_the_other_role_has_no_room() -> None:
    crowded = full(wanted=4, ready=2, unplaced=1)
    assert watch(20, prefill=replace(CALM, wanted=3, ready=3), decode=full()).prefill == 3
    assert watch(20, prefill=replace(CALM, wanted=3, ready=3), decode=crowded).prefill < 3


def test_prefill_follows_decode_by_the_ratio_of_their_work() -> None:
    """Half a unit of prefill work for each of decode: a wave that fills decode calls for prefill before it is late."""
    usual = watch(600, prefill=full(usage=0.0, busy=0.35), decode=full(usage=0.7))
    assert usual.memory.ratio == pytest.approx(0.5)
    wave = full(wanted=6, ready=6, usage=0.9, running_reqs=60)
    made = watch(15, prefill=full(wanted=2, usage=0.0, busy=0.7), decode=wave, begin=605, memory=usual.memory)
    alone = watch(15, prefill=full(wanted=2, usage=0.0, busy=0.7), decode=wave)
    assert (alone.prefill, made.prefill) == (2, 4)


def test_while_no_engine_answers_nothing_is_decided() -> None:
    lost = RoleSeen(wanted=3, ready=0)
    assert watch(900, decode=lost, prefill=replace(CALM, ready=0, wanted=3)).decode == 3


def test_without_prefill_engines_the_others_are_judged_alone() -> None:
    none = Bounds(low=0, high=0)
    made = plan(Seen(at_s=0.0, prefill=RoleSeen(wanted=0, ready=0), decode=CALM), Memory(), prefill=none, decode=WIDE)
    assert (made.prefill, made.decode) == (0, 2)


roles = st.builds(
    RoleSeen,
    wanted=st.integers(0, 20), ready=st.integers(0, 20), running_reqs=st.integers(0, 500),
    queue_reqs=st.integers(0, 5000), usage=st.floats(0, 1), busy=st.floats(0, 1), unplaced=st.integers(0, 5),
)  # fmt: skip


@given(looks=st.lists(st.tuples(roles, roles), max_size=40), low=st.integers(0, 5), more=st.integers(0, 10))
def test_whatever_is_seen_the_bounds_hold_and_the_memory_stays_small(
    looks: list[tuple[RoleSeen, RoleSeen]], low: int, more: int
) -> None:
    bounds, memory = Bounds(low=low, high=low + more), Memory()
    for number, (prefill, decode) in enumerate(looks):
        seen = Seen(at_s=20.0 * number, prefill=prefill, decode=decode)
        made = plan(seen, memory, prefill=bounds, decode=bounds)
        assert made == plan(seen, memory, prefill=bounds, decode=bounds)
        assert all(bounds.low <= count <= bounds.high for count in (made.prefill, made.decode))
        memory = made.memory
        assert len(memory.loads) <= 17


@pytest.mark.slow
@settings(max_examples=25)
@given(usage=st.floats(0, 1), busy=st.floats(0, 1), running=st.integers(1, 64), count=st.integers(1, 12))
def test_a_steady_load_settles(usage: float, busy: float, running: int, count: int) -> None:
    """The same requests on whatever engines there are: each role changes in one direction only, and then no more."""
    work = {"prefill": count * busy, "decode": count * usage}
    wanted, history, memory = {"prefill": count, "decode": count}, [], Memory()
    for at_s in range(0, 3600, 5):
        seen = {
            name: RoleSeen(
                wanted=n, ready=n, running_reqs=running, usage=min(1.0, work[name] / n), busy=min(1.0, work[name] / n)
            )
            for name, n in wanted.items()
        }
        made = plan(
            Seen(at_s=float(at_s), prefill=seen["prefill"], decode=seen["decode"]), memory, prefill=WIDE, decode=WIDE
        )
        memory, wanted = made.memory, {"prefill": made.prefill, "decode": made.decode}
        history.append((made.prefill, made.decode))
    for column in (0, 1):
        steps = [b[column] - a[column] for a, b in pairwise(history) if a[column] != b[column]]
        assert all(step > 0 for step in steps) or all(step < 0 for step in steps), history
    assert history[-1] == history[len(history) // 2]


def is_good(day: Figures) -> bool:
    """Nothing is lost, hardly a request waits, it does not go to and fro, and it costs little more than it must."""
    return (
        day.answered == day.requests
        and day.regrets <= 8
        and day.changes <= 80
        and day.queue_max <= 400
        and day.wait_p99_s <= 30
        and day.engine_hours <= 1.6 * day.ideal_hours
        and day.engine_hours <= 0.6 * day.peak_hours
    )


@pytest.mark.slow
def test_a_day_is_served_at_little_more_than_it_must_cost() -> None:
    day = run_day(7)
    assert is_good(day), day


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(100, 120))
def test_other_days_too(seed: int) -> None:
    day = run_day(seed)
    assert is_good(day), day


@pytest.mark.proof
def test_a_planner_without_patience_goes_to_and_fro() -> None:
    """The test above can fail: the same day, with no window and no gap between more and fewer."""
    day = run_day(7, pace=ScalePace(up_s=0.0, down_s=5.0, spare=0.75))
    assert not is_good(day)
    assert day.regrets > 100, day
