"""What deciding costs: plan and commit with 64 running requests, beside the goal and a floor. One JSON line at the end.

    python benchmarks/sched.py [--fast]

Three loads: pure decode, decode while long prompts are computed chunk by chunk, and a saturated pool where requests
come, end and are retracted. The runner is free (its answers are made before the clock starts). Floor: building the same
plain data (one SeqWork, SampleSpec and TokenDelta per request) with everything else for nothing. One core; medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time

import numpy as np

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult
from serinus.core.request import Request, TokenDelta
from serinus.core.sampling import SamplingParams
from serinus.sched import SchedSettings, Scheduler

GOAL_MS = 1.0
RUNNING = 64
PAGE = 16
CONTEXT = 8192
RNG = np.random.default_rng(11)


def scheduler(pages: int, **settings: int) -> Scheduler:
    """One on a fresh cache."""
    cache = PrefixCache(CacheGeometry(page_size=PAGE, parts={Part.FULL: PartGeometry(pages=pages + 1)}))
    numbers = {"max_running_requests": RUNNING, "rows": RUNNING + 1, "chunked_prefill_size": 2048, **settings}
    return Scheduler(SchedSettings(page_size=PAGE, context_length=CONTEXT, vocab_size=32_000, **numbers), cache)


def request(rid: str, prompt: int, output: int) -> Request:
    """A greedy one of random ids."""
    params = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
    return Request(rid=rid, prompt=RNG.integers(0, 32_000, prompt, dtype=np.int32), sampling=params, seed=0)


def answer(plan: StepPlan) -> StepResult:
    """What a runner would say."""
    return StepResult(step=plan.step, seqs=tuple(SeqResult(token=7) if w.sample else SeqResult() for w in plan.work))


def timed_step(sched: Scheduler) -> tuple[float, float] | None:
    """Seconds of plan and of commit; None where nothing could run."""
    begin = time.perf_counter()
    plan = sched.plan(0.0)
    planned = time.perf_counter()
    if plan is None:
        return None
    result = answer(plan)
    again = time.perf_counter()
    sched.commit(plan, result, 0.0)
    return planned - begin, time.perf_counter() - again


def decode(steps: int) -> list[tuple[float, float]]:
    """64 requests of 256 tokens, all decoding."""
    sched = scheduler(RUNNING * CONTEXT // PAGE)
    for i in range(RUNNING):
        sched.add(request(f"r{i}", 256 + i % PAGE, steps + 200))
    while sched.stats().totals.generation_tokens < RUNNING * 2:
        timed_step(sched)
    times = [timed_step(sched) for _ in range(steps)]
    assert all(times), "benchmark: a step had nothing to run"
    assert sched.stats().num_running_reqs == RUNNING, sched.stats()
    return [pair for pair in times if pair]


def mixed(steps: int) -> list[tuple[float, float]]:
    """56 decoding, and always an 8,000-token prompt in chunks of 2,048 that ends at its first token."""
    sched = scheduler(RUNNING * CONTEXT // PAGE)
    for i in range(56):
        sched.add(request(f"r{i}", 256, steps + 100))
    for _ in range(12):
        timed_step(sched)
    times = []
    for i in range(steps):
        if sched.stats().num_queue_reqs < 2:
            sched.add(request(f"long{i}", 8_000, 1))
        times.append(timed_step(sched))
    return [pair for pair in times if pair]


def churn(steps: int) -> tuple[list[tuple[float, float]], int]:
    """A pool too small for its load: arrivals, ends, evictions and retractions all the time. Also: retractions."""
    sched = scheduler(1500, growth_tokens=16)
    times = []
    for i in range(steps):
        while sched.stats().num_queue_reqs < 16:
            sched.add(request(f"r{i}-{sched.stats().totals.requests}", int(RNG.integers(50, 600)), 200))
        pair = timed_step(sched)
        assert pair is not None, "benchmark: a step had nothing to run"
        times.append(pair)
    return times, sched.stats().totals.retracted


def floor_seconds(runs: int) -> float:
    """Building the plain data of 64 decoding requests."""
    params = SamplingParams(temperature=0.0)
    ids, slots = np.zeros(9, np.int32), np.zeros(9, np.int64)
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        work = tuple(
            SeqWork(
                rid="r", row=i, start=8, tokens=ids[8:9], slots={Part.FULL: slots[8:9]},
                sample=SampleSpec(params=params, seed=0, position=9, generated=4),
            )
            for i in range(RUNNING)
        )  # fmt: skip
        deltas = tuple(TokenDelta(rid="r", token_ids=(i,)) for i in range(RUNNING))
        seconds.append(time.perf_counter() - begin)
        assert len(work) == len(deltas)
    return statistics.median(seconds)


def figures(times: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds: medians of plan, commit and their sum, and the sum's 99th percentile."""
    both = [plan + commit for plan, commit in times]
    return {
        "plan_ms": round(statistics.median(plan for plan, _ in times) * 1e3, 4),
        "commit_ms": round(statistics.median(commit for _, commit in times) * 1e3, 4),
        "step_ms": round(statistics.median(both) * 1e3, 4),
        "step_p99_ms": round(sorted(both)[int(len(both) * 0.99)] * 1e3, 4),
    }


def commit_id() -> str:
    """The commit that was measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fast", action="store_true", help="fewer steps")
    steps = 300 if parser.parse_args().fast else 2000
    floor_ms = floor_seconds(steps) * 1e3
    churned, retracted = churn(steps)
    loads = {"decode": figures(decode(steps)), "mixed": figures(mixed(steps)), "churn": figures(churned)}
    for name, row in loads.items():
        print(f"{name:8}" + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    step_ms = loads["decode"]["step_ms"]
    print(
        json.dumps(
            {
                "benchmark": "sched",
                "machine": f"{platform.processor() or platform.machine()}, 1 core, Python {platform.python_version()}",
                "commit": commit_id(),
                "running": RUNNING,
                "step_ms": step_ms,
                "goal_ms": GOAL_MS,
                "met": step_ms <= GOAL_MS,
                "ceiling": {"what": "building the plain data alone", "step_ms": round(floor_ms, 4)},
                "ratio_to_ceiling": round(floor_ms / step_ms, 3),
                "retractions_in_churn": retracted,
                "loads": loads,
            }
        )
    )


if __name__ == "__main__":
    main()
