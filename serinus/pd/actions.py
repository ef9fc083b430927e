"""All that the handoff machines can ask for, as plain data: what `handle(event, now)` returns, in order.

The driver of a machine (port.py) performs them and reports with an event (events.py); AddPrefill, Landed and the like
are for the engine. The machines run on the leader only: what a rank is asked to do with its pages is in pages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.parts import PageSpan
from serinus.core.request import Request, TokenLogprobs
from serinus.pd.pages import DigestPiece, HandoffOver, MovePiece, PagesGranted, TakeIn, Unstage
from serinus.wire import Buffer
from serinus.wire.messages import LayoutSignature, Message

# ---- actions of both sides ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a peer, reliably while the connection lives."""

    peer: str
    message: Message
    payload: Buffer = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePeer:
    """Drop a connection; no Gone follows. Ranks give back what is staged or mapped for it (no answer)."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPeer:
    """Connect to an address under this new name."""

    peer: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPeer:
    """A peer was greeted: join its data backend, on every rank; answered by PeerUnreachable where that fails. Comes
    before anything moves; undone by ClosePeer and Gone."""

    peer: str
    backend: str
    layout: LayoutSignature
    """Of the KV of the peer."""
    endpoints: tuple[bytes, ...]
    """How its memory is reached, one text per rank of it; one-sided backends."""
    sends: bool = False
    """KV goes from it to us."""


PeerAction: TypeAlias = Send | OpenPeer | ClosePeer | AttachPeer
"""What the caller of a port passes on to the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChanged:
    """For the log and the metrics: a peer came or went. Nothing needs doing."""

    peer: str
    engine: str
    """Its name, where known."""
    address: str
    """Where it was connected to; empty for accepted peers."""
    state: str
    """up | down | refused; connecting: it does not answer, and is waited for"""
    reason: str = ""
    backend: str = ""
    """With up: how KV travels."""


# ---- actions of a decode engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReads:
    """A hint to every rank: the reads of this handoff are of no use any more. Each TakeIn is still answered."""

    peer: str
    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePeer:
    """Push: cut this peer off from the memory of every rank (RankFenced), then report PeerFenced. Until then its grants
    stay in quarantine, and no connection to it is opened."""

    peer: str
    backend: str
    ranks: int
    """How many ranks it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A peer, or a read of our own, may still write these pages: hold them *before* the request gives them up. Comes
    before the Recompute, or in the answer to CancelHandoff."""

    rid: str
    grant: int
    spans: tuple[PageSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineOver:
    """These pages can be written no more: drop the hold."""

    grant: int
    spans: tuple[PageSpan, ...]
    seconds: float = 0.0
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """All pages are filled and verified, and here is the first token. The end of this handoff."""

    rid: str
    xid: str
    token: int
    ends: bool
    """The answer is complete with it."""
    logprobs: TokenLogprobs | None
    page_count: int
    """Own pages filled, all parts."""
    byte_count: int
    """That came, of all ranks."""
    seconds: float
    """From the first Data to here."""
    verify_seconds: float
    """From the last Data to here: what was not checked, and confirmed, before."""
    copy_seconds: float
    """Of `seconds`, spent copying and checking."""
    wait_seconds: float
    """From StartHandoff to the first Data."""
    connect_seconds: float
    """Of it, until the peer was greeted (0 where it was up)."""
    confirm_seconds: float
    """Pull: from CONFIRM to OK; else 0."""
    engine: str
    """Name of the prefill engine."""
    backend: str
    """How the pages travelled."""
    cached_tokens: Mapping[str, int]
    """What prefill itself found cached."""
    queue_seconds: float
    """On the prefill engine."""
    compute_seconds: float
    traces: tuple[PageTrace, ...]
    """Which pages came from where, by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The handoff failed; its pages may be reused now, but for those in quarantine. The end of this handoff."""

    rid: str
    code: str
    """peer_gone | peer_slow | refused | deadline | digest | transfer | mismatch | rejected | aborted | error |
    expired | shutdown | kv_canary"""
    reason: str
    had_grant: bool = False
    """Whether the prefill engine had been given permission to fill pages: the transfer failed, not what precedes it."""
    xid: str = ""
    """Name of the handoff; empty = it had none yet."""


DecodeAction: TypeAlias = (
    PeerAction | PeerChanged | PagesGranted | TakeIn | HandoffOver | CancelReads | FencePeer | Quarantine
    | QuarantineOver | Landed | Recompute | HandoffFinding
)  # fmt: skip

# ---- actions of a prefill engine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPrefill:
    """Compute this prompt for a decode engine. Where it cannot be taken, answer with EndPrefill: rejected, timeout."""

    xid: str
    rid: str
    """What the decode engine calls it, for the log."""
    request: Request
    """Its rid is the xid: two decode engines may use the same rid."""
    held: int
    """Prompt tokens that decode has; aligned to own pages."""
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChunk:
    """All pages of one ChunkReady were read: drop its hold."""

    xid: str
    spans: tuple[PageSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPrefill:
    """The handoff has failed, and its pages are still being read: compute no more of it (sched.abort), keep its holds.
    AbortPrefill follows when they are no longer read."""

    xid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefill:
    """It is finished, has no grant yet, and too many like it are parked: drop all its holds and end the
    request (its KV stays in the cache). AddPrefill comes again when there is a grant."""

    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDrained:
    """Decode has everything. The end of this handoff."""

    xid: str
    page_count: int
    """Own pages sent, summed over parts (once, however many ranks)."""
    byte_count: int
    """Bytes sent by all ranks together."""
    seconds: float
    """From the first piece sent to here."""
    grant_wait_seconds: float = 0.0
    """From PREPARE to GRANT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPrefill:
    """The handoff failed: end the request in whatever state it is and drop all its holds; its pages are not read. The
    end of this handoff."""

    xid: str
    code: str
    reason: str
    had_grant: bool = False
    rid: str = ""
    """What the decode engine calls the request, for the log."""


PrefillAction: TypeAlias = (
    PeerAction | PeerChanged | AddPrefill | MovePiece | DigestPiece | Unstage | ReleaseChunk | StopPrefill
    | ForgetPrefill | PrefillDrained | AbortPrefill | HandoffFinding
)  # fmt: skip
