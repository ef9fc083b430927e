"""Built: an engine with all its parts, as its driver has it: a turn, what a turn has for others, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import torch

from serinus.cache import PrefixCache
from serinus.canary import CanaryRank
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import InvariantError, PeerGone
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.engine.engine import Engine
from serinus.engine.kv_events import KvEventPublisher
from serinus.engine.messages import FrontEvent, TurnOutput
from serinus.engine.peers import Peers
from serinus.models import ModelSpec
from serinus.pool import DevicePool
from serinus.ranks import LeaderLine
from serinus.ranks.tier_parts import Tiers, pause
from serinus.text import GenerationConfig

_QUIET_S: Final = 5.0
"""Seconds that copies and storage operations get to end before the engine goes."""
_PAUSE_S: Final = 0.001
_log = get_logger("engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine, and what was decided while it was built."""

    config: ServeConfig
    """The settings in force."""
    spec: ModelSpec
    engine: Engine
    line: LeaderLine
    """To the engine's ranks."""
    cache: PrefixCache
    pools: Mapping[Part, DevicePool]
    """KV of each part."""
    canary: CanaryRank | None
    """The canary of the rank in this process; None = there is none."""
    tiers: Tiers | None
    """Host tier and storage; None = none."""
    events: KvEventPublisher | None
    """Publishes what becomes cached; None = that is not wanted."""
    incarnation: int
    peers: Peers | None
    """Connections to other engines, for the driver of the engine; None = it has none."""
    pd_address: str
    """Where decode engines find this one; empty = nowhere."""
    clock: Clock
    metrics: Metrics
    context_length: int
    """Tokens of one sequence at most."""
    generation: GenerationConfig
    """Sampling defaults of the checkpoint, and the tokens that end an answer."""
    dtype: torch.dtype
    device: str
    seconds: dict[str, float]
    """Start-up phases: weights, pool, warm-up."""
    memory: Mapping[str, int]
    """Bytes of the leader's GPU by what they hold."""

    @property
    def pool(self) -> DevicePool:
        """The pool of part FULL; its pages have no bytes where all layers slide."""
        return self.pools[Part.FULL]

    @property
    def max_total_tokens(self) -> int:
        """Slots a request can use."""
        return (self.pool.spec.page_count - 1) * self.pool.spec.page_size

    def turn(self, messages: Sequence[FrontEvent] = ()) -> TurnOutput:
        """One turn of the engine at this moment, with what its peers sent; peers and subscribers of cache events get
        what it tells them. The caller flushes the line, and meanwhile sends the rest to fronts."""
        from_peers = [] if self.peers is None else self.peers.receive()
        output = self.engine.turn(self.clock.now(), messages, from_peers)
        self.deliver(output)
        return output

    def deliver(self, output: TurnOutput) -> None:
        """Pass on what an output has for peers and for subscribers of cache events."""
        if self.peers is not None:
            self.peers.deliver(output.peers)
        if self.events is not None:
            self.events.publish(output.cache_events)

    def close(self) -> None:
        """Let copies and storage writes end, then end the ranks and what carries pages; all of that also where it is
        interrupted meanwhile. May be called again."""
        with ExitStack() as ends:
            if self.peers is not None:
                ends.callback(self.peers.close)
            ends.callback(self.engine.handoffs.close)
            if self.events is not None:
                ends.callback(self.events.close)
            ends.callback(self.line.close)
            if self.tiers is not None:
                ends.callback(self.tiers.close)
                if self.line.sound and (left := self._quiet()):
                    _log.warning("engine: %d copies and storage operations are given up", left)

    def _quiet(self) -> int:
        """Wait until nothing is under way in the tiers; returns what still is when waiting has no more use."""
        end, left = self.clock.now() + _QUIET_S, 0
        try:
            while self.line.sound and (left := self.cache.poll().in_flight) and self.clock.now() < end:
                pause(_PAUSE_S)
        except (PeerGone, InvariantError) as error:
            _log.warning("%s, while the engine closes", error)
        return left
