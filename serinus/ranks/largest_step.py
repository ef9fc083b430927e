"""How much memory of a GPU the largest step takes beside weights and KV: run once at start, before there is a pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqWork, StepPlan
from serinus.core.sampling import SamplingParams
from serinus.kernels import Kernels
from serinus.models import Model
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Runner


def largest_step_bytes(
    config: ServeConfig, model: Model, kernels: Kernels, shape: PoolSpec, context: int, chunk: int
) -> int:
    """Bytes that torch reserves for a chunk of a full context beside as many sampled rows as may run, and gives back.

    Args:
        shape: of a page of part FULL.
        chunk: prompt tokens of a step at most.
    Cost: one such step, on two pages; all of it is padding.
    """
    parts = model.spec.parts
    pools = {
        part: DevicePool(replace(shape, layer_count=len(model.spec.layers_of(part)), page_count=2), kernels)
        for part in parts
    }
    tables = {part: RequestTable(2, context, shape.device) for part in parts}
    runner = Runner(model, pools, tables, kernels)
    count = min(chunk, context)
    work = [_work(parts, context - 1, 1, seed) for seed in range(config.sched.max_running_requests - 1)]
    work.append(_work(parts, context - count, count, 0))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    runner.run(StepPlan(step=1, work=tuple(work)))
    taken = torch.cuda.max_memory_reserved() - before
    runner.close()
    torch.cuda.empty_cache()
    return max(taken, 0)


def _work(parts: tuple[Part, ...], start: int, count: int, seed: int) -> SeqWork:
    """`count` tokens from `start` on, then a sample. Row 1 names slot 0 everywhere."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    return SeqWork(
        rid="largest",
        row=1,
        start=start,
        tokens=np.zeros(count, np.int32),
        slots={part: np.zeros(count, np.int64) for part in parts},
        sample=SampleSpec(params=params, seed=seed, position=start + count, generated=0),
    )
