"""The job by threads and by model: 1, 2, 4 and 8 threads where the machine has the cores, random weights.

    221m   16 requests of 256 + 64 tokens, as in job.py
    0.6b   16 requests of 256 + 16 tokens: Qwen3-0.6B, vocabulary 151,936
    1.7b   the same of Qwen3-1.7B; only with --large (3.5 GB of weights, minutes on two cores)

    python benchmarks/sizes.py [--large] [--rounds 2] [--folder DIR]

Each row has a process of its own. Ceilings (as in job.py) are measured in that process, with as many threads.
Thread counts above the cores of the machine are left out, and `skipped` names them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from job import PROMPT, REQUESTS, floors, serinus_run
from model import checkpoint
from report import bandwidth, emit, matmul_rate

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.rng import Rng
from serinus.engine import build_engine
from serinus.kernels import load

CLOCK = WallClock()
THREADS = (1, 2, 4, 8)
OUTPUTS = {"221m": 64, "0.6b": 16, "1.7b": 16}
SECONDS_MAX = 1200


def measure(name: str, path: Path, threads: int, rounds: int) -> dict[str, float]:
    """One row, in this process: the best of the rounds."""
    torch.set_num_threads(threads)
    settings = {
        "model_path": str(path), "device": "cpu", "max_total_tokens": 8192, "max_step_ms": 0, "threads": threads,
        "decode_log_interval": 0,
        "context_length": 1024, "skip_tokenizer_init": True,
    }  # fmt: skip
    built = build_engine(from_names(ServeConfig, settings), CLOCK)
    output = OUTPUTS[name]

    def prompts(index: int, length: int) -> list[list[int]]:
        rngs = [Rng(100 * index + i) for i in range(REQUESTS)]
        return [[rng.randrange(5, 32000) for _ in range(length)] for rng in rngs]

    serinus_run(built, prompts(0, 16), 4)
    runs = [serinus_run(built, prompts(index, PROMPT), output) for index in range(1, rounds + 1)]
    best = min(runs, key=lambda run: run.prefill_s + run.decode_s)
    floor = floors(
        built, bandwidth(load("cpu"), dtype := built.pool.spec.dtype), matmul_rate(load("cpu"), dtype), output
    )
    return {
        "seconds": round(best.prefill_s + best.decode_s, 2),
        "prefill_tok_per_s": round(REQUESTS * PROMPT / best.prefill_s, 1),
        "decode_step_ms": round(best.decode_s / (output - 1) * 1e3, 2),
        "prefill_of_floor": round(floor.prefill_s / best.prefill_s, 3),
        "decode_of_floor": round(floor.decode_s / best.decode_s, 3),
    }


def row(name: str, folder: Path, threads: int, rounds: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--row", name, str(threads), "--rounds", str(rounds), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {threads} threads: {found}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--large", action="store_true", help="also the 1.7b shape")
    arguments.add_argument("--only", nargs="*", default=[], metavar="SHAPE", help="these shapes alone")
    arguments.add_argument("--folder", default="", help="where checkpoints are, or are made; default: a temporary one")
    arguments.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.row:
        name, threads = args.row
        print(json.dumps(measure(name, Path(args.folder) / name, int(threads), args.rounds)), flush=True)
        return
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in THREADS if count <= cores]
    names = args.only or ["221m", "0.6b", *(["1.7b"] if args.large else [])]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        for name in names:
            checkpoint(name, folder)
            rows[name] = {str(count): row(name, folder, count, args.rounds) for count in counts}
    emit(
        "sizes",
        rows=rows,
        texts={name: text(rows.get(name, {})) for name in OUTPUTS},
        skipped=[count for count in THREADS if count > cores],
    )


def text(found: dict[str, dict[str, float]]) -> dict[str, str]:
    """Cells of the table; a shape that was not measured says so."""
    if not found:
        return {"here": "not measured", "beside": ""}
    here = "; ".join(f"{count}: {values['seconds']:.1f} s" for count, values in found.items())
    prefill = "; ".join(f"{count}: {values['prefill_tok_per_s']:.0f}" for count, values in found.items())
    decode = "; ".join(f"{count}: {values['decode_of_floor']:.0%}" for count, values in found.items())
    return {"here": here, "beside": f"prefill, tok/s, {prefill}; decode of its floor {decode}"}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
