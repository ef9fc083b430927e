"""The same models on an accelerator: the fp32 answers of the CPU, token for token, and the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.kernels import load
from serinus.kernels.triton.peer_exchange import PeerExchange
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES, make_checkpoint
from serinus.testing.direct import DirectEngine
from tests.models.parity import engine, equals_transformers, random_ids, run_in_uneven_chunks
from tests.models.test_gpt_oss import quantized_twins
from tests.models.test_quantized import dequantized
from tests.models.test_quantized_files import CASES, written
from tests.models.test_quantized_files import FAMILIES as SIZES
from tests.models.test_ranks import FAMILIES as RANKED

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


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_on_a_gpu_are_those_of_transformers(checkpoints: dict[str, Path], family: str) -> None:
    equals_transformers(checkpoints[family], "triton", device="cuda")


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v2"])
def test_a_model_quantized_at_load_on_a_gpu_is_that_of_its_dequantized_weights(
    tmp_path: Path, family: str, method: str
) -> None:  # fmt: skip
    path = make_checkpoint(tmp_path / "made", family, tokenizer=False)
    if family != "llama":  # of latent attention no more than the output projection is
        assert run_quantized(path, method, "cpu") == run_quantized(path, method, "cuda")
        return
    plain = dequantized(path, tmp_path / "plain", method)
    equals_transformers(path, "triton", device="cuda", plain=plain, quantization=method)


def run_quantized(path: Path, method: str, device: str) -> list[int]:
    """Greedy tokens of a prompt."""
    kernels = load(device)
    spec = load_spec(path, quantization=method, device=device)
    model = load_model(spec, path, torch.float32, kernels, device=device)
    direct = DirectEngine(model, kernels, page_size=8, page_count=160, device=device)
    return run_in_uneven_chunks(direct, random_ids(7, 150)).output


@pytest.mark.parametrize("case", ["at load", *[case for case in CASES if case.startswith("fp8")]])
def test_fp8_in_sixteen_bits_rounds_the_rows_of_prompts_and_answers_as_its_weights_do(
    tmp_path: Path, case: str, record_property: Callable[[str, object], None]
) -> None:
    """The mean error of log-probabilities behind a prompt of 600 tokens, decoded in recorded steps under the canary,
    beside that of bf16 alone, which rounds less."""
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4}
    path = make_checkpoint(tmp_path / "made", "llama", tokenizer=False, dtype="float32", **sizes)
    method, quantized, plain = "auto", path, path
    if case == "at load":
        method, plain = "fp8", dequantized(path, tmp_path / "plain", "fp8")
    else:
        quantized, plain = written(path, tmp_path, case)
    prompts = [{"prompt_token_ids": random_ids(seed, 600)} for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    longer = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = {}
    for name, folder, dtype, asked in (
        ("exact", plain, "float32", "auto"), ("bf16", plain, "bfloat16", "auto"),
        ("fp8", quantized, "bfloat16", method),
    ):  # fmt: skip
        with LLM(
            str(folder), device="cuda", dtype=dtype, quantization=asked, max_total_tokens=4096,
            skip_tokenizer_init=True, chunked_prefill_size=256, kv_canary="raise", kv_canary_real_data="all",
            kv_canary_coverage="full",
        ) as llm:  # fmt: skip
            answers = llm.generate(prompts, params, use_tqdm=False)
            places = [out.outputs[0].logprobs[0] for out in answers]
            found[name] = [dict(zip(each.top_ids, each.top_logprobs, strict=True)) for each in places]
            assert all(len(out.outputs[0].token_ids) == 24 for out in llm.generate(prompts, longer, use_tqdm=False))
    errors = {}
    for name in ("bf16", "fp8"):
        apart = [
            abs(ours[token] - exact[token])
            for ours, exact in zip(found[name], found["exact"], strict=True)
            for token in ours.keys() & exact.keys()
        ]
        assert len(apart) > 20
        errors[name] = sum(apart) / len(apart)
        record_property(f"mean error of {name}", errors[name])
    assert errors["fp8"] < 0.1, errors


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_on_a_gpu_is_what_its_integers_stand_for(tmp_path: Path, case: str) -> None:
    for family in ("llama", "qwen2_moe"):
        path = make_checkpoint(tmp_path / family, family, tokenizer=False, **SIZES[family])
        quantized, plain = written(path, tmp_path / f"of {family}", case)
        equals_transformers(quantized, "triton", device="cuda", plain=plain)


def test_mxfp4_on_a_gpu_is_what_its_blocks_stand_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        for path in quantized_twins(tmp_path / str(dtype)):
            with caplog.at_level("INFO", "serinus.models"):
                direct, model = engine(path, dtype, "triton", device="cuda")
            run_in_uneven_chunks(direct, random_ids(7, 150))
            seen[path.name] = torch.cat(model.seen).float()
        apart = (seen["packed"] - seen["plain"]).abs()
        assert float(apart.max()) <= 1e-4 if dtype == torch.float32 else float(apart.mean()) < 0.02
    said = [record.getMessage() for record in caplog.records if "mxfp4" in record.getMessage()]
    assert said == ["experts in mxfp4 are multiplied with in 4 bits"] * 2


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_recorded_steps_of_mixtures_and_latent_rows_give_the_tokens_of_those_that_are_not(
    checkpoints: dict[str, Path], family: str
) -> None:
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 for i in range(20 + 30 * j)]} for j in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for disabled in (True, False):
        with LLM(
            str(checkpoints[family]), device="cuda", dtype="bfloat16", max_total_tokens=2048, chunked_prefill_size=64,
            skip_tokenizer_init=True, disable_cuda_graph=disabled, max_running_requests=8,
            kv_canary="raise", kv_canary_real_data="all", kv_canary_coverage="full",
        ) as llm:  # fmt: skip
            answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)])
    assert answers[0] == answers[1]


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
@pytest.mark.parametrize("family", RANKED)
def test_two_ranks_give_the_tokens_of_one_gpu(family: str, tmp_path: Path) -> None:
    """One for each rank; steps queued kernel by kernel, and recorded."""
    make_checkpoint(tmp_path, family, dtype="float32", tokenizer=False, **RANKED[family])  # type: ignore[arg-type]
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for tp, pp, graphs in ((1, 1, None), (2, 1, None), (1, 2, None), (2, 1, 4), (1, 2, 4)):
        with LLM(
            str(tmp_path), device="cuda", dtype="float32", max_total_tokens=2048, chunked_prefill_size=64,
            skip_tokenizer_init=True, tp_size=tp, pp_size=pp, cuda_graph_max_bs=graphs, disable_cuda_graph=not graphs,
            kv_canary="raise", kv_canary_real_data="all",
        ) as llm:  # fmt: skip
            answers[tp, pp, graphs] = [
                out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)
            ]
    alone = answers.pop((1, 1, None))
    assert [shape for shape, found in answers.items() if found != alone] == []


@pytest.mark.gpus(2)
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_sums_of_ranks_have_the_same_bits_by_nccl_and_as_the_end_of_a_linear(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows and of more, with a bias and behind a norm, queued kernel by kernel and recorded. NCCL reads its
    variables once in a process: each setting has a leader of its own, as its ranks are processes of their own."""
    sizes = {"hidden": 256, "intermediate": 1024, "heads": 8, "kv_heads": 2, "head_size": 128}
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_checkpoint(tmp_path, family, dtype="bfloat16", tokenizer=False, **sizes, **biased)  # type: ignore[arg-type]
    found = []
    for disabled in ("1", "0"):
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(_answers_of_two_ranks, str(tmp_path)).result())
    (by_nccl, nccl_added), (by_words, words_added) = found
    assert (nccl_added, words_added) == ([False, False], [True, True])
    assert by_words == by_nccl


