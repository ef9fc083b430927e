"""The first steps of an engine, before its first client: of two requests that are thrown away."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from serinus.cache import PrefixCache
from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.engine.planning import geometry_of, sched_settings
from serinus.ranks import LeaderLine
from serinus.ranks.build import RankParts
from serinus.sched import Scheduler

__all__ = ["first_steps"]

_FIRST_TOKENS: Final = 40
"""Of each prompt: more than attention takes for decoding, and linears as few rows."""
_LOOK_S: Final = 0.05


def first_steps(parts: RankParts, line: LeaderLine, clock: Clock) -> None:
    """Answer two short requests, greedy and sampled, with a scheduler and a cache of their own, without tiers, that are
    thrown away: whatever is compiled, loaded or allocated at first use is there before the first client comes, on every
    rank. The KV it leaves behind lies on pages that the real ledger calls free.
    """
    settings, pool = sched_settings(parts, line.depth, ()), parts.pool_specs[Part.FULL]
    settings = replace(settings, prefetch_policy="none")
    room = min(settings.context_length, (pool.page_count - 1) * pool.page_size)
    scheduler = Scheduler(settings, PrefixCache(geometry_of(parts.pool_specs, parts.spec.window)))
    with torch.inference_mode():
        _run_out(line, scheduler, clock, room)
    parts.phases.mark("warm-up")


def _run_out(line: LeaderLine, scheduler: Scheduler, clock: Clock, room: int) -> None:
    """`room`: tokens that a request may have."""
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
        prompt = np.zeros(max(1, min(_FIRST_TOKENS, room - 2)), np.int32)
        scheduler.add(Request(rid=f"warm-up-{temperature}", prompt=prompt, sampling=sampling, seed=0))
    while not scheduler.idle:
        plan = scheduler.plan(clock.now())
        if plan is None:
            raise InvariantError("engine: the warm-up requests cannot run, expected a step")
        line.run(plan)
        while True:
            line.pump(_LOOK_S)
            if (finished := line.finished()) is not None:
                break
        scheduler.commit(plan, finished.result, clock.now())
