"""From a ServeConfig to an engine core that can step: model, pool, table, cache, scheduler, runner.

The only place where all rooms below meet. Times each phase, so that start-up can say where the time went.
"""

from __future__ import annotations

import json
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
from serinus.engine.memory import available_bytes, trim
from serinus.engine.watch import StepWatch
from serinus.kernels import load
from serinus.models import ModelSpec, choose_dtype, load_model, load_spec, resolve
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Runner
from serinus.sched import SchedSettings, Scheduler

__all__ = ["Built", "build_core"]

_POOL_FRACTION = {"cpu": 0.2, "cuda": 0.85}
"""Part of the free memory that KV takes when nobody says: a host has other guests, an accelerator has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine core and what was decided while it was built."""

    config: ServeConfig
    """The settings in force."""
    spec: ModelSpec
    core: EngineCore
    cache: PrefixCache
    pool: DevicePool
    metrics: Metrics
    context_length: int
    """Tokens of one sequence at most."""
    dtype: torch.dtype
    device: str
    seconds: dict[str, float]
    """Start-up phases: weights, pool, warm-up."""

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
        pool_spec = _pool_spec(config, spec, dtype, device, context)
        pool = DevicePool(pool_spec, kernels)
        sched_settings = _sched_settings(config, spec, pool_spec, context)
        table = RequestTable(sched_settings.rows, context, device)
        phases.mark("pool")
        runner = Runner(model, {Part.FULL: pool}, {Part.FULL: table}, kernels)
        _first_steps(runner, _scheduler(config, sched_settings, pool_spec)[0], clock)
        phases.mark("warm-up")
    scheduler, cache = _scheduler(config, sched_settings, pool_spec)
    metrics = Metrics(engine=config.engine_name, role=config.role)
    watch = StepWatch(metrics, clock, every_steps=config.sched.decode_log_interval)
    core = EngineCore(scheduler=scheduler, runner=runner, watch=watch, clock=clock)
    return Built(
        config=config,
        spec=spec,
        core=core,
        cache=cache,
        pool=pool,
        metrics=metrics,
        context_length=context,
        dtype=dtype,
        device=device,
        seconds=phases.seconds,
    )


def _scheduler(config: ServeConfig, settings: SchedSettings, pool: PoolSpec) -> tuple[Scheduler, PrefixCache]:
    cache = PrefixCache(
        CacheGeometry(page_size=pool.page_size, full_pages=pool.page_count),
        enable_prefix=not config.sched.disable_radix_cache,
        policy=config.sched.radix_eviction_policy,
    )
    return Scheduler(settings, cache), cache


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


def _pool_spec(config: ServeConfig, spec: ModelSpec, dtype: torch.dtype, device: str, context: int) -> PoolSpec:
    """As many pages as asked for, or as memory allows and the largest batch could use."""
    page_size = config.memory.page_size
    sizes = PoolSpec(
        layer_count=spec.layer_count,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        page_size=page_size,
        page_count=2,
        dtype=dtype,
        device=device,
    )
    have = available_bytes(device)
    fraction = config.memory.mem_fraction_static or _POOL_FRACTION[torch.device(device).type]
    if config.memory.max_total_tokens is not None:
        pages = -(-config.memory.max_total_tokens // page_size)
        needed = (pages + 1) * sizes.page_bytes
        if needed > have:
            raise ConfigError(
                f"engine: max_total_tokens is {config.memory.max_total_tokens}, which takes {needed / 1e9:.1f} GB of "
                f"KV; {have / 1e9:.1f} GB are free on {device}"
            )
    else:
        largest = config.sched.max_running_requests * -(-context // page_size)
        pages = min(int(have * fraction) // sizes.page_bytes - 1, largest)
        if pages < 1:
            raise ConfigError(
                f"engine: mem_fraction_static is {fraction}, which leaves {have * fraction / 1e9:.2f} GB for KV;"
                f" one page takes {sizes.page_bytes} bytes, expected room for at least one"
            )
    return replace(sizes, page_count=pages + 1)


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
    )
