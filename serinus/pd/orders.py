"""What a rank is told to do with its pages for a handoff, and what it answers: plain data.

The leader agrees, its ranks move bytes. Orders go down to each rank on one ordered line, together with the batches it
runs and the copies of the tiers, and are obeyed one after the other; answers come back in the same order, at any time
later. From that follows all the safety there is to it: a page that is free on the leader may be given out again while
a rank has not yet come to what it was told about it, as whoever gets it next reaches that rank after that.

StagePiece, OfferPiece, Unstage and HandoffOver go to ranks as the machine asks for them (actions.py); what it asks of
all ranks of a decode engine together is FillPages, one for each rank that has some of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.pd.actions import HandoffOver, OfferPiece, StagePiece, Unstage
from serinus.pd.events import PieceStaged, StageFailed, StageFull, no_bytes
from serinus.wire.messages import LayoutSignature

__all__ = [
    "HAND_ANSWERS",
    "HAND_ORDERS",
    "FillPages",
    "HandAnswer",
    "HandOrder",
    "JoinPeer",
    "LeavePeer",
    "PagesFilled",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPeer:
    """A peer was greeted: pages of this layout may come from it. No answer."""

    peer: str
    backend: str
    layout: LayoutSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavePeer:
    """The connection is over: give back what is staged or mapped for it. No answer; unknown peers change nothing."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPages:
    """Receiver-checked: put what a source rank sent into own pages, then check its digests. One PagesFilled answers it,
    however it went."""

    peer: str
    xid: str
    piece: int
    source: int
    """Rank of the peer."""
    part: Part
    first: int
    """Index of the first source page in the prompt, in the peer's pages."""
    digests: bytes
    """Of the source pages."""
    digest_seed: int
    pages: NDArray[np.int32]
    """Own pages that the source pages reach into, in order."""
    target_first: int
    """Index of the first of `pages` in the prompt, in own pages."""
    byte_count: int
    shm_name: str = ""
    """Where the bytes are: in a segment of the source rank..."""
    shm_offset: int = 0
    payload: NDArray[np.uint8] = field(default_factory=no_bytes)
    """...or here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesFilled:
    """A FillPages was obeyed: this rank touches those pages no more for it."""

    xid: str
    piece: int
    source: int
    rank: int
    """Who answers."""
    seconds: float = 0.0
    """What it took here."""
    error: str = ""
    code: str = ""
    """digest | transfer, where it failed."""


HandOrder: TypeAlias = JoinPeer | LeavePeer | StagePiece | OfferPiece | Unstage | FillPages | HandoffOver
HandAnswer: TypeAlias = PieceStaged | StageFull | StageFailed | PagesFilled
HAND_ORDERS = (JoinPeer, LeavePeer, StagePiece, OfferPiece, Unstage, FillPages, HandoffOver)
"""Types that a hand obeys."""
HAND_ANSWERS = (PieceStaged, StageFull, StageFailed, PagesFilled)
"""Of a StagePiece one of the first three; of a FillPages the last."""
