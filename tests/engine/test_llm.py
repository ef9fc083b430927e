"""The offline LLM: prompts in, answers out, in this process; nothing stays behind, whatever a call was given."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus import LLM, SamplingParams
from serinus.core.errors import BadRequest, PeerGone
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.rng import choice_seed
from serinus.engine.interrupt import Interrupt
from serinus.engine.llm import RequestOutput
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.ranks.steps_ahead import StepsAhead
from serinus.testing.oracle import toy_continue

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=128, tokenizer=False)


@pytest.fixture(scope="module")
def llm(toy: Path) -> LLM:
    return LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128)


def test_prompts_are_answered_in_their_order(llm: LLM, toy: Path) -> None:
    prompts = [[1, 2, 3], list(range(1, 40)), [9, 9]]
    outputs = llm.generate(prompts, GREEDY)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [toy_continue(load_spec(toy), prompt, 5) for prompt in prompts]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize(
    "bounds",
    [
        {"request_timeout": 60.0},
        {"max_queued_requests": 1},
        {"schedule_policy": "priority", "max_queued_by_priority": ("0=1",)},
    ],
)
def test_an_engine_starts_whatever_bounds_its_requests_have(toy: Path, bounds: dict[str, Any]) -> None:
    """The steps of its start are of requests too, which come long after the machine was started."""
    with LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128, **bounds) as llm:
        (output,) = llm.generate([1, 2, 3], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), [1, 2, 3], 5)


def test_n_answers_to_one_prompt_stand_together(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [len(answer.token_ids) for answer in output.outputs] == [2, 2, 2]


def test_each_of_n_answers_has_the_seed_that_http_gives_it(llm: LLM) -> None:
    (together,) = llm.generate([5, 6, 7], SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True))
    alone = [
        llm.generate([5, 6, 7], SamplingParams(seed=choice_seed(7, choice), max_tokens=8, ignore_eos=True))[0]
        for choice in range(3)
    ]
    answers = [answer.token_ids for answer in together.outputs]
    assert answers == [output.outputs[0].token_ids for output in alone]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("bad", [[], [64], [-1], [1 << 40], [1] * 200])
def test_a_prompt_that_cannot_be_served_refuses_the_whole_call_and_leaves_nothing(
    llm: LLM, toy: Path, bad: Sequence[int]
) -> None:
    with pytest.raises(BadRequest):
        llm.generate([[1, 2, 3], bad], GREEDY)
    llm.flush_cache()  # refused while anything runs or waits
    (output,) = llm.generate([[1, 2, 3]], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), [1, 2, 3], 5)


def test_the_shortest_context_there_is_answers_one_token(toy: Path) -> None:
    llm = LLM(str(toy), skip_tokenizer_init=True, max_total_tokens=16, context_length=2)
    (output,) = llm.generate([[7]], GREEDY)
    assert len(output.outputs[0].token_ids) == 1


def test_an_llm_that_is_dropped_closes_its_engine(toy: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(
        str(toy),
        skip_tokenizer_init=True,
        max_total_tokens=256,
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_dir=str(tmp_path),
    )
    own = set(threading.enumerate()) - before
    assert own, "tiers without threads: nothing to close"
    del llm
    assert not [thread for thread in own if thread.is_alive()]


def test_a_call_that_breaks_off_leaves_nothing_and_the_next_one_is_answered(
    llm: LLM, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LLM) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_wait", broken)
        with pytest.raises(RuntimeError, match="planted"):
            llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
    assert len(llm._engine._outbox) == 0
    (output,) = llm.generate([[9, 9]], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), [9, 9], 5)


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C, so many times, in the middle of the second step from now on."""

    def plant(times: int) -> None:
        run, steps = StepsAhead.run, iter(range(1, 100))

        def interrupted(self: StepsAhead, plan: StepPlan) -> StepResult | None:
            if next(steps) == 2:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return run(self, plan)

        monkeypatch.setattr(StepsAhead, "run", interrupted)

    return plant


