"""What the control line between ranks costs per step: a decode step of 64 requests at PP2 x TP2, ranks as processes
whose runner computes nothing. `python benchmarks/parallel_control.py [--requests 64] [--tp 2] [--pp 2]`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.sampling import SamplingParams
from serinus.engine.ranks import Follower, FollowerGroup, RankBody, RankExecutor, RankGroup
from serinus.parallel import Mesh

CLOCK = WallClock()


class Nothing:
    """A runner that answers at once."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self._answers = rank == mesh.result_rank

    def run(self, plan: StepPlan) -> StepResult | None:
        """Tokens without work."""
        return StepResult(step=plan.step, seqs=(SeqResult(token=7),) * len(plan.work)) if self._answers else None


def follow(address: str, rank: int, mesh: Mesh) -> None:
    """A follower's process."""
    group = FollowerGroup(address, mesh=mesh, rank=rank, clock=CLOCK)
    follower = Follower(RankBody(rank=rank, mesh=mesh, runner=Nothing(rank, mesh), clock=CLOCK), group)
    follower.run()
    follower.close()


def plan_of(step: int, params: list[SamplingParams], rids: list[str]) -> StepPlan:
    """One token for each request, and a table write now and then."""
    token = np.array([step % 1000], np.int32)
    work = tuple(
        SeqWork(rid=rid, row=i + 1, start=500 + step, tokens=token, slots=np.array([64 * i + step], np.int64),
                sample=SampleSpec(params=params[i], seed=i, position=501 + step, generated=step))
        for i, rid in enumerate(rids)
    )  # fmt: skip
    writes = tuple(
        TableWrite(row=i + 1, start=500 + step, slots=np.arange(16, dtype=np.int64)) for i in range(0, len(rids), 16)
    )
    return StepPlan(step=step, work=work, table_writes=writes)


def measure(mesh: Mesh, requests: int, steps: int) -> dict[str, object]:
    """Lead and time."""
    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(f"ipc://{folder}/c", mesh=mesh, clock=CLOCK)
        words = [sys.executable, __file__, "--follow", group.address]
        shape = ["--tp", str(mesh.tp), "--pp", str(mesh.pp)]
        children = [subprocess.Popen([*words, *shape, "--rank", str(rank)]) for rank in range(1, mesh.size)]
        group.gather(lambda: None, 60.0)
        body = RankBody(rank=0, mesh=mesh, runner=Nothing(0, mesh), clock=CLOCK)
        executor = RankExecutor(group, body, mesh, CLOCK)
        params = [SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=900) for _ in range(requests)]
        rids = [f"cmpl-0123456789abcdef-{i}" for i in range(requests)]
        executor.record([(rid, "running") for rid in rids], ())
        plans = [plan_of(step, params, rids) for step in range(1, steps + 1)]
        trips, submits, takes = [], [], []
        for plan in plans:
            begun = CLOCK.now()
            executor.submit(plan)
            submitted = CLOCK.now()
            submits.append(submitted - begun)
            while True:
                asked = CLOCK.now()
                if executor.take() is not None:
                    break
                executor.pump(1.0)
            takes.append(CLOCK.now() - asked)
            trips.append(CLOCK.now() - begun)
        found = {
            "mesh": f"TP{mesh.tp} PP{mesh.pp}",
            "requests": requests,
            "control_ms_a_step": 1e3 * executor.control_seconds / steps,
            "control_bytes_a_step": executor.control_bytes / executor.headers,
            "round_trip_ms_p50": 1e3 * statistics.median(trips),
            "submit_ms_p50": 1e3 * statistics.median(submits),
            "take_ms_p50": 1e3 * statistics.median(takes),
        }
        executor.close()
        for child in children:
            child.wait()
        return found


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--follow")
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    mesh = Mesh(tp=arguments.tp, pp=arguments.pp)
    if arguments.follow:
        follow(arguments.follow, arguments.rank, mesh)
    else:
        print(json.dumps(measure(mesh, arguments.requests, arguments.steps)))


if __name__ == "__main__":
    main()
