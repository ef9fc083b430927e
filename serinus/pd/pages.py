"""What one rank is asked to do with its pages for a handoff, and what it answers: plain data, one record per fact.

These records are actions of the machines, commands of the leader's line and, the answers, events of the machines: they
pass as they are. A rank obeys its commands in the order of the line, together with the plans it runs and the copies of
the tiers. From that follows the safety of receiver-checked transfers: a page that is free on the leader may be given
out again while a rank has not yet come to a command about it, because the command of the next owner reaches that rank
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.pd.modes import Mode


def no_bytes() -> NDArray[np.uint8]:
    """A payload without bytes."""
    return np.empty(0, np.uint8)


def _no_pages() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePiece:
    """Prefill: bring pages of one rank on their way to a peer and digest them. One PieceMoved answers it, however it
    went; the answers of one rank come in the order of its commands, at any time, also after the end of the handoff."""

    peer: str
    xid: str
    piece: int
    rank: int
    mode: Mode
    """RECEIVER_CHECKED: copy them to where the peer can take them. PULL: only digest them, or say that they can be read
    and are digested by a DigestPiece; they stay held. PUSH: write them into the pages of the peer; counted as
    outstanding from here on."""
    part: Part
    pages: NDArray[np.int32]
    digest_seed: int
    targets: NDArray[np.int32] = field(default_factory=_no_pages)
    """PUSH: pages of the peer (the same ids on all its ranks) that ours reach into."""


class PieceStatus(Enum):
    """How a MovePiece ended."""

    DONE = "done"
    """The rank reads those pages no more for it. PULL: the peer may read them; they are digested, or a DigestPiece does
    it."""
    FULL = "full"
    """RECEIVER_CHECKED: there was no room; to be asked for again when the peer has taken something."""
    FAILED = "failed"
    """It cannot be done, now or later, and nothing of it is under way any more."""
    LOST = "lost"
    """PUSH: it failed and may still write: the peer is given up, and cuts us off before it uses those pages again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMoved:
    """The answer to a MovePiece."""

    peer: str
    xid: str
    piece: int
    rank: int = 0
    status: PieceStatus = PieceStatus.DONE
    digests: bytes = b""
    """Little-endian u64 per page. PULL: empty where the pages are whole and are digested while they are read, as a
    DigestPiece asks for."""
    byte_count: int = 0
    payload: NDArray[np.uint8] = field(default_factory=no_bytes)
    """Bytes that travel in the frame (tcp)."""
    shm_name: str = ""
    """Where else they lie (shm, local)."""
    shm_offset: int = 0
    others: int = 0
    """FULL: pieces that were staged there for the peer at that moment; 0 = it will never fit."""
    reason: str = ""
    """FAILED: why, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPiece:
    """Prefill, pull: digest pages of a piece of which the peer was told. Answered by PieceDigested."""

    peer: str
    xid: str
    piece: int
    rank: int
    part: Part
    pages: NDArray[np.int32]
    digest_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDigested:
    """The answer to a DigestPiece, also after the end of the handoff."""

    peer: str
    xid: str
    piece: int
    rank: int
    digests: bytes
    """As in PieceMoved, never empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstage:
    """Prefill, receiver-checked: the peer has taken (or dropped) a piece: its staging bytes are free. No answer."""

    peer: str
    xid: str
    piece: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeIn:
    """Decode: bring what a source rank sent into own pages, and check its digests. One TakenIn answers it, however it
    went: from then on the rank touches these pages no more for it."""

    peer: str
    xid: str
    piece: int
    source: int
    """Rank of the peer."""
    rank: int
    """Own rank that takes it; the others that have some of these bytes get a command of their own."""
    mode: Mode
    """RECEIVER_CHECKED: the bytes are in `payload` or in a segment. PUSH: the peer has written them already. PULL: they
    are to be read from `sources` (also a read that failed or was cancelled is answered when it has really ended)."""
    part: Part
    first: int
    """Index of the first source page in the prompt, in pages of the peer."""
    digests: bytes
    """Of the source pages. PULL: empty where they come with DONE: then the answer has what was found."""
    digest_seed: int
    pages: NDArray[np.int32]
    """Own pages that the source pages reach into, in order."""
    target_first: int
    """Index of the first of `pages` in the prompt, in own pages."""
    byte_count: int
    shm_name: str = ""
    """Segment of the source rank that holds the bytes; empty = `payload` has them."""
    shm_offset: int = 0
    payload: NDArray[np.uint8] = field(default_factory=no_bytes)
    """The bytes, where no segment has them."""
    sources: NDArray[np.int32] = field(default_factory=_no_pages)
    """PULL: pages of the source rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """The answer to a TakeIn, at any time, also after the end of its handoff."""

    xid: str
    piece: int
    source: int = 0
    rank: int = 0
    """The rank that answers."""
    seconds: float = 0.0
    """Time it took there."""
    error: str = ""
    """In words, where it failed."""
    code: str = ""
    """digest | transfer, where it failed."""
    digests: bytes = b""
    """Of what was read, where the TakeIn had none to compare them with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOver:
    """Decode, where pages are cut anew, with stamps: no TakeIn of it comes any more, and of those under way nothing is
    used; ranks forget what they know of it. No answer."""

    peer: str
    xid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesGranted:
    """Decode, pull: own pages are given to this handoff now, and nothing that is queued on a rank's device later uses
    them: reads of it begin behind what is queued now, not behind the steps that are queued when DATA comes. No answer.
    """

    peer: str
    xid: str


# ---- one-sided backends: each rank reaches into pools, and lets its own be reached, by itself ----------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMemory:
    """Make own pages reachable for peers, once, before any is greeted. Answered by MemoryShared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShared:
    """The answer to ShareMemory."""

    endpoints: Mapping[str, bytes]
    """How this rank's memory is reached, by backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUnreachable:
    """The answer to an AttachPeer that failed: this rank cannot reach the memory of the peer."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFenced:
    """The answer to FencePeer: nothing that the peer began reaches this rank's memory any more."""

    peer: str
    backend: str
    all_peers: bool
    """All peers were cut off, not this one alone."""
    endpoint: bytes
    """Ours from now on, where they were."""
