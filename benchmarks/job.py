"""The whole job against transformers: 16 requests of 256 prompt + 64 output tokens, greedy, 221M parameters, in the
type that this CPU computes in (bf16, or fp32).

Claim: at least 2.3 times faster than `generate` with a static batch of 16, in one run on one machine.
Ceilings: prefill operations at the measured matmul rate; each decode step the larger of its weight and KV bytes at the
measured read bandwidth and its operations at the matmul rate. Op by op that floor is higher: the linears of 16 rows may
be bound by operations, and attention, which runs between them, by bytes. Both are told. Also: the same with sampled
answers, one stream alone, the memory that is resident, and decode steps without the canary, which the floor does not
count.

    python benchmarks/job.py [--rounds 3] [--no-transformers] [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import checkpoint_221m
from report import bandwidth, emit, matmul_rate, resident_bytes

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.engine import Built, build_engine
from serinus.kernels import load
from serinus.selftest import EngineDriver

REQUESTS, PROMPT, OUTPUT, POOL_TOKENS = 16, 256, 64, 8192
CLOCK = WallClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the job."""

    prefill_s: float
    """Until every request has its first token."""
    decode_s: float
    """From there to the end."""
    outputs: list[list[int]]
    """Tokens of each request."""


GREEDY: dict[str, float] = {"temperature": 0.0}
SAMPLED: dict[str, float] = {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.05}


