"""The policy `priority`: smaller is served first, others give way, no token is lost, and floods keep no request out."""

from __future__ import annotations

import pytest

from serinus.core.errors import CapacityError
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


@pytest.mark.parametrize("depth", [1, 3])
def test_a_running_request_gives_its_row_to_a_more_important_one_and_goes_on_where_it_was(depth: int) -> None:
    engine = TinyEngine(schedule_policy="priority", max_running_requests=1, depth=depth)
    low = engine.add("low", [1, 2, 3], max_new_tokens=12, priority=1)
    for _ in range(4):
        engine.step()
    high = engine.add("high", [4, 5], max_new_tokens=3)
    assert order_of_ends(engine) == ["high", "low"]
    check_answers(engine, [low, high])
    assert (retractions_of(engine, "low"), retractions_of(engine, "high")) == (1, 0)


def test_running_requests_give_way_the_least_important_first_until_there_are_pages_enough() -> None:
    engine = TinyEngine(schedule_policy="priority", page_count=13, growth_tokens=0)
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
