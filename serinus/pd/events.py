"""All that can happen to the handoff machines, and all they can ask for, as plain data.

Events go in through `handle(event, now)`, actions come out of it. Who drives the machines (pd/ports.py, a simulation)
performs Send, OpenPeer, ClosePeer, CopyIn, StagePart and Unstage; the rest is for the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.request import Request, TokenLogprobs
from serinus.wire import Buffer
from serinus.wire.messages import Data, Message

__all__ = [
    "AbortPrefill",
    "AddPrefill",
    "CancelHandoff",
    "ChunkComputed",
    "ClosePeer",
    "Copied",
    "CopyIn",
    "DecodeAction",
    "DecodeEvent",
    "Drain",
    "EndPrefill",
    "Landed",
    "OpenPeer",
    "PartStaged",
    "PeerChanged",
    "PeerLost",
    "PrefillAction",
    "PrefillDrained",
    "PrefillEvent",
    "Received",
    "Recompute",
    "ReleaseChunk",
    "Send",
    "Shutdown",
    "StageFull",
    "StagePart",
    "StartHandoff",
    "Tick",
    "Unstage",
    "WantPeer",
]

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
class StartHandoff:
    """Ask a prefill engine for the KV of a prompt. The pages are the machine's until Landed, Recompute or the return
    of CancelHandoff."""

    rid: str
    request: Request
    address: str
    """Control address of the prefill engine."""
    held: int
    """Prompt tokens whose KV is here already; page aligned, at most prompt length - 1."""
    pages: NDArray[np.int32]
    """Pages for the rest of the prompt, in order, distinct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelHandoff:
    """The request ended here (client abort...): its pages are free when `handle` returns. Unknown id: no effect."""

    rid: str
    reason: str = "aborted by the client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A CopyIn was performed."""

    xid: str
    chunk: int
    seconds: float = 0.0
    """What it took."""
    error: str = ""
    """In words, where it failed."""
    code: str = ""
    """digest | transfer, where it failed."""


DecodeEvent = Received | PeerLost | Tick | Shutdown | WantPeer | StartHandoff | CancelHandoff | Copied

# ---- events of a prefill engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    """More pages of a prompt are computed, canonical and held (sched.ChunkReady). Unknown xid: released at once."""

    xid: str
    first: int
    """Index of the first of `pages` among the granted ones."""
    pages: NDArray[np.int32]
    """Own page ids, in order; at least one."""
    last: bool = False
    """The prompt is complete; `token` is set."""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPrefill:
    """The request ended here without its KV complete (rejected, aborted, failed). Unknown ids change nothing."""

    xid: str
    code: str
    """rejected | aborted | error"""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStaged:
    """A StagePart was performed: nobody reads those pages any more."""

    peer: str
    xid: str
    part: int
    digests: bytes
    """Little-endian u64 per page."""
    byte_count: int
    payload: Buffer = b""
    """Bytes that travel in the frame (tcp)."""
    shm_name: str = ""
    """Where else they lie (shm, local)."""
    shm_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFull:
    """A StagePart found no room; it is asked for again when the peer has taken something."""

    peer: str
    xid: str
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no new handoffs and no new peers; those under way go on. Given again: no effect."""

    reason: str = "the engine is stopping"


PrefillEvent = Received | PeerLost | Tick | Shutdown | Drain | ChunkComputed | EndPrefill | PartStaged | StageFull

# ---- actions of both sides ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a peer, reliably while the connection lives."""

    peer: str
    message: Message
    payload: Buffer = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePeer:
    """Drop a connection and whatever is staged for it; no PeerLost follows."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChanged:
    """For the log and the metrics: a peer came or went. Nothing needs doing."""

    peer: str
    engine: str
    """Its name, where known."""
    address: str
    """Where it was connected to; empty for accepted peers."""
    state: str
    """up | down | refused"""
    reason: str = ""
    backend: str = ""
    """With up: how KV travels."""
    incarnation: int = 0


# ---- actions of a decode engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPeer:
    """Connect to an address under this new name."""

    peer: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn:
    """Fill pages, then check the digests of the source, then report Copied; all of it *before the next event is
    handled*: that is what lets the closing of a grant free its pages at once."""

    peer: str
    xid: str
    data: Data
    pages: NDArray[np.int32]
    """Where the bytes go, one page per digest."""
    digest_seed: int
    payload: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """All pages are filled and verified, and here is the first token. The end of this handoff."""

    rid: str
    token: int
    logprobs: TokenLogprobs | None
    page_count: int
    byte_count: int
    seconds: float
    """From the first Data to here."""
    copy_seconds: float
    """Of it, spent copying and checking."""
    wait_seconds: float
    """From StartHandoff to the first Data."""
    engine: str
    """Name of the prefill engine."""
    cached_tokens: Mapping[str, int]
    """What prefill itself found cached."""
    queue_seconds: float
    """On the prefill engine."""
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The handoff failed; its pages may be reused now. The end of this handoff."""

    rid: str
    code: str
    """peer_gone | peer_slow | refused | deadline | digest | transfer | mismatch | rejected | aborted | error |
    shutdown"""
    reason: str


DecodeAction = Send | ClosePeer | PeerChanged | OpenPeer | CopyIn | Landed | Recompute

# ---- actions of a prefill engine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPrefill:
    """Compute this prompt for a decode engine. Where it cannot be taken, answer with EndPrefill(code='rejected')."""

    xid: str
    rid: str
    """What the decode engine calls it, for the log."""
    request: Request
    """Its rid is the xid: two decode engines may use the same rid."""
    held: int
    """Prompt tokens that decode has; page aligned."""
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Copy pages to where the peer can take them, digest them, and report PartStaged (or StageFull)."""

    peer: str
    xid: str
    part: int
    pages: NDArray[np.int32]
    digest_seed: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstage:
    """The peer has taken (or dropped) a part: its staging bytes are free."""

    peer: str
    xid: str
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChunk:
    """All pages of one ChunkComputed were read: drop its hold."""

    xid: str
    pages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDrained:
    """Decode has everything. The end of this handoff."""

    xid: str
    page_count: int
    byte_count: int
    seconds: float
    """From the first part staged to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPrefill:
    """The handoff failed: end the request in whatever state it is and drop all its holds; nobody reads its pages. The
    end of this handoff."""

    xid: str
    code: str
    reason: str


PrefillAction = (
    Send | ClosePeer | PeerChanged | AddPrefill | StagePart | Unstage | ReleaseChunk | PrefillDrained | AbortPrefill
)
