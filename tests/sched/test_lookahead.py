"""What a plan says of the next one, and what the next one takes of it."""

from __future__ import annotations

from typing import Any

import pytest

from serinus.core.plan import StepPlan
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine


def engine(**settings: Any) -> TinyEngine:
    return TinyEngine(**{"overlaps": True, "growth_tokens": 0, "max_running_requests": 4, **settings})


def planned(tiny: TinyEngine) -> StepPlan:
    """The next plan, which is run and committed."""
    plan = tiny.plan()
    assert plan is not None
    tiny.commit()
    return plan


def test_the_next_plan_takes_the_very_work_that_this_one_said() -> None:
    tiny = engine()
    asked = [tiny.add(f"r{i}", [4 + i] * (5 + i), max_new_tokens=9) for i in range(3)]
    before = planned(tiny)
    assert [len(work.tokens) for work in before.work] == [5, 6, 7], "prompts are computed, and end"
    for _ in range(6):
        assert before.ahead is not None
        plan = planned(tiny)
        assert [id(work) for work in plan.work] == [id(work) for work in before.ahead.work]
        assert [work.start for work in plan.work] == [work.start + len(work.tokens) for work in before.work]
        assert [plan.work[i].rid for i in before.ahead.follows] == [work.rid for work in plan.work]
        before = plan
    tiny.run()
    for request in asked:
        assert tiny.answers[request.rid].tokens == fake_continue(request, 9, 1000, [], tiny.runner.windows)
    assert tiny.runner.followed == 8, "of nine tokens one is chosen behind the prompt; every other step follows"
    tiny.check_drained()


def test_one_that_ends_or_goes_is_not_in_the_next_plan_and_the_others_are() -> None:
    tiny = engine()
    for i, count in enumerate((2, 9, 9)):
        tiny.add(f"r{i}", [7 + i] * 6, max_new_tokens=count)
    first, second = planned(tiny), planned(tiny)
    assert first.ahead is not None
    assert [work.rid for work in first.ahead.work] == ["r0", "r1", "r2"]
    assert second.ahead is not None
    assert [work.rid for work in second.ahead.work] == ["r1", "r2"], "r0 has its last token by length"
    tiny.take(tiny.scheduler.abort("r1", "gone"))
    third = planned(tiny)
    assert [id(work) for work in third.work] == [id(second.ahead.work[1])]
    tiny.run()
    tiny.check_drained()


def test_a_newcomer_waits_for_one_plan_and_no_longer() -> None:
    tiny = engine()
    tiny.add("old", range(6), max_new_tokens=20)
    assert planned(tiny).ahead is not None
    tiny.add("new", [9] * 6, max_new_tokens=3)
    following, mixed = planned(tiny), planned(tiny)
    assert [work.rid for work in following.work] == ["old"]
    assert following.ahead is None, "the newcomer is in the plan behind it"
    assert [work.rid for work in mixed.work] == ["old", "new"]


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"repetition_penalty": 1.2}])
def test_tokens_are_chosen_by_the_next_plan_where_one_needs_those_before_it_on_the_host(
    sampling: dict[str, Any],
) -> None:
    tiny = engine()
    asked = [tiny.add("plain", range(6), max_new_tokens=9), tiny.add("asks", range(7), max_new_tokens=4, **sampling)]
    assert planned(tiny).ahead is None, "the second shares the first one's prompt, and waits for that"
    found = []
    while (ahead := planned(tiny).ahead) is not None:
        found.append((len(ahead.work), ahead.chooses))
    assert found == [(2, False)] * 3 + [(1, True)] * 4, "once that one has ended, as they are computed"
    tiny.run()
    for request in asked:
        count = request.sampling.max_new_tokens
        assert tiny.answers[request.rid].tokens == fake_continue(request, count, 1000, [], tiny.runner.windows)
    tiny.check_drained()


def test_nothing_is_said_where_a_page_for_it_would_be_taken_from_a_request() -> None:
    """Four pages of four tokens, two for each: the third one of one is that of the other."""
    tiny = engine(page_count=5)
    asked = [tiny.add(f"r{i}", [3 + i] * 6, max_new_tokens=5) for i in range(2)]
    for _ in range(3):
        plan = planned(tiny)
        assert not tiny.scheduler.totals.retracted
    assert plan.ahead is None, "position 8 has no page"
    tiny.run()
    assert tiny.scheduler.totals.retracted
    for request in asked:
        assert tiny.answers[request.rid].tokens == fake_continue(request, 5, 1000, [], tiny.runner.windows)
    tiny.check_drained()
