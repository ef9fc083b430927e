"""Memory of a GPU: the pool leaves room for the largest step, and a step without memory ends its requests alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.models.small_checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def checkpoint(path: Path) -> str:
    make_checkpoint(
        path, "qwen3", hidden=1024, layers=2, heads=8, kv_heads=4, head_size=128, intermediate=8192, vocab=512,
        context=16384, tokenizer=False,
    )  # fmt: skip
    return str(path)


def ids(count: int, seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + seed) % 500 for i in range(count)]}


def short_answers(llm: LLM) -> list[tuple[int, ...]]:
    return [out.outputs[0].token_ids for out in llm.generate([ids(40, s) for s in range(3)], GREEDY, use_tqdm=False)]


def test_what_is_left_to_the_pool_is_enough_for_the_largest_step(tmp_path: Path) -> None:
    with LLM(checkpoint(tmp_path), device="cuda", skip_tokenizer_init=True, chunked_prefill_size=8192) as llm:
        answers = llm.generate([ids(15000, seed) for seed in range(24)], GREEDY, use_tqdm=False)
        assert [out.outputs[0].finish_reason for out in answers] == ["length"] * 24
        free, total = torch.cuda.mem_get_info()
        assert free < total


@pytest.mark.parametrize("canary", ["none", "heal"])
def test_a_step_without_memory_ends_its_requests_and_not_the_engine(tmp_path: Path, canary: str) -> None:
    with LLM(
        checkpoint(tmp_path), device="cuda", skip_tokenizer_init=True, chunked_prefill_size=8192,
        max_total_tokens=40000, kv_canary=canary,
    ) as llm:  # fmt: skip
        computed, cached = short_answers(llm), short_answers(llm)  # in bf16 these may differ
        torch.cuda.empty_cache()
        filler = torch.empty(torch.cuda.mem_get_info()[0] - (48 << 20), dtype=torch.uint8, device="cuda")
        (failed,) = llm.generate([ids(9000, 5)], GREEDY, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        del filler
        torch.cuda.empty_cache()
        assert short_answers(llm) == cached
        llm.flush_cache()
        assert short_answers(llm) == computed
        assert llm.generate([ids(9000, 5)], GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("left_mb", [8, 48, 256])
def test_no_request_ends_the_engine_however_little_memory_is_left(tmp_path: Path, left_mb: int) -> None:
    """Long prompts, log-probabilities of all their tokens, penalties and noise, side by side, in graphs and outside."""
    kinds = (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=3),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True, seed=3, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5),
        GREEDY,
    )
    with LLM(
        checkpoint(tmp_path), device="cuda", skip_tokenizer_init=True, chunked_prefill_size=8192,
        max_total_tokens=60000, max_running_requests=16,
    ) as llm:  # fmt: skip
        computed, cached = short_answers(llm), short_answers(llm)  # in bf16 these may differ
        torch.cuda.empty_cache()
        filler = torch.empty(torch.cuda.mem_get_info()[0] - (left_mb << 20), dtype=torch.uint8, device="cuda")
        prompts = [ids(9000 if seed % 4 == 0 else 700, 100 + seed) for seed in range(12)]
        answers = llm.generate(prompts, [kinds[i % 4] for i in range(12)], use_tqdm=False)
        ends = [out.outputs[0].finish_reason for out in answers]
        assert set(ends) <= {"length", "error"}, ends
        assert left_mb > 48 or "error" in ends
        del filler
        torch.cuda.empty_cache()
        assert short_answers(llm) == cached
        llm.flush_cache()
        assert short_answers(llm) == computed
        answers = llm.generate(prompts, [kinds[i % 4] for i in range(12)], use_tqdm=False)
        assert [out.outputs[0].finish_reason for out in answers] == ["length"] * 12
