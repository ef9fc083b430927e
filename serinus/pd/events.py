"""All that can happen to the handoff machines, as plain data: they go in through `handle(event, now)`.

Messages and lost connections come as `wire` hands them over (PeerMessage, Gone), answers of ranks as pages.py has them.
What comes out of the machines is in actions.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from serinus.core.handoff import ChunkReady, HandoffFinding
from serinus.core.parts import PageSpan
from serinus.core.request import Request
from serinus.pd.pages import PieceDigested, PieceMoved, TakenIn
from serinus.wire import Gone, PeerMessage

# ---- events of both sides -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; to be given at least every quarter of a second while the loop is not busy."""

    load: int = 0
    """Requests running or waiting here; told to the peers."""
    turn: int = 0
    """Turns of the scheduler; told to the peers."""
    step_s: float = 0.0
    """The longest that we did not listen lately (a step of the model); told to the peers."""
    queue_s: float = 0.0
    """Seconds until a prompt that comes now would be begun here; told to decode engines."""
    token_s: float = 0.0
    """Seconds of a prompt token here, 0 = not measured yet; told to decode engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """This engine stops: end every handoff and tell the peers."""

    reason: str = "the engine stops"


# ---- events of a decode engine ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WantPeer:
    """Connect to a prefill engine ahead of need (and again whenever it is lost)."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareHandoff:
    """Ask a prefill engine to compute a prompt for which there are no pages here yet; StartHandoff (the grant) or
    CancelHandoff follows. May end with Recompute like any handoff, before StartHandoff too."""

    rid: str
    request: Request
    address: str
    """Control address of the prefill engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartHandoff:
    """Ask a prefill engine for the KV of a prompt; where PrepareHandoff came before, this is the grant. The pages are
    the machine's until Landed, Recompute or the return of CancelHandoff; those of a Quarantine until it is over."""

    rid: str
    request: Request
    address: str
    """Control address of the prefill engine."""
    held: int
    """Prompt tokens whose KV is here already; page aligned, at most prompt length - 1."""
    spans: tuple[PageSpan, ...]
    """Pages to fill, one span per part of the model, distinct pages: FULL from page held // page_size on, SWA from the
    page where the window of the first generated token begins (or held); both up to the end of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelHandoff:
    """The request ended here (client abort...): its pages are free when `handle` returns, but for those that it asks to
    be quarantined. Unknown id: no effect."""

    rid: str
    code: str = "aborted"
    """What the peer is told: aborted, timeout, kv_canary, or kept (computed here, which is no failure)."""
    reason: str = "aborted by the client"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFenced:
    """A FencePeer was performed: nothing that this peer began can write into our memory any more."""

    peer: str
    all_peers: bool = False
    """The fence cut off all peers of that backend (their connections are given up by the machine)..."""
    endpoints: tuple[bytes, ...] | None = None
    """...and these are our endpoints of that backend from now on."""


DecodeEvent: TypeAlias = (
    PeerMessage
    | Gone
    | Tick
    | Shutdown
    | WantPeer
    | PrepareHandoff
    | StartHandoff
    | CancelHandoff
    | TakenIn
    | PeerFenced
    | HandoffFinding
)

# ---- events of a prefill engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPrefill:
    """The request ended here without its KV complete (rejected, aborted, failed). Unknown ids change nothing."""

    xid: str
    code: str
    """rejected | aborted | timeout | error | kv_canary"""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no new handoffs and no new peers; those under way go on. Given again: no effect."""

    reason: str = "the engine is stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimParked:
    """Requests wait here and none can run for want of pages: the youngest handoff without a grant that has pages
    computed gives them up (ForgetPrefill). Without it, handoffs that wait for decode could starve those that decode
    waits for."""


PrefillEvent: TypeAlias = (
    PeerMessage | Gone | Tick | Shutdown | Drain | ReclaimParked | ChunkReady | EndPrefill | PieceMoved
    | PieceDigested | HandoffFinding
)  # fmt: skip
