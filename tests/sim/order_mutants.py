"""Mutants of the order of service and of deadlines: only worlds in which requests are ranked can notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from serinus.engine.deadlines import Deadlines
from serinus.engine.engine import Engine
from serinus.sched import scheduler
from serinus.sched.queues import ReqQueue, place_of
from serinus.sim import Scenario, draw
from tests.sim.hunting import mutant, replaced

__all__ = ["ranked"]


def ranked(seed: int) -> Scenario:
    """A world in which requests have priorities and deadlines."""
    return draw(seed, ranked=True, canary="")


@mutant("priorities are not looked at", world=ranked, says="I21:")
def priorities_ignored() -> Iterator[None]:
    """Requests are served as they came."""
    with replaced(scheduler, "place_of", lambda request, arrivals, deadline, settings: arrivals):
        yield


@mutant("a larger priority goes first", world=ranked, says="I21:")
def priorities_turned_round() -> Iterator[None]:
    """As SGLang has it by default; it is documented otherwise here."""

    def place(request: Any, *rest: Any) -> int:
        return place_of(replace(request, priority=-request.priority), *rest)

    with replaced(scheduler, "place_of", place):
        yield


@mutant("waiting counts for nothing", world=ranked, says="I21:")
def no_ageing() -> Iterator[None]:
    """Requests do not age: a steady load of important ones keeps others out."""

    def place(request: Any, arrivals: int, deadline: float, settings: Any) -> int:
        return place_of(request, arrivals, deadline, replace(settings, priority_ageing_s=0.0))

    with replaced(scheduler, "place_of", place):
        yield


@mutant("the line is served from its end", world=ranked, says="I21:")
def last_comes_first() -> Iterator[None]:
    """The request that is due last is tried first."""
    original = ReqQueue.in_turn
    with replaced(ReqQueue, "in_turn", lambda self, count: original(self, len(self))[::-1][:count]):
        yield


@mutant("deadlines are forgotten", world=ranked, says="I22:")
def deadlines_forgotten() -> Iterator[None]:
    """No request ends for its deadline once it runs."""
    with replaced(Deadlines, "over", lambda self, now: []):
        yield


@mutant("a deadline ends only the answer", world=ranked, says="I22:")
def only_the_answer_ends() -> Iterator[None]:
    """The client is told, and the request goes on with its pages."""
    original = Engine._time_out

    def time_out(self: Any, rid: str, *rest: Any) -> None:
        with replaced(type(self.scheduler), "abort", lambda *_, **__: None):
            original(self, rid, *rest)

    with replaced(Engine, "_time_out", time_out):
        yield
