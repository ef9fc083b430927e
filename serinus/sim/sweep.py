"""Systematic trouble: one fault at every single step of a recorded run, and all pairs of faults for a small world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from serinus.sim.cluster import run
from serinus.sim.options import Cancel, Crash, Fault, Options, Scenario


def calm_scenario(scenario: Scenario, works: int) -> Scenario:
    """The first few requests of a scenario in a perfect world."""
    return replace(
        scenario, options=Options(), faults=(), drop_frames=(), repeat_frames=(), works=scenario.works[:works]
    )


def _single(scenario: Scenario, step: int) -> Iterator[Fault]:
    for engine in scenario.shape.engines:
        yield Crash(engine=engine.name, step=step, down_s=0.3)
    for work in scenario.works:
        yield Cancel(rid=work.rid, step=step)


def at_every_step(scenario: Scenario, *, every: int = 1) -> Iterator[Scenario]:
    """A crash of each engine and a cancel of each request before every event; every frame lost once, repeated once.

    `every` > 1 looks at each every-th event and frame only.
    """
    recorded = run(scenario)
    for step in range(0, recorded.busy_steps, every):
        for fault in _single(scenario, step):
            yield replace(scenario, faults=(fault,))
    for frame in range(1, recorded.busy_frames + 1, every):
        yield replace(scenario, drop_frames=(frame,))
        yield replace(scenario, repeat_frames=(frame,))


def pairs_of_faults(scenario: Scenario, *, every: int = 1) -> Iterator[Scenario]:
    """All pairs of two of these; `every` > 1 looks at each every-th of them only."""
    recorded = run(scenario)
    faults = [fault for step in range(recorded.busy_steps) for fault in _single(scenario, step)]
    frames = range(1, recorded.busy_frames + 1)

    def all_of_them() -> Iterator[Scenario]:
        for one, other in combinations(faults, 2):
            yield replace(scenario, faults=(one, other))
        for fault, frame in product(faults, frames):
            yield replace(scenario, faults=(fault,), drop_frames=(frame,))
            yield replace(scenario, faults=(fault,), repeat_frames=(frame,))
        for one_frame, other_frame in combinations(frames, 2):
            yield replace(scenario, drop_frames=(one_frame, other_frame))

    for index, pair in enumerate(all_of_them()):
        if index % every == 0:
            yield pair
