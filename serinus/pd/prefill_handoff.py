"""One handoff of a prefill engine: what decode asked for, how far it is, and the messages that answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from serinus.core.errors import InvariantError
from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request
from serinus.pd.actions import AddPrefill, PrefillDrained
from serinus.pd.clients import HeldChunk, Piece
from serinus.pd.layout import RankLayout, target_range
from serinus.pd.settings import HandoffSettings
from serinus.wire.messages import Done, PieceDigests, Prepare


def prepare_fault(message: Prepare) -> str:
    """Why this prompt cannot be computed, in words; empty = it can."""
    length = len(message.request.prompt)
    if not length:
        return "pd: a prompt without tokens, expected at least one"
    if message.held >= length:
        return f"pd: held is {message.held}, expected less than {length}"
    if not message.deadline_s > 0:
        return f"pd: deadline_s is {message.deadline_s}, expected more than 0"
    return "" if message.grant else "pd: grant is 0, expected a number from 1 on"


@dataclass(slots=True, kw_only=True)
class PrefillHandoff:
    """One handoff as its prefill engine sees it."""

    xid: str
    rid: str
    """What the decode engine calls it."""
    peer: str
    request: Request
    held: int
    """Aligned to own pages."""
    grant: int
    """Its number; permission only where `granted_at` is set."""
    deadline_s: float
    """Seconds that it may take, from PREPARE and again from its grant."""
    deadline: float
    prepared_at: float
    end: int
    """One past the last page of the prompt."""
    due: dict[Part, int] = field(default_factory=dict)
    """Next page to be announced, by part."""
    granted_at: float | None = None
    seed: int = 0
    spans: dict[Part, PageSpan] = field(default_factory=dict)
    """Pages of decode, once granted."""
    first: dict[Part, int] = field(default_factory=dict)
    """First own page that decode wants, by part with bytes, once granted."""
    early: list[ChunkReady] = field(default_factory=list)
    """Computed before the grant."""
    is_forgotten: bool = False
    """Was finished and not granted, and gave its pages up."""
    piece_count: int = 0
    """Pieces cut so far."""
    moves_due: int = 0
    """Pieces not yet sent, counted per rank."""
    digests_due: set[tuple[int, int]] = field(default_factory=set)
    """Pieces sent without digests, which are not made yet, with their ranks."""
    digests: list[PieceDigests] = field(default_factory=list)
    """Of pieces that were sent without."""
    outstanding: int = 0
    """Push: writes under way, counted per rank."""
    chunks: list[HeldChunk] = field(default_factory=list)
    """Pull: what decode may read."""
    sent_pieces: int = 0
    sent_pages: int = 0
    sent_bytes: int = 0
    last: ChunkReady | None = None
    done_sent: bool = False
    first_sent_at: float = 0.0
    lease_until: float = 0.0
    """Pull: once everything is offered."""
    end_code: str = ""
    end_reason: str = ""
    """Why it ended, while its pages are still being read."""
    drain_until: float = 0.0
    """...and when that has taken too long."""
    must_ack: bool = False
    """Push: decode waits for ABORT_ACK."""

    @classmethod
    def of(
        cls, message: Prepare, peer: str, settings: HandoffSettings, now: float
    ) -> PrefillHandoff:  # fmt: skip
        """A PREPARE without fault, as a handoff of which nothing is done."""
        size = settings.layout.page_size
        request = replace(message.request, rid=message.xid, prefill_address="", arrival=now)
        deadline_s = min(message.deadline_s, settings.handoff_s_max)
        return cls(
            xid=message.xid, rid=message.request.rid, peer=peer, request=request, held=message.held // size * size,
            grant=message.grant, deadline_s=deadline_s, deadline=now + deadline_s, prepared_at=now,
            end=-(-len(request.prompt) // size),
        )  # fmt: skip

    def add(self) -> AddPrefill:
        """The request to the engine to compute it."""
        return AddPrefill(xid=self.xid, rid=self.rid, request=self.request, held=self.held, peer=self.peer)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def is_parked(self) -> bool:
        """Finished, with pages, without a grant."""
        return self.last is not None and self.granted_at is None

    def announce(self, event: ChunkReady) -> None:
        """Count a chunk in. Raises InvariantError where it does not follow on the last one."""
        for span in event.spans:
            if span.first != self.due.get(span.part) or not len(span.pages) or span.end > self.end:
                raise InvariantError(
                    f"pd: {self.xid} announced {span.part.name} pages {span.first}..{span.end},"
                    f" expected the next from {self.due.get(span.part)} on, up to {self.end}"
                )
            self.due[span.part] = span.end
        complete = all(first == self.end for first in self.due.values())
        if not event.spans or self.last is not None or event.last != complete:
            raise InvariantError(f"pd: {self.xid} announced up to {self.due} (last: {event.last}), expected {self.end}")
        if event.last:
            if event.token is None:
                raise InvariantError(f"pd: the last chunk of {self.xid} has no token")
            self.last = event

    def grant_fault(
        self, spans: Sequence[PageSpan], settings: HandoffSettings, ours: RankLayout, theirs: RankLayout
    ) -> str:
        """Why a grant of these pages is not for all that decode lacks, in words; empty = it is."""
        size = theirs.page_size
        end = -(-self.tokens // size)
        parts = sorted(span.part for span in spans)
        if parts != sorted(ours.parts):
            return f"spans of parts {parts}, expected {sorted(ours.parts)}"
        for span in spans:
            lowest = settings.first_needed(span.part, self.held, self.tokens) // size
            if not lowest <= span.first < end or len(span.pages) != end - span.first:
                return f"{len(span.pages)} pages from {span.first} on, expected {lowest} or later, up to {end}"
            ascending = np.sort(span.pages)
            if ascending.ndim != 1 or ascending[0] < 0 or (ascending[1:] == ascending[:-1]).any():
                return f"pages of shape {span.pages.shape}, expected one row of distinct ones from 0 on"
        return ""

    def cut(self, event: ChunkReady, pages_per_piece: Mapping[Part, tuple[int, ...]]) -> tuple[HeldChunk, list[Piece]]:
        """A chunk as pieces, without what decode does not want. `pages_per_piece`: of the first pieces of a handoff,
        one by one; the last number is that of all others."""
        chunk = HeldChunk(spans=event.spans)
        pieces: list[Piece] = []
        for span in event.spans:
            if span.part not in self.first:
                continue
            wanted = max(span.first, self.first[span.part])
            sizes = pages_per_piece[span.part]
            while wanted < span.end:
                number, self.piece_count = self.piece_count, self.piece_count + 1
                end = min(wanted + sizes[min(number, len(sizes) - 1)], span.end)
                pages = span.pages[wanted - span.first : end - span.first]
                pieces.append(
                    Piece(xid=self.xid, number=number, part=span.part, first=wanted, pages=pages, chunk=chunk)
                )  # fmt: skip
                wanted = end
        return chunk, pieces

    def targets(self, piece: Piece, ours: RankLayout, theirs: RankLayout) -> PageSpan:
        """Pages of decode that a piece reaches into."""
        span = self.spans[piece.part]
        into = target_range(ours, theirs, piece.first, len(piece.pages))
        first = max(into.start, span.first)
        return PageSpan(part=piece.part, first=first, pages=span.pages[first - span.first : into.stop - span.first])

    def done(self) -> Done:
        """The message that ends the transfer; only after the last chunk.

        Raises InvariantError: the handoff is not complete.
        """
        last = self.last
        if last is None or last.token is None:
            raise InvariantError(f"pd: {self.xid} is not complete, expected its last chunk before DONE")
        return Done(
            xid=self.xid,
            grant=self.grant,
            token=last.token,
            logprobs=last.logprobs,
            ends=last.ends,
            piece_count=self.sent_pieces,
            page_count=self.sent_pages,
            byte_count=self.sent_bytes,
            digests=tuple(self.digests),
            cached_tokens=dict(last.cached_tokens),
            queue_seconds=last.queue_seconds,
            compute_seconds=last.compute_seconds,
        )

    def drained(self, now: float) -> PrefillDrained:
        """The result for the engine: decode has everything."""
        granted_at = self.granted_at if self.granted_at is not None else now
        return PrefillDrained(
            xid=self.xid,
            page_count=sum(self.end - first for first in self.first.values()),
            byte_count=self.sent_bytes,
            seconds=now - self.first_sent_at,
            grant_wait_seconds=max(0.0, granted_at - self.prepared_at),
        )
