"""Prompt chunks that a plan says of the next one: when they are said, of which requests, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from serinus.core.handoff import HandoffSpec
from serinus.core.plan import StepPlan
from serinus.core.rng import Rng
from serinus.sched.request_state import Phase
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine

BUDGET = 8


def engine(**settings: Any) -> TinyEngine:
    """Eight prompt tokens a step, two pages."""
    given = {"overlaps": True, "growth_tokens": 0, "max_running_requests": 6, "chunked_prefill_size": BUDGET}
    return TinyEngine(**{**given, **settings})


def prompt(number: int, length: int) -> list[int]:
    """Unlike that of any other number from its first token on."""
    return [30 * (number + 1) + i for i in range(length)]


def filled(**settings: Any) -> tuple[TinyEngine, StepPlan]:
    """An engine with more prompts than two steps hold, and its first plan."""
    tiny = engine(**settings)
    for number in range(6):
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=4)
    plan = tiny.plan()
    assert plan is not None
    return tiny, plan


def planned(tiny: TinyEngine) -> StepPlan:
    plan = tiny.plan()
    assert plan is not None
    return plan


def work_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(work.rid, work.start, len(work.tokens)) for work in plan.work]


def ahead_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [] if plan.ahead is None else [(each.rid, each.start, len(each.tokens)) for each in plan.ahead.work]


def assert_answered(tiny: TinyEngine, *rids: str, count: int = 4, length: int = 8) -> None:
    for rid in rids:
        request = make_request(rid, prompt(int(rid[1:]), length))
        assert tiny.answers[rid].tokens == fake_continue(request, count, 1000, [], tiny.runner.windows), rid


def test_chunks_that_fill_the_next_step_are_said_behind_tokens_and_taken_as_they_are() -> None:
    tiny, first = filled()
    assert work_of(first) == [("r0", 0, 8)]
    assert ahead_of(first) == [("r0", 8, 1), ("r1", 0, 8)], "the prompt that ends in the plan goes on by a token"
    assert first.ahead is not None
    assert first.ahead.follows.tolist() == [0]
    told = tiny.commit()
    second = planned(tiny)
    assert [id(work) for work in second.work] == [id(work) for work in first.ahead.work]
    assert second.takes is not None
    assert second.takes.tolist() == [0, 1]
    assert ahead_of(second) == [("r0", 9, 1), ("r1", 8, 1), ("r2", 0, 8)]
    then = tiny.commit()
    assert (told.prompt_tokens, told.decode_tokens, told.new_requests) == (8, 0, 1)
    assert (then.prompt_tokens, then.decode_tokens, then.new_requests) == (8, 1, 1)
    tiny.run()
    assert tiny.runner.chunks_followed >= 3
    assert_answered(tiny, *(f"r{number}" for number in range(6)))
    tiny.check_drained()


def test_a_newcomer_that_is_admitted_ahead_is_counted_with_the_plan_that_brings_its_chunk() -> None:
    """With what it found cached, by tier."""
    tiny = engine()
    tiny.add("first", prompt(1, 9), max_new_tokens=1)
    tiny.run()
    for number in range(2, 7):
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=1)
        if number == 2:
            tiny.add("again", [*prompt(1, 8), *prompt(8, 8)], max_new_tokens=1)
    assert ahead_of(planned(tiny)) == [("again", 8, 8)]
    assert (tiny.commit().cached_tokens, tiny.scheduler._batch.prefilling[0].rid) == (0, "again")
    planned(tiny)
    outcome = tiny.commit()
    assert (outcome.new_requests, outcome.cached_tokens, outcome.cached_by_tier) == (1, 8, {"device": 8})


@pytest.mark.parametrize("others", [0, 1])
def test_nothing_is_said_where_prompts_leave_some_of_the_next_step(others: int) -> None:
    """A newcomer would be in it; also where a longer prompt leaves it half."""
    tiny = engine()
    tiny.add("r0", prompt(0, 8), max_new_tokens=4)
    tiny.add("r1", prompt(1, 4 if others else 16), max_new_tokens=4)
    plan = planned(tiny)
    assert plan.ahead is None
    tiny.add("late", prompt(7, 4), max_new_tokens=4)
    tiny.commit()
    assert ("late", 0, 4) in work_of(planned(tiny))


def test_one_that_was_admitted_and_not_said_is_in_the_next_plan() -> None:
    """It has its row and its pages, and a newcomer behind it that is shorter its part of the step."""
    tiny = engine()
    tiny.add("r0", prompt(0, 8), max_new_tokens=4)
    tiny.add("r1", prompt(1, 8), max_new_tokens=4)
    assert planned(tiny).ahead is None
    (state,) = (each for each in tiny.scheduler.requests if each.rid == "r1")
    assert (state.phase, state.under_way) == (Phase.PREFILL, False)
    tiny.scheduler.sanity_check()
    tiny.add("r2", prompt(2, 4), max_new_tokens=4)
    assert tiny.commit().new_requests == 1
    assert work_of(planned(tiny)) == [("r0", 8, 1), ("r1", 0, 4), ("r2", 0, 4)]
    assert tiny.commit().new_requests == 2


def test_decodes_alone_are_said_behind_the_last_prompts() -> None:
    tiny = engine()
    tiny.add("r0", prompt(0, 12), max_new_tokens=4)
    assert planned(tiny).ahead is None, "the chunk of 4 leaves some of the step"
    tiny.commit()
    second = planned(tiny)
    assert work_of(second) == [("r0", 8, 4)]
    assert ahead_of(second) == [("r0", 12, 1)]


@pytest.mark.parametrize("how", ["abort", "heal"])
def test_a_chunk_ahead_of_a_request_that_goes_is_dropped_and_its_pages_are_free(how: str) -> None:
    """It is in no plan yet: whatever it had is given back at once, and the next plan takes the rest."""
    tiny, first = filled(heals=how == "heal", verify_steps=int(how == "heal"))
    assert ahead_of(first) == [("r0", 8, 1), ("r1", 0, 8)]
    if how == "abort":
        tiny.take(tiny.scheduler.abort("r1", "gone"))
    else:
        tiny.scheduler.heals.heal("r1", "wrong", 0.0)
    tiny.scheduler.sanity_check()
    tiny.commit()
    second = planned(tiny)
    assert work_of(second) == [("r0", 8, 1)]
    assert second.takes is not None
    assert second.takes.tolist() == [0]
    tiny.run()
    assert_answered(tiny, "r0", *(f"r{number}" for number in range(1 + (how == "abort"), 6)))
    tiny.check_drained()


def test_a_plan_of_which_nothing_goes_on_is_followed_by_another_one() -> None:
    tiny = engine()
    for number in range(6):
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=1)
    assert ahead_of(planned(tiny)) == [("r1", 0, 8)], "r0 ends with its first token"
    tiny.take(tiny.scheduler.abort("r1", "gone"))
    tiny.commit()
    second = planned(tiny)
    assert (work_of(second), second.takes) == ([("r2", 0, 8)], None)


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 0}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"hidden_state": True}]
)
@pytest.mark.parametrize("whose", ["the chunk's", "the token's"])
def test_no_chunk_is_said_where_the_host_is_to_look_at_a_token_of_that_step(asked: dict[str, Any], whose: str) -> None:
    tiny = engine()
    for number in range(6):
        given = asked if number == (whose == "the chunk's") else {}
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=4, **given)
    plan = planned(tiny)
    is_alone = whose == "the token's" and "prompt_logprobs" in asked  # by then it has them
    assert ahead_of(plan) == ([("r0", 8, 1), ("r1", 0, 8)] if is_alone else [])
    tiny.run()
    tiny.check_drained()


def test_a_newcomer_that_would_find_more_of_its_prefix_behind_the_plan_waits_for_that() -> None:
    """The first page of the running prompt, a third of its own."""
    tiny = engine()
    tiny.add("r0", prompt(0, 8), max_new_tokens=4)
    tiny.add("next", [*prompt(0, 4), *prompt(1, 8)], max_new_tokens=4)
    for number in range(2, 6):
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=4)
    assert planned(tiny).ahead is None
    tiny.commit()
    assert ("next", 4, 8) in work_of(planned(tiny))


def test_no_newcomer_is_admitted_ahead_whose_prefix_comes_from_the_host() -> None:
    tiny = engine(host_pages=32, page_count=17)
    tiny.add("first", prompt(1, 9), max_new_tokens=1)
    tiny.run()
    tiny.cache.evict(64)
    for number in range(2, 7):
        tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=1)
        if number == 2:
            tiny.add("again", [*prompt(1, 8), *prompt(8, 8)], max_new_tokens=1)
    assert planned(tiny).ahead is None
    tiny.commit()
    assert work_of(planned(tiny))[0] == ("again", 8, 8)
    tiny.run()
    tiny.end_copies()


@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_said_behind_a_chunk_that_a_peer_waits_for_nor_of_one(place: int) -> None:
    tiny = engine()
    for number in range(6):
        if number == place:
            handoff = HandoffSpec(xid="x", held=0)
            tiny.scheduler.add(make_request(f"r{number}", prompt(number, 8)), handoff=handoff)
        else:
            tiny.add(f"r{number}", prompt(number, 8), max_new_tokens=4)
    assert planned(tiny).ahead is None


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_where_a_newcomer_can_overtake_those_that_wait_none_of_them_is_admitted_ahead(policy: str) -> None:
    tiny, plan = filled(schedule_policy=policy, priority_ageing_s=1.0)
    assert plan.ahead is None
    assert tiny.scheduler.running_count == 1


@pytest.mark.slow
def test_no_request_waits_for_a_chunk_that_was_said_ahead() -> None:
    """Wherever one is said: had a shorter prompt come by now, and were the next plan made as it begins, there would be
    no work for it either."""
    looked = 0
    for seed in range(40):
        for turn in range(12):
            tiny = _played(seed, turn)
            plan = tiny.plan()
            if plan is None:
                break
            if not any(length > 1 for _, _, length in ahead_of(plan)) or tiny.scheduler._planner._rows_are_taken:
                continue
            for state in tiny.scheduler.requests:
                state.ahead = None
            tiny.add("late", [999] * 4, max_new_tokens=1)
            tiny.commit()
            assert not [work for work in work_of(planned(tiny)) if work[0] == "late"], f"seed {seed}, turn {turn}"
            looked += 1
    assert looked > 20


def _played(seed: int, turns: int) -> TinyEngine:
    rng = Rng(seed)
    tiny = engine(page_count=65, max_running_requests=rng.choice([4, 12]), chunked_prefill_size=rng.choice([8, 16]))
    for number in range(rng.randint(4, 20)):
        tiny.add(f"r{number}", prompt(number, rng.randint(1, 24)), max_new_tokens=rng.randint(1, 5))
    for _ in range(turns):
        tiny.step()
    return tiny
