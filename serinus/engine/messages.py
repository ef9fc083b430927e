"""What goes into a turn of an engine and what comes out of it: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serinus.cache import KvEvent
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.core.trace import SpanRecord
from serinus.pd import PeerAction
from serinus.wire.messages import Abort, EngineCall, EngineReply, Generate, StopEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """End a request whose answer cannot be sent; its front has been told already."""

    rid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontMessage:
    """What a front asks for."""

    front: str
    """Its name; answers go there."""
    message: Request | Generate | Abort | EngineCall | StopEngine | FailRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontGone:
    """A front's connection ended: nothing reads its answers any more."""

    front: str


FrontEvent = FrontMessage | FrontGone


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutput:
    """What a turn of an engine wants to be sent."""

    deltas: Sequence[tuple[str, tuple[TokenDelta, ...]]] = ()
    """By front, in order."""
    replies: Sequence[tuple[str, EngineReply]] = ()
    """Answers to calls, with their front."""
    peers: Sequence[PeerAction] = ()
    """Messages to other engines, and connections to open or end, in order."""
    spans: tuple[SpanRecord, ...] = ()
    """Of traces, for any front."""
    spans_to: str = ""
    """The front that gets `spans`."""
    cache_events: Sequence[KvEvent] = field(default=())
    """What became cached or uncached, where that is published."""


def failed_delta(rid: str, reason: str, status: int) -> TokenDelta:
    """The only, and last, delta of a request that is refused or has failed; `status` is the HTTP status that fits."""
    return TokenDelta(rid=rid, finish=FinishReason.ERROR, error=reason, error_status=status)
