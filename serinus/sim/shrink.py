"""From a failing scenario to a smaller one that still fails: drop faults, requests, options, tokens, engines' troubles.

Greedy, in passes, until a whole pass removes nothing; bounded by the number of runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace

from serinus.sim.cluster import run
from serinus.sim.options import Cancel, Scenario


def shrink(
    scenario: Scenario, *, runs_max: int = 400,
    progress: Callable[[int, Scenario], None] = lambda runs, scenario: None,
) -> Scenario:  # fmt: skip
    """The smallest scenario found that still has a finding (any: what is left may show another face of one bug).

    `progress` is told the runs so far and the best scenario. Cost: at most `runs_max` runs.
    """
    runs, best = 0, scenario
    while True:
        before = best
        for smaller in _steps(best):
            if runs >= runs_max:
                return best
            if smaller == best:
                continue
            runs += 1
            if run(smaller).finding is not None:
                best = smaller
                progress(runs, best)
                break
        if best is before:
            return best


def _steps(scenario: Scenario) -> Iterator[Scenario]:
    """Everything that is one step smaller, the big steps first."""
    half = len(scenario.works) // 2
    if half:
        yield _with_works(scenario, range(half))
        yield _with_works(scenario, range(half, len(scenario.works)))
    if scenario.faults:
        yield replace(scenario, faults=())
    options = scenario.options
    for field in dataclasses.fields(options):
        if getattr(options, field.name):
            yield replace(scenario, options=replace(options, **{field.name: 0.0}))
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    for index in range(len(scenario.works)):
        yield _with_works(scenario, [i for i in range(len(scenario.works)) if i != index])
    for name in ("drop_frames", "repeat_frames"):
        frames = getattr(scenario, name)
        for index in range(len(frames)):
            yield replace(scenario, **{name: frames[:index] + frames[index + 1 :]})
    for index, engine in enumerate(scenario.shape.engines):
        if (engine.tp, engine.pp) != (1, 1):
            engines = list(scenario.shape.engines)
            engines[index] = replace(engine, tp=1, pp=1)
            yield replace(scenario, shape=replace(scenario.shape, engines=tuple(engines)))
    if scenario.shape.canary and not options.damages:  # without one, damage is a finding by itself
        yield replace(scenario, shape=replace(scenario.shape, canary=""))
    if scenario.shape.window:
        whole = tuple(replace(engine, swa_pages=0) for engine in scenario.shape.engines)
        yield replace(scenario, shape=replace(scenario.shape, engines=whole, slides="", window=0))
    for index, work in enumerate(scenario.works):
        works = list(scenario.works)
        if work.new_tokens > 1:
            works[index] = replace(work, new_tokens=1)
            yield replace(scenario, works=tuple(works))
        if len(work.prompt) > 1:
            works[index] = replace(work, prompt=work.prompt[: len(work.prompt) // 2])
            yield replace(scenario, works=tuple(works))


def _with_works(scenario: Scenario, indices: range | list[int]) -> Scenario:
    works = tuple(scenario.works[index] for index in indices)
    rids = {work.rid for work in works}
    faults = tuple(fault for fault in scenario.faults if not isinstance(fault, Cancel) or fault.rid in rids)
    return replace(scenario, works=works, faults=faults)
