"""An engine behind an endpoint, from its settings: core, role, loop, and the `Ready` that fronts are told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.engine.build import build_engine
from serinus.engine.built import Built
from serinus.engine.compile_ahead import Compilers, is_compiled
from serinus.engine.loop import EngineLoop
from serinus.engine.progress import counted
from serinus.models import file_bytes, resolve
from serinus.pool import PoolSpec
from serinus.ranks.build import choose_device
from serinus.ranks.rank_processes import RankProcesses
from serinus.wire import ZmqChannel
from serinus.wire.messages import Ready

_log = get_logger("engine")
_LARGE_BYTES = 1 << 30
"""Weights of models that have kernels compiled ahead at start; for less it takes longer to start the processes."""
_STEP_BYTES = 16 << 30
"""Of a GPU, that the largest step may take while they run."""


def launch(
    config: ServeConfig, endpoint: str, clock: Clock, started: float, starter: RankProcesses | None = None
) -> EngineLoop:
    """Bind, load, return the loop; `started` is when this process began, for the start-up phases.

    `starter`: starts the other ranks, where there are any.

    Raises ConfigError: settings, checkpoint, machine or address are wrong.
    """
    channel = ZmqChannel(endpoint, clock=clock)
    imports_s = clock.now() - started
    with _compiling(config, clock) as wait:
        built = build_engine(config, clock, starter, before_pool=wait)
    seconds = {"imports": imports_s, **built.seconds, "engine": clock.now() - started}
    for phase, spent in seconds.items():
        built.metrics.set("startup_time_seconds", spent, phase)
    _announce(built, seconds)
    return EngineLoop(built, endpoint=channel, ready=ready_of(built, seconds), clock=clock)


@contextmanager
def _compiling(config: ServeConfig, clock: Clock) -> Iterator[Callable[[], object]]:
    """Kernels of a GPU are compiled ahead by other processes, where they were not before; what it gives waits for
    them."""
    ahead: Compilers | None = None
    if choose_device(config.model.device) != "cpu" and config.parallel.size == 1 and not is_compiled(config):
        weights = file_bytes(Path(resolve(config.model.model_path, config.model.revision)))
        try:
            ahead = Compilers(config, clock, spared=weights + _STEP_BYTES) if weights >= _LARGE_BYTES else None
        except ConfigError as error:
            _log.info("kernels are compiled at first use: %s", error)
    if ahead is None:
        yield lambda: None
        return
    with ahead:
        yield partial(ahead.wait, counted)


def ready_of(built: Built, seconds: dict[str, float]) -> Ready:
    """What the front is told of the engine; `seconds`: of its start, by phase."""
    config, spec, pool, swa = built.config, built.spec, built.pool.spec, built.pools.get(Part.SWA)
    return Ready(
        engine=config.engine_name,
        incarnation=built.incarnation,
        role=config.role,
        vocab_size=spec.vocab_size,
        context_length=built.context_length,
        max_total_tokens=built.max_total_tokens,
        page_size=pool.page_size,
        pd_address=built.pd_address,
        eos_ids=built.generation.eos_ids,
        sampling_defaults=dict(built.generation.defaults),
        seconds=seconds,
        info={
            "architecture": spec.architecture,
            "model_signature": spec.signature,
            "quantization": "none" if spec.quantization is None else spec.quantization.text,
            "layers": spec.layer_count,
            "dtype": str(built.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(pool.dtype).removeprefix("torch."),
            "device": built.device,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
            "kv_bytes": sum(_bytes(each.spec) for each in built.pools.values()),
            **{f"memory_{name.lower().replace(' ', '_')}_bytes": count for name, count in built.memory.items()},
            "page_bytes": sum(each.page_bytes for each in built.pools.values()),
            "swa_tokens": 0 if swa is None else (swa.spec.page_count - 1) * swa.spec.page_size,
            "window": spec.window or 0,
            "tp_size": config.parallel.tp_size,
            "pp_size": config.parallel.pp_size,
            "ep_size": config.parallel.ep_size,
            "host_tokens": _host_tokens(built),
            "host_bytes": _host_bytes(built),
            "storage": config.cache.hicache_storage_dir,
            "chunked_prefill_size": built.engine.scheduler.settings.chunked_prefill_size,
            "kv_canary": config.canary.kv_canary,
            "max_running_requests": config.sched.max_running_requests,
        },
    )


def _bytes(pool: PoolSpec) -> int:
    return pool.page_count * pool.page_bytes


def _host_tokens(built: Built) -> int:
    if built.tiers is None:
        return 0
    return (built.tiers.host[Part.FULL].page_count - 1) * built.pool.spec.page_size


def _host_bytes(built: Built) -> int:
    return 0 if built.tiers is None else sum(p.page_count * p.page_bytes for p in built.tiers.host.values())


def _announce(built: Built, seconds: dict[str, float]) -> None:
    config = built.config
    for part, each in built.pools.items():
        half_gb = _bytes(each.spec) / 2 / 1e9
        tokens = (each.spec.page_count - 1) * each.spec.page_size
        name = "" if len(built.pools) == 1 else f" part: {part.name}, layers: {each.spec.layer_count},"
        _log.info(
            "KV Cache is allocated.%s dtype: %s, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
            name, each.spec.dtype, tokens, half_gb, half_gb,
        )  # fmt: skip
    if built.tiers is not None:
        _log.info(
            "Host tier is allocated. #tokens: %d, size: %.2f GB, write policy: %s, storage: %s",
            _host_tokens(built), _host_bytes(built) / 1e9, config.cache.hicache_write_policy,
            config.cache.hicache_storage_dir or "none",
        )  # fmt: skip
    _log.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_running_requests=%d, context_len=%d",
        built.max_total_tokens, built.engine.scheduler.settings.chunked_prefill_size, config.sched.max_running_requests,
        built.context_length,
    )  # fmt: skip
    generation = built.generation
    defaults = ", ".join(f"{name}={value}" for name, value in generation.defaults.items())
    _log.info("Answers end at tokens %s.", ", ".join(map(str, generation.eos_ids)) or "none")
    if defaults:
        _log.info(
            "Requests have by default: %s (%s; --generation-config none ignores it).", defaults, generation.source
        )
    _log.info("engine %s loaded: %s", config.engine_name, ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items()))
