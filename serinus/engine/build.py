"""From a ServeConfig to an engine core that can step: what each rank has, and on the leader the cache, the scheduler
and the core that uses them.

The only place where all rooms below meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from serinus.cache import CacheGeometry, PrefixCache
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, InvariantError, PeerGone
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.engine.core import EngineCore
from serinus.engine.executor import Executor, LocalExecutor
from serinus.engine.followers import Followers, mesh_of
from serinus.engine.kv_events import KvEventPublisher, KvEventSettings
from serinus.engine.kv_guard import KvGuard
from serinus.engine.rank_build import (
    RankParts,
    build_rank,
    choose_device,
    context_of,
    overrides_of,
    rows_of,
)
from serinus.engine.rank_watch import RankWatch
from serinus.engine.ranks import RankExecutor, RankGroup, make_body
from serinus.engine.ranks.canary import RanksGuard
from serinus.engine.ranks.tiers import TierPorts, lead_tiers
from serinus.engine.sizes import part_specs
from serinus.engine.tiers import Tiers, host_counts
from serinus.engine.watch import StepWatch
from serinus.models import ModelSpec, choose_dtype, load_spec, resolve
from serinus.parallel.comm import Comm, SoloComm
from serinus.pool import DevicePool, PoolSpec
from serinus.sched import SchedSettings, Scheduler

__all__ = ["Built", "KvSizes", "OtherRanks", "build_core", "kv_sizes"]

_CHUNK = 2048
"""Prompt tokens of a step where nobody says."""
_STAGES_CHUNK = 256
"""...on the stages of a CPU."""
_HELLO_S = 60.0
"""Seconds that followers may take to say hello on the control line, once they are known to be there."""
_LOOK_S = 0.05
_VERDICT_S = 3.0
"""Seconds that the watchdog gets to say why a rank's line broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine core and what was decided while it was built."""

    config: ServeConfig
    """The settings in force."""
    spec: ModelSpec
    core: EngineCore
    cache: PrefixCache
    pools: Mapping[Part, DevicePool]
    """KV of each part."""
    tiers: Tiers | None
    """Host tier and storage; None = none."""
    followers: OtherRanks | None
    """The processes of the other ranks; None = one rank."""
    metrics: Metrics
    context_length: int
    """Tokens of one sequence at most."""
    dtype: torch.dtype
    device: str
    seconds: dict[str, float]
    """Start-up phases: weights, pool, warm-up."""

    @property
    def pool(self) -> DevicePool:
        """The pool of part FULL; its pages have no bytes where all layers slide."""
        return self.pools[Part.FULL]

    @property
    def max_total_tokens(self) -> int:
        """Slots a request can use."""
        return (self.pool.spec.page_count - 1) * self.pool.spec.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizes:
    """Room for KV that an engine of these settings has."""

    pools: Mapping[Part, PoolSpec]
    """On the device, by part."""
    host: Mapping[Part, int]
    """Host pages by part, page 0 included; empty = no host tier."""


def kv_sizes(config: ServeConfig, weight_bytes: int) -> KvSizes:
    """What `build_core` would make of the memory that is free now, once weights of so many bytes are loaded.

    Allocates nothing. Raises ConfigError as `build_core` does.
    """
    device = choose_device(config.model.device)
    folder = resolve(config.model.model_path, config.model.revision)
    spec = load_spec(folder, overrides=overrides_of(config), load_format=config.model.load_format)
    dtype = choose_dtype(spec, config.model.dtype, device)
    pools = part_specs(config, spec, dtype, device, context_of(config, spec), taken=weight_bytes)
    return KvSizes(pools=pools, host=host_counts(config, pools, taken=weight_bytes if device == "cpu" else 0))


