"""Several plans under way: the requests of each, retraction beside them, and what a commit changes for later plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from serinus.cache import PartGeometry
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.handoff import HandoffSpec
from serinus.core.parts import Part
from serinus.core.plan import StepPlan
from serinus.core.request import FinishReason
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue, fake_prompt_logprobs
from serinus.testing.tiny_engine import TinyEngine
from tests.sched.depth_drive import drive

PROMPT = list(range(10, 40))


def planned(engine: TinyEngine) -> StepPlan:
    plan = engine.plan()
    assert plan is not None
    return plan


def decoding(count: int, **settings: Any) -> TinyEngine:
    """An engine with requests that decode; the fill was committed."""
    engine = TinyEngine(**{"max_running_requests": 8, "page_count": 65, "growth_tokens": 0, **settings})
    for i in range(count):
        engine.add(f"r{i}", [100 + i] * 3, max_new_tokens=20)
    planned(engine)
    engine.commit()
    return engine


def rids(plan: StepPlan | None) -> list[str]:
    return [work.rid for work in plan.work] if plan else []


def finish(engine: TinyEngine, **prompts: list[int]) -> None:
    """All requests end with the oracle's tokens, and leave nothing behind."""
    engine.run()
    engine.end_copies()
    engine.run()
    for rid, prompt in prompts.items():
        answer = engine.answers[rid]
        request = make_request(rid, prompt)
        assert answer.tokens == fake_continue(request, len(answer.tokens), 1000, windows=engine.runner.windows), rid
        assert answer.finish is FinishReason.LENGTH, rid
    engine.check_drained()


def test_one_more_plan_than_the_depth_is_refused() -> None:
    engine = decoding(4, depth=2)
    planned(engine)
    planned(engine)
    assert engine.scheduler.under_way == 2
    with pytest.raises(InvariantError, match=r"step 2 is not committed, .*depth 2"):
        engine.scheduler.plan(0.0)
    with pytest.raises(ConfigError, match="depth is 0"):
        TinyEngine(depth=0)


def test_commits_come_in_the_order_of_plans() -> None:
    engine = decoding(4, depth=2)
    first, second = planned(engine), planned(engine)
    results = [engine.runner.run(plan) for plan in (first, second)]
    with pytest.raises(InvariantError, match="step 3 is committed, expected step 2"):
        engine.scheduler.commit(second, results[1], 0.0)
    engine.scheduler.commit(first, results[0], 0.0)
    engine.scheduler.commit(second, results[1], 0.0)
    assert engine.scheduler.under_way == 0


@pytest.mark.parametrize(("depth", "shares"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (8, [1, 1, 1, 1, 1])])
def test_each_plan_takes_its_share_of_the_decoding_requests(depth: int, shares: list[int]) -> None:
    engine = decoding(5, depth=depth)
    plans = [planned(engine) for _ in shares]
    assert [len(plan.work) for plan in plans] == shares
    assert Counter(rid for plan in plans for rid in rids(plan)) == {f"r{i}": 1 for i in range(5)}
    assert depth == len(shares) or engine.plan() is None  # all requests are under way


def test_no_request_starves_where_fewer_plans_are_made_than_there_may_be() -> None:
    engine = decoding(5, depth=3)
    for _ in range(15):
        planned(engine)
        engine.commit()
    assert {len(answer.tokens) for answer in engine.answers.values()} == {1 + 15 * 2 // 5}


def test_a_prompt_has_chunks_in_several_plans_and_is_published_one_commit_after_the_other() -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=8)
    engine.add("a", PROMPT, max_new_tokens=3)
    plans = [planned(engine) for _ in range(3)]
    assert [(plan.work[0].start, len(plan.work[0].tokens)) for plan in plans] == [(0, 8), (8, 8), (16, 8)]
    found = []
    for _ in range(3):
        engine.commit()
        engine.scheduler.sanity_check()
        found.append(engine.cache.probe("", make_request("b", PROMPT).prompt).device)
    assert found == [8, 16, 24]
    finish(engine, a=PROMPT)


