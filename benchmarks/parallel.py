"""What ranks cost and give on one machine: the job of job.py by one process, by stages, by slices, by both.

    python benchmarks/parallel.py [--rounds 3] [--fast] [--checkpoint DIR]

Claims, against one process with as many threads as there are cores: two stages with half of the cores each reach 0.9 of
its throughput at 16 requests, two slices 0.7; deciding for 2 x 2 ranks costs at most 0.3 ms a step; a prompt that two
stages prefill for another engine has its first token there at most 1.05 times as late as on the two stages themselves,
as its pages travel while later chunks are still computed. The engines are processes of their own; they do the same job
in turns, every round has prompts of its own, and the middle ratio of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from job import CLOCK, OUTPUT, POOL_TOKENS, PROMPT, REQUESTS
from model import checkpoint_221m
from parallel_control import measure as control_line
from report import emit
from serving import handoff

from serinus.core.config import ServeConfig, from_names
from serinus.core.rng import Rng
from serinus.engine import Built, build_engine
from serinus.parallel import Mesh

MESHES = {"one": (1, 1), "pp2": (1, 2), "tp2": (2, 1), "pp2tp2": (2, 2)}
GOALS = {"pp2": 0.9, "tp2": 0.7}


class Engine:
    """A process that does the job when told to."""

    def __init__(self, name: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", name, "--checkpoint", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._hear()

    def job(self, index: int) -> dict[str, float]:
        """Do the index-th job; what it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):
            line = self._process.stdout.readline()
        assert line, f"an engine ended with {self._process.wait()}"
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve_jobs(name: str, path: Path) -> None:
    """An engine's process: a number comes in, a line of what that job took goes out."""
    tp, pp = MESHES[name]
    cores = len(os.sched_getaffinity(0))
    settings = {
        "model_path": str(path), "max_total_tokens": POOL_TOKENS, "max_step_ms": 0, "context_length": 1024,
        "decode_log_interval": 0,
        "tp_size": tp, "pp_size": pp, "threads": max(1, cores // (tp * pp)),
    }  # fmt: skip
    built = build_engine(from_names(ServeConfig, settings), CLOCK)
    say({})
    for line in sys.stdin:
        say(job(built, int(line)))
    built.close()


def say(what: dict[str, float]) -> None:
    """A line for whoever started this process."""
    print(json.dumps(what), flush=True)


def job(built: Built, index: int) -> dict[str, float]:
    """The job once, with prompts of its own."""
    from job import serinus_run

    rngs = [Rng(100 * index + i) for i in range(REQUESTS)]
    prompts = [[rng.randrange(5, 32000) for _ in range(PROMPT)] for rng in rngs]
    before = Spent.of(built)
    run = serinus_run(built, prompts, OUTPUT)
    return {"prefill_s": run.prefill_s, "decode_s": run.decode_s, **Spent.of(built).since(before)}


class Spent:
    """What leading the ranks has cost so far, and how long they waited."""

    def __init__(self, steps: int, control_s: float, control_bytes: int, computed_s: float, waited_s: float) -> None:
        self.steps, self.control_s, self.control_bytes = steps, control_s, control_bytes
        self.computed_s, self.waited_s = computed_s, waited_s

    @classmethod
    def of(cls, built: Built) -> Spent:
        """Of an engine now; nothing of one rank."""
        line = built.line
        if line.size == 1:
            return cls(0, 0.0, 0, 0.0, 0.0)
        computed, waited = (sum(column) for column in zip(*line.rank_seconds, strict=True))
        return cls(line.steps, line.control_seconds, line.control_bytes, computed, waited)

    def since(self, before: Spent) -> dict[str, float]:
        """Per step, and the part of all ranks' time in steps that went by waiting."""
        steps = self.steps - before.steps
        if not steps:
            return {}
        waited, computed = self.waited_s - before.waited_s, self.computed_s - before.computed_s
        return {
            "control_ms": 1e3 * (self.control_s - before.control_s) / steps,
            "control_bytes": (self.control_bytes - before.control_bytes) / steps,
            "waiting": waited / (waited + computed),
        }


def jobs(path: Path, rounds: int) -> dict[str, Any]:
    """All engines in turns; throughput of each against one process."""
    engines = {name: Engine(name, path) for name in MESHES}
    ratios: dict[str, list[float]] = {name: [] for name in MESHES}
    last: dict[str, dict[str, float]] = {}
    for index in range(rounds + 1):
        order = list(engines) if index % 2 else list(engines)[::-1]
        last = {name: engines[name].job(index) for name in order}
        seconds = {name: found["prefill_s"] + found["decode_s"] for name, found in last.items()}
        if index:  # the first round warms up
            for name in engines:
                ratios[name].append(seconds["one"] / seconds[name])
    for engine in engines.values():
        engine.close()
    values: dict[str, Any] = {}
    for name, found in last.items():
        values |= {f"{name}_{key}": round(value, 4) for key, value in found.items()}
    return values | {f"{name}_ratio": round(statistics.median(ratios[name]), 3) for name in GOALS | {"pp2tp2": 0}}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--fast", action="store_true", help="one round, to see that it runs")
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    arguments.add_argument("--engine", choices=tuple(MESHES), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    path = checkpoint_221m(args.checkpoint)
    if args.engine:
        serve_jobs(args.engine, path)
        return
    rounds = 1 if args.fast else args.rounds
    values = jobs(path, rounds)
    line, wide = (control_line(Mesh(tp=2, pp=2), requests, 400) for requests in (REQUESTS, 64))
    handed = handoff(path, rounds, "--prefill-pp-size", "2")
    emit(
        "parallel",
        **values,
        line_ms=round(float(line["control_ms_a_step"]), 3),
        line_bytes=round(float(line["control_bytes_a_step"])),
        line64_ms=round(float(wide["control_ms_a_step"]), 3),
        handed_ttft_s=handed["handoff_ttft_s"],
        own_ttft_s=handed["local_ttft_s"],
        handed_ratio=round(handed["handoff_ttft_s"] / handed["local_ttft_s"], 3),
    )


if __name__ == "__main__":
    main()
