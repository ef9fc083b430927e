"""Fair shares of API keys: by weight, for all that have requests in line, whatever they flood the queue with."""

from __future__ import annotations

from collections import Counter

import pytest

from serinus.core.errors import RateLimited
from serinus.core.request import Share
from serinus.core.rng import Rng
from serinus.sched.shares import FairShares
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine
from tests.cells import diagonal

A, B, C = Share(name="a"), Share(name="b"), Share(name="c", weight=3.0)


def tokens_in(engine: TinyEngine, steps: int, names: dict[str, str]) -> Counter[str]:
    """Steps; the tokens that went through the model, by share. `names`: that of each request."""
    found: Counter[str] = Counter()
    for _ in range(steps):
        plan = engine.plan()
        if plan is None:
            break
        for work in plan.work:
            found[names[work.rid]] += len(work.tokens)
        engine.commit()
        engine.scheduler.sanity_check()
    return found


def flood(engine: TinyEngine, share: Share, count: int, names: dict[str, str], *, tokens: int = 4) -> None:
    for number in range(count):
        rid = f"{share.name}{len(names)}"
        names[rid] = share.name
        engine.add(rid, [len(names) % 900 + 1, number % 7], max_new_tokens=tokens, share=share)


def test_a_share_that_floods_the_queue_keeps_no_other_out() -> None:
    engine = TinyEngine(max_running_requests=1)
    names: dict[str, str] = {}
    flood(engine, A, 40, names)
    tokens_in(engine, 12, names)
    late = engine.add("late", [500, 501], max_new_tokens=2, share=B)
    names["late"] = "b"
    steps = 0
    while "late" not in engine.answers or engine.answers["late"].finish is None:
        assert engine.step() is not None
        steps += 1
    assert steps <= 4 + 2 + 1  # what ran, and its own
    assert engine.answers["late"].tokens == fake_continue(late, 2, 1000)
    assert engine.scheduler.waiting_count > 30


