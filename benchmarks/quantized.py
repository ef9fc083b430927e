"""Quantized weights beside bf16: decode steps and prefill of one model, 221M parameters, in turns.

Claim: with one stream a step takes at most 1 / 1.7 of the time with 8 bits, and 1 / 2.5 with 4. Ceiling: the bytes of
the weights at the bandwidth that `report.bandwidth` measures.

    python benchmarks/quantized.py [--rounds 5] [--tokens 96] [--checkpoint DIR]

What a step has besides its weights (KV, sampling, scheduling) is in the times and not in the floors.
"""

from __future__ import annotations

import argparse

import torch
from model import checkpoint_221m
from report import bandwidth, emit

from serinus.core.clock import WallClock
from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.engine.step_floor import read_bytes
from serinus.kernels import load
from serinus.models import load_spec

CLOCK = WallClock()
METHODS = {"bf16": "auto", "int8": "int8", "int4": "int4"}
STREAMS, PROMPT = (1, 4, 8), 512


def seconds(llm: LLM, streams: int, prompt: int, tokens: int, seed: int) -> float:
    """Of the answers; no prompt was seen before."""
    chance = torch.Generator().manual_seed(seed * 1000 + streams)
    prompts = torch.randint(0, 32000, (streams, prompt), generator=chance).tolist()
    start = CLOCK.now()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return CLOCK.now() - start


def main() -> None:
    """One JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--checkpoint", default="")
    args = parser.parse_args()
    path = str(checkpoint_221m(args.checkpoint))
    engines = {
        name: LLM(path, quantization=method, dtype="bfloat16", max_total_tokens=8192, skip_tokenizer_init=True)
        for name, method in METHODS.items()
    }
    steps = {(name, streams): float("inf") for name in engines for streams in STREAMS}
    prefill = dict.fromkeys(engines, float("inf"))
    rate = 0.0
    for turn in range(args.rounds):
        rate = max(rate, bandwidth(load("cpu"), torch.bfloat16))
        for streams in STREAMS:
            for name, llm in engines.items():
                short, long = (
                    seconds(llm, streams, 16, count, 2 * turn + (count > 1)) for count in (1, args.tokens + 1)
                )
                steps[name, streams] = min(steps[name, streams], (long - short) / args.tokens)
        for name, llm in engines.items():
            prefill[name] = min(prefill[name], seconds(llm, 1, PROMPT, 1, 7000 + turn))
    found = {}
    for name, method in METHODS.items():
        floor = read_bytes(load_spec(path, quantization=method), 2) / rate
        found[name] = {
            "floor_ms": round(floor * 1e3, 2),
            **{f"step_ms_{n}": round(steps[name, n] * 1e3, 2) for n in STREAMS},
            **{f"gain_{n}": round(steps["bf16", n] / steps[name, n], 2) for n in STREAMS},
            "of_floor_1": round(floor / steps[name, 1], 2), "prefill_512_ms": round(prefill[name] * 1e3, 1),
        }  # fmt: skip
        engines[name].close()
    emit("quantized", threads=torch.get_num_threads(), bandwidth_gb_s=round(rate / 1e9, 1), **found)


if __name__ == "__main__":
    main()
