"""From a ServeConfig to an engine core that can step: model, pool, table, cache, scheduler, runner.

The only place where all rooms below meet. Times each phase, so that start-up can say where the time went.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from serinus.cache import CacheGeometry, PrefixCache
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.engine.core import EngineCore
from serinus.engine.executor import LocalExecutor
from serinus.engine.kv_events import KvEventPublisher, KvEventSettings
from serinus.engine.kv_guard import make_guard
from serinus.engine.memory import trim
from serinus.engine.sizes import part_specs
from serinus.engine.tiers import Tiers, build_tiers, host_counts, namespace_of
from serinus.engine.watch import StepWatch
from serinus.kernels import load
from serinus.models import ForwardHook, ModelSpec, choose_dtype, compose_hooks, load_model, load_spec, resolve
from serinus.pool import DevicePool, LayerGate, PoolSpec, RequestTable
from serinus.runner import Runner
from serinus.sched import SchedSettings, Scheduler

__all__ = ["Built", "KvSizes", "build_core", "kv_sizes"]


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


class _Phases:
    """Seconds spent since the last mark, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = now - self._last
        self._last = now


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
    spec = load_spec(folder, overrides=_overrides(config), load_format=config.model.load_format)
    dtype = choose_dtype(spec, config.model.dtype, device)
    pools = part_specs(config, spec, dtype, device, context_of(config, spec), taken=weight_bytes)
    return KvSizes(pools=pools, host=host_counts(config, pools, taken=weight_bytes if device == "cpu" else 0))


def build_core(config: ServeConfig, clock: Clock) -> Built:
    """Load the model and allocate everything.

    Raises ConfigError where the checkpoint, the machine and the settings do not fit together.
    Cost: dominated by reading and packing the weights.
    """
    phases = _Phases(clock)
    device = choose_device(config.model.device)
    if config.kernels.threads:
        torch.set_num_threads(config.kernels.threads)
    kernels = load(device, config.kernels.attention_backend)
    folder = resolve(config.model.model_path, config.model.revision)
    seed = config.model.random_seed or 0
    spec = load_spec(folder, overrides=_overrides(config), load_format=config.model.load_format, seed=seed)
    dtype = choose_dtype(spec, config.model.dtype, device)
    context = context_of(config, spec)
    with torch.inference_mode():
        model = load_model(
            spec,
            folder,
            dtype,
            kernels,
            load_format=config.model.load_format,
            seed=seed,
            positions=context,
            device=device,
        )
        trim()
        phases.mark("weights")
        specs = part_specs(config, spec, dtype, device, context)
        pools = {part: DevicePool(part_spec, kernels) for part, part_spec in specs.items()}
        sched_settings = _sched_settings(config, spec, specs[Part.FULL], context)
        tables = {part: RequestTable(sched_settings.rows, context, device) for part in specs}
        namespace = namespace_of(config, spec, specs[Part.FULL], dtype)
        tiers = build_tiers(config, spec, pools, namespace, clock)
        phases.mark("pool")
        guard = make_guard(config, spec, pools, tables, device, {} if tiers is None else tiers.host)
        hooks: list[ForwardHook] = [] if tiers is None else [LayerGate(tiers.mover)]
        hooks += [] if guard is None else [guard.hook]
        oracle = config.kernels.sampling_backend == "token_oracle"
        runner = Runner(model, pools, tables, kernels, hook=compose_hooks(hooks), token_oracle=oracle)
        _first_steps(runner, _scheduler(sched_settings, specs, spec.window), clock)
        phases.mark("warm-up")
    events = _events(config, clock)
    cache = _cache(config, specs, spec.window, tiers, namespace, clock, events=events is not None)
    metrics = Metrics(engine=config.engine_name, role=config.role)
    watch = StepWatch(metrics, clock, every_steps=config.sched.decode_log_interval)
    scheduler = Scheduler(sched_settings, cache)
    if guard is not None:
        guard.bind(cache, scheduler)
    core = EngineCore(
        scheduler=scheduler,
        executor=LocalExecutor(runner),
        watch=watch,
        clock=clock,
        cache=cache,
        tiers=tiers,
        events=events,
        guard=guard,
        sanity=config.cache.enable_sanity_check,
    )
    return Built(
        config=config,
        spec=spec,
        core=core,
        cache=cache,
        pools=pools,
        tiers=tiers,
        metrics=metrics,
        context_length=context,
        dtype=dtype,
        device=device,
        seconds=phases.seconds,
    )


