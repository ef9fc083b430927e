"""The offline LLM: prompts in, answers out, in this process; nothing stays behind, whatever a call was given."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

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
from serinus.runner import Runner
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
        run, steps = Runner.run, iter(range(1, 100))

        def interrupted(self: Runner, plan: StepPlan) -> StepResult | None:
            if next(steps) == 2:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return run(self, plan)

        monkeypatch.setattr(Runner, "run", interrupted)

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
    cache.quarantine(Part.FULL, np.arange(1, 33, dtype=np.int32))
    assert cache.stats().pages.quarantined > 8
    prompt = [(7 * i) % 64 for i in range(110)]
    (output,) = llm.generate([prompt], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), prompt, 5)
