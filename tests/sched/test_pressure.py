"""Too little room: which requests are admitted or retracted, and that none loses a token or returns one twice."""

from __future__ import annotations

import pytest

from serinus.core.request import FinishReason, Request
from serinus.core.rng import Rng
from serinus.testing.fake_runner import fake_continue, fake_pooled, fake_prompt_logprobs
from serinus.testing.tiny_engine import TinyEngine


def finish_all(engine: TinyEngine, requests: list[Request], steps_max: int = 2000) -> None:
    for _ in range(steps_max):
        outcome = engine.step()
        engine.scheduler.sanity_check()
        if outcome is None:
            break
    for request in requests:
        count = request.sampling.max_new_tokens
        assert count is not None
        assert engine.answers[request.rid].tokens == fake_continue(request, count, 1000), request.rid
    engine.check_drained()


def test_the_youngest_gives_way_and_goes_on_later_where_it_was() -> None:
    engine = TinyEngine(page_count=9, growth_tokens=0)
    old = engine.add("old", [1, 2, 3, 4], max_new_tokens=20)
    young = engine.add("young", [5, 6, 7, 8], max_new_tokens=20)
    finish_all(engine, [old, young])
    assert engine.scheduler.stats().totals.retracted > 0
    usages = [engine.answers[rid].last.usage for rid in ("old", "young")]  # type: ignore[union-attr]
    assert [usage.retractions > 0 for usage in usages if usage] == [False, True]


@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_that_need_a_page_at_once_get_them_in_one_allocation(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TinyEngine(page_count=40, growth_tokens=0, overlaps=overlaps, max_running_requests=4)
    requests = [engine.add(f"r{i}", [1 + i, 2, 3, 4], max_new_tokens=12) for i in range(4)]
    given: list[int] = []
    original = engine.cache.allocate_each
    monkeypatch.setattr(
        engine.cache, "allocate_each", lambda rids, counts: given.append(len(rids)) or original(rids, counts)
    )  # fmt: skip
    finish_all(engine, requests)
    assert given[:4] == [1] * 4, "as they are admitted"
    assert set(given[4:]) == {4}, "all have the same length"


def test_no_request_is_admitted_in_a_step_that_retracts_one() -> None:
    engine = TinyEngine(page_count=9, growth_tokens=0)
    engine.add("old", [1, 2, 3, 4], max_new_tokens=24)
    engine.add("young", [5, 6, 7, 8], max_new_tokens=24)
    outcome = engine.step()
    while outcome is not None and not outcome.retracted:
        if len(engine.answers["old"].tokens) == 12:
            engine.add("new", [9], max_new_tokens=1)
        outcome = engine.step()
    assert outcome is not None
    assert (outcome.retracted, outcome.new_requests, outcome.decode_tokens) == (1, 0, 1)


def test_a_retracted_request_that_samples_draws_the_same_tokens() -> None:
    """The fake runner checks that penalties count each of its tokens once."""
    engine = TinyEngine(page_count=9, growth_tokens=0)
    requests = [
        engine.add(rid, [ord(rid)] * 4, max_new_tokens=20, temperature=1.0, seed=ord(rid), presence_penalty=0.5)
        for rid in ("a", "b")
    ]
    finish_all(engine, requests)
    assert engine.scheduler.stats().totals.retracted > 0


def test_prompt_logprobs_survive_a_retraction_in_the_middle_of_the_prompt() -> None:
    engine = TinyEngine(page_count=12, growth_tokens=0, chunked_prefill_size=4)
    old = [engine.add(rid, [ord(rid)] * 4, max_new_tokens=18) for rid in ("a", "b")]
    engine.step()
    engine.step()
    young = engine.add("c", list(range(20, 44)), max_new_tokens=2, prompt_logprobs=0)
    retracted_early = False
    while (outcome := engine.step()) is not None:
        retracted_early = retracted_early or (outcome.retracted > 0 and "c" not in engine.answers)
    assert retracted_early
    finish_all(engine, [*old, young])
    assert engine.answers["c"].prompt_logprobs == fake_prompt_logprobs(young)


def test_pooled_states_begin_anew_where_a_retraction_took_the_pages_of_the_prompt() -> None:
    engine = TinyEngine(page_count=12, growth_tokens=0, chunked_prefill_size=4)
    old = [engine.add(rid, [ord(rid)] * 4, max_new_tokens=18) for rid in ("a", "b")]
    engine.step()
    engine.step()
    young = engine.add("c", list(range(20, 44)), max_new_tokens=2, hidden_state=True, pooling="mean")
    retracted_early = False
    while (outcome := engine.step()) is not None:
        retracted_early = retracted_early or (outcome.retracted > 0 and "c" not in engine.answers)
    assert retracted_early
    finish_all(engine, [*old, young])
    assert [place.hidden for place in engine.answers["c"].logprobs] == [fake_pooled(young), b""]


def test_newcomers_wait_until_the_running_requests_have_room_to_grow() -> None:
    engine = TinyEngine(page_count=9, growth_tokens=16)
    engine.add("a", [1] * 8, max_new_tokens=20)
    engine.add("b", [2] * 8, max_new_tokens=20)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running_reqs, stats.num_queue_reqs) == (1, 1)
    engine.run()
    assert engine.scheduler.stats().totals.retracted == 0


