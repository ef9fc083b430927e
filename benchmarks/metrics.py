"""What counting costs: CPU of prometheus-client's objects per call, and per step of the engine's loop.

    python benchmarks/metrics.py [--fast]

A decode step of 64 requests makes one observation; each request that begins makes one more and each that ends adds to
a counter: with answers of 64 tokens that is one each per step. `share` is their part of a step of 5 ms, what an
accelerator needs. Floor: a dictionary store. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import timeit
from collections.abc import Callable

from serinus.core.metrics import Metrics

STEP_US = 5000.0
GOAL_SHARE = 0.01


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a tenth of the calls")
    calls = 20_000 if parser.parse_args().fast else 200_000
    metrics = Metrics("engine", "unified")
    store: dict[str, float] = {}

    def us(call: Callable[[], object], count: int = calls) -> float:
        return min(timeit.repeat(call, number=count, repeat=5)) / count * 1e6

    found = {
        "observe_us": us(lambda: metrics.observe("step_seconds", 0.004)),
        "add_us": us(lambda: metrics.add("num_finished_requests", 1, "stop")),
        "set_us": us(lambda: metrics.set("gen_throughput", 1.0)),
        "render_us": us(metrics.render, calls // 400),
        "floor_us": us(lambda: store.__setitem__("gen_throughput", 1.0)),
    }
    step_us = 2 * found["observe_us"] + found["add_us"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    line = {
        "benchmark": "metrics",
        "commit": commit.stdout.strip() or "unknown",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}",
        **{name: round(value, 3) for name, value in found.items()},
        "per_step_us": round(step_us, 2),
        "share": round(step_us / STEP_US, 5),
        "goal_share": GOAL_SHARE,
        "met": step_us / STEP_US <= GOAL_SHARE,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
