"""When answers end, and which requests are refused before they begin."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from serinus.core.errors import BadRequest, CapacityError, ConfigError, PromptTooLong
from serinus.core.plan import SeqResult, StepPlan, StepResult
from serinus.core.request import FinishReason, Request
from serinus.core.sampling import SamplingParams
from serinus.sched import HandoffSpec, SchedSettings
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine

PROMPT = [5, 6, 7, 8, 9]
FREE_RUN = fake_continue(make_request("free", PROMPT), 40, 1000)
EOS = FREE_RUN[4]


def answer(engine: TinyEngine, **sampling: Any) -> tuple[list[int], FinishReason | None, int | None]:
    engine.add("a", PROMPT, **sampling)
    engine.run()
    engine.check_drained()
    found = engine.answers["a"]
    assert found.last is not None
    return found.tokens, found.finish, found.last.matched_stop


def test_the_free_run_has_no_early_repetition_that_would_blur_these_tests() -> None:
    assert EOS not in FREE_RUN[:4]
    assert len(set(FREE_RUN[:10])) == 10


def test_an_end_of_sequence_token_ends_the_answer_and_is_part_of_it() -> None:
    assert answer(TinyEngine(eos_ids=(EOS,))) == (FREE_RUN[:5], FinishReason.STOP, EOS)


def test_a_stop_token_of_the_request_ends_it_too() -> None:
    assert answer(TinyEngine(), stop_token_ids=(FREE_RUN[2], EOS)) == (FREE_RUN[:3], FinishReason.STOP, FREE_RUN[2])


def test_ignore_eos_goes_on_past_the_models_token_but_not_past_the_requests_own() -> None:
    tokens, finish, _ = answer(TinyEngine(eos_ids=(EOS,)), ignore_eos=True, max_new_tokens=8)
    assert (tokens, finish) == (FREE_RUN[:8], FinishReason.LENGTH)
    stopped = answer(TinyEngine(eos_ids=(EOS,)), ignore_eos=True, stop_token_ids=(EOS,))
    assert stopped == (FREE_RUN[:5], FinishReason.STOP, EOS)


def test_no_stop_token_is_chosen_before_min_new_tokens() -> None:
    engine = TinyEngine(eos_ids=(EOS,), vocab_size=1000)
    tokens, _, _ = answer(engine, min_new_tokens=5, max_new_tokens=9)
    assert tokens[:4] == FREE_RUN[:4]
    assert tokens[4] != EOS
    assert len(tokens) > 5


def test_a_stop_token_right_after_min_new_tokens_ends_the_answer() -> None:
    assert answer(TinyEngine(eos_ids=(EOS,)), min_new_tokens=4) == (FREE_RUN[:5], FinishReason.STOP, EOS)


def test_a_stop_token_that_was_forbidden_does_not_end_the_answer() -> None:
    engine = TinyEngine(eos_ids=(EOS,))
    engine.add("a", PROMPT, min_new_tokens=1)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    outcome = engine.scheduler.commit(plan, StepResult(step=1, seqs=(SeqResult(token=EOS),)), 0.0)
    assert [(delta.token_ids, delta.finish) for delta in outcome.deltas] == [((EOS,), None)]


def test_a_stop_token_at_the_length_limit_counts_as_a_stop() -> None:
    assert answer(TinyEngine(eos_ids=(EOS,)), max_new_tokens=5) == (FREE_RUN[:5], FinishReason.STOP, EOS)


def test_an_answer_without_limit_runs_to_the_end_of_the_context() -> None:
    tokens, finish, stop = answer(TinyEngine(context_length=18))
    assert (tokens, finish, stop) == (FREE_RUN[:13], FinishReason.LENGTH, None)


def test_a_request_that_wants_more_than_the_pool_ends_when_it_has_all_of_it() -> None:
    tokens, finish, _ = answer(TinyEngine(page_count=5), max_new_tokens=50)
    assert (tokens, finish) == (FREE_RUN[:11], FinishReason.LENGTH)


def test_only_requests_with_penalties_get_the_tokens_that_penalties_need() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, frequency_penalty=0.5)
    engine.add("b", PROMPT[::-1])
    engine.step()
    engine.step()
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    specs = {work.rid: work.sample for work in plan.work}
    penalised, plain = specs["a"], specs["b"]
    assert penalised is not None
    assert penalised.history is not None
    output, said = Counter(engine.answers["a"].tokens), penalised.history
    assert set(np.flatnonzero(np.unpackbits(said.seen, bitorder="little"))) == {*PROMPT, *output}
    assert dict(zip(said.output_ids.tolist(), said.output_times.tolist(), strict=True)) == output
    assert plain is not None
    assert plain.history is None


def test_what_penalties_look_at_is_made_once_for_a_request_however_many_steps_it_takes() -> None:
    engine = TinyEngine(page_count=9, growth_tokens=0)
    for rid in "ab":
        engine.add(rid, [ord(rid)] * 4, max_new_tokens=20, repetition_penalty=1.1)
    made: dict[str, set[int]] = {"a": set(), "b": set()}
    choose = engine.runner.run

    def run(plan: StepPlan) -> StepResult:
        for work in plan.work:
            if work.sample is not None:
                made[work.rid].add(id(work.sample.history))
        return choose(plan)

    engine.runner.run = run  # type: ignore[method-assign]
    engine.run()
    assert engine.scheduler.stats().totals.retracted > 0
    assert [len(histories) for histories in made.values()] == [1, 1]


def refused(engine: TinyEngine, error: type[BadRequest], field: str, prompt: list[int], **sampling: Any) -> str:
    with pytest.raises(error) as caught:
        engine.add("a", prompt, **sampling)
    assert caught.value.field == field
    assert engine.scheduler.idle
    return str(caught.value)


def test_an_empty_prompt_is_refused() -> None:
    assert "at least one token" in refused(TinyEngine(), BadRequest, "prompt", [])


@pytest.mark.parametrize("token", [-1, 1000])
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_place(token: int) -> None:
    assert f"got {token}" in refused(TinyEngine(), BadRequest, "prompt[2]", [1, 2, token, 3])


def test_stop_ids_and_biases_outside_the_vocabulary_are_refused() -> None:
    refused(TinyEngine(), BadRequest, "stop_token_ids", [1], stop_token_ids=(1000,))
    refused(TinyEngine(), BadRequest, "logit_bias", [1], logit_bias={1000: 1.0})


def test_a_prompt_that_leaves_no_room_for_a_token_in_the_context_is_refused() -> None:
    assert "the context" in refused(TinyEngine(context_length=16), PromptTooLong, "prompt", [1] * 16)
    TinyEngine(context_length=16).add("a", [1] * 15)


def test_a_prompt_that_could_never_be_admitted_to_the_pool_is_refused_at_once() -> None:
    assert "the KV pool" in refused(TinyEngine(page_count=5), PromptTooLong, "prompt", [1] * 16)
    assert "the KV pool" in refused(TinyEngine(max_total_tokens=10), PromptTooLong, "prompt", [1] * 10)


def test_the_longest_admissible_prompt_gets_its_one_token() -> None:
    engine = TinyEngine(page_count=5)
    engine.add("a", [1] * 15)
    engine.run()
    assert len(engine.answers["a"].tokens) == 1


def test_an_id_in_use_is_refused_and_free_again_after_its_end() -> None:
    engine = TinyEngine()
    engine.add("a", PROMPT, max_new_tokens=1)
    with pytest.raises(BadRequest, match="rid"):
        engine.add("a", PROMPT)
    engine.run()
    engine.answers.clear()
    engine.add("a", PROMPT, max_new_tokens=1)
    engine.run()
    assert engine.answers["a"].tokens == FREE_RUN[:1]


def test_one_request_more_than_the_queue_holds_is_refused_with_back_pressure() -> None:
    engine = TinyEngine(max_queued_requests=2)
    engine.add("a", PROMPT)
    engine.scheduler.add(make_request("b", PROMPT), remote=True)
    with pytest.raises(CapacityError, match="max_queued_requests = 2"):
        engine.add("c", PROMPT)
    assert "c" not in engine.scheduler


@pytest.mark.parametrize("held", [-4, 3, 8])
def test_a_peer_that_claims_an_impossible_prefix_is_refused(held: int) -> None:
    engine = TinyEngine()
    with pytest.raises(BadRequest, match="held"):
        engine.scheduler.add(make_request("a", [1] * 8), handoff=HandoffSpec(xid="x", held=held))
    assert engine.scheduler.idle


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0), ("context_length", 1), ("max_running_requests", 9), ("chunked_prefill_size", 3),
        ("schedule_policy", "random"), ("max_queued_requests", 0), ("growth_tokens", -1), ("max_total_tokens", 1),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    good: dict[str, Any] = {
        "page_size": 4, "context_length": 64, "rows": 9, "vocab_size": 10, "max_running_requests": 8,
    }  # fmt: skip
    SchedSettings(**good)
    with pytest.raises(ConfigError, match=name):
        SchedSettings(**{**good, name: value})


def test_a_two_dimensional_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a prompt of shape \(2, 2\), expected one row"):
        Request(rid="a", prompt=np.zeros((2, 2), np.int32), sampling=SamplingParams(), seed=0)
