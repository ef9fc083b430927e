"""The two halves of an engine's canary from its settings: the leader's, and that of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from serinus.cache import PrefixCache
from serinus.canary.faults import LeadFaults
from serinus.canary.judge import Requests
from serinus.canary.lead import CanaryLead
from serinus.canary.perturb import Perturber, PerturbPlan, rank_fault_plan
from serinus.canary.rank import CanaryRank, TokenOracle
from serinus.canary.settings import CheckSettings
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.line import CommandLine
from serinus.core.parts import Part
from serinus.core.settings import CanarySettings, coverage_stride
from serinus.kernels import load, warm
from serinus.models import ModelSpec
from serinus.parallel import Shard
from serinus.pool import DevicePool, HostPool, RequestTable


def make_canary_rank(
    config: ServeConfig,
    spec: ModelSpec,
    shards: Sequence[Shard],
    rank: int,
    pools: Mapping[Part, DevicePool],
    tables: Mapping[Part, RequestTable],
    host: Mapping[Part, HostPool],
    *,
    device: str,
    clock: Clock,
    oracle: TokenOracle | None = None,
    dtype: torch.dtype | None = None,
) -> CanaryRank | None:
    """The canary of one rank; None = the settings ask for none.

    Args:
        spec: the whole model; shards: what each rank has of it.
        pools, tables, host: of this rank; host is empty without a host tier.
        oracle: the tokens that the sampler must emit, with --sampling-backend token_oracle.
        dtype: of the model; None = that of the pools.
    Raises ConfigError: the settings ask for faults that this model or this engine cannot have.
    """
    settings = config.canary
    if settings.kv_canary == "none":
        return None
    shard = shards[rank]
    own = spec.on(shard)
    plan = rank_fault_plan(config, spec, shards, rank)
    if plan is None and (settings.kv_canary_perturb_api or settings.kv_canary_perturb):
        plan = PerturbPlan()  # faults of another rank: all of them do alike what steps without faults alone may do
    tier = {part: pool.data_PY for part, pool in host.items()}
    kernels = load(device)
    if settings.kv_canary_real_data == "all" and not spec.is_latent:
        # Else the first decode step would wait for what digests in attention.
        shape, kv_dtype = (spec.head_size, spec.head_count // spec.kv_head_count), pools[Part.FULL].spec.dtype
        warm(
            kernels, shapes=(shape,), dtype=dtype or kv_dtype, kv_dtype=kv_dtype, watched=True,
            windows=sorted({part is Part.SWA for part in own.layer_parts}), capped=spec.attention_softcap is not None,
        )  # fmt: skip
    return CanaryRank(
        CheckSettings(
            page_size=config.memory.page_size,
            window=spec.window,
            real_data=settings.kv_canary_real_data,
            stride=coverage_stride(settings.kv_canary_coverage),
            depth=shard.pp,
            is_swept=settings.kv_canary_sweep_interval > 0 or settings.kv_canary_sweep_seconds > 0,
            stats_interval=settings.kv_canary_stats_interval,
            divergence_interval=settings.kv_canary_swa_divergence_interval,
        ),
        pools,
        tables,
        {part: [shard.layers.start + layer for layer in own.layers_of(part)] for part in own.parts},
        kernels,
        perturber=None if plan is None else Perturber(plan, host=tier),
        oracle=oracle,
        head_ids=shard.kv_heads,
        host=host,
        clock=clock,
    )


def make_canary_lead(
    config: ServeConfig,
    spec: ModelSpec,
    shards: Sequence[Shard],
    line: CommandLine,
    cache: PrefixCache,
    requests: Requests,
    clock: Clock,
) -> CanaryLead | None:
    """The leader's half of the canary, which starts those of the ranks; None = the settings ask for none.

    Args:
        spec: the whole model; shards: what each rank has of it.
        requests: those of the engine.
    Raises ConfigError: see make_canary_rank.
    """
    if config.canary.kv_canary == "none":
        return None
    faults = None
    if config.canary.kv_canary_perturb or config.canary.kv_canary_perturb_api:

        def plans_of(settings: CanarySettings) -> Sequence[PerturbPlan | None]:
            planned = replace(config, canary=settings)
            return [rank_fault_plan(planned, spec, shards, rank) for rank in range(len(shards))]

        faults = LeadFaults(config.canary, line, cache, clock, plans_of)
    return CanaryLead(
        config.canary,
        line,
        cache,
        requests,
        clock=clock,
        parts=sorted(part for part in spec.parts if spec.layers_of(part)),
        names=[shard.name for shard in shards] if len(shards) > 1 else [""],
        faults=faults,
    )