def test_behind_its_last_chunk_a_prompt_waits_and_the_next_one_uses_the_budget() -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=16)
    engine.add("a", PROMPT, max_new_tokens=2)
    engine.add("b", [5, *PROMPT], max_new_tokens=2)
    spans = [[(w.rid, w.start, len(w.tokens)) for w in planned(engine).work] for _ in range(3)]
    assert spans == [[("a", 0, 16)], [("a", 16, 14)], [("b", 0, 16)]]
    finish(engine, a=PROMPT, b=[5, *PROMPT])


def test_prompt_logprobs_are_collected_over_chunks_of_several_plans() -> None:
    engine = TinyEngine(depth=2, chunked_prefill_size=8)
    request = engine.add("a", PROMPT, max_new_tokens=2, prompt_logprobs=0)
    finish(engine, a=PROMPT)
    assert engine.answers["a"].prompt_logprobs == fake_prompt_logprobs(request)


def test_one_that_is_aborted_stays_until_the_last_of_its_plans() -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=8)
    engine.add("a", PROMPT, max_new_tokens=3)
    planned(engine)
    planned(engine)
    engine.take(engine.scheduler.abort("a", "client gone"))
    assert engine.plan() is None  # nothing more is computed for it
    engine.commit()
    engine.scheduler.sanity_check()
    assert "a" in engine.scheduler
    assert engine.cache.free() == 32 - 8
    engine.commit()
    assert engine.scheduler.idle
    assert engine.answers["a"].tokens == []
    assert engine.cache.probe("", make_request("b", PROMPT).prompt).device == 16  # what was computed is kept
    engine.check_drained()


def test_a_request_that_lacks_a_page_waits_while_the_youngest_is_under_way_and_takes_its_pages_then() -> None:
    engine = TinyEngine(depth=2, page_count=5, growth_tokens=0)
    old, young = [1] * 7, [2] * 5
    engine.add("old", old, max_new_tokens=5)
    engine.add("young", young, max_new_tokens=3)
    planned(engine)
    engine.commit()
    assert engine.cache.free() == 0
    assert [rids(planned(engine)), rids(planned(engine))] == [["old"], ["young"]]
    engine.commit()
    assert engine.plan() is None  # old needs a page, only young could give one
    engine.scheduler.sanity_check()
    assert engine.scheduler.stats().totals.retracted == 0
    engine.commit()
    assert rids(planned(engine)) == ["old"]
    assert engine.scheduler.stats().totals.retracted == 1
    finish(engine, old=old, young=young)


def test_while_a_request_waits_for_a_page_no_younger_request_gets_another_chunk() -> None:
    engine = TinyEngine(depth=2, page_count=9, growth_tokens=0, chunked_prefill_size=8)
    old, young = [1] * 7, [2] * 24
    engine.add("old", old, max_new_tokens=5)
    planned(engine)
    engine.commit()
    engine.add("young", young, max_new_tokens=3)
    assert [(w.rid, w.start) for w in planned(engine).work] == [("old", 7), ("young", 0)]
    assert [(w.rid, w.start) for w in planned(engine).work] == [("young", 8)]
    engine.commit()
    assert engine.plan() is None
    engine.commit()
    assert [(w.rid, w.start) for w in planned(engine).work] == [("old", 8)]
    finish(engine, old=old, young=young)


def test_rows_are_rewritten_in_the_next_plan_where_two_computed_the_same_page_side_by_side() -> None:
    engine = TinyEngine(depth=2, chunked_prefill_size=-1)
    shared = [7] * 8
    a, b = [*shared, *range(20, 40)], [*shared, *range(50, 70)]
    engine.add("a", a, max_new_tokens=6)
    engine.add("b", b, max_new_tokens=6)
    first = planned(engine)
    assert rids(first) == ["a", "b"]  # too little is shared to wait for it
    engine.add("c", [3] * 6, max_new_tokens=6)
    assert rids(planned(engine)) == ["c"]
    free = engine.cache.free()
    engine.commit()
    assert engine.cache.free() == free + 2  # the duplicates of b, at once
    rewritten = planned(engine).table_writes
    (row,) = {work.row for work in first.work if work.rid == "b"}
    assert any((write.row, write.start, len(write.slots)) == (row, 0, 28) for write in rewritten), rewritten
    finish(engine, a=a, b=b, c=[3] * 6)


@pytest.mark.parametrize("window", [3, 6])
def test_a_window_moves_on_under_chunks_of_several_plans(window: int) -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=8, beside={Part.SWA: PartGeometry(pages=9, window=window)})
    long = list(range(100, 148))
    engine.add("a", long, max_new_tokens=5)
    engine.add("b", PROMPT, max_new_tokens=5)
    finish(engine, a=long, b=PROMPT)


