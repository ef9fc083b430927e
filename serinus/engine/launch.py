"""An engine behind an endpoint, from its settings: core, role, loop, and the `Ready` that fronts are told."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.engine.build import Built, build_core
from serinus.engine.decode_role import DecodeRole
from serinus.engine.loop import EngineLoop
from serinus.engine.prefill_role import PrefillRole
from serinus.engine.roles import Handoffs, NoHandoffs
from serinus.pd import (
    AnyBackend,
    DecodePort,
    PdSettings,
    PrefillPort,
    host_identity,
    make_backends,
    make_one_sided,
)
from serinus.pool import PoolSpec
from serinus.wire import Post, ZmqChannel
from serinus.wire.messages import LayoutSignature, Ready

__all__ = ["launch", "layout_of", "pd_settings"]

_log = get_logger("engine")


def launch(config: ServeConfig, endpoint: str, clock: Clock, started: float) -> EngineLoop:
    """Bind, load, return the loop; `started` is when this process began, for the start-up phases.

    Raises ConfigError: settings, checkpoint, machine or address are wrong.
    """
    channel = ZmqChannel(endpoint, clock=clock)
    imports_s = clock.now() - started
    built = build_core(config, clock)
    incarnation = new_incarnation()
    handoffs, pd_address = _role(built, incarnation, clock)
    seconds = {"imports": imports_s, **built.seconds, "engine": clock.now() - started}
    for phase, spent in seconds.items():
        built.metrics.set("startup_time_seconds", spent, phase)
    ready = _ready(built, incarnation, pd_address, seconds)
    _announce(built, seconds)
    return EngineLoop(built, endpoint=channel, handoffs=handoffs, ready=ready, clock=clock)


def _role(built: Built, incarnation: int, clock: Clock) -> tuple[Handoffs, str]:
    """The engine's part in handoffs, and the address where decode engines find it (prefill engines only)."""
    config, scheduler, metrics = built.config, built.core.scheduler, built.metrics
    if config.role == "unified":
        return NoHandoffs(scheduler), ""
    host = config.pd.bootstrap_host
    backends = _backends(config, incarnation)
    settings = pd_settings(built, incarnation, backends)
    if host not in ("127.0.0.1", "localhost", "::1") and not config.pd.cluster_secret:
        _log.warning("engines are greeted at %s without --cluster-secret: whoever reaches it may join", host)
    bind = f"tcp://{config.pd.bootstrap_host}:{config.pd.bootstrap_port}" if config.role == "prefill" else ""
    channel = ZmqChannel(bind, clock=clock)
    post = Post(channel, incarnation=incarnation, clock=clock)
    if config.role == "prefill":
        store = built.core.guard.outgoing(built.pools)
        prefill_port = PrefillPort(settings, post=post, backends=backends, store=store, clock=clock)
        role = PrefillRole(scheduler=scheduler, port=prefill_port, channels=(channel,), metrics=metrics, clock=clock)
        return role, channel.address
    port = DecodePort(settings, post=post, backends=backends, store=built.pools, clock=clock)
    return (
        DecodeRole(
            scheduler=scheduler,
            port=port,
            channels=(channel,),
            metrics=metrics,
            clock=clock,
            addresses=config.pd.prefill_addresses,
            on_failure=config.pd.on_failure,
            optimistic=config.pd.optimistic_prefill,
            guard=built.core.guard,
        ),
        "",
    )


def _backends(config: ServeConfig, incarnation: int) -> tuple[AnyBackend, ...]:
    choice = config.pd.transfer_backend
    one_sided = make_one_sided(choice, tag=f"{config.engine_name}-{incarnation}", host=config.pd.bootstrap_host)
    return make_backends(choice) if one_sided is None else (one_sided,)


def pd_settings(built: Built, incarnation: int, backends: Sequence[AnyBackend]) -> PdSettings:
    """What the handoff machines of this engine are told at birth."""
    config = built.config
    return PdSettings(
        engine=config.engine_name,
        incarnation=incarnation,
        layout=layout_of(built),
        vocab_size=built.spec.vocab_size,
        backends=tuple(backend.name for backend in backends),
        capabilities={backend.name: backend.capabilities for backend in backends},
        cluster_secret=config.pd.cluster_secret,
        park_tokens=config.pd.park_tokens,
        host=host_identity(),
        handoff_s_max=config.pd.handoff_s_max,
        keepalive_s=config.pd.keepalive_s,
        silence_s_max=config.pd.peer_s_max,
    )


def layout_of(built: Built) -> LayoutSignature:
    """What shapes this engine's KV bytes; pd.layout says what may differ between two engines."""
    spec, pool = built.spec, built.pool.spec
    return LayoutSignature(
        model=spec.signature,
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        page_size=pool.page_size,
        layer_count=spec.layer_count,
        kv_head_count=pool.kv_head_count,
        head_size=pool.head_size,
        layer_parts=bytes(spec.layer_parts),
        window=spec.window or 0,
        stamp_bytes=max(each.spec.stamp_bytes for each in built.pools.values()) // pool.page_size,
    )


def _ready(built: Built, incarnation: int, pd_address: str, seconds: dict[str, float]) -> Ready:
    config, spec, pool, swa = built.config, built.spec, built.pool.spec, built.pools.get(Part.SWA)
    return Ready(
        engine=config.engine_name,
        incarnation=incarnation,
        role=config.role,
        vocab_size=spec.vocab_size,
        context_length=built.context_length,
        max_total_tokens=built.max_total_tokens,
        page_size=pool.page_size,
        pd_address=pd_address,
        seconds=seconds,
        info={
            "architecture": spec.architecture,
            "model_signature": spec.signature,
            "layers": spec.layer_count,
            "dtype": str(built.dtype).removeprefix("torch."),
            "device": built.device,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
            "kv_bytes": sum(_bytes(each.spec) for each in built.pools.values()),
            "page_bytes": sum(each.page_bytes for each in built.pools.values()),
            "swa_tokens": 0 if swa is None else (swa.spec.page_count - 1) * swa.spec.page_size,
            "window": spec.window or 0,
            "host_tokens": _host_tokens(built),
            "host_bytes": _host_bytes(built),
            "storage": config.cache.hicache_storage_dir,
            "chunked_prefill_size": config.sched.chunked_prefill_size,
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
        half_gb = _bytes(each.spec) / 2 / 2**30
        tokens = (each.spec.page_count - 1) * each.spec.page_size
        name = "" if len(built.pools) == 1 else f" part: {part.name}, layers: {each.spec.layer_count},"
        _log.info(
            "KV Cache is allocated.%s dtype: %s, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
            name, built.dtype, tokens, half_gb, half_gb,
        )  # fmt: skip
    if built.tiers is not None:
        _log.info(
            "Host tier is allocated. #tokens: %d, size: %.2f GB, write policy: %s, storage: %s",
            _host_tokens(built), _host_bytes(built) / 2**30, config.cache.hicache_write_policy,
            config.cache.hicache_storage_dir or "none",
        )  # fmt: skip
    _log.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_running_requests=%d, context_len=%d",
        built.max_total_tokens, config.sched.chunked_prefill_size, config.sched.max_running_requests,
        built.context_length,
    )  # fmt: skip
    _log.info("engine %s loaded: %s", config.engine_name, ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items()))
