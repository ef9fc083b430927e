"""All that can happen to the handoff machines, as plain data: they go in through `handle(event, now)`.

What comes out of it is in actions.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan
from serinus.core.request import Request
from serinus.wire import Buffer
from serinus.wire.messages import Message

__all__ = [
    "CancelHandoff",
    "Copied",
    "DecodeEvent",
    "Drain",
    "EndPrefill",
    "PeerFenced",
    "PeerLost",
    "PieceStaged",
    "PieceWritten",
    "PrefillEvent",
    "PrepareHandoff",
    "Received",
    "Shutdown",
    "Squeeze",
    "StageFailed",
    "StageFull",
    "StartHandoff",
    "Tick",
    "WantPeer",
    "no_bytes",
]


def no_bytes() -> NDArray[np.uint8]:
    """A payload without bytes."""
    return np.empty(0, np.uint8)


# ---- events of both sides -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message came from a peer."""

    peer: str
    """Name of the connection."""
    incarnation: int
    """Of the sender."""
    message: Message
    payload: Buffer = b""
    """Bytes that came with Data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """The connection ended: the process died, refused, or was cut off. The name is never used again."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; to be given at least every quarter of a second while the loop is not busy."""

    load: int = 0
    """Requests running or waiting here; told to the peers."""
    turn: int = 0
    """Turns of the scheduler; told to the peers."""
    step_s: float = 0.0
    """The longest that we did not listen lately (a step of the model); told to the peers."""


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
    reason: str = "aborted by the client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A CopyIn, CheckIn or ReadIn has ended on all ranks: none of them touches its pages any more. At any time after it
    was asked for, also after the end of its handoff."""

    xid: str
    piece: int
    rank: int = 0
    """Of the source, as in the Data it was about."""
    seconds: float = 0.0
    """What it took."""
    error: str = ""
    """In words, where it failed."""
    code: str = ""
    """digest | transfer, where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFenced:
    """A FencePeer was performed: nothing that this peer began can write into our memory any more."""

    peer: str
    everybody: bool = False
    """The fence cut off all peers of that backend (their connections are given up by the machine)..."""
    endpoints: tuple[bytes, ...] | None = None
    """...and these are our endpoints of that backend from now on."""


DecodeEvent = (
    Received
    | PeerLost
    | Tick
    | Shutdown
    | WantPeer
    | PrepareHandoff
    | StartHandoff
    | CancelHandoff
    | Copied
    | PeerFenced
)

# ---- events of a prefill engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPrefill:
    """The request ended here without its KV complete (rejected, aborted, failed). Unknown ids change nothing."""

    xid: str
    code: str
    """rejected | aborted | error"""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStaged:
    """A StagePiece was performed: nobody reads those pages any more. Or an OfferPiece: they are digested. At any time
    after it was asked for, also after the end of its handoff; those of one rank in the order they were asked in."""

    peer: str
    xid: str
    piece: int
    rank: int = 0
    digests: bytes = b""
    """Little-endian u64 per page."""
    byte_count: int = 0
    payload: NDArray[np.uint8] = field(default_factory=no_bytes)
    """Bytes that travel in the frame (tcp)."""
    shm_name: str = ""
    """Where else they lie (shm, local)."""
    shm_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed:
    """A StagePiece cannot be performed, now or later: what its rank needs for it is not to be had."""

    peer: str
    xid: str
    piece: int
    rank: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFull:
    """A StagePiece found no room; it is asked for again when the peer has taken something."""

    peer: str
    xid: str
    piece: int
    rank: int = 0
    others: int = 0
    """Pieces that were staged there for the peer at that moment; 0 = it will never fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceWritten:
    """A WritePiece has ended, well or not: nobody reads those pages or writes the peer's for it any more."""

    peer: str
    xid: str
    piece: int
    rank: int = 0
    digests: bytes = b""
    """Little-endian u64 per source page."""
    byte_count: int = 0
    error: str = ""
    """In words, where not everything was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no new handoffs and no new peers; those under way go on. Given again: no effect."""

    reason: str = "the engine is stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze:
    """Requests wait here and none can run for want of pages: the youngest order without a grant that has pages computed
    gives them up (ForgetPrefill). Without it, orders that wait for decode could starve those that decode waits for."""


PrefillEvent = (
    Received | PeerLost | Tick | Shutdown | Drain | Squeeze | ChunkReady | EndPrefill | PieceStaged | StageFull
    | StageFailed | PieceWritten
)  # fmt: skip
