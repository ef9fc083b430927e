"""The engine on a GPU, through `LLM`: a model's shape with dummy weights, bf16. Decode of 1, 16, 64 and 256 requests
and prefill of 64 x 1,024 tokens, without the canary, under rotating:16 and in full; one JSON line each.

A decode step is the mean of those from the 16th to the 80th token of a run on prompts that are cached, the better of
two. Floor of a step: its weights and KV at the read rate of the card; ceiling of prefill: its products at the rate of a
large one.

    python -m benchmarks.gpu_engine [--model qwen3-8b] [--canary none rotating:16 full] [--batch 1 16 64 256] [--eager]
        [--wait] [--tp-size 2] [--pp-size 2] [--quantization fp8]

Of several ranks the floor is a rank's part. Of a mixture the floor counts the experts that so many tokens hit if they
choose at random, the ceiling those of one.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit
from serinus import LLM, SamplingParams
from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.engine.step_floor import read_bytes
from serinus.models import ModelSpec
from serinus.models.quantization import AT_LOAD

_SHARED = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "rope_theta": 1e6,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 102_400, "rope_theta": 1e4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": False,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201_088, "rope_theta": 150_000.0, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip
MODELS["qwen3-8b-half"] = {
    **MODELS["qwen3-8b"], "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 6144,
}  # fmt: skip
"""What one of two slices computes, but for the head and the sums: on one GPU."""
MODELS["gpt-oss-20b-mxfp4"] = {**MODELS["gpt-oss-20b"], "quantization_config": {"quant_method": "mxfp4"}}
CONTEXTS = {1: 1024, 16: 1024, 64: 1024, 256: 560}
"""Prompt tokens by batch."""
SHORT, LONG = 16, 80
_LATE = 24
"""More steps than tokens are told late."""
CLOCK = WallClock()


def config_in(folder: Path, model: str) -> str:
    """A checkpoint's folder without weights."""
    (folder / "config.json").write_text(json.dumps({**_SHARED, **MODELS[model]}))
    return str(folder)


def kv_bytes(spec: ModelSpec, context: float) -> float:
    """What attention reads of a request: of layers with a window no more than that."""
    rows = sum(min(context, spec.window or context) if part is Part.SWA else context for part in spec.layer_parts)
    return rows * (1 if spec.is_latent else 2) * spec.kv_head_count * spec.head_size * 2


def device_ms(job: Callable[[], object], repeat: int = 10) -> float:
    """Median milliseconds of a job on the device."""
    times = []
    for _ in range(repeat + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        job()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def rates() -> dict[str, float]:
    """Bytes read and products a second at best, in TB and TFLOP."""
    data, out = torch.empty(1 << 29, dtype=torch.int64, device="cuda"), torch.empty((), device="cuda").long()
    read_ms, change_ms = device_ms(lambda: torch.sum(data, 0, out=out)), device_ms(lambda: data[: 1 << 28].add_(1))
    bytes_ms = max(data.nbytes / read_ms, data.nbytes / change_ms)
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"read_tb_s": bytes_ms / 1e9, "tflop_s": 2 * 8192**3 / device_ms(lambda: a @ b) / 1e9}


def seconds(job: Callable[[], object]) -> float:
    """Of a job on the host's clock."""
    torch.cuda.synchronize()
    begin = CLOCK.now()
    job()
    return CLOCK.now() - begin


def step_ms(llm: LLM, prompts: list[list[int]], short: int = SHORT, long: int = LONG) -> tuple[float, float]:
    """Milliseconds of a decode step of these prompts, which are cached: the mean from when all have `short` tokens to
    when they have `long`, and the median of these steps, which one that waited does not move. What the call does before
    and after that does not count. Under rotating:16 tokens are told 16 steps late, and the last of an answer at once:
    it goes on until these are none of the `long`."""
    counted: Any = llm
    turn, ends, told = llm._turn, list[float](), 0

    def timed(*given: Any) -> Any:
        nonlocal told
        output = turn(*given)
        told += sum(len(delta.token_ids) for _, deltas in output.deltas for delta in deltas)
        while told >= (len(ends) + 1) * len(prompts):
            ends.append(CLOCK.now())
        return output

    counted._turn = timed
    params = SamplingParams(temperature=0.0, max_tokens=long + _LATE, ignore_eos=True)
    try:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    finally:
        del counted._turn
    steps_ms = [(after - before) * 1e3 for before, after in pairwise(ends[short - 1 : long])]
    return statistics.mean(steps_ms), statistics.median(steps_ms)


