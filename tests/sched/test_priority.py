"""The policy `priority`: smaller is served first, others give way, no token is lost, and floods keep no request out."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.core.errors import CapacityError, TooLate
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine


def order_of_ends(engine: TinyEngine) -> list[str]:
    """Steps to the end; the requests in the order in which they ended."""
    ended: list[str] = []
    while (outcome := engine.step()) is not None:
        engine.scheduler.sanity_check()
        ended += [delta.rid for delta in outcome.deltas if delta.finish is not None]
    engine.check_drained()
    return ended


def check_answers(engine: TinyEngine, requests: list[Request]) -> None:
    for request in requests:
        assert engine.answers[request.rid].tokens == fake_continue(request, request.sampling.max_new_tokens or 0, 1000)


def retractions_of(engine: TinyEngine, rid: str) -> int:
    last = engine.answers[rid].last
    assert last is not None
    assert last.usage is not None
    return last.usage.retractions


@pytest.mark.parametrize(
    ("policy", "expected"), [("priority", ["c", "e", "b", "d", "a"]), ("fcfs", ["a", "b", "c", "d", "e"])]
)
def test_the_smallest_number_is_served_first_and_of_one_number_the_oldest(policy: str, expected: list[str]) -> None:
    engine = TinyEngine(schedule_policy=policy, max_running_requests=1)
    for number, (rid, priority) in enumerate({"a": 5, "b": 0, "c": -7, "d": 0, "e": -7}.items()):
        engine.add(rid, [10 + number], max_new_tokens=1, priority=priority)
    assert order_of_ends(engine) == expected


@pytest.mark.parametrize(("depth", "overlaps"), [(1, False), (1, True), (3, False)])
def test_a_running_request_gives_its_row_to_a_more_important_one_and_goes_on_where_it_was(
    depth: int, overlaps: bool
) -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1, depth=depth, overlaps=overlaps)
    low = engine.add("low", [1, 2, 3], max_new_tokens=12, priority=1)
    for _ in range(4):
        engine.step()
    high = engine.add("high", [4, 5], max_new_tokens=3)
    assert order_of_ends(engine) == ["high", "low"]
    check_answers(engine, [low, high])
    assert (retractions_of(engine, "low"), retractions_of(engine, "high")) == (1, 0)


@pytest.mark.parametrize("overlaps", [False, True])
def test_running_requests_give_way_the_least_important_first_until_there_are_pages_enough(overlaps: bool) -> None:
    engine = TinyEngine(schedule_policy="priority", page_count=13, growth_tokens=0, overlaps=overlaps)
    running = [
        engine.add(rid, [n] * 12, max_new_tokens=8, priority=n) for n, rid in ((1, "mid"), (3, "least"), (2, "low"))
    ]
    engine.step()
    high = engine.add("high", [9] * 30, max_new_tokens=4)
    ends = order_of_ends(engine)
    assert ends[0] == "high"
    check_answers(engine, [*running, high])
    given = [retractions_of(engine, rid) for rid in ("mid", "low", "least")]
    assert given[0] <= given[1] <= given[2]
    assert given[2] > 0


@pytest.mark.parametrize(("policy", "priority"), [("priority", 5), ("priority", 6), ("fcfs", 0), ("lpm", 0)])
def test_no_request_gives_way_to_an_equal_or_a_less_important_one_nor_under_another_policy(
    policy: str, priority: int
) -> None:
    engine = TinyEngine(schedule_policy=policy, max_running_requests=1)
    engine.add("first", [1, 2, 3], max_new_tokens=8, priority=5)
    engine.step()
    engine.add("second", [4, 5], max_new_tokens=2, priority=priority)
    assert order_of_ends(engine) == ["first", "second"]
    assert engine.scheduler.stats().totals.retracted == 0


def test_no_request_gives_way_to_one_that_waits_for_its_twin() -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=2, chunked_prefill_size=4)
    engine.add("other", [7], max_new_tokens=20, priority=1)
    engine.add("twin", [3] * 24, max_new_tokens=1, priority=1)
    engine.step()
    engine.add("high", [3] * 24, max_new_tokens=1, priority=0)
    engine.step()
    assert engine.scheduler.stats().totals.retracted == 0  # its row would be taken from it for nothing
    assert order_of_ends(engine) == ["high", "twin", "other"]  # once less is missing than half, it need not wait
    assert retractions_of(engine, "other") == 0


def test_a_flood_keeps_no_more_important_request_out() -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1, max_queued_requests=2)
    for number in range(2):
        engine.add(f"low-{number}", [1, number], max_new_tokens=1, priority=9)
    with pytest.raises(CapacityError, match="2 requests wait already, expected less than max_queued_requests = 2"):
        engine.add("one-more", [1], max_new_tokens=1, priority=9)
    engine.add("urgent", [2], max_new_tokens=1, priority=8)
    with pytest.raises(CapacityError):  # three wait that would be served before it
        engine.add("later", [3], max_new_tokens=1, priority=10)
    for priority in range(7, -6, -1):  # each more important than all before it
        engine.add(f"p{priority}", [4], max_new_tokens=1, priority=priority)
    with pytest.raises(CapacityError, match="16 requests of all priorities"):
        engine.add("most", [4], max_new_tokens=1, priority=-100)
    engine.scheduler.abort_all("over")
    engine.check_drained()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_in_any_order_the_line_is_sorted_and_every_answer_is_whole(seed: int) -> None:
    rng = Rng(seed)
    engine = TinyEngine(
        schedule_policy="priority", page_count=rng.randrange(12, 30), growth_tokens=rng.choice([0, 8]),
        max_running_requests=rng.randrange(1, 4), depth=rng.choice([1, 2]), chunked_prefill_size=rng.choice([4, 16]),
    )  # fmt: skip
    requests: list[Request] = []
    for number in range(14):
        prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 12))]
        priority = rng.choice([-(1 << 31), -1, 0, 0, 3, (1 << 31) - 1])
        requests.append(engine.add(f"r{number}", prompt, max_new_tokens=rng.randrange(1, 14), priority=priority))
        for _ in range(rng.randrange(3)):
            engine.step()
            engine.scheduler.sanity_check()
        waiting = [(state.request.priority, int(state.rid[1:])) for state in engine.scheduler._waiting]
        assert waiting == sorted(waiting)
    ended = order_of_ends(engine)
    assert len(set(ended)) == len(ended)
    check_answers(engine, requests)


def test_of_one_priority_the_earliest_deadline_is_first_and_those_without_one_come_last() -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1)
    for rid, timeout_s, priority in (("none", 0.0, 1), ("late", 90.0, 1), ("soon", 9.0, 1), ("least", 1.0, 2)):
        engine.add(rid, [1, len(rid)], max_new_tokens=1, priority=priority, timeout_s=timeout_s)
    assert order_of_ends(engine) == ["soon", "late", "none", "least"]


def test_a_deadline_changes_nothing_under_first_come_first_served() -> None:
    engine = TinyEngine(max_running_requests=1)
    engine.add("first", [1], max_new_tokens=1)
    engine.add("soon", [2], max_new_tokens=1, timeout_s=1.0)
    assert order_of_ends(engine) == ["first", "soon"]


@pytest.mark.parametrize("seed", range(20))
def test_none_waits_for_a_more_important_one_that_came_too_long_after_it(seed: int) -> None:
    """Under a flood that never ends: of two that wait, the one served first came at most n and a half steps later than
    the other, where it is n steps more important."""
    rng = Rng(seed)
    ageing_s = rng.choice([0.2, 1.0, 5.0])
    engine = TinyEngine(
        schedule_policy="priority", max_running_requests=rng.choice([1, 2]), priority_ageing_s=ageing_s,
        max_queued_requests=4096,
    )  # fmt: skip
    requests: dict[str, Request] = {}
    begun: set[str] = set()
    for number in range(300):
        if rng.random() < 0.8:
            timeout_s = rng.choice([0.0, 0.0, 100.0, 1000.0])
            rid, priority = f"r{number}", rng.choice([0, 0, 0, 0, 1, 3])
            requests[rid] = engine.add(
                rid, [number + 1], max_new_tokens=rng.randrange(1, 4), priority=priority, timeout_s=timeout_s
            )
        engine.clock.advance(rng.random() * 0.05)
        waited = {state.rid for state in engine.scheduler._waiting}
        plan = engine.plan()
        if plan is None:
            continue
        new = [work.rid for work in plan.work if work.rid in waited]
        left = [state.request for state in engine.scheduler._waiting]
        for one in (requests[rid] for rid in new):
            for other in left:
                steps = other.priority - one.priority
                assert one.arrival - other.arrival <= (steps + 0.5) * ageing_s + 1e-3, (seed, one.rid, other.rid)
        begun.update(new)
        engine.commit()
    engine.run()
    engine.check_drained()
    assert len(begun) > 30


def test_a_low_priority_under_an_endless_flood_is_served_in_time_and_never_without_ageing() -> None:
    served_at = {}
    for ageing_s in (1.0, 0.0):
        engine = TinyEngine(schedule_policy="priority", max_running_requests=1, priority_ageing_s=ageing_s)
        engine.add("low", [999], max_new_tokens=1, priority=2)
        for number in range(400):
            engine.add(f"r{number}", [number + 1], max_new_tokens=1)
            engine.step()
            if "low" in engine.answers:
                served_at[ageing_s] = engine.clock.now()
                break
        engine.scheduler.abort_all("over")
    assert set(served_at) == {1.0}
    assert 2.0 <= served_at[1.0] <= 2.6


def test_a_request_that_aged_past_the_running_ones_takes_nothing_from_them() -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1, priority_ageing_s=1.0)
    engine.clock.advance(10.0)
    engine.add("low", [1], max_new_tokens=8, priority=1)
    engine.step()
    engine.clock.advance(5.0)
    engine.add("high", [2], max_new_tokens=1, priority=0)  # five steps later: it waits
    assert order_of_ends(engine) == ["low", "high"]
    assert engine.scheduler.totals.retracted == 0


def test_each_priority_has_a_bound_of_its_own_where_one_is_set() -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1, queued_max_of={5: 1, 0: 2})
    engine.add("five", [1], max_new_tokens=1, priority=5)
    with pytest.raises(CapacityError, match=r"1 requests of priority 5 wait already, expected less than 1"):
        engine.add("five-again", [2], max_new_tokens=1, priority=5)
    for number in range(2):
        engine.add(f"zero{number}", [3 + number], max_new_tokens=1)
    with pytest.raises(CapacityError, match="2 requests of priority 0"):
        engine.add("zero2", [9], max_new_tokens=1)
    engine.add("six", [9], max_new_tokens=1, priority=6)
    engine.run()
    engine.check_drained()


def test_a_prompt_that_cannot_be_computed_by_its_deadline_is_refused_when_it_comes_or_when_its_turn_does() -> None:
    engine = TinyEngine(
        schedule_policy="priority", max_running_requests=1, context_length=256, page_count=129, chunked_prefill_size=48
    )  # fmt: skip
    engine.add("unmeasured", [4] * 200, max_new_tokens=1, timeout_s=0.001)  # no step was as large: none can tell
    engine.scheduler.abort("unmeasured", "over")
    engine.add("measure", [5] * 48, max_new_tokens=1)
    engine.run()  # 48 tokens in 10 ms
    with pytest.raises(TooLate, match=r"200 tokens, which takes longer than the 0.03 s"):
        engine.add("never", [6] * 200, max_new_tokens=1, timeout_s=0.03)
    engine.add("short", [7] * 40, max_new_tokens=1, timeout_s=0.03)
    engine.add("first", [8], max_new_tokens=9, priority=-1)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.take_late() == []
    while "first" not in engine.answers or engine.answers["first"].finish is None:
        engine.step()
    assert engine.step() is None
    assert engine.scheduler.take_late() == ["short"]
    assert engine.scheduler.totals.computed_tokens == 48 + 1 + 8  # nothing was computed for it
    engine.scheduler.abort("short", "late")
    engine.check_drained()


@pytest.mark.parametrize(("important", "other"), [(0, 10), (-5, 0), (1, 2), (-3, -2)])
def test_under_the_eviction_policy_priority_prompts_of_less_important_requests_leave_first(
    important: int, other: int
) -> None:
    engine = TinyEngine(policy="priority", page_count=13)
    for rid, first, priority in (("older", 100, important), ("later", 200, other), ("needs room", 300, other)):
        engine.add(rid, range(first, first + 17), max_new_tokens=1, priority=priority)
        engine.run()
    found = [engine.cache.probe("", np.arange(first, first + 16, dtype=np.int32)).device for first in (100, 200)]
    assert found == [16, 12]
