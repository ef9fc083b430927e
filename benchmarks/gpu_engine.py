"""The engine on a GPU, through `LLM`: Qwen3-8B's shape with dummy weights, bf16. Decode of 1, 16, 64 and 256 requests
and prefill of 64 x 1,024 tokens, without the canary, under rotating:16 and in full; one JSON line each.

A decode step is the difference of two runs on prompts that are cached: of 80 and of 16 tokens. Floor of a step: its
weights and KV at the read rate of the card; ceiling of prefill: its products at the rate of a large one.

    python -m benchmarks.gpu_engine [--canary none rotating:16 full] [--batch 1 16 64 256] [--eager] [--wait]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit
from serinus import LLM, SamplingParams
from serinus.core.clock import WallClock

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, SIZE, VOCAB = 36, 4096, 12288, 32, 8, 128, 151_936
CONTEXTS = {1: 1024, 16: 1024, 64: 1024, 256: 560}
"""Prompt tokens by batch."""
SHORT, LONG = 16, 80
WEIGHTS = LAYERS * (WIDTH * (HEADS + 2 * KV_HEADS) * SIZE + WIDTH * HEADS * SIZE + 3 * WIDTH * INNER) + VOCAB * WIDTH
KV_BYTES = LAYERS * 2 * KV_HEADS * SIZE * 2
CLOCK = WallClock()


def config_in(folder: Path) -> str:
    """A checkpoint's folder without weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu", "attention_bias": False, "eos_token_id": 151_645, "bos_token_id": 151_643,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


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


def measure(llm: LLM, batches: list[int], said: dict[str, Any], card: dict[str, float]) -> None:
    """One line for prefill and one for each batch."""
    rng = random.Random(1)

    def run(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def prompts_of(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, 150_000) for _ in range(length)] for _ in range(count)]

    run(prompts_of(4, 1024), 2)
    prompts, tokens = prompts_of(64, 1024), 64 * 1024
    took = seconds(partial(run, prompts, 1))
    emit(
        "gpu_engine_prefill", **said, tokens=tokens, tok_s=round(tokens / took),
        ceiling_tok_s=round(card["tflop_s"] * 1e12 / (2 * WEIGHTS)), card=card,
    )  # fmt: skip
    for batch in batches:
        prompts = prompts_of(batch, CONTEXTS[batch])
        run(prompts, 2)
        short, long = (min(seconds(partial(run, prompts, n)) for _ in range(2)) for n in (SHORT, LONG))
        step_ms = (long - short) / (LONG - SHORT) * 1e3
        context = CONTEXTS[batch] + (SHORT + LONG) / 2
        floor_ms = (2 * WEIGHTS + batch * context * KV_BYTES) / card["read_tb_s"] / 1e9
        emit(
            "gpu_engine_decode", **said, batch=batch, context=context, step_ms=round(step_ms, 3),
            floor_ms=round(floor_ms, 3), share=round(floor_ms / step_ms, 3), tok_s=round(batch / step_ms * 1e3),
            card=card,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canary", nargs="+", default=["none", "rotating:16", "full"])
    parser.add_argument("--batch", nargs="+", type=int, default=[*CONTEXTS], choices=[*CONTEXTS])
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--wait", action="store_true", help="each step begins when the one before it was read")
    arguments = parser.parse_args()
    card = {name: round(rate, 2) for name, rate in rates().items()}
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        path = config_in(Path(folder))
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
        path, load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16",
        max_running_requests=256, chunked_prefill_size=8192, max_total_tokens=400_000,
        disable_cuda_graph=arguments.eager, disable_overlap_schedule=arguments.wait, **settings,
    ) as llm:  # fmt: skip
        said = {"canary": canary, "graphs": not arguments.eager, "overlap": not arguments.wait}
        said |= {"gpu": torch.cuda.get_device_name()}
        phases = {name: round(spent, 2) for name, spent in llm._built.seconds.items()}
        said |= {"start_s": round(CLOCK.now() - begin, 1), "phases": phases}
        measure(llm, arguments.batch, said, card)


if __name__ == "__main__":
    main()