def serinus_run(built: Built, prompts: list[list[int]], count: int, chosen: dict[str, float] = GREEDY) -> Run:
    """The whole engine but sockets and text: all requests at once, turned as the process loop does."""
    driver = EngineDriver(built)
    sampling = SamplingParams(**chosen, max_new_tokens=count, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        driver.send(Request(rid=str(index), prompt=np.array(prompt, np.int32), sampling=sampling, seed=index))
    outputs: list[list[int]] = [[] for _ in prompts]
    begin = middle = CLOCK.now()
    while True:
        for delta in driver.turn():
            outputs[int(delta.rid)].extend(delta.token_ids)
        if middle == begin and all(outputs):
            middle = CLOCK.now()
        if built.engine.idle:
            break
        driver.wait()
    return Run(prefill_s=middle - begin, decode_s=CLOCK.now() - middle, outputs=outputs)


def transformers_seconds(
    path: Path, prompts: list[list[int]], rounds: int, dtype: torch.dtype
) -> tuple[float, list[list[int]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    ids = torch.tensor(prompts)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}

    def generate(count: int) -> list[list[int]]:
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, **settings
            )
        return [row[len(prompts[0]) :].tolist() for row in found]

    generate(2)
    best, outputs = float("inf"), []
    for _ in range(rounds):
        begin = CLOCK.now()
        outputs = generate(OUTPUT)
        best = min(best, CLOCK.now() - begin)
    return best, outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Seconds the hardware needs at least."""

    prefill_s: float
    """All prompts: operations over the matmul rate."""
    decode_s: float
    """All decode steps of the batch: the larger of bytes over bandwidth and operations over the matmul rate."""
    decode_ops_s: float
    """The same op by op: the larger of the two for the linears, then for attention, which runs when they do not."""
    stream_step_s: float
    """One decode step of one request."""


def floors(built: Built, bytes_per_s: float, flops_per_s: float, output: int = OUTPUT) -> Floors:
    """Of this engine's model in the type that the engine computes in."""
    spec, itemsize = built.spec, built.pool.spec.dtype.itemsize
    qkv = (spec.head_count + 2 * spec.kv_head_count) * spec.head_size
    layer = spec.hidden_size * (qkv + spec.head_count * spec.head_size + 3 * spec.intermediate_size)
    body = layer * spec.layer_count
    head = spec.hidden_size * spec.vocab_size
    kv_token = spec.layer_count * 2 * spec.kv_head_count * spec.head_size * itemsize
    mean_context = PROMPT + output / 2

    def step(batch: int) -> float:
        step_bytes = itemsize * (body + head) + batch * mean_context * kv_token
        return max(step_bytes / bytes_per_s, 2 * batch * (body + head) / flops_per_s)

    def step_by_op(batch: int) -> float:
        kv_bytes = batch * mean_context * kv_token
        attended = batch * mean_context * spec.layer_count * 4 * spec.head_count * spec.head_size
        linears = max(itemsize * (body + head) / bytes_per_s, 2 * batch * (body + head) / flops_per_s)
        return linears + max(kv_bytes / bytes_per_s, attended / flops_per_s)

    prefill = REQUESTS * PROMPT * 2 * body / flops_per_s
    steps = output - 1
    return Floors(
        prefill_s=prefill,
        decode_s=steps * step(REQUESTS),
        decode_ops_s=steps * step_by_op(REQUESTS),
        stream_step_s=step(1),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    arguments.add_argument("--no-transformers", action="store_true")
    args = arguments.parse_args()
    path = checkpoint_221m(args.checkpoint)
    settings = {"model_path": str(path), "max_total_tokens": POOL_TOKENS, "threads": args.threads, "max_step_ms": 0}
    settings |= {"decode_log_interval": 0, "context_length": 1024}

    def build(**more: str) -> Built:
        return build_engine(from_names(ServeConfig, {**settings, **more}), CLOCK)

    imports, begin = resident_bytes(), CLOCK.now()
    built = build()
    load_s = CLOCK.now() - begin
    kernels, dtype = load("cpu"), built.pool.spec.dtype

    def job(index: int) -> list[list[int]]:
        """Other prompts each time: nothing is found in the prefix cache."""
        rngs = [Rng(100 * index + i) for i in range(REQUESTS)]
        return [[rng.randrange(5, 32000) for _ in range(PROMPT)] for rng in rngs]

    serinus_run(built, job(0), OUTPUT)
    runs = [serinus_run(built, job(index), OUTPUT) for index in range(1, args.rounds + 1)]
    sampled = [serinus_run(built, job(20 + index), OUTPUT, SAMPLED) for index in range(args.rounds)]
    resident = resident_bytes()  # before the ceilings: what they read is no memory of an engine
    streams, rates = [], []
    for index in range(args.rounds):  # in turns: a stream and the ceiling beside it come from the same seconds
        rates.append(bandwidth(kernels, dtype, 5))
        streams.append(serinus_run(built, job(50 + index)[:1], OUTPUT))
    del built
    built = build(kv_canary="none")
    serinus_run(built, job(70), OUTPUT)
    plain = [serinus_run(built, job(70 + index), OUTPUT) for index in range(1, args.rounds + 1)]
    bytes_per_s, flops_per_s = bandwidth(kernels, dtype), matmul_rate(kernels, dtype)
    bytes_per_s = max(bytes_per_s, *rates)
    floor = floors(built, bytes_per_s, flops_per_s)
    plain_s = min(run.decode_s for run in plain)
    best = min(runs, key=lambda run: run.prefill_s + run.decode_s)
    stream_step_s = min(run.decode_s for run in streams) / (OUTPUT - 1)
    seconds = best.prefill_s + best.decode_s
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors")) * dtype.itemsize // 2  # files in bf16
    values = {
        "seconds": round(seconds, 3),
        "prefill_s": round(best.prefill_s, 3),
        "decode_step_ms": round(best.decode_s / (OUTPUT - 1) * 1000, 2),
        "sampled_step_ms": round(min(run.decode_s for run in sampled) / (OUTPUT - 1) * 1000, 2),
        "plain_step_ms": round(plain_s / (OUTPUT - 1) * 1000, 2),
        "plain_of_floor": round(floor.decode_s / plain_s, 3),
        "plain_of_op_floor": round(floor.decode_ops_s / plain_s, 3),
        "output_tok_per_s": round(REQUESTS * OUTPUT / seconds, 1),
        "floor_s": round(floor.prefill_s + floor.decode_s, 3),
        "prefill_of_floor": round(floor.prefill_s / best.prefill_s, 3),
        "decode_of_floor": round(floor.decode_s / best.decode_s, 3),
        "decode_of_op_floor": round(floor.decode_ops_s / best.decode_s, 3),
        "stream_tok_per_s": round(1 / stream_step_s, 1),
        "stream_of_floor": round(floor.stream_step_s / stream_step_s, 3),
        "bandwidth_gb_s": round(bytes_per_s / 1e9, 1),
        "matmul_gflop_s": round(flops_per_s / 1e9, 1),
        "load_s": round(load_s, 2),
        "resident_mb": round(resident / 1e6),
        "imports_mb": round(imports / 1e6),
        "weights_and_kv_mb": round((weights + POOL_TOKENS * built.pool.page_bytes / built.pool.spec.page_size) / 1e6),
    }
    prompts = job(1)
    del built
    if not args.no_transformers:
        theirs, outputs = transformers_seconds(path, prompts, args.rounds, dtype)
        same = sum(a == b for a, b in zip(outputs, runs[0].outputs, strict=True))
        values |= {"transformers_s": round(theirs, 3), "ratio": round(theirs / seconds, 2), "equal_answers": same}
    emit("job", **values)


if __name__ == "__main__":
    main()
