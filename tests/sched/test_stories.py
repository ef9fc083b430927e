"""The life of a request on one engine: admitted, chunked, decoded, published, ended."""

from __future__ import annotations

import pytest

from serinus.core.errors import InvariantError
from serinus.core.plan import SeqResult, StepResult
from serinus.core.request import FinishReason, TokenLogprobs
from serinus.testing.fake_runner import fake_continue, fake_pooled, fake_prompt_logprobs
from serinus.testing.tiny_engine import TinyEngine

PROMPT = list(range(10, 30))


def test_a_request_gets_the_tokens_of_the_oracle_and_leaves_nothing_behind() -> None:
    engine = TinyEngine()
    request = engine.add("a", PROMPT, max_new_tokens=9)
    engine.run()
    answer = engine.answers["a"]
    assert answer.tokens == fake_continue(request, 9, 1000)
    assert answer.finish is FinishReason.LENGTH
    engine.check_drained()


def test_nothing_to_do_is_no_plan() -> None:
    engine = TinyEngine()
    assert engine.scheduler.plan(0.0) is None
    assert engine.scheduler.idle


def test_decoding_requests_come_before_prompt_chunks_in_one_plan() -> None:
    engine = TinyEngine(chunked_prefill_size=8)
    engine.add("short", [1, 2, 3], max_new_tokens=9)
    engine.step()
    engine.add("long", PROMPT, max_new_tokens=2)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert [(w.rid, len(w.tokens)) for w in plan.work] == [("short", 1), ("long", 8)]


def test_prompts_are_cut_at_page_borders_and_only_the_last_chunk_samples() -> None:
    engine = TinyEngine(chunked_prefill_size=10)
    engine.add("a", PROMPT, max_new_tokens=1)
    cuts = []
    while (plan := engine.scheduler.plan(0.0)) is not None:
        cuts.append((plan.work[0].start, len(plan.work[0].tokens), plan.work[0].sample is not None))
        engine.scheduler.commit(plan, engine.runner.run(plan), 0.0)
    assert cuts == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_a_prompt_is_never_split_without_a_bound_on_chunks() -> None:
    engine = TinyEngine(chunked_prefill_size=-1)
    engine.add("a", list(range(50)), max_new_tokens=1)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.prompt_tokens, outcome.deltas[0].finish) == (50, FinishReason.LENGTH)


def test_a_table_write_is_planned_only_when_a_page_is_added() -> None:
    engine = TinyEngine(page_size=4)
    engine.add("a", [1, 2, 3, 4], max_new_tokens=9)
    writes = []
    while (plan := engine.scheduler.plan(0.0)) is not None:
        writes.append([(w.start, len(w.slots)) for w in plan.table_writes])
        engine.scheduler.commit(plan, engine.runner.run(plan), 0.0)
    assert writes == [[(0, 4)], [(4, 4)], [], [], [], [(8, 4)], [], [], []]


def test_a_later_request_finds_the_published_prompt_of_an_earlier_one() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=3)
    engine.run()
    request = engine.add("b", [*PROMPT[:18], 7, 7], max_new_tokens=3)
    engine.run()
    usage = engine.answers["b"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert usage.cached_tokens == {"device": 16}
    assert engine.answers["b"].tokens == fake_continue(request, 3, 1000)


def test_generated_tokens_are_found_again_by_the_next_turn_of_a_conversation() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=9)
    engine.run()
    engine.add("b", [*PROMPT, *engine.answers["a"].tokens, 5, 6], max_new_tokens=1)
    engine.run()
    usage = engine.answers["b"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert usage.cached_tokens == {"device": 28}  # 20 + 8 tokens have KV: the last one was never computed


@pytest.mark.parametrize("untrusted", [True, False])
def test_a_request_condemned_after_it_was_aborted_publishes_nothing_more(untrusted: bool) -> None:
    engine = TinyEngine()
    request = engine.add("a", PROMPT, max_new_tokens=9)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert engine.scheduler.abort("a", "its client left") is not None
    assert engine.scheduler.abort("a", "its KV is wrong", FinishReason.ERROR, untrusted=untrusted) is None
    engine.scheduler.commit(plan, engine.runner.run(plan), 0.0)
    assert engine.cache.probe("", request.prompt).device == (0 if untrusted else 20)
    engine.check_drained()


def test_requests_of_another_salt_share_nothing() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=1)
    engine.run()
    engine.add("b", PROMPT, max_new_tokens=1, cache_salt="tenant")
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.cached_tokens, outcome.prompt_tokens) == (0, 20)