@pytest.mark.parametrize("waiting", [1, 8])
def test_ctrl_c_in_a_step_ends_the_call_alone(llm: LLM, toy: Path, ctrl_c: Callable[[int], None], waiting: int) -> None:
    ctrl_c(1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([list(range(k, 40 + k)) for k in range(waiting)], GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (llm._engine.idle, len(llm._engine._outbox)) == (True, 0)
    llm.flush_cache()  # refused while anything runs or waits
    (output,) = llm.generate([[9, 9]], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), [9, 9], 5)


def test_a_second_ctrl_c_does_not_wait_for_the_step(toy: Path, ctrl_c: Callable[[int], None]) -> None:
    llm = LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128)
    ctrl_c(2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], GREEDY)
    with pytest.raises(PeerGone, match="interrupted, in the middle of a step"):
        llm.generate([[1, 2, 3]], GREEDY)
    llm.close()


def test_an_llm_outside_the_main_thread_and_a_handler_of_the_program_are_left_alone(llm: LLM) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("SIGINT came")

    before = signal.signal(signal.SIGINT, own)
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    answers: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([[1, 2]], GREEDY)))
    thread.start()
    thread.join()
    assert len(answers) == 1


def test_more_prompts_than_may_wait_are_answered(toy: Path) -> None:
    llm = LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128, max_queued_requests=3)
    prompts = [[i + 1, 2, 3] for i in range(11)]
    outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        toy_continue(load_spec(toy), prompt, 5) for prompt in prompts
    ]


def test_a_prompt_that_needs_quarantined_pages_gets_them(toy: Path) -> None:
    """Nothing else runs that could free a page: what was wrong in them is overwritten before it is read."""
    llm = LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128)
    llm.generate([list(range(1, 60))], GREEDY)
    cache = llm._built.cache
    cache.condemn(Part.FULL, np.arange(1, 33, dtype=np.int32))
    assert cache.stats().pages.quarantined > 8
    prompt = [(7 * i) % 64 for i in range(110)]
    (output,) = llm.generate([prompt], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), prompt, 5)


