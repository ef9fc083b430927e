"""What the canary, as it is by default, costs the whole engine: decode steps of 16 requests by two engines, one without
it, of the 221M model and of Qwen3-0.6B's shape, in one run.

Goal: <= 1.5 % of a step. `benchmarks/canary.py` has what it costs a rank alone; here the leader counts too: chain
hashes, verified horizons, receipts, verdicts. The engines take turns step by step; of each phase of the rotation the
median of the rounds counts, of these the mean. Both are made anew `--draws` times: where the pages of a pool lie makes
an engine a percent or two faster or slower.

    python benchmarks/canary_engine.py [--rounds 5] [--draws 8] [--threads 2] [--checkpoint DIR] [--larger DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from canary import BATCH, CLOCK, PROMPT, STRIDE, overhead, seconds
from model import checkpoint, checkpoint_221m
from report import emit

from serinus.core.config import ServeConfig, from_names
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.engine import build_engine
from serinus.selftest import EngineDriver

GOAL = 0.015
MODES = ("none", "heal")


def decoding(path: Path, mode: str, threads: int, steps: int) -> EngineDriver:
    """An engine that decodes its batch, for so many steps and more; under the canary all is as by default."""
    given = {"model_path": str(path), "threads": threads, "max_total_tokens": 8192, "context_length": 1024}
    named = {**given, "kv_canary": mode, "max_step_ms": 0, "decode_log_interval": 0}
    driver = EngineDriver(build_engine(from_names(ServeConfig, named), CLOCK))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=steps + 2 * STRIDE, ignore_eos=True)
    for index in range(BATCH):
        rng = Rng(index)
        prompt = np.array([rng.randrange(5, 32000) for _ in range(PROMPT)], np.int32)
        driver.send(Request(rid=str(index), prompt=prompt, sampling=sampling, seed=index, stream=True))
    while not all(driver.deltas.values()):
        driver.turn()
    return driver


def step_seconds(engines: dict[str, EngineDriver], steps: int, seed: int) -> dict[str, list[float]]:
    """Of so many decode steps of each, in turns of any order."""
    order, spent = np.random.default_rng(seed), {mode: list[float]() for mode in engines}
    for _ in range(steps):
        for mode in order.permutation(list(engines)).tolist():
            spent[mode].append(seconds(engines[mode].turn))
    return spent


def cost(path: Path, threads: int, rounds: int, draws: int) -> dict[str, Any]:
    """Of one model: a step without the canary, and the share that it adds, with its standard error."""
    shares, plain, steps = list[float](), list[float](), (rounds + 1) * STRIDE
    for draw in range(draws):
        made = MODES if draw % 2 else MODES[::-1]
        spent = step_seconds({mode: decoding(path, mode, threads, steps) for mode in made}, steps, draw)
        plain += spent["none"]
        shares.append(overhead(spent["heal"], spent["none"]))
    return {
        "decode_step_ms": round(statistics.median(plain) * 1e3, 2),
        "overhead": round(statistics.fmean(shares), 4),
        "spread": round(statistics.stdev(shares) / draws**0.5, 4),
        "draws": [round(share, 4) for share in shares],
        "goal": GOAL,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--draws", type=int, default=8, help="times that both engines are made anew, at least 2")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory of the 221M model, to use or to make")
    arguments.add_argument("--larger", default="", help="directory for 0.6b, to use or to make; none: it is made anew")
    args = arguments.parse_args()
    smaller = cost(Path(checkpoint_221m(args.checkpoint)), args.threads, args.rounds, args.draws)
    with tempfile.TemporaryDirectory() as made:
        larger = cost(checkpoint("0.6b", Path(args.larger or made)), args.threads, args.rounds, args.draws)
    emit("canary_engine", **smaller, qwen3_0_6b=larger)


if __name__ == "__main__":
    main()