@pytest.mark.parametrize(("rows", "policy"), diagonal([3, 1], ["fcfs", "priority"]))
def test_tokens_are_shared_by_weight_while_all_have_requests_in_line(rows: int, policy: str) -> None:
    engine = TinyEngine(max_running_requests=rows, schedule_policy=policy)
    names: dict[str, str] = {}
    flood(engine, A, 200, names, tokens=6)
    flood(engine, C, 200, names, tokens=3)  # smaller requests, three times the weight
    found = tokens_in(engine, 400 // rows, names)
    assert engine.scheduler._requests.shares.waiting_of("a") > 0
    assert engine.scheduler._requests.shares.waiting_of("c") > 0
    most = 8 * (rows + 1)  # a request of each for every row, over the weight
    assert abs(found["c"] / 3 - found["a"]) <= most, found


def test_a_share_is_served_alone_at_full_speed_and_pays_nothing_for_it_later() -> None:
    engine = TinyEngine(max_running_requests=1)
    names: dict[str, str] = {}
    flood(engine, B, 1, names)
    flood(engine, A, 60, names)
    tokens_in(engine, 150, names)
    flood(engine, B, 60, names)
    found = tokens_in(engine, 100, names)
    assert abs(found["a"] - found["b"]) <= 16, found  # b saved up nothing, a owes nothing


def test_priorities_count_among_the_requests_of_one_key_alone() -> None:
    engine = TinyEngine(max_running_requests=1, schedule_policy="priority")
    for number in range(6):
        engine.add(f"a{number}", [number + 1], max_new_tokens=1, priority=-100 - number, share=A)
        engine.add(f"b{number}", [number + 101], max_new_tokens=1, priority=5, share=B)
    ended = []
    while (outcome := engine.step()) is not None:
        ended += [delta.rid for delta in outcome.deltas if delta.finish is not None]
    assert ended[0::2] == [f"a{number}" for number in reversed(range(6))]
    assert ended[1::2] == [f"b{number}" for number in range(6)]


def test_no_request_gives_way_to_one_of_another_key() -> None:
    engine = TinyEngine(max_running_requests=1, schedule_policy="priority")
    engine.add("a", [1], max_new_tokens=8, priority=9, share=A)
    engine.step()
    engine.add("b", [2], max_new_tokens=1, share=B)
    engine.run()
    assert engine.scheduler.totals.retracted == 0


def test_more_of_a_key_than_may_wait_are_refused_and_others_are_not() -> None:
    engine = TinyEngine(max_running_requests=1)
    small = Share(name="small", queued_max=2)
    for number in range(2):
        engine.add(f"s{number}", [number + 1], max_new_tokens=1, share=small)
    with pytest.raises(RateLimited, match=r"2 requests of the API key 'small' wait already.*max_queued_requests = 2"):
        engine.add("s2", [9], max_new_tokens=1, share=small)
    engine.add("other", [9], max_new_tokens=1, share=A)
    engine.step()
    engine.add("s2", [9], max_new_tokens=1, share=small)
    engine.run()
    engine.check_drained()


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_arrivals_two_shares_with_requests_in_line_get_their_parts(seed: int) -> None:
    """The bound of the class, over drawn arrivals: no share lags behind another by more than the largest requests."""
    rng = Rng(seed)
    shares = FairShares()
    all_of = [Share(name=f"s{n}", weight=rng.choice([0.5, 1.0, 2.0, 5.0])) for n in range(rng.randrange(2, 6))]
    line = {share.name: 0 for share in all_of}
    backlogged: dict[tuple[str, str], tuple[float, float]] = {}
    served: Counter[str] = Counter()
    for _ in range(3000):
        if rng.random() < 0.55:
            share = rng.choice(all_of)
            shares.wait(share)
            line[share.name] += 1
        elif waiting := [share for share in all_of if line[share.name]]:
            share = min(waiting, key=lambda each: (shares.time_of(each.name), each.name))
            shares.leave(share)
            shares.serve(share)
            line[share.name] -= 1
            tokens = rng.randrange(1, 30)
            shares.charge(share, tokens)
            served[share.name] += tokens
        for one in all_of:
            for other in all_of:
                pair = (one.name, other.name)
                if not (line[one.name] and line[other.name]):
                    backlogged.pop(pair, None)
                    continue
                since = backlogged.setdefault(pair, (served[one.name], served[other.name]))
                got = (served[one.name] - since[0]) / one.weight - (served[other.name] - since[1]) / other.weight
                assert got <= 2 * 30 / one.weight + 2 * 30 / other.weight, (seed, pair, got)


def test_shares_that_ended_are_forgotten() -> None:
    shares = FairShares()
    for number in range(5000):
        share = Share(name=f"k{number}")
        shares.wait(share)
        shares.leave(share)
        shares.serve(share)
        shares.charge(share, 1)
        shares.serve(share)
    assert len(shares._times) <= 300
    assert make_request("r", [1]).share == Share()


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_the_key_that_holds_most_for_its_weight_gives_its_pages_back(weight: float) -> None:
    """Under pressure the youngest request of all would go, which is the only one of its key."""
    small, flood_of = Share(name="small", weight=weight), Share(name="flood")
    engine = TinyEngine(page_count=1 + 16, page_size=2, growth_tokens=0)
    for number in range(4):
        engine.add(f"flood{number}", [number + 1, 2], max_new_tokens=14, share=flood_of)
    engine.add("small", [90, 91], max_new_tokens=14, share=small)
    engine.run()
    usages = {rid: answer.last.usage for rid, answer in engine.answers.items() if answer.last is not None}
    retracted = {rid: usage.retractions for rid, usage in usages.items() if usage is not None}
    assert sum(retracted.values()) > 0
    assert retracted["flood0"] == 0  # the oldest gets on
    assert (retracted["small"] == 0) == (weight == 1.0), retracted
    engine.check_drained()