def test_a_prompt_whose_window_moves_on_at_its_commit_takes_no_page_from_others_before() -> None:
    engine = TinyEngine(
        depth=2, beside={Part.SWA: PartGeometry(pages=9, window=4)}, growth_tokens=0, chunked_prefill_size=-1
    )
    old = list(range(100, 148))
    engine.add("old", old, max_new_tokens=2)
    engine.scheduler.add(make_request("young", [5] * 6, max_new_tokens=2), remote=True)
    assert [each.rid for each in engine.scheduler.take_reservations(0.0)] == ["young"]
    first = planned(engine)
    assert first.work[0].start + len(first.work[0].tokens) < len(old)  # as far as there are pages for its window
    engine.take(engine.scheduler.landed("young", 7, None, 0.0))
    assert rids(planned(engine)) == ["young"]
    assert engine.scheduler.stats().totals.retracted == 0
    finish(engine, old=old)


def test_chunks_for_a_decode_engine_are_announced_as_they_are_committed() -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=8)
    engine.scheduler.add(make_request("x", PROMPT, max_new_tokens=4), handoff=HandoffSpec(xid="x", held=4))
    for _ in range(3):
        planned(engine)
    assert engine.chunks == []
    told = []
    while engine.scheduler.under_way:
        told.append([(span.first, len(span.pages)) for chunk in engine.commit().chunks for span in chunk.spans])
        engine.plan()
    assert told == [[(1, 1)], [(2, 2)], [(4, 2)], [(6, 2)]]
    assert engine.scheduler.handoff_drained("x")
    engine.check_drained()


def test_a_handoff_that_ends_with_chunks_under_way_announces_nothing_more() -> None:
    engine = TinyEngine(depth=3, chunked_prefill_size=8)
    engine.scheduler.add(make_request("x", PROMPT, max_new_tokens=4), handoff=HandoffSpec(xid="x", held=0))
    planned(engine)
    planned(engine)
    assert engine.commit().chunks
    assert engine.scheduler.handoff_ended("x")
    assert engine.plan() is None
    assert engine.commit().chunks == ()
    engine.check_drained()


# Loads


def host_hit(**settings: Any) -> TinyEngine:
    """An engine whose host alone knows PROMPT."""
    engine = TinyEngine(**{"host_pages": 65, "auto": False, "depth": 3, "chunked_prefill_size": 8, **settings})
    engine.add("warm", PROMPT, max_new_tokens=1)
    engine.run()
    engine.end_copies()
    engine.run()
    engine.cache.evict(32)
    assert engine.cache.free() == 32
    return engine


def test_a_load_that_failed_blanks_its_request_out_of_every_plan_under_way() -> None:
    engine = host_hit()
    longer = [*PROMPT, *range(50, 62)]
    engine.add("a", longer, max_new_tokens=3)
    engine.add("other", [3, 3], max_new_tokens=3)
    plans = [planned(engine), planned(engine)]
    assert [(w.rid, w.start) for plan in plans for w in plan.work] == [("a", 28), ("other", 0), ("a", 32)]
    assert engine.mover is not None
    (op,) = engine.mover.pending
    engine.mover.fail(op)
    assert [delta.rid for delta in engine.commit().deltas] == ["other"]
    assert engine.scheduler.stats().num_queue_reqs == 1
    engine.scheduler.sanity_check()
    assert engine.commit().deltas == ()
    finish(engine, a=longer, other=[3, 3])


def test_it_may_run_again_on_other_pages_before_its_old_plan_has_run() -> None:
    engine = host_hit()
    longer = [*PROMPT, *range(50, 64)]
    engine.add("grows", [3] * 4, max_new_tokens=3)
    planned(engine)
    engine.add("a", longer, max_new_tokens=3)
    old = planned(engine)
    engine.commit()
    assert engine.mover is not None
    (op,) = engine.mover.pending
    engine.mover.fail(op)
    engine.mover.finish(op)
    again = planned(engine)
    assert [(work.rid, work.start) for work in again.work] == [("grows", 4), ("a", 0)]
    assert again.work[0].slots[0] == old.table_writes[0].slots[0]
    engine.scheduler.sanity_check()
    assert engine.commit().deltas == ()
    finish(engine, grows=[3] * 4, a=longer)