@pytest.mark.parametrize("policy", ["priority", "lru"])
def test_what_was_asked_with_a_smaller_priority_stays_longer_under_that_policy(policy: str) -> None:
    engine = TinyEngine(page_count=13, policy=policy)
    kept = engine.add("kept", [1, *PROMPT[:16]], max_new_tokens=1, priority=-1)
    engine.run()
    for index in range(2, 6):
        engine.add(f"later-{index}", [index, *PROMPT[:16]], max_new_tokens=1, priority=0)
        engine.run()
    assert engine.cache.probe("", kept.prompt).device == (16 if policy == "priority" else 0)


def test_without_prefix_caching_every_prompt_is_computed_whole() -> None:
    engine = TinyEngine(enable_prefix=False)
    for rid in ("a", "b"):
        engine.add(rid, PROMPT, max_new_tokens=1)
        engine.run()
    assert engine.runner.token_count == 40
    engine.check_drained()


def test_copies_of_one_prompt_wait_for_the_first_instead_of_computing_it_again() -> None:
    engine = TinyEngine()
    for rid in "abcd":
        engine.add(rid, PROMPT, max_new_tokens=2, temperature=1.0, seed=ord(rid))
    first = engine.step()
    second = engine.step()
    assert first is not None
    assert second is not None
    assert (first.new_requests, first.prompt_tokens) == (1, 20)
    assert (second.new_requests, second.prompt_tokens, second.cached_tokens) == (3, 12, 48)


def test_duplicates_go_back_and_the_row_is_rewritten_when_two_compute_the_same_prefix() -> None:
    engine = TinyEngine(chunked_prefill_size=16)
    one = engine.add("a", [*PROMPT[:8], *range(100, 120)], max_new_tokens=4)
    two = engine.add("b", [*PROMPT[:8], *range(200, 230)], max_new_tokens=4)
    engine.run()
    assert engine.cache.stats().duplicate_pages == 0  # the first chunk of `a` takes the whole budget
    engine = TinyEngine(chunked_prefill_size=-1)
    one, two = (
        engine.add("a", one.prompt.tolist(), max_new_tokens=4),
        engine.add("b", two.prompt.tolist(), max_new_tokens=4),
    )
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.work) == 2
    engine.scheduler.commit(plan, engine.runner.run(plan), 0.0)
    assert engine.cache.stats().duplicate_pages == 2
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    rewrite = plan.table_writes[0]
    assert (rewrite.row, rewrite.start, len(rewrite.slots)) == (plan.work[1].row, 0, 36)
    assert fake_continue(two, 2, 1000)[1] == engine.runner.run(plan).seqs[1].token


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    alone, busy = TinyEngine(), TinyEngine(chunked_prefill_size=8)
    alone.add("a", PROMPT, temperature=1.0, seed=3, max_new_tokens=12)
    alone.run()
    for rid in "xyz":
        busy.add(rid, list(range(ord(rid), ord(rid) + 15)), max_new_tokens=20)
    busy.step()
    busy.add("a", PROMPT, temperature=1.0, seed=3, max_new_tokens=12)
    busy.run()
    assert busy.answers["a"].tokens == alone.answers["a"].tokens


def test_prompt_logprobs_come_once_with_the_first_token_and_bypass_the_cache() -> None:
    engine = TinyEngine(chunked_prefill_size=8)
    engine.add("warm", PROMPT, max_new_tokens=1)
    engine.run()
    request = engine.add("a", PROMPT, max_new_tokens=3, prompt_logprobs=0, logprobs=0)
    outcomes = [engine.step() for _ in range(3)]
    assert sum(o.prompt_tokens for o in outcomes if o) == 20
    engine.run()
    assert engine.answers["a"].prompt_logprobs == fake_prompt_logprobs(request)
    assert engine.answers["a"].prompt_logprobs[0] == TokenLogprobs(logprob=None)
    assert len(engine.answers["a"].logprobs) == 3


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooled_states_come_with_the_first_token_and_of_the_whole_prompt(pooling: str) -> None:
    """None of it is taken from the cache: hidden states are not kept there."""
    engine = TinyEngine(chunked_prefill_size=8)
    engine.add("warm", PROMPT, max_new_tokens=1)
    engine.run()
    request = engine.add("a", PROMPT, max_new_tokens=3, hidden_state=True, pooling=pooling)
    outcomes = [engine.step() for _ in range(3)]
    assert sum(o.prompt_tokens for o in outcomes if o) == 20
    engine.run()
    assert [place.hidden for place in engine.answers["a"].logprobs] == [fake_pooled(request), b"", b""]
    assert engine.answers["a"].prompt_logprobs == []


