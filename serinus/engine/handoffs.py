"""An engine's part in handoffs, from its settings: the role, its port, and where decode engines find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serinus.canary import ArrivalVerdict
from serinus.core.addresses import is_loopback, tcp_url
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.line import CommandLine
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import OwnPages, Part
from serinus.engine.decode_role import DecodeRole
from serinus.engine.peers import Peers
from serinus.engine.prefill_role import PrefillRole
from serinus.engine.roles import Handoffs, NoHandoffs
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.models import ModelSpec
from serinus.pd import (
    AnyBackend,
    DecodeSide,
    HandoffPort,
    HandoffSettings,
    PrefillSide,
    host_identity,
)
from serinus.pool import DevicePool
from serinus.ranks.layouts import layout_of
from serinus.ranks.page_workers import STAGING_PIECES
from serinus.sched import Scheduler
from serinus.wire import Mailbox, ZmqChannel

_log = get_logger("engine")
_MESSAGE_BYTES_MAX: Final = 16 << 20
"""Of what decode engines send: a prompt of a million tokens with its sampling parameters, or as many pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffParts:
    """What a role is made of."""

    config: ServeConfig
    spec: ModelSpec
    pools: Mapping[Part, DevicePool]
    """Of the leader's rank."""
    backends: Sequence[AnyBackend]
    """How pages travel, of the leader's rank."""
    scheduler: Scheduler
    line: CommandLine
    metrics: Metrics
    arrived: Callable[[str, OwnPages | None], ArrivalVerdict] | None
    """The canary's check of pages that came; None = there is no canary."""
    heard: Callable[[HandoffFinding], None] | None
    """Takes what canaries of other engines found on pages of handoffs; None = there is no canary."""
    trace: Callable[[Sequence[PageTrace]], None]
    """Notes which pages handoffs moved."""
    incarnation: int
    spans: SpanLog = NO_SPANS
    """Records what is traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeHandoffs:
    """A role, and how its peers are reached."""

    role: Handoffs
    peers: Peers | None = None
    """Its connections, for the driver of the engine; None = it has none."""
    address: str = ""
    """Where decode engines find it; empty = nowhere."""


def make_handoffs(parts: HandoffParts, clock: Clock) -> MadeHandoffs:
    """The engine's role as its settings say.

    Raises ConfigError: an address in use, or a data backend that does not fit this engine.
    """
    config, incarnation = parts.config, parts.incarnation
    if config.role == "unified":
        return MadeHandoffs(role=NoHandoffs(parts.scheduler))
    host = config.pd.bootstrap_host
    if not is_loopback(host) and not config.pd.cluster_secret:
        _log.warning("engines are greeted at %s without --cluster-secret: any process that reaches it may join", host)
    bind = tcp_url(host, config.pd.bootstrap_port) if config.role == "prefill" else ""
    channel = ZmqChannel(bind, clock=clock, message_bytes_max=_MESSAGE_BYTES_MAX)
    peers = Peers(Mailbox(channel, incarnation=incarnation, clock=clock), (channel,))
    role = make_role(parts, clock.now())
    return MadeHandoffs(role=role, peers=peers, address=channel.address if config.role == "prefill" else "")


def make_role(
    parts: HandoffParts, now: float, addresses: Sequence[str] | None = None,
    *, port: Callable[..., HandoffPort[Any]] = HandoffPort,
) -> DecodeRole | PrefillRole:  # fmt: skip
    """The role of a decode or prefill engine over its port. `addresses`: of prefill engines, None = as configured;
    `port`: makes the port."""
    config = parts.config
    settings = handoff_settings(parts)
    common: dict[str, Any] = {"line": parts.line, "backends": parts.backends}
    if config.role == "prefill":
        prefill = port(PrefillSide, settings, **common)
        return PrefillRole(
            scheduler=parts.scheduler,
            port=prefill,
            metrics=parts.metrics,
            trace=parts.trace,
            heard=parts.heard,
            spans=parts.spans,
        )
    return DecodeRole(
        scheduler=parts.scheduler,
        port=port(DecodeSide, settings, **common),
        metrics=parts.metrics,
        now=now,
        addresses=config.pd.prefill_addresses if addresses is None else addresses,
        on_failure=config.pd.on_failure,
        optimistic=config.pd.optimistic_prefill,
        trace=parts.trace,
        arrived=parts.arrived,
        heard=parts.heard,
        spans=parts.spans,
    )


def handoff_settings(parts: HandoffParts) -> HandoffSettings:
    """The settings of the handoff machine of this engine."""
    config = parts.config
    return HandoffSettings(
        engine=config.engine_name,
        incarnation=parts.incarnation,
        layout=layout_of(parts),
        vocab_size=parts.spec.vocab_size,
        backends=tuple(backend.name for backend in parts.backends),
        capabilities={backend.name: backend.capabilities for backend in parts.backends},
        cluster_secret=config.pd.cluster_secret,
        park_tokens=config.pd.park_tokens,
        host=host_identity(),
        handoff_s_max=config.pd.handoff_s_max,
        keepalive_s=config.pd.keepalive_s,
        silence_s_max=config.pd.peer_s_max,
        staging_pieces=STAGING_PIECES,
    )