def test_a_commit_settles_only_the_loads_that_its_own_plan_waited_for() -> None:
    engine = host_hit()
    engine.add("first", [3, 3, 3], max_new_tokens=3)
    planned(engine)
    engine.add("a", [*PROMPT, 50], max_new_tokens=3)
    planned(engine)
    assert engine.mover is not None
    loads = list(engine.mover.pending)
    assert len(loads) == 1
    engine.commit()
    assert list(engine.mover.pending) == loads
    engine.commit()
    assert list(engine.mover.pending) == []
    finish(engine, first=[3, 3, 3], a=[*PROMPT, 50])


@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_published_onto_pages_of_a_load_that_has_not_ended(fails: bool) -> None:
    engine = host_hit(chunked_prefill_size=24)
    engine.add("a", [*PROMPT, 50], max_new_tokens=3, prompt_logprobs=0)  # computes what the host has
    engine.add("b", [*PROMPT, 60], max_new_tokens=3)
    spans = [[(w.rid, w.start, len(w.tokens)) for w in planned(engine).work] for _ in range(2)]
    assert spans == [[("a", 0, 24)], [("a", 24, 7), ("b", 28, 3)]]
    assert engine.mover is not None
    (op,) = engine.mover.pending
    if fails:
        engine.mover.fail(op)
    engine.commit()  # of the first plan, which did not wait for the load
    assert op not in engine.mover.pending
    engine.scheduler.sanity_check()
    assert engine.scheduler.stats().num_queue_reqs == fails
    finish(engine, a=[*PROMPT, 50], b=[*PROMPT, 60])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_of_an_old_window_spares_requests_that_only_share_the_prefix(depth: int) -> None:
    sliding = {Part.SWA: PartGeometry(pages=12, host_pages=65, window=4)}
    engine = TinyEngine(depth=depth, host_pages=65, beside=sliding, auto=False)
    long = [*PROMPT[:12], *range(60, 80)]
    engine.add("warm", PROMPT[:12], max_new_tokens=1)
    engine.run()
    engine.end_copies()
    engine.run()
    engine.add("a", long, max_new_tokens=12)
    for _ in range(4):
        engine.step()
    assert len(engine.answers["a"].tokens) > 2
    engine.end_copies()
    assert engine.mover is not None
    while not any(m.kind.value == "load" for copy in engine.mover.pending.values() for m in copy.moves):
        engine.end_copies()
        engine.cache.evict(12, part=Part.SWA)
        if "b" not in engine.scheduler:
            engine.add("b", [*PROMPT[:12], 99], max_new_tokens=3)
        if engine.scheduler.under_way == depth:
            engine.commit()
        engine.plan()
    for op in list(engine.mover.pending):
        engine.mover.fail(op)
        engine.mover.finish(op)
    finish(engine, a=long, b=[*PROMPT[:12], 99])
    usage = engine.answers["a"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert usage.retractions == 0


# All at once


@pytest.mark.slow
def test_trouble_of_every_kind_changes_no_answer_and_leaves_nothing_behind() -> None:
    happened = Counter[str]()
    for seed in range(45):
        happened += drive(seed, 1 + seed % 3, turns=150)
    expected = {
        "chunks of one request in several plans", "aborted, and still in a later plan",
        "retracted beside a plan under way", "a load failed", "began again in a plan under way",
        "a step was computed before its plan",
    }  # fmt: skip
    assert expected <= set(happened), happened


_HEALED = {"a page was damaged", "heal: RUNNING", "heal: NOTHING", "began again in a plan under way"}


@pytest.mark.slow
def test_heals_at_random_moments_lose_no_token_and_give_none_twice() -> None:
    happened = Counter[str]()
    for seed in range(14):
        happened += drive(seed, 1 + seed % 3, turns=150, heals=True)
    assert set(happened) >= _HEALED, happened


@pytest.mark.proof
def test_heals_at_random_moments_lose_no_token_and_give_none_twice_in_many_seeds() -> None:
    happened = Counter[str]()
    for seed in range(1000, 1200):
        happened += drive(seed, 1 + seed % 3, heals=True)
    assert set(happened) >= _HEALED, happened