def test_usage_tells_queueing_and_the_first_token_apart() -> None:
    engine = TinyEngine(max_running_requests=1)
    engine.add("a", PROMPT, max_new_tokens=3)
    engine.add("b", [5, 6], max_new_tokens=1)
    engine.run()
    usage = engine.answers["b"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert usage.queue_seconds == pytest.approx(0.03)
    assert usage.first_token_seconds == pytest.approx(0.04)
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 1)


def test_usage_comes_with_the_first_and_the_last_delta_only() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=4)
    seen = []
    while (outcome := engine.step()) is not None:
        seen += [delta.usage is not None for delta in outcome.deltas]
    assert seen == [True, False, False, True]


def test_an_abort_frees_everything_at_once() -> None:
    engine = TinyEngine()
    engine.add("running", PROMPT)
    engine.step()
    engine.step()
    engine.add("waiting", [1, 2])
    for rid, tokens in (("waiting", 0), ("running", 2)):
        delta = engine.scheduler.abort(rid, "client gone")
        assert delta is not None
        assert (delta.finish, delta.error, delta.error_status) == (FinishReason.ABORT, "client gone", 499)
        assert delta.usage is not None
        assert delta.usage.completion_tokens == tokens
    engine.check_drained()


def test_an_abort_during_a_step_takes_effect_at_its_commit() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT)
    engine.step()
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert engine.scheduler.abort("a", "client gone") is not None
    assert engine.cache.available() < engine.cache.page_count - 1
    assert engine.scheduler.abort("a", "again") is None
    outcome = engine.scheduler.commit(plan, engine.runner.run(plan), 0.0)
    assert outcome.deltas == ()
    engine.check_drained()


def test_aborting_an_unknown_request_changes_nothing() -> None:
    assert TinyEngine().scheduler.abort("nobody", "client gone") is None


def test_abort_all_ends_every_request() -> None:
    engine = TinyEngine(max_running_requests=2)
    for rid in "abcd":
        engine.add(rid, [ord(rid), 1, 2])
    engine.step()
    deltas = engine.scheduler.abort_all("shutting down")
    assert [delta.rid for delta in deltas] == ["a", "b", "c", "d"]
    engine.check_drained()


def test_a_plan_must_be_committed_before_the_next() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT)
    assert engine.scheduler.plan(0.0) is not None
    with pytest.raises(InvariantError, match="step 1 is not committed"):
        engine.scheduler.plan(0.0)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (StepResult(step=2, seqs=(SeqResult(token=1),)), "result of step 2"),
        (StepResult(step=1, seqs=()), "has 0 parts"),
        (StepResult(step=1, seqs=(SeqResult(),)), "got token None"),
        (StepResult(step=1, seqs=(SeqResult(token=1000),)), "got token 1000"),
    ],
)
def test_a_result_that_does_not_fit_its_plan_stops_the_engine(result: StepResult, words: str) -> None:
    engine = TinyEngine()
    engine.add("a", [1, 2, 3])
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(InvariantError, match=words):
        engine.scheduler.commit(plan, result, 0.0)


def test_sanity_check_names_a_row_that_was_not_rewritten() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT)
    engine.step()
    state = engine.scheduler._states["a"]
    state.full.put(0, state.full.pages[1:2])
    with pytest.raises(InvariantError, match="O5"):
        engine.scheduler.sanity_check()


def test_stats_count_tokens_by_what_they_are() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=20)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running_reqs, stats.num_queue_reqs) == (1, 0)
    assert (stats.total_tokens, stats.used_tokens, stats.free_tokens) == (128, 20, 108)
    assert stats.token_usage == pytest.approx(20 / 128)
    assert (stats.totals.requests, stats.totals.prompt_tokens, stats.totals.generation_tokens) == (1, 20, 1)
