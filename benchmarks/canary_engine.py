"""What the canary, as it is by default, costs the whole engine: decode steps of 16 requests by two engines, one without
it, of the 221M model and of Qwen3-0.6B's shape, in one run.

Goal: <= 1.5 % of a step. `benchmarks/canary.py` has what it costs a rank alone; here the leader counts too: chain
hashes, verified horizons, receipts, verdicts. The engines take turns step by step; of each phase of the rotation the
median of the rounds counts, of these the mean. Both compute with the same weights in memory. Both are made anew
`--draws` times, twice each: where pools lie makes an engine a percent or two faster or slower, and so does which of the
two is made first; a draw is the mean of both orders.

    python benchmarks/canary_engine.py [--rounds 5] [--draws 6] [--threads 2] [--checkpoint DIR] [--larger DIR]
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from canary import BATCH, GOALS, STRIDE, decoding, in_turns, overhead, parser, told
from model import checkpoint, checkpoint_221m, one_model
from report import emit

from serinus.selftest import EngineDriver

MODES = ("none", "heal")


def step(engine: EngineDriver) -> None:
    """A decode step of the whole batch."""
    assert len(engine.turn()) == BATCH, f"not a token of each request, expected {BATCH}"


def cost(path: Path, threads: int, rounds: int, draws: int) -> dict[str, Any]:
    """Of one model: a step without the canary, and the share that it adds."""
    shares, plain, steps = list[float](), list[float](), (rounds + 1) * STRIDE
    for draw in range(2 * draws):
        with one_model():
            jobs: dict[str, Callable[[], object]] = {
                mode: partial(step, decoding(path, steps, threads=threads, kv_canary=mode))
                for mode in (MODES if draw % 2 else MODES[::-1])
            }
        spent = in_turns(jobs, steps, draw)
        plain += spent["none"]
        shares.append(overhead(spent["heal"], spent["none"]))
        jobs.clear()
        gc.collect()  # engines are cycles, and two more come
    pairs = [statistics.fmean(shares[i : i + 2]) for i in range(0, 2 * draws, 2)]
    return {"decode_step_ms": round(statistics.median(plain) * 1e3, 2), **told(pairs, GOALS["all_rotating"])}


def main() -> None:
    args = parser(__doc__, draws=6).parse_args()
    smaller = cost(Path(checkpoint_221m(args.checkpoint)), args.threads, args.rounds, args.draws)
    with tempfile.TemporaryDirectory() as made:
        larger = cost(checkpoint("0.6b", Path(args.larger or made)), args.threads, args.rounds, args.draws)
    emit("canary_engine", **smaller, qwen3_0_6b=larger)


if __name__ == "__main__":
    main()
