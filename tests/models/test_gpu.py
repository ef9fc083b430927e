"""The same models on an accelerator, through the `ref` kernels: the fp32 answers of the CPU, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES, make_checkpoint
from serinus.testing.direct import DirectEngine
from tests.models.parity import random_ids, run_in_uneven_chunks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_decodes_from_the_kv_of_the_windows_alone(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, dtype="float32", layers=7, tokenizer=False)
    prompt = random_ids(3, 150)
    answers = {}
    for device in ("cpu", "cuda"):
        kernels = load(device, "ref")
        model = load_model(load_spec(path), path, torch.float32, kernels, device=device)
        direct = DirectEngine(model, kernels, page_size=8, page_count=160, device=device)
        answers[device] = run_in_uneven_chunks(direct, prompt, forget=True).output
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mistral"])
def test_a_gpu_gives_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, dtype="float32")
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, dtype="float32", max_total_tokens=2048, chunked_prefill_size=64)
        answers[device] = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_serves_in_sixteen_bits_under_the_canary(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype="float32")
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(4)]
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)
    longer = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    likeliest: dict[str, list[float]] = {}
    for name in ("float32", dtype):
        with LLM(
            str(tmp_path), device="cuda", dtype=name, max_total_tokens=2048, chunked_prefill_size=64,
            kv_canary="raise", kv_canary_real_data="all", kv_canary_coverage="full",
        ) as llm:  # fmt: skip
            answers = llm.generate(prompts, first, use_tqdm=False)
            likeliest[name] = [out.outputs[0].logprobs[0].logprob for out in answers]
            assert all(len(out.outputs[0].token_ids) == 24 for out in llm.generate(prompts, longer, use_tqdm=False))
    assert likeliest[dtype] == pytest.approx(likeliest["float32"], abs=0.05)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_two_ranks_over_nccl_give_the_tokens_of_one_gpu(family: str, tmp_path: Path) -> None:
    """Needs two GPUs, one for each rank."""
    sizes = {"layers": 7, "kv_heads": 2, "intermediate": 157, "vocab": 511}
    make_checkpoint(tmp_path, family, dtype="float32", tokenizer=False, **sizes)  # type: ignore[arg-type]
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        with LLM(
            str(tmp_path), device="cuda", dtype="float32", max_total_tokens=2048, chunked_prefill_size=64,
            skip_tokenizer_init=True, tp_size=tp, pp_size=pp,
        ) as llm:  # fmt: skip
            answers[tp, pp] = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
    assert answers[2, 1] == answers[1, 1]
    assert answers[1, 2] == answers[1, 1]
