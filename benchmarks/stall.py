"""What streams and a short prompt wait while a long prompt is computed: 8 streams, 3,600 tokens, 221M parameters, bf16.

Claim: with the default `--max-step-ms` (300 ms on a CPU) no stream waits longer than 1.5 times that for a token, where
steps of 2,048 prompt tokens make all of them wait for seconds; the long prompt's own first token comes at most 50 %
later, as each step decodes too. A short prompt of 64 tokens just behind the long one does not wait for the end of it.
(Where a step by itself takes more than half of the bound, prompt tokens may take as long again.)

    python benchmarks/stall.py [--checkpoint DIR] [--threads N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from model import checkpoint_221m
from report import emit

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.rng import Rng
from serinus.engine import build_engine
from serinus.selftest import EngineDriver

STREAMS, LONG, SHORT = 8, 3600, 64
CLOCK = WallClock()


def tokens(seed: int, count: int) -> list[int]:
    """A prompt like no other."""
    rng = Rng(seed)
    return [rng.randrange(5, 32000) for _ in range(count)]


def run(path: Path, threads: int, max_step_ms: float | None) -> dict[str, float]:
    """Longest gap of a stream, and seconds to the first token of the long and of the short prompt."""
    settings = {"model_path": str(path), "max_total_tokens": 16384, "threads": threads, "decode_log_interval": 0}
    built = build_engine(
        from_names(ServeConfig, {**settings, "max_step_ms": max_step_ms, "context_length": 4096}), CLOCK
    )
    driver = EngineDriver(built)
    driver.add("learn", tokens(1, 2500), 2)  # the rate is known, as in an engine that has served for a while
    driver.run()
    for i in range(STREAMS):
        driver.add(f"s{i}", tokens(10 + i, 64), 2000, stream=True)
    while not all(driver.tokens(f"s{i}") for i in range(STREAMS)):
        driver.turn()
    driver.add("long", tokens(2, LONG), 1)
    driver.add("short", tokens(3, SHORT), 1)
    begin = last = CLOCK.now()
    first: dict[str, float] = {}
    gap = 0.0
    while len(first) < 2:
        rids = {delta.rid for delta in driver.turn()}
        now = CLOCK.now()
        first |= {rid: now - begin for rid in ("long", "short") if rid in rids and rid not in first}
        if any(rid.startswith("s") and rid != "short" for rid in rids):
            gap, last = max(gap, now - last), now
    built.close()
    return {"gap_s": round(gap, 3), "long_s": round(first["long"], 2), "short_s": round(first["short"], 2)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    args = arguments.parse_args()
    path = checkpoint_221m(args.checkpoint)
    chunk, bound = run(path, args.threads, 0.0), run(path, args.threads, None)
    cost = round(bound["long_s"] / chunk["long_s"] - 1, 3)
    emit("stall", chunk=chunk, bound=bound, cost=cost)


if __name__ == "__main__":
    main()
