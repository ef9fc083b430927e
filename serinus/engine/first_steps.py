"""The first steps of an engine: whatever is compiled, loaded or allocated at first use is there before the first client
comes, on every rank.

Triton compiles a kernel once more for other dtypes, constants and cuts by shape. So where it serves, short prompts of
several lengths are computed, alone, behind a cached prefix and beside decodes, and sampled in all ways, under the
canary where there is one. What decode steps need is compiled as they are recorded. That nothing is left over is held by
tests/engine/test_kernel_variants.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from serinus.cache import PrefixCache
from serinus.canary import StartCanary
from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams, TokenBias
from serinus.engine.planning import geometry_of, sched_settings
from serinus.kernels import load
from serinus.ranks import LeaderLine
from serinus.ranks.build import RankParts, specializes
from serinus.ranks.sizes import chunk_of
from serinus.sched import Scheduler

_TOKENS: Final = 40
"""Of each of the first prompts: more than attention takes for decoding, and linears as few rows."""
_ROWS: Final = (8, 32, 64, 128)
"""Tokens of prompts that linears and digests are cut differently for."""
_FEW: Final = 2
"""Tokens of a prompt that is attended over latent rows; for the longer ones keys are made of them."""
_LONG: Final = 8192
"""Tokens of a prompt whose keys and values are copied out of their pages."""
_LOOK_S: Final = 0.05
_REQUESTS_MAX: Final = 8
"""That come at once."""
_DRAWN: Final = SamplingParams(max_new_tokens=2, temperature=1.0, top_p=0.9, ignore_eos=True)
_GREEDY: Final = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
_ADJUSTED: Final = SamplingParams(
    max_new_tokens=3, min_new_tokens=3, temperature=1.0, top_k=20, top_p=0.9, frequency_penalty=0.5,
    repetition_penalty=1.1, logit_bias=TokenBias({0: 1.0}), stop_token_ids=(0,), logprobs=1, prompt_logprobs=1,
    ignore_eos=True,
)  # fmt: skip
"""All that changes scores before one is drawn."""


def first_steps(parts: RankParts, line: LeaderLine, clock: Clock) -> None:
    """Answer a few short requests, with a scheduler and a cache of their own, without tiers, that are thrown away. The
    KV that is left behind lies on pages that the real ledger calls free.

    Raises InvariantError: they cannot run. Cost: what is compiled; with that done some ten short steps.
    """
    settings, pool = sched_settings(parts, line.depth, ()), parts.pool_specs[Part.FULL]
    settings = replace(
        settings, prefetch_policy="none", request_s_max=0.0, max_queued_requests=_REQUESTS_MAX, queued_max_of={}
    )  # bounds are for clients
    room = min(settings.context_length, (pool.page_count - 1) * pool.page_size)
    cache, chains = PrefixCache(geometry_of(parts.pool_specs, parts.spec.window)), None
    if specializes(parts) and parts.canary is not None and parts.canary.perturber is None:
        chains = load("cpu").chain_hashes
        line.command(StartCanary())  # what is counted now is forgotten where its lead starts it
    scheduler = Scheduler(settings, cache, chains)
    with torch.inference_mode():
        for requests in _requests(parts, room):
            for number, (size, token, sampling) in enumerate(requests):
                prompt = np.full(max(1, min(size, room - (sampling.max_new_tokens or 1))), token, np.int32)
                scheduler.add(Request(rid=f"warm-up-{number}", prompt=prompt, sampling=sampling, seed=0))
            _run_out(line, scheduler, clock)
    parts.phases.mark("warm-up")


def _requests(parts: RankParts, room: int) -> Iterator[list[tuple[int, int, SamplingParams]]]:
    """Those that come at once: their sizes, the token that all of the prompt is, and how they are sampled."""
    yield [(_TOKENS, 0, _GREEDY), (_TOKENS, 0, _DRAWN)]
    if not specializes(parts):
        return
    sizes, chunk = list(_ROWS), chunk_of(parts.config, parts.device)
    if parts.spec.is_latent:
        sizes.insert(0, _FEW)
    chunk = room if chunk < 0 else min(chunk, room)
    if parts.spec.experts is not None or parts.spec.quantization is not None or parts.spec.is_latent:
        while sizes[-1] < chunk:
            sizes.append(min(2 * sizes[-1], chunk))
    else:
        sizes.append(min(_LONG, chunk))
    for token, size in enumerate(sizes, 1):
        yield [(size, token, _GREEDY)]
    page = parts.config.memory.page_size
    longest = max(2 * page, _ROWS[0])
    token = len(sizes) + 1
    yield [(longest, token, _GREEDY)]
    yield [(longest + 2 * page, token, _GREEDY)]  # behind what is cached
    yield [(longest + 4 * page, token, _GREEDY), (1, 0, _GREEDY), (longest, token + 1, _ADJUSTED)]
    yield [(1, token, _ADJUSTED)]


def _run_out(line: LeaderLine, scheduler: Scheduler, clock: Clock) -> None:
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