def test_a_large_request_at_the_head_of_the_line_is_not_starved_by_small_ones() -> None:
    engine = TinyEngine(page_count=17, max_running_requests=4)
    engine.add("first", [9] * 20, max_new_tokens=10)
    engine.step()
    engine.add("large", list(range(100, 150)), max_new_tokens=2)
    for i in range(20):
        engine.add(f"small{i}", [i, i], max_new_tokens=2)
    order = []
    while (outcome := engine.step()) is not None:
        order += [delta.rid for delta in outcome.deltas if delta.finish]
    assert order[:2] == ["first", "large"]


def test_cached_pages_make_room_when_no_request_uses_them() -> None:
    engine = TinyEngine(page_count=9)
    for i in range(6):
        request = engine.add(f"r{i}", list(range(100 * i, 100 * i + 24)), max_new_tokens=4)
        engine.run()
        assert engine.answers[request.rid].tokens == fake_continue(request, 4, 1000)
    assert engine.cache.stats().evicted_pages > 0
    engine.check_drained()


def test_fcfs_takes_the_oldest_and_lpm_the_longest_cached_prefix() -> None:
    for policy, expected in (("fcfs", ["cold", "warm"]), ("lpm", ["warm", "cold"])):
        engine = TinyEngine(schedule_policy=policy, max_running_requests=1)
        engine.add("seed", list(range(20)), max_new_tokens=1)
        engine.run()
        engine.add("cold", list(range(50, 70)), max_new_tokens=1)
        engine.add("warm", [*range(16), 99], max_new_tokens=1)
        order = []
        while (outcome := engine.step()) is not None:
            order += [delta.rid for delta in outcome.deltas]
        assert order == expected, policy


def test_lpm_lets_no_request_be_passed_for_ever() -> None:
    engine = TinyEngine(schedule_policy="lpm", max_running_requests=1, lpm_skips_max=3)
    engine.add("seed", list(range(20)), max_new_tokens=1)
    engine.run()
    engine.add("cold", list(range(50, 70)), max_new_tokens=1)
    served = []
    for i in range(10):
        engine.add(f"warm{i}", [*range(16), 99 + i], max_new_tokens=1)
        engine.add(f"other{i}", [*range(16), 199 + i], max_new_tokens=1)
        outcome = engine.step()
        assert outcome is not None
        served += [delta.rid for delta in outcome.deltas]
    assert served.index("cold") == 3


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_random_load_on_a_small_pool_answers_every_request_right(page_size: int) -> None:
    rng = Rng(page_size)
    engine = TinyEngine(
        page_size=page_size, page_count=64 // page_size + 1, chunked_prefill_size=12, growth_tokens=4,
        max_running_requests=6,
    )  # fmt: skip
    requests: list[Request] = []
    for turn in range(400):
        if rng.random() < 0.5:
            shared = [1] * rng.randrange(12)
            tail = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 12))]
            requests.append(engine.add(f"r{turn}", shared + tail, max_new_tokens=rng.randrange(1, 25)))
        engine.step()
    engine.run()
    totals = engine.scheduler.stats().totals
    assert totals.retracted > 10, f"seed {page_size}"
    assert engine.cache.stats().evicted_pages > 100, f"seed {page_size}"
    finish_all(engine, requests)
    assert {a.finish for a in engine.answers.values()} == {FinishReason.LENGTH}