def _answers_of_two_ranks(path: str) -> tuple[list[tuple[list[int], list[float]]], list[bool]]:
    """Tokens and their log-probabilities without recorded steps and with; whether linears ended with sums."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    added: list[bool] = []
    linear = PeerExchange.linear_all_reduce

    def counted(*given: Any) -> torch.Tensor | None:
        out = linear(*given)
        added[-1] |= out is not None
        return out

    PeerExchange.linear_all_reduce = counted  # type: ignore[method-assign]
    answers = []
    for graphs in (None, 40):
        added.append(False)
        with LLM(
            path, device="cuda", dtype="bfloat16", max_total_tokens=8192, skip_tokenizer_init=True, tp_size=2,
            cuda_graph_max_bs=graphs, disable_cuda_graph=not graphs, kv_canary="raise", kv_canary_real_data="all",
        ) as llm:  # fmt: skip
            for count in (3, 40):
                prompts = [{"prompt_token_ids": random_ids(seed, 30)} for seed in range(count)]
                answers += [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    return [(each.token_ids, [told.logprob for told in each.logprobs or []]) for each in answers], added


@pytest.mark.gpus(2)
@pytest.mark.parametrize("case", ["int8", "int4", "fp8", *[case for case in CASES if case.startswith("fp8")]])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_two_ranks_share_quantized_weights(tmp_path: Path, family: str, case: str) -> None:
    """In fp32, where products round nothing away, the tokens of one GPU; in bf16, where FP8 rounds the rows of prompts,
    its log-probabilities but for rounding."""
    sizes = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4} if family == "llama" else {}
    path = make_checkpoint(tmp_path / "made", family, tokenizer=False, dtype="float32", **{**SIZES[family], **sizes})
    is_made, method = case in CASES, "auto" if case in CASES else case
    path = written(path, tmp_path, case)[0] if is_made else path
    prompts = [{"prompt_token_ids": random_ids(seed, 300)} for seed in range(4)]
    for dtype, params in (
        ("float32", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)),
        ("bfloat16", SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)),
    ):
        tokens, likeliest = [], []
        for ranks in (1, 2):
            with LLM(
                str(path), device="cuda", dtype=dtype, quantization=method, max_total_tokens=2048,
                skip_tokenizer_init=True, chunked_prefill_size=256, tp_size=ranks, kv_canary="raise",
                kv_canary_real_data="all",
            ) as llm:  # fmt: skip
                answers = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([out.outputs[0].token_ids for out in answers])
            likeliest.append([out.outputs[0].logprobs[0].logprob for out in answers] if params.logprobs else [])
        assert tokens[1] == tokens[0] or dtype == "bfloat16"
        assert likeliest[1] == pytest.approx(likeliest[0], abs=0.2)
