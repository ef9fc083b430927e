"""An engine's part in handoffs, from its settings: the role, its port, and where decode engines find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.core.clock import Clock
from serinus.core.log import get_logger
from serinus.engine.build import Built
from serinus.engine.decode_role import DecodeRole
from serinus.engine.layouts import data_backends, layout_of
from serinus.engine.prefill_role import PrefillRole
from serinus.engine.ranks import RankExecutor
from serinus.engine.ranks.crew import STAGING_PIECES, RankCrew
from serinus.engine.roles import Handoffs, NoHandoffs
from serinus.pd import AnyBackend, DecodePort, PdSettings, PrefillPort, host_identity
from serinus.wire import Post, ZmqChannel

__all__ = ["make_handoffs", "pd_settings"]

_log = get_logger("engine")


def make_handoffs(built: Built, incarnation: int, clock: Clock) -> tuple[Handoffs, str]:
    """The engine's role, and the address where decode engines find it (prefill engines only).

    Raises ConfigError: an address in use, or a data backend that does not fit this engine.
    """
    config, scheduler, metrics, guard = built.config, built.core.scheduler, built.metrics, built.core.guard
    if config.role == "unified":
        return NoHandoffs(scheduler), ""
    host = config.pd.bootstrap_host
    backends = data_backends(config, f"{config.engine_name}-{incarnation}")
    if host not in ("127.0.0.1", "localhost", "::1") and not config.pd.cluster_secret:
        _log.warning("engines are greeted at %s without --cluster-secret: whoever reaches it may join", host)
    bind = f"tcp://{config.pd.bootstrap_host}:{config.pd.bootstrap_port}" if config.role == "prefill" else ""
    channel = ZmqChannel(bind, clock=clock)
    common: dict[str, Any] = {
        "settings": pd_settings(built, incarnation, backends),
        "post": Post(channel, incarnation=incarnation, clock=clock),
        "backends": backends,
        "clock": clock,
    }
    executor = built.core.executor
    if isinstance(executor, RankExecutor):
        common["crew"] = RankCrew(executor)
    else:
        common["store"] = guard.outgoing(built.pools) if config.role == "prefill" else built.pools
    if config.role == "prefill":
        prefill = PrefillPort(**common)
        role = PrefillRole(scheduler=scheduler, port=prefill, channels=(channel,), metrics=metrics, clock=clock)
        return role, channel.address
    return (
        DecodeRole(
            scheduler=scheduler,
            port=DecodePort(**common),
            channels=(channel,),
            metrics=metrics,
            clock=clock,
            addresses=config.pd.prefill_addresses,
            on_failure=config.pd.on_failure,
            optimistic=config.pd.optimistic_prefill,
            guard=guard,
        ),
        "",
    )


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
        staging_pieces=STAGING_PIECES if isinstance(built.core.executor, RankExecutor) else 1,
    )