def measure(llm: LLM, batches: list[int], said: dict[str, Any], card: dict[str, float]) -> None:
    """One line for prefill and one for each batch."""
    spec = llm._built.spec
    rng = random.Random(1)

    def run(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def prompts_of(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, spec.vocab_size) for _ in range(length)] for _ in range(count)]

    run(prompts_of(4, 1024), 2)
    tokens, ranks = 64 * 1024, said["tp"] * said["pp"]
    times = [seconds(partial(run, prompts_of(64, 1024), 1)) for _ in range(2)]
    took, products = min(times), read_bytes(replace(spec, quantization=None), 2)
    emit(
        "gpu_engine_prefill", **said, tokens=tokens, tok_s=round(tokens / took), times=times,
        ceiling_tok_s=round(ranks * card["tflop_s"] * 1e12 / products), card=card,
    )  # fmt: skip
    for batch in batches:
        prompts = prompts_of(batch, CONTEXTS[batch])
        run(prompts, 2)
        took_ms, median_ms = min(step_ms(llm, prompts) for _ in range(2))
        context = CONTEXTS[batch] + (SHORT + LONG) / 2
        floor_ms = (read_bytes(spec, 2, batch) + batch * kv_bytes(spec, context)) / card["read_tb_s"] / 1e9 / ranks
        emit(
            "gpu_engine_decode", **said, batch=batch, context=context, step_ms=round(took_ms, 3),
            median_ms=round(median_ms, 3), floor_ms=round(floor_ms, 3), share=round(floor_ms / took_ms, 3),
            tok_s=round(batch / took_ms * 1e3), card=card,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=[*MODELS])
    parser.add_argument("--canary", nargs="+", default=["none", "rotating:16", "full"])
    parser.add_argument("--batch", nargs="+", type=int, default=[*CONTEXTS], choices=[*CONTEXTS])
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--wait", action="store_true", help="each step begins when the one before it was read")
    parser.add_argument("--quantization", default="auto", choices=["auto", *AT_LOAD])
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    arguments = parser.parse_args()
    card = {name: round(rate, 2) for name, rate in rates().items()}
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        path = config_in(Path(folder), arguments.model)
        for canary in arguments.canary:
            run(path, canary, arguments, card)
            gc.collect()
            torch.cuda.empty_cache()


def run(path: str, canary: str, arguments: argparse.Namespace, card: dict[str, float]) -> None:
    """One engine."""
    settings: dict[str, Any] = {"kv_canary": "none"}
    if canary != "none":
        settings = {"kv_canary": "heal", "kv_canary_coverage": canary}
    begin = CLOCK.now()
    with LLM(
        path, load_format="dummy", quantization=arguments.quantization, skip_tokenizer_init=True, device="cuda",
        dtype="bfloat16",
        max_running_requests=256, chunked_prefill_size=8192, max_total_tokens=240_000,
        disable_cuda_graph=arguments.eager, disable_overlap_schedule=arguments.wait,
        tp_size=arguments.tp_size, pp_size=arguments.pp_size, cuda_graph_max_bs=256, **settings,
    ) as llm:  # fmt: skip
        said = {
            "model": arguments.model,
            "weights": arguments.quantization,
            "canary": canary,
            "graphs": not arguments.eager,
        }
        said |= {
            "tp": arguments.tp_size,
            "pp": arguments.pp_size,
            "overlap": not arguments.wait,
            "gpu": torch.cuda.get_device_name(),
        }
        phases = {name: round(spent, 2) for name, spent in llm._built.seconds.items()}
        said |= {"start_s": round(CLOCK.now() - begin, 1), "phases": phases}
        measure(llm, arguments.batch, said, card)


if __name__ == "__main__":
    main()
