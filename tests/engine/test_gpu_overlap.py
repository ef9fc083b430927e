"""Steps ahead on a GPU: the tokens of an engine that waits, and no host wait between two steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus import LLM, SamplingParams
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import Request
from serinus.engine.messages import FrontMessage
from serinus.models.small_checkpoints import make_checkpoint
from serinus.ranks.steps_ahead import StepsAhead

pytestmark = pytest.mark.gpu

CANARIES: dict[str, dict[str, Any]] = {
    "none": {"kv_canary": "none"}, "full": {"kv_canary": "heal", "kv_canary_coverage": "full"},
    "rotating": {"kv_canary": "raise", "kv_canary_coverage": "rotating:3"},
}  # fmt: skip


def engine(folder: Path, **settings: Any) -> LLM:
    make_checkpoint(folder, "qwen3", dtype="float32", hidden=256, heads=4, kv_heads=2, head_size=64, tokenizer=False)
    return LLM(
        str(folder), device="cuda", dtype="float32", max_total_tokens=4096, chunked_prefill_size=64,
        skip_tokenizer_init=True, max_running_requests=8, **settings,
    )  # fmt: skip


def runner_of(llm: LLM) -> StepsAhead:
    runner = llm._built.line.body._runner
    assert isinstance(runner, StepsAhead)
    return runner


def count_chunks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each step from now on that was queued when its plan came: its prompt chunks."""
    runner, counts = runner_of(llm), list[int]()
    run = runner.run

    def counted(plan: StepPlan) -> StepResult | None:
        if plan.takes is not None:
            counts.append(sum(len(work.tokens) > 1 for work in plan.work))
        return run(plan)

    monkeypatch.setattr(runner, "run", counted)
    return counts


@pytest.mark.parametrize("canary", list(CANARIES))
@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("later", [{}, {"repetition_penalty": 1.2}, {"logprobs": 2}], ids=["plain", "penalty", "asks"])
def test_tokens_are_those_of_an_engine_that_waits(
    tmp_path: Path, canary: str, later: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, graphs: bool
) -> None:
    """`later`: of every third request; its tokens are chosen when the ones before are on the host."""
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 for i in range(20 + 13 * j)]} for j in range(12)]
    params = [
        SamplingParams(
            temperature=0.6 * (j % 2), max_tokens=20 + 5 * (j % 4), ignore_eos=True, seed=j, **({} if j % 3 else later)
        )
        for j in range(12)
    ]  # fmt: skip
    answers, asked, taken = [], [], []
    for waits in (True, False):
        settings = {"disable_overlap_schedule": waits, "disable_cuda_graph": not graphs, **CANARIES[canary]}
        with engine(tmp_path, **settings) as llm:
            chunks = count_chunks(llm, monkeypatch)
            outs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
            answers.append([out.token_ids for out in outs])
            asked.append([each for out in outs for each in out.logprobs or ()])
            taken.append(runner_of(llm).taken)
            if canary != "none":
                view = llm._engine.canary.view()
                assert view["slots_due"] == view["slots_checked"] > 0
                assert not view["violations"]
    assert answers[0] == answers[1]
    for waits, ahead in zip(*asked, strict=True):  # a batch of another size adds up in another order
        assert (ahead.logprob, *ahead.top_logprobs) == pytest.approx((waits.logprob, *waits.top_logprobs), abs=1e-4)
    assert bool(asked[0]) is ("logprobs" in later)
    assert taken[0] == 0
    assert taken[1] > 20
    assert later or sum(chunks) > 1, "of the engine that does not wait"


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("canary", list(CANARIES))
def test_the_next_step_is_queued_before_the_tokens_of_this_one_are_waited_for(
    tmp_path: Path, canary: str, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that waits for the stream would be told; of events, that of the tokens and those behind it alone."""
    with engine(tmp_path, **CANARIES[canary]) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, repetition_penalty=penalty)
        prompts = [torch.arange(5 + i, 25 + 2 * i).int().numpy() for i in range(3)]
        requests = [
            Request(rid=f"r{i}", prompt=prompt, sampling=sampling, seed=i, stream=True)
            for i, prompt in enumerate(prompts)
        ]
        llm._turn([FrontMessage(front="f", message=each) for each in requests])
        for _ in range(8):
            llm._turn([])
        runner, seen = runner_of(llm), list[str]()
        graphs = runner._runner.graphs
        assert graphs is not None
        replay, read = graphs.replay, runner._runner.read
        monkeypatch.setattr(graphs, "replay", lambda *given: [seen.append("queue"), replay(*given)][1])
        monkeypatch.setattr(runner._runner, "read", lambda flight: [seen.append("read"), read(flight)][1])
        before = runner.taken
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(10):
                llm._turn([])
            torch.cuda.set_sync_debug_mode("default")
        assert runner.taken == before + 10
        assert seen == ["queue", "read"] * 10
        assert not [str(each.message) for each in told if "called a synchronizing" in str(each.message)]
        while not llm._engine.idle:
            llm._turn([])


@pytest.mark.parametrize("canary", list(CANARIES))
def test_prompt_chunks_are_queued_before_the_tokens_of_the_step_before_are_waited_for(
    tmp_path: Path, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one step each, more than there are rows, behind tokens of those before."""
    with engine(tmp_path, **CANARIES[canary]) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        prompts = [((13 * i + torch.arange(64)) % 500).int().numpy() for i in range(36)]
        requests = [
            Request(rid=f"r{i}", prompt=prompt, sampling=sampling, seed=i, stream=True)
            for i, prompt in enumerate(prompts)
        ]
        llm._turn([FrontMessage(front="f", message=each) for each in requests])
        for _ in range(4):
            llm._turn([])
        runner, seen, chunks = runner_of(llm), list[str](), count_chunks(llm, monkeypatch)
        forward, read = runner._runner._forward, runner._runner.read
        monkeypatch.setattr(runner._runner, "_forward", lambda *given: [seen.append("queue"), forward(*given)][1])
        monkeypatch.setattr(runner._runner, "read", lambda flight: [seen.append("read"), read(flight)][1])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(10):
                llm._turn([])
            torch.cuda.set_sync_debug_mode("default")
        assert chunks == [1] * 10
        assert seen == ["queue", "read"] * 10
        assert not [str(each.message) for each in told if "called a synchronizing" in str(each.message)]
        while not llm._engine.idle:
            llm._turn([])