def ids_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_of_every_form_are_continued(llm: LLM) -> None:
    forms = [[5, 6], (5, 6), np.array([5, 6]), {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": np.array([5, 6])}]
    (expected,) = ids_of(llm.generate([5, 6], GREEDY))
    assert ids_of(llm.generate(forms, GREEDY)) == [expected] * len(forms)
    for form in (*forms, np.array([[5, 6]])):
        assert ids_of(llm.generate(form, GREEDY)) == [expected]
    (output,) = llm.generate({"prompt_token_ids": [5, 6], "prompt": "shown only", "multi_modal_data": None}, GREEDY)
    assert (output.prompt, output.prompt_token_ids, ids_of([output])) == ("shown only", (5, 6), [expected])


def test_prompts_share_what_is_cached_only_with_those_of_their_salt(llm: LLM) -> None:
    llm.flush_cache()
    prompt = {"prompt_token_ids": list(range(1, 30))}
    cached = []
    for salt in ("a", "a", "b", None):
        (output,) = llm.generate({**prompt, "cache_salt": salt}, GREEDY)
        assert output.usage is not None
        cached.append(sum(output.usage.cached_tokens.values()))
    assert cached == [0, 28, 0, 0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("text", "prompts: got 'text', expected token ids, as no tokenizer"),
        (b"bytes", r"prompts: got b'bytes', expected a text, a list of token ids, \{'prompt'"),
        (None, "prompts: got None"),
        ([], "prompts: got .*, expected at least one prompt"),
        ([[1], None], r"prompts\[1\]: got None"),
        ([[1], []], r"prompts\[1\]: got \[\], expected at least one token"),
        ([1.0, 2.0], r"prompts: got \[1.0, 2.0\], expected token ids, as integers"),
        ([True, False], "expected token ids, as integers"),
        ([1, "x"], "expected token ids, as integers"),
        ([[1, 2], [[3]]], r"prompts\[1\]: got \[\[3\]\], expected token ids, as integers"),
        ([[1, [2]]], r"prompts\[0\]: got \[1, \[2\]\], expected token ids, as integers"),
        (({"prompt_token_ids": [1]} for _ in range(2)), "prompts: got <generator"),
        ({"text": "x"}, r"prompts\['text'\]: got 'x', expected one of the keys prompt, prompt_token_ids, cache_salt"),
        ({"prompt_token_ids": None}, "expected a prompt or prompt_token_ids in it"),
        ({"prompt": [1, 2]}, r"prompts\['prompt'\]: got \[1, 2\], expected a text"),
        ([{"prompt_token_ids": "12"}], r"prompts\[0\]\['prompt_token_ids'\]: got '12'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, r"prompts\['cache_salt'\]: got 5"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, r"prompts\['cache_salt'\]: got .*, expected .* Unicode"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, bad: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        llm.generate(bad, GREEDY)


@pytest.mark.parametrize("bad", [{"temperature": 0}, "greedy", [None], [GREEDY, GREEDY]])
def test_what_are_no_sampling_params_are_refused_by_name(llm: LLM, bad: Any) -> None:
    with pytest.raises(BadRequest, match="sampling_params"):
        llm.generate([5, 6], bad)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An LLM with a tokenizer and a chat template."""
    return LLM(str(make_toy(tmp_path_factory.mktemp("chatty"))), page_size=4, max_total_tokens=1024)


def test_texts_and_dicts_of_texts_are_the_same_prompt(chatty: LLM) -> None:
    outputs = chatty.generate(["hello", {"prompt": "hello"}], GREEDY)
    assert [output.prompt for output in outputs] == ["hello", "hello"]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text != ""


def test_a_stop_text_may_be_given_without_a_list(chatty: LLM) -> None:
    (whole,) = chatty.generate("hello", GREEDY)
    stop = whole.outputs[0].text[2:4]
    (output,) = chatty.generate("hello", replace(GREEDY, stop=stop))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.outputs[0].text == whole.outputs[0].text.partition(stop)[0]


def test_a_chat_is_rendered_as_over_http(chatty: LLM) -> None:
    plain = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    first, second = chatty.chat([plain, parts], GREEDY)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert chatty.chat(plain, GREEDY)[0].outputs == first.outputs
    (open_ended,) = chatty.chat([*plain, {"role": "assistant", "content": "so"}], GREEDY, continue_final_message=True)
    assert chatty.tokenizer is not None
    assert chatty.tokenizer.decode(open_ended.prompt_token_ids).endswith("so")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "messages: got"),
        ("hello", "messages: got 'hello', expected a list of messages"),
        ([{"role": "pope", "content": "x"}], r"messages\[0\].role: got 'pope'"),
        (["hello"], r"messages\[0\]: got 'hello', expected an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "this server reads text only"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(chatty: LLM, bad: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        chatty.chat(bad, GREEDY)


def test_defaults_of_the_checkpoint_hold_where_no_parameters_are_given(tmp_path: Path) -> None:
    folder = make_toy(tmp_path / "toy", vocab=64, context=128, tokenizer=False)
    said = {"temperature": 0.0, "max_new_tokens": 3, "eos_token_id": []}
    (folder / "generation_config.json").write_text(json.dumps(said))
    with LLM(str(folder), skip_tokenizer_init=True, max_total_tokens=128) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        (answer,) = ids_of(llm.generate([5, 6]))
        assert list(answer) == toy_continue(load_spec(folder), [5, 6], 3)
        assert len(ids_of(llm.generate([5, 6], SamplingParams(ignore_eos=True)))[0]) == 126
    said["eos_token_id"] = [answer[1], 1 << 30]
    (folder / "generation_config.json").write_text(json.dumps(said))
    with LLM(str(folder), skip_tokenizer_init=True, max_total_tokens=128) as llm:
        assert ids_of(llm.generate([5, 6])) == [answer[:2]]
    with LLM(str(folder), skip_tokenizer_init=True, max_total_tokens=128, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert ids_of(llm.generate([5, 6], replace(GREEDY, ignore_eos=False, max_new_tokens=3))) == [answer]


def test_the_eos_token_of_the_tokenizer_ends_an_answer(tmp_path: Path) -> None:
    folder = make_toy(tmp_path / "toy")
    with LLM(str(folder), max_total_tokens=1024) as llm:
        (whole,) = ids_of(llm.generate("hello", GREEDY))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (named,) = (name for name, token_id in vocab.items() if token_id == whole[2])
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": named}))
    with LLM(str(folder), max_total_tokens=1024) as llm:
        (output,) = llm.generate("hello", replace(GREEDY, ignore_eos=False))
        assert output.outputs[0].token_ids == whole[: whole.index(whole[2]) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", whole[2])