class OtherRanks(Protocol):
    """Who starts, finds and ends the ranks that do not lead: processes (Followers), or threads in tests."""

    token: bytes
    """What only the ranks of this engine know."""
    control_bind: str
    """Where the leader's line may listen."""

    def start(self, *, control: str) -> None:
        """Start them; the leader's line is at `control`."""
        ...

    def join(self) -> Comm:
        """Wait until all are connected; the leader's end. Raises ConfigError, PeerGone."""
        ...

    def check(self) -> None:
        """Raise where one is lost."""
        ...

    def why(self, s_max: float) -> str:
        """Which one is lost and why, in words; empty = none."""
        ...

    def explained(self, error: PeerGone) -> ConfigError | PeerGone:
        """An error of the ranks' lines as what is known of it."""
        ...

    def fail(self, error: BaseException) -> None:
        """The engine does not come up: end them."""
        ...

    def dismiss(self) -> None:
        """They are about to be told to stop: that they end is no loss from now on."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """All ranks, the leader first."""
        ...

    def close(self) -> None:
        """End them; they have been told to stop."""
        ...


def build_core(config: ServeConfig, clock: Clock, followers: OtherRanks | None = None) -> Built:
    """Load the model and allocate everything, on all ranks; `followers`: who starts the others, None = made here.

    Raises ConfigError where the checkpoint, the machine and the settings do not fit together, PeerGone where a rank
    does not come up. Cost: dominated by reading and packing the weights.
    """
    mesh = mesh_of(config)
    if mesh.size == 1:
        parts = build_rank(config, mesh, 0, SoloComm(), clock)
        return _lead(parts, LocalExecutor(parts.runner), None, None, clock)
    followers = Followers(config, clock) if followers is None else followers
    with ExitStack() as undo:
        try:
            group = RankGroup(followers.control_bind, mesh=mesh, clock=clock, token=followers.token)
            undo.callback(group.close)
            group.why = lambda: followers.why(_VERDICT_S)
            followers.start(control=group.address)
            parts = build_rank(config, mesh, 0, followers.join(), clock)
            undo.callback(parts.close)
            group.gather(followers.check, _HELLO_S)
            whole = parts.canary is not None
            executor = RankExecutor(
                group, make_body(parts, clock), mesh, clock,
                whole=whole, dismiss=followers.dismiss, ends=(followers.close,),
            )  # fmt: skip
            built = _lead(parts, executor, executor, followers, clock)
        except PeerGone as error:
            reason = followers.explained(error)
            followers.fail(reason)
            raise reason from error
        except BaseException as error:
            followers.fail(error)
            raise
        undo.pop_all()
    return built


def _lead(
    parts: RankParts, executor: Executor, line: RankExecutor | None, followers: OtherRanks | None, clock: Clock
) -> Built:
    """The leader's core on top of its rank."""
    config, spec, specs = parts.config, parts.spec, parts.pool_specs
    settings = _sched_settings(config, spec, specs[Part.FULL], parts.context, executor)
    with torch.inference_mode():
        _first_steps(executor, _scheduler(settings, specs, spec.window), clock)
    parts.phases.mark("warm-up")
    events = _events(config, clock)
    names = [parts.mesh.name(rank) for rank in range(parts.mesh.size)]
    ports = lead_tiers(line, names, parts.tiers)
    cache = _cache(parts, ports, clock, events=events is not None)
    metrics = Metrics(engine=config.engine_name, role=config.role, rank="TP0" if line is None else names[0])
    ranks = None if line is None else RankWatch(metrics, line, engine=config.engine_name, role=config.role, clock=clock)
    watch = StepWatch(metrics, clock, every_steps=config.sched.decode_log_interval, ranks=ranks)
    scheduler = Scheduler(settings, cache)
    guard = _guard(parts, line)
    if guard is not None:
        guard.bind(cache, scheduler)
    core = EngineCore(
        scheduler=scheduler,
        executor=executor,
        watch=watch,
        clock=clock,
        cache=cache,
        tiers=parts.tiers,
        events=events,
        guard=guard,
        sanity=config.cache.enable_sanity_check,
    )
    return Built(
        config=config,
        spec=spec,
        core=core,
        cache=cache,
        pools=parts.pools,
        tiers=parts.tiers,
        followers=followers,
        metrics=metrics,
        context_length=parts.context,
        dtype=parts.dtype,
        device=parts.device,
        seconds=parts.phases.seconds,
    )


def _guard(parts: RankParts, line: RankExecutor | None) -> KvGuard | RanksGuard | None:
    """The canary of the whole engine, where there is one."""
    if line is None or parts.canary is None:
        return parts.guard
    shards = parts.spec.shards(parts.mesh, parts.config.parallel.partition)
    return RanksGuard(parts.config, parts.spec, shards, line, lambda: line.findings)


