"""A leader and its ranks over zmq, with runners that compute nothing, for the tests of the line."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.core.plan import SeqResult, SeqWork, StepPlan, StepResult
from serinus.parallel import Mesh
from serinus.ranks import (
    LeaderLine,
    LeaderLinks,
    RankBody,
    RankLink,
    RankLoop,
)
from serinus.ranks.handshake import signed
from serinus.wire.messages import RankHello, RankWelcome

__all__ = ["CLOCK", "Ranks", "Runner", "bodies_of", "hello", "plan_of"]

CLOCK = WallClock()


class Runner:
    """Answers a plan with its rows, on the rank that samples."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self.rank, self.mesh = rank, mesh
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult | None:
        self.plans.append(plan)
        if self.rank != self.mesh.result_rank:
            return None
        return StepResult(step=plan.step, seqs=tuple(SeqResult(token=work.row) for work in plan.work))


def bodies_of(mesh: Mesh) -> tuple[list[RankBody], list[Runner]]:
    runners = [Runner(rank, mesh) for rank in range(mesh.size)]
    return [RankBody(rank=r.rank, mesh=mesh, runner=r, clock=CLOCK) for r in runners], runners


def hello(rank: int, secret: str) -> RankHello:
    return RankHello(rank=rank, pid=1, host="h", settings="", mac=signed(secret, rank, ""))


class Ranks:
    """A leader and its ranks over zmq; those that follow obey in threads once `start`ed."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        self.mesh = mesh
        self.reason = ""
        self.links = LeaderLinks(f"ipc://{folder}/c", mesh=mesh, clock=CLOCK, secret="t")
        self.links.why = lambda: self.reason
        self.links.welcome(RankWelcome(store=""))
        self.bodies, self.runners = bodies_of(mesh)
        self.alive_when_dismissed: list[bool] = []
        self.line = LeaderLine(self.bodies[0], mesh, CLOCK, self.links, dismiss=self._dismissed)
        self.ends = [RankLink(self.links.address, hello(rank, "t"), clock=CLOCK) for rank in range(1, mesh.size)]
        self.loops = [RankLoop(self.bodies[rank], end) for rank, end in enumerate(self.ends, 1)]
        self.threads = ThreadPoolExecutor(mesh.size)
        self.running: list[Any] = []
        self.links.gather(lambda: None, 10.0)
        for end in self.ends:
            end.welcome()

    def _dismissed(self) -> None:
        self.alive_when_dismissed.append(not any(each.done() for each in self.running))

    def start(self) -> None:
        """From now on the ranks obey."""
        self.running = [self.threads.submit(self._run, *each) for each in zip(self.loops, self.ends, strict=True)]

    @staticmethod
    def _run(loop: RankLoop, end: RankLink) -> None:
        try:
            loop.run()
        finally:
            end.close()

    def finish(self, plan: StepPlan) -> StepResult:
        """Run a plan and wait for its result."""
        self.line.run(plan)
        while True:
            self.line.pump(1.0)
            if (finished := self.line.finished()) is not None:
                return finished.result

    def until(self, condition: Callable[[], bool]) -> None:
        """Pump until something is so."""
        for _ in range(1000):
            if condition():
                return
            self.line.pump(0.05)
        raise AssertionError("it never came")

    def close(self) -> None:
        """End the ranks and their threads."""
        if not self.running:
            for end in self.ends:
                end.close()
        self.line.close()
        for each in self.running:
            each.exception(timeout=60)
        self.threads.shutdown()


def plan_of(step: int, *rids: str) -> StepPlan:
    one, slot = np.array([7], np.int32), {Part.FULL: np.array([4], np.int64)}
    return StepPlan(
        step=step,
        work=tuple(SeqWork(rid=rid, row=i + 1, start=0, tokens=one, slots=slot) for i, rid in enumerate(rids)),
    )
