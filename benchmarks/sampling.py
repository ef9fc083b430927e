"""Sampling of one decode step: 16 rows of 151,936 bf16 logits on one core, each mixture of parameters beside greedy.

Claim: any mixture takes at most 5 ms. Floor: every logit is read once at the measured bandwidth of a plain sum.

    python benchmarks/sampling.py [--repeat 20]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from report import best_ms, emit

from serinus.core.history import TokenHistory
from serinus.core.plan import SampleSpec
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.runner import Sampler

ROWS, VOCAB, PROMPT, OUTPUT, BIASES, GOAL_MS = 16, 151_936, 131_072, 1_000, 300, 5.0
MIXTURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logit_bias_65536": {"logit_bias": {i: float(i % 3) for i in range(1, 131_072, 2)}},
    "logprobs": {"temperature": 0.0, "logprobs": 20},
    "all": {
        "temperature": 0.8,
        "top_k": 1000,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": dict.fromkeys(range(BIASES), 1.0),
        "logprobs": 5,
    },
}


def thread_ms(job: Callable[[], object], repeat: int) -> float:
    """The best of `repeat` runs, in time of this thread: what others do on this core does not count."""
    return best_ms(job, repeat, time.thread_time)


def histories() -> list[TokenHistory]:
    """Of prompts of 128k tokens and answers of 1,000."""
    chance = np.random.default_rng(1)
    made = [TokenHistory(chance.integers(0, VOCAB, PROMPT).astype(np.int32)) for _ in range(ROWS)]
    for history in made:
        for token in chance.integers(0, VOCAB, OUTPUT).tolist():
            history.add(token)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(1)
    kinds = {scale: (torch.randn(ROWS, VOCAB, generator=chance) * scale).bfloat16() for scale in (1.0, 4.0)}
    sampler, seen = Sampler(load("cpu")), histories()
    milliseconds: dict[str, float] = {}
    for name, given in MIXTURES.items():
        params = SamplingParams(**given)
        specs = [
            SampleSpec(
                params=params, seed=i, position=PROMPT + i, generated=OUTPUT,
                history=seen[i] if params.penalised else None,
            )
            for i in range(ROWS)
        ]  # fmt: skip
        flat, peaked = (thread_ms(partial(sampler.sample, each, specs), arguments.repeat) for each in kinds.values())
        milliseconds[name] = round(max(flat, peaked), 2)
        print(f"{name:20s} {flat:7.2f} ms flat  {peaked:7.2f} ms peaked")
    plain = kinds[1.0].view(torch.int32)
    emit(
        "sampling",
        rows=ROWS,
        vocab=VOCAB,
        ms=milliseconds,
        worst_ms=max(milliseconds.values()),
        floor_ms=round(thread_ms(plain.sum, arguments.repeat), 2),
        goal_ms=GOAL_MS,
    )


if __name__ == "__main__":
    main()
