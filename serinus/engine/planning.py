"""What a leader plans with, from the settings and its own rank: the prefix cache, and the settings of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.canary.coverage import turn_size
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.core.queue_bounds import bounds_by_priority
from serinus.core.settings import coverage_stride
from serinus.core.stamps import ChainHashes
from serinus.pool import PoolSpec
from serinus.ranks.build import RankParts, rows_of
from serinus.ranks.sizes import chunk_of
from serinus.ranks.tier_parts import Tiers
from serinus.ranks.tiers import TierPorts
from serinus.sched import SchedSettings

_CPU_STEP_S: Final = 0.3
"""Seconds of a step on a CPU, where the settings do not say."""


def make_cache(
    make: Callable[..., PrefixCache], parts: RankParts, ports: TierPorts, clock: Clock,
    chain_hashes: ChainHashes | None, *, events: bool,
) -> PrefixCache:  # fmt: skip
    """The prefix cache of a leader. `make`: its class; `events`: whether it collects what becomes cached."""
    config = parts.config
    return make(
        geometry_of(parts.pool_specs, parts.spec.window, parts.tiers),
        enable_prefix=not config.sched.disable_radix_cache,
        policy=config.sched.radix_eviction_policy,
        write_policy=config.cache.hicache_write_policy,
        mover=ports.mover,
        storage=ports.storage,
        namespace=parts.namespace,
        kv_events=events,
        clock=clock,
        chain_hashes=chain_hashes,
    )


def geometry_of(specs: Mapping[Part, PoolSpec], window: int | None, tiers: Tiers | None = None) -> CacheGeometry:
    """What there is of pages, by part; without `tiers` on the device alone."""
    host = {} if tiers is None else {part: pool.page_count for part, pool in tiers.host.items()}
    windows = {Part.SWA: window}
    parts = {
        part: PartGeometry(pages=spec.page_count, host_pages=host.get(part, 0), window=windows.get(part))
        for part, spec in specs.items()
    }
    return CacheGeometry(page_size=specs[Part.FULL].page_size, parts=parts)


def sched_settings(parts: RankParts, depth: int, eos_ids: tuple[int, ...]) -> SchedSettings:
    """The scheduler's settings. `depth`: plans under way at once; `eos_ids`: tokens that end an answer."""
    config, spec, pool = parts.config, parts.spec, parts.pool_specs[Part.FULL]
    running = config.sched.max_running_requests
    return SchedSettings(
        page_size=pool.page_size,
        context_length=parts.context,
        rows=rows_of(config),
        vocab_size=spec.vocab_size,
        eos_ids=eos_ids,
        max_total_tokens=(pool.page_count - 1) * pool.page_size,
        max_running_requests=running,
        max_queued_requests=config.sched.max_queued_requests,
        queued_max_of=bounds_by_priority(config.sched.max_queued_by_priority),
        priority_ageing_s=config.sched.priority_ageing_s,
        request_s_max=config.sched.request_s_max,
        chunked_prefill_size=chunk_of(config, pool.device),
        step_s_max=_step_s_max(config, pool.device),
        schedule_policy=config.sched.schedule_policy,
        min_remote_tokens=config.pd.min_remote_tokens,
        local_gain=config.pd.local_gain,
        prefetch_policy=(
            "none" if config.cache.hicache_storage_backend == "none" else config.cache.hicache_storage_prefetch_policy
        ),
        prefetch_s_max=config.cache.hicache_prefetch_s_max,
        depth=depth,
        overlaps=overlaps(parts),
        verify_parts=tuple(part for part in spec.parts if spec.layers_of(part)),
        raises=config.canary.kv_canary == "raise",
        heals=config.canary.kv_canary == "heal",
        confirms_streams=config.canary.kv_canary_stream == "confirmed",
        turn_size=turn_size(pool.page_size),
        verify_steps=0 if config.canary.kv_canary == "none" else coverage_stride(config.canary.kv_canary_coverage),
    )


def _step_s_max(config: ServeConfig, device: str) -> float:
    """Seconds of a step at most; 0 = no bound. On a CPU a chunk of full length takes seconds, in which no stream gets a
    token; whole prompts, where they are asked for, stay whole."""
    asked = config.sched.max_step_ms
    if asked is not None:
        return asked / 1e3
    return _CPU_STEP_S if device == "cpu" and config.sched.chunked_prefill_size != -1 else 0.0


def overlaps(parts: RankParts) -> bool:
    """Whether steps are begun before the one before them is read. Not on a CPU, which would compute one before it gives
    out the other; nor of several stages, which have several plans under way."""
    return parts.device != "cpu" and parts.mesh.pp == 1 and not parts.config.kernels.disable_overlap_schedule
