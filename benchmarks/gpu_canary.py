"""What the canary takes of a decode step on a GPU: engines of one process in turns, Qwen3-8B's shape with dummy
weights, bf16; one without it and one with it, one JSON line a coverage. Goals at 64 requests: rotating:16 3 %, full
5 %.

A step is the mean of those from the 16th to the 144th token on prompts that are cached; the share is the median over
the rounds of neighbouring turns.

    python -m benchmarks.gpu_canary [--batch 64] [--coverage rotating:16 full] [--rounds 4] [--layers 24]  (80 GB)
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engine import CONTEXTS, MODELS, config_in, step_ms
from benchmarks.report import emit
from serinus import LLM

MODEL = "qwen3-8b"
SHORT, LONG = 16, 144
GOALS = {"rotating:16": 0.03, "full": 0.05}


def stepper(path: str, batch: int, undo: ExitStack, **settings: Any) -> Callable[[], float]:
    """An engine; milliseconds of one of its decode steps."""
    llm = undo.enter_context(
        LLM(
            path, load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16",
            max_running_requests=batch, chunked_prefill_size=8192,
            max_total_tokens=batch * (CONTEXTS[batch] + LONG + 32), **settings,
        )
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [[rng.randrange(10, MODELS[MODEL]["vocab_size"]) for _ in range(CONTEXTS[batch])] for _ in range(batch)]
    once = partial(step_ms, llm, prompts, SHORT, LONG)
    once()
    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64, choices=[*CONTEXTS])
    parser.add_argument("--coverage", nargs="+", default=[*GOALS])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=36, help="24: two engines of 256 requests in 80 GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        path = config_in(Path(folder), MODEL)
        config = json.loads(Path(path, "config.json").read_text()) | {"num_hidden_layers": arguments.layers}
        Path(path, "config.json").write_text(json.dumps(config))
        plain = stepper(path, arguments.batch, undo, kv_canary="none")
        for coverage in arguments.coverage:
            with ExitStack() as only:
                watched = stepper(path, arguments.batch, only, kv_canary="heal", kv_canary_coverage=coverage)
                pairs = [(plain(), watched()) for _ in range(arguments.rounds)]
            del watched
            gc.collect()
            torch.cuda.empty_cache()
            shares = [with_it / without - 1 for without, with_it in pairs]
            emit(
                "gpu_canary", gpu=torch.cuda.get_device_name(), batch=arguments.batch, layers=arguments.layers,
                coverage=coverage,
                step_ms=round(statistics.median(pair[0] for pair in pairs), 3), goal=GOALS.get(coverage),
                share=round(statistics.median(shares), 4), shares=[round(share, 4) for share in shares],
            )  # fmt: skip


if __name__ == "__main__":
    main()
