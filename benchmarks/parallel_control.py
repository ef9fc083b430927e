"""What the control line between ranks costs a step, for parallel.py: processes of ranks that compute nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.sampling import SamplingParams
from serinus.parallel import Mesh
from serinus.ranks import LeaderLine, LeaderLinks, RankBody, RankLink, RankLoop
from serinus.ranks.exit_reason import ExitRecord
from serinus.ranks.leader_supervisor import LeaderSupervisor
from serinus.wire.messages import RankHello, RankWelcome

__all__ = ["measure"]

CLOCK = WallClock()
_HERE = Path(__file__).parent
_FOLLOW = "from parallel_control import follow; follow({address!r}, {rank}, {mesh.tp}, {mesh.pp})"


class Nothing:
    """A runner that answers at once."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self._answers = rank == mesh.result_rank

    def run(self, plan: StepPlan) -> StepResult | None:
        """Tokens without work."""
        return StepResult(step=plan.step, seqs=(SeqResult(token=7),) * len(plan.work)) if self._answers else None


def follow(address: str, rank: int, tp: int, pp: int) -> None:
    """The process of a rank that does not lead."""
    mesh = Mesh(tp=tp, pp=pp)
    link = RankLink(address, RankHello(rank=rank, pid=0, host="", settings=""), clock=CLOCK, silence_s=5.0)
    link.start()
    link.welcome()
    loop = RankLoop(RankBody(rank=rank, mesh=mesh, runner=Nothing(rank, mesh), clock=CLOCK), link)
    loop.run()
    link.close()


def plan_of(step: int, params: list[SamplingParams], rids: list[str]) -> StepPlan:
    """One token for each request, and a table write now and then."""
    token = np.array([step % 1000], np.int32)
    work = tuple(
        SeqWork(rid=rid, row=i + 1, start=500 + step, tokens=token, slots={Part.FULL: np.array([64 * i + step])},
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
        links = LeaderLinks(f"ipc://{folder}/c", mesh=mesh, clock=CLOCK, silence_s=5.0)
        record = ExitRecord()
        supervisor = LeaderSupervisor(links, silence_s=5.0, clock=CLOCK, exit_record=record, ends_process=False)
        supervisor.start(dict)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _FOLLOW.format(address=links.address, rank=rank, mesh=mesh)], cwd=_HERE
            )
            for rank in range(1, mesh.size)
        ]
        links.welcome(RankWelcome(store=""))
        links.gather(supervisor.check, 60.0)
        body = RankBody(rank=0, mesh=mesh, runner=Nothing(0, mesh), clock=CLOCK)
        line = LeaderLine(body, mesh, CLOCK, links, dismiss=supervisor.dismiss, ends=(supervisor.close,))
        params = [SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=900) for _ in range(requests)]
        rids = [f"cmpl-0123456789abcdef-{i}" for i in range(requests)]
        plans = [plan_of(step, params, rids) for step in range(1, steps + 1)]
        trips, submits, takes = [], [], []
        for plan in plans:
            begun = CLOCK.now()
            line.run(plan)
            line.flush()
            submitted = CLOCK.now()
            submits.append(submitted - begun)
            while True:
                asked = CLOCK.now()
                line.pump(1.0)
                if line.finished() is not None:
                    break
            takes.append(CLOCK.now() - asked)
            trips.append(CLOCK.now() - begun)
        found = {
            "mesh": f"TP{mesh.tp} PP{mesh.pp}",
            "requests": requests,
            "control_ms_a_step": 1e3 * line.control_seconds / steps,
            "control_bytes_a_step": line.control_bytes / line.headers,
            "round_trip_ms_p50": 1e3 * statistics.median(trips),
            "submit_ms_p50": 1e3 * statistics.median(submits),
            "take_ms_p50": 1e3 * statistics.median(takes),
        }
        line.close()
        for child in children:
            child.wait()
        return found