def _events(config: ServeConfig, clock: Clock) -> KvEventPublisher | None:
    """Who is told what is cached; None = nobody. Raises ConfigError: the setting is wrong or its endpoint in use."""
    if not config.cache.kv_events_config:
        return None
    settings = KvEventSettings.from_json(config.cache.kv_events_config)
    return KvEventPublisher(settings, clock) if settings.enabled else None


def _cache(parts: RankParts, ports: TierPorts, clock: Clock, *, events: bool) -> PrefixCache:
    config = parts.config
    return PrefixCache(
        _geometry(parts.pool_specs, parts.spec.window, parts.tiers),
        enable_prefix=not config.sched.disable_radix_cache,
        policy=config.sched.radix_eviction_policy,
        write_policy=config.cache.hicache_write_policy,
        mover=ports.mover,
        storage=ports.storage,
        namespace=parts.namespace,
        kv_events=events,
        clock=clock,
    )


def _geometry(specs: Mapping[Part, PoolSpec], window: int | None, tiers: Tiers | None) -> CacheGeometry:
    host = {} if tiers is None else {part: pool.page_count for part, pool in tiers.host.items()}
    full, swa = specs[Part.FULL], specs.get(Part.SWA)
    return CacheGeometry(
        page_size=full.page_size,
        full_pages=full.page_count,
        swa_pages=0 if swa is None else swa.page_count,
        window=window,
        host_full_pages=host.get(Part.FULL, 0),
        host_swa_pages=host.get(Part.SWA, 0),
    )


def _scheduler(settings: SchedSettings, specs: Mapping[Part, PoolSpec], window: int | None) -> Scheduler:
    """One on a cache of its own, without tiers: for the first steps."""
    alone = replace(settings, prefetch_policy="none")
    return Scheduler(alone, PrefixCache(_geometry(specs, window, None)))


def _first_steps(executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
    """Answer two short requests, greedy and sampled, with a scheduler of their own that is thrown away: whatever is
    compiled, loaded or allocated at first use is there before the first client comes, on every rank. The KV it leaves
    behind lies on pages that the real ledger calls free.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
        prompt = np.zeros(max(1, min(3, scheduler.settings.context_length - 2)), np.int32)
        scheduler.add(Request(rid=f"warm-up-{temperature}", prompt=prompt, sampling=sampling, seed=0))
    while not scheduler.idle:
        plan = scheduler.plan(clock.now())
        if plan is None:
            raise InvariantError("engine: the warm-up requests cannot run, expected a step")
        if executor.journals:
            executor.record(scheduler.take_moves(), ())
        executor.submit(plan)
        while (result := executor.take()) is None:
            executor.pump(_LOOK_S)
        scheduler.commit(plan, result, clock.now())
    if executor.journals:
        executor.record(scheduler.take_moves(), ())
        executor.flush()


def _chunk_of(config: ServeConfig, device: str) -> int:
    """Prompt tokens of one step. Stages wait for each other until as many chunks are under way as there are stages, so
    short ones are better for them; a CPU loses nothing by short ones, an accelerator does."""
    asked = config.sched.chunked_prefill_size
    if asked is not None:
        return asked
    return _STAGES_CHUNK if config.parallel.pp_size > 1 and device == "cpu" else _CHUNK


def _sched_settings(
    config: ServeConfig, spec: ModelSpec, pool: PoolSpec, context: int, executor: Executor
) -> SchedSettings:
    running = config.sched.max_running_requests
    return SchedSettings(
        page_size=pool.page_size,
        context_length=context,
        rows=rows_of(config),
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        max_total_tokens=(pool.page_count - 1) * pool.page_size,
        max_running_requests=running,
        max_queued_requests=config.sched.max_queued_requests,
        chunked_prefill_size=_chunk_of(config, pool.device),
        schedule_policy=config.sched.schedule_policy,
        min_remote_tokens=config.pd.min_remote_tokens,
        prefetch_policy=(
            "none" if config.cache.hicache_storage_backend == "none" else config.cache.hicache_storage_prefetch_policy
        ),
        prefetch_s_max=config.cache.hicache_prefetch_s_max,
        depth=executor.depth,
        journal=executor.journals,
    )