def _events(config: ServeConfig, clock: Clock) -> KvEventPublisher | None:
    """Who is told what is cached; None = nobody. Raises ConfigError: the setting is wrong or its endpoint in use."""
    if not config.cache.kv_events_config:
        return None
    settings = KvEventSettings.from_json(config.cache.kv_events_config)
    return KvEventPublisher(settings, clock) if settings.enabled else None


def _cache(
    config: ServeConfig,
    specs: Mapping[Part, PoolSpec],
    window: int | None,
    tiers: Tiers | None,
    namespace: str,
    clock: Clock,
    *,
    events: bool,
) -> PrefixCache:
    return PrefixCache(
        _geometry(specs, window, tiers),
        enable_prefix=not config.sched.disable_radix_cache,
        policy=config.sched.radix_eviction_policy,
        write_policy=config.cache.hicache_write_policy,
        mover=None if tiers is None else tiers.mover,
        storage=None if tiers is None else tiers.storage,
        namespace=namespace,
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


def _first_steps(runner: Runner, scheduler: Scheduler, clock: Clock) -> None:
    """Answer two short requests, greedy and sampled, with a scheduler of their own that is thrown away: whatever is
    compiled, loaded or allocated at first use is there before the first client comes. The KV it leaves behind lies on
    pages that the real ledger calls free.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
        prompt = np.zeros(max(1, min(3, scheduler.settings.context_length - 2)), np.int32)
        scheduler.add(Request(rid=f"warm-up-{temperature}", prompt=prompt, sampling=sampling, seed=0))
    while not scheduler.idle:
        plan = scheduler.plan(clock.now())
        if plan is None:
            raise InvariantError("engine: the warm-up requests cannot run, expected a step")
        scheduler.commit(plan, runner.run(plan), clock.now())


def _overrides(config: ServeConfig) -> dict[str, Any]:
    text = config.model.json_model_override_args
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"engine: json_model_override_args is {text!r} ({error}), expected a JSON object") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"engine: json_model_override_args is {text!r}, expected a JSON object")
    return overrides


def choose_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"engine: device is {name!r}, but torch sees no CUDA device; expected cpu")
    return name


def context_of(config: ServeConfig, spec: ModelSpec) -> int:
    """The context in force: the model's, or the smaller one that was asked for."""
    asked = config.model.context_length
    if asked is None:
        return spec.context_length
    if asked > spec.context_length:
        raise ConfigError(
            f"engine: context_length is {asked}, expected at most {spec.context_length}, which the model holds"
        )
    return asked


def _sched_settings(config: ServeConfig, spec: ModelSpec, pool: PoolSpec, context: int) -> SchedSettings:
    running = config.sched.max_running_requests
    return SchedSettings(
        page_size=pool.page_size,
        context_length=context,
        rows=running + 1,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        max_total_tokens=(pool.page_count - 1) * pool.page_size,
        max_running_requests=running,
        max_queued_requests=config.sched.max_queued_requests,
        chunked_prefill_size=config.sched.chunked_prefill_size,
        schedule_policy=config.sched.schedule_policy,
        min_remote_tokens=config.pd.min_remote_tokens,
        prefetch_policy=(
            "none" if config.cache.hicache_storage_backend == "none" else config.cache.hicache_storage_prefetch_policy
        ),
        prefetch_s_max=config.cache.hicache_prefetch_s_max,
    )
