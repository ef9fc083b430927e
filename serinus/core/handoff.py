"""What passes between the scheduler and the handoff machines, as plain data: `sched` and `pd` both read it here.

Spans name pages by part. Page indices are absolute: index i holds positions i * page_size .. of the prompt, on both
sides. FULL comes first, then (where the model slides) SWA, of which only the pages travel that the decode engine will
read: those that hold positions from prompt length - window + 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSpec:
    """Prefill side: the handoff for which a prompt is computed."""

    xid: str
    """Name of the handoff."""
    held: int
    """Prompt tokens the decode engine has already; page aligned, at most prompt length - 1."""
    rid: str = ""
    """What the decode engine and its client call the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Decode side: pages that a prefill engine may fill now: the request's own until landed, recompute or abort."""

    rid: str
    """Id of the request."""
    request: Request
    """What a client asked of this engine."""
    held: int
    """Prompt tokens found in the own cache (host hits are on the device by now); their pages are locked. Page
    aligned, at most prompt length - 1."""
    spans: tuple[PageSpan, ...]
    """One for each part. FULL: from the page of position `held` to the end of the prompt, the last page may be partly
    used. SWA: the end of that, as far back as the window behind the prompt reaches; never empty."""

    @property
    def prompt(self) -> NDArray[np.int32]:
        """All tokens of the prompt."""
        return self.request.prompt

    @property
    def pages(self) -> NDArray[np.int32]:
        """The pages of part FULL."""
        return self.spans[0].pages


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReady:
    """Prefill side: pages of a prompt; their KV is computed, canonical, and held (`transfer`) until drained.

    An event of the handoff machine: where it does not know the handoff any more, they are released at once.
    """

    rid: str = ""
    """The request, as this engine calls it; empty = by the name of the handoff."""
    xid: str
    """Name of the handoff."""
    spans: tuple[PageSpan, ...]
    """FULL first, at least one page; SWA where the decode engine wants some of these positions."""
    last: bool = False
    """All pages are announced now; `token` is set."""
    token: int | None = None
    """The first generated token."""
    logprobs: TokenLogprobs | None = None
    """Its log-probabilities, where asked for."""
    ends: bool = False
    """The answer is complete with it: its grammar says so."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """In the last one: tokens beyond `held` that this engine found cached, by tier."""
    queue_seconds: float = 0.0
    """In the last one: from arrival to the first step that worked for it."""
    compute_seconds: float = 0.0
    """In the last one: from that step to the last."""

    def __post_init__(self) -> None:
        full = self.spans[0]
        assert full.part is Part.FULL, f"core: a chunk of {self.xid} begins with {full.part.name}, expected FULL"
        assert len(full.pages), f"core: a chunk of {self.xid} without pages"

    @property
    def pages(self) -> NDArray[np.int32]:
        """The pages of part FULL: they name the chunk when it is drained."""
        return self.spans[0].pages


def beyond(found: Mapping[str, int], held: int) -> dict[str, int]:
    """Tokens found by tier, nearest first, less the first `held` of them: those decode has, and counts."""
    beyond: dict[str, int] = {}
    for tier, count in found.items():
        if count > held:
            beyond[tier] = count - held
        held = max(0, held - count)
    return beyond


# ---- where pages came from ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedPiece:
    """What one DATA message of one rank filled, in pages of the engine that took it."""

    first: int
    """Index of its first page in the prompt..."""
    end: int
    """...and one past its last."""
    rank: int
    """Of the prefill engine."""
    number: int
    """0, 1, 2... per handoff and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTrace:
    """The handoff by which pages of one part came, or were sent: what the history of each of them says."""

    arrived: bool
    """They came from the other engine; False = they were sent to it."""
    engine: str
    """Name of the other engine."""
    peer: str
    """Of the connection to it."""
    xid: str
    """Name of the handoff."""
    rid: str
    """What the decode engine and its client call the request."""
    span: PageSpan
    """The pages that it moved."""
    pieces: tuple[MovedPiece, ...] = ()
    """What they came in."""

    def pieces_of(self, page: int) -> str:
        """The pieces that filled one page, in words: several ranks have a part of it each."""
        places = np.flatnonzero(self.span.pages == page) + self.span.first
        found = [p for p in self.pieces if any(p.first <= place < p.end for place in places.tolist())]
        return ", ".join(f"piece {piece.number} of rank {piece.rank}" for piece in found)

    def words(self, page: int) -> str:
        """For the history of one page."""
        pieces = self.pieces_of(page)
        verb = "filled by" if self.arrived else "sent to"
        return f"{verb} {self.engine}, handoff {self.xid}, request {self.rid}{', ' if pieces else ''}{pieces}"

    def as_json(self, page: int) -> dict[str, str]:
        """The same for one page as JSON-ready data."""
        way = "from" if self.arrived else "to"
        return {"xid": self.xid, "rid": self.rid, way: self.engine, "pieces": self.pieces_of(page)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFinding:
    """Wrong KV on a page that a handoff moved. An event of the handoff machine where the own canary found it: the other
    engine is told. A result of it where that one says so."""

    engine: str
    """Name of the other engine."""
    peer: str
    """Of the connection to it, as far as it is known."""
    xid: str
    """Name of the handoff."""
    rid: str
    """What the decode engine and its client call the request."""
    part: str = ""
    """Name of the part; empty where the whole handoff was given up for it."""
    position: int = -1
    """Position in the prompt; -1 = not one of it."""
    reason: str = ""
    """The violation in words."""
    salt: str = ""
    """A recall: the namespace of the KV that was condemned..."""
    tokens: bytes = b""
    """...and its tokens from position 0 on, int32; empty where it is named by the handoff alone."""
    is_source: bool = False
    """Whether the engine that says so sent these pages: what it computed behind them is in doubt."""
    is_recall: bool = False
    """Whether the other engine is to condemn it too; else it is only told."""
