"""All that the handoff machines can ask for, as plain data: what `handle(event, now)` returns, in order.

Who drives the machines (pd/ports.py, a simulation) performs what it is asked for and reports with an event (events.py);
AddPrefill, Landed and the like are for the engine. The machines run on the leader only: an action that names a rank is
for that rank, and its report is the rank's (for actions that all ranks of decode take part in, CopyIn and its kin, the
folded one: done when all have done it, failed when one has failed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request, TokenLogprobs
from serinus.wire import Buffer
from serinus.wire.messages import Data, LayoutSignature, Message

__all__ = [
    "AbortPrefill",
    "AddPrefill",
    "AttachPeer",
    "CancelReads",
    "CheckIn",
    "ClosePeer",
    "CopyIn",
    "DecodeAction",
    "FencePeer",
    "ForgetPrefill",
    "HandoffOver",
    "Landed",
    "OfferPiece",
    "OpenPeer",
    "PeerChanged",
    "PrefillAction",
    "PrefillDrained",
    "Quarantine",
    "QuarantineOver",
    "ReadIn",
    "Recompute",
    "ReleaseChunk",
    "Send",
    "StagePiece",
    "StopPrefill",
    "Unstage",
    "WritePiece",
]

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
class AttachPeer:
    """A peer was greeted: join its data backend. Comes before anything moves; undone by ClosePeer and PeerLost."""

    peer: str
    backend: str
    layout: LayoutSignature
    """Of the peer."""
    endpoints: tuple[bytes, ...]
    """How its memory is reached, one text per rank of it; one-sided backends."""


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
class _Intake:
    peer: str
    xid: str
    data: Data
    """Names part, first page, source rank, and one digest per source page."""
    pages: NDArray[np.int32]
    """Own pages that the source pages reach into, in order."""
    target_first: int
    """Index of the first of `pages` in the prompt, in own pages."""
    digest_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn(_Intake):
    """Receiver-checked: fill pages, then check the digests of the source, then report Copied, whenever all ranks have
    done it. Every rank performs it before anything that comes after it (orders.py): that is what lets the closing of a
    grant free its pages at once, also while a rank has not yet come to it."""

    payload: Buffer = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOver:
    """Receiver-checked, with stamps: no CopyIn of it comes any more, ranks may forget what they know of it."""

    peer: str
    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckIn(_Intake):
    """Push: the bytes are in our pages already; check their digests and report Copied, before what comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadIn(_Intake):
    """Pull: read `data.pages` of that source rank into our pages, check the digests, and report Copied, whenever the
    read has really ended (also where it failed or was cancelled: letting a handle go is not its end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReads:
    """A hint: nobody wants the ReadIns of this handoff any more. Each still ends with its Copied."""

    peer: str
    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePeer:
    """Push: cut this peer off from our memory, then report PeerFenced. Until then its grants stay in quarantine, and
    nobody connects to it."""

    peer: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Somebody may still write these pages: hold them *before* the request gives them up. Comes before the Recompute,
    or in the answer to CancelHandoff."""

    rid: str
    grant: int
    spans: tuple[PageSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineOver:
    """Nobody can write these pages any more: drop the hold."""

    grant: int
    spans: tuple[PageSpan, ...]
    seconds: float = 0.0
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """All pages are filled and verified, and here is the first token. The end of this handoff."""

    rid: str
    token: int
    logprobs: TokenLogprobs | None
    page_count: int
    """Own pages filled, all parts."""
    byte_count: int
    """That came, of all ranks."""
    seconds: float
    """From the first Data to here."""
    copy_seconds: float
    """Of it, spent copying and checking."""
    wait_seconds: float
    """From StartHandoff to the first Data."""
    connect_seconds: float
    """Of it, until the peer was greeted (0 where it was up)."""
    confirm_seconds: float
    """Pull: from CONFIRM to OK; else 0."""
    engine: str
    """Name of the prefill engine."""
    cached_tokens: Mapping[str, int]
    """What prefill itself found cached."""
    queue_seconds: float
    """On the prefill engine."""
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The handoff failed; its pages may be reused now, but for those in quarantine. The end of this handoff."""

    rid: str
    code: str
    """peer_gone | peer_slow | refused | deadline | digest | transfer | mismatch | rejected | aborted | error |
    expired | shutdown"""
    reason: str


DecodeAction = (
    Send | ClosePeer | AttachPeer | PeerChanged | OpenPeer | CopyIn | HandoffOver | CheckIn | ReadIn | CancelReads
    | FencePeer | Quarantine | QuarantineOver | Landed | Recompute
)  # fmt: skip

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
    """Prompt tokens that decode has; aligned to own pages."""
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePiece:
    """Receiver-checked: copy pages of one rank to where the peer can take them, digest them, and report PieceStaged (or
    StageFull). The rank performs it before anything that comes after it, and reports in the same order."""

    peer: str
    xid: str
    piece: int
    rank: int
    part: Part
    pages: NDArray[np.int32]
    digest_seed: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPiece:
    """Pull: digest pages of one rank where they are (they stay held), and report PieceStaged."""

    peer: str
    xid: str
    piece: int
    rank: int
    part: Part
    pages: NDArray[np.int32]
    digest_seed: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePiece:
    """Push: digest pages of one rank, write them into the peer's pages, and report PieceWritten when nothing of it is
    outstanding any more, however it went. It is counted as outstanding from here on."""

    peer: str
    xid: str
    grant: int
    piece: int
    rank: int
    part: Part
    first: int
    """Index of the first page in the prompt, in own pages."""
    pages: NDArray[np.int32]
    target_first: int
    """Index of the first of `targets` in the prompt, in the peer's pages."""
    targets: NDArray[np.int32]
    """Pages of the peer (the same ids on all its ranks) that ours reach into."""
    digest_seed: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstage:
    """The peer has taken (or dropped) a piece: its staging bytes are free."""

    peer: str
    xid: str
    piece: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChunk:
    """All pages of one ChunkReady were read: drop its hold."""

    xid: str
    spans: tuple[PageSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPrefill:
    """The handoff has failed, and its pages are still being read: compute no more of it (sched.abort), keep its holds.
    AbortPrefill follows when nobody reads them."""

    xid: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefill:
    """It is finished, nobody granted it pages yet, and too many like it are parked: drop all its holds and end the
    request (its KV stays in the cache). AddPrefill comes again when there is a grant."""

    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDrained:
    """Decode has everything. The end of this handoff."""

    xid: str
    page_count: int
    """Own pages sent, summed over parts (once, however many ranks)."""
    byte_count: int
    """Of all ranks."""
    seconds: float
    """From the first piece sent to here."""
    grant_wait_seconds: float = 0.0
    """From PREPARE to GRANT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPrefill:
    """The handoff failed: end the request in whatever state it is and drop all its holds; nobody reads its pages. The
    end of this handoff."""

    xid: str
    code: str
    reason: str
    had_grant: bool = False


PrefillAction = (
    Send | ClosePeer | AttachPeer | PeerChanged | AddPrefill | StagePiece | OfferPiece | WritePiece | Unstage
    | ReleaseChunk | StopPrefill | ForgetPrefill | PrefillDrained | AbortPrefill
)  # fmt: skip
