"""What one handoff must bring and what has come: pages by part and source rank. Granted = sent = landed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serinus.core.handoff import MovedPiece
from serinus.core.parts import PageSpan, Part
from serinus.pd.integrity import check_digests
from serinus.pd.layout import RankLayout, Routes, is_same, target_range
from serinus.pd.settings import PIECE_PAGES_MAX, HandoffSettings
from serinus.wire.messages import Data, Done


def span_fault(
    spans: tuple[PageSpan, ...], settings: HandoffSettings, layout: RankLayout, held: int, prompt_tokens: int
) -> str:  # fmt: skip
    """Why these are not the pages a prompt needs, in words; empty = they are."""
    size = settings.layout.page_size
    end = -(-prompt_tokens // size)
    by_part = {span.part: span for span in spans}
    wanted = {Part.FULL, *layout.parts}
    if len(by_part) != len(spans) or set(by_part) != wanted:
        return f"spans of {sorted(span.part.name for span in spans)}, expected {sorted(part.name for part in wanted)}"
    for part, span in by_part.items():
        first = settings.first_needed(part, held, prompt_tokens) // size
        if (span.first, span.end) != (first, end):
            return f"{part.name} pages {span.first}..{span.end} of the prompt, expected {first}..{end}"
        ascending = np.sort(span.pages)
        if (ascending[1:] == ascending[:-1]).any():
            return f"{len(span.pages)} {part.name} pages, expected distinct ones"
    return ""


@dataclass(slots=True, kw_only=True)
class ArrivalAccount:
    """Pages due and pages come, of one handoff."""

    source: RankLayout
    """Of the prefill engine."""
    target: RankLayout
    routes: Routes
    """From the one to the other."""
    spans: dict[Part, PageSpan]
    """Own pages, of the parts that have bytes."""
    end: int
    """One past the last page of the prompt, in source pages."""
    due: dict[tuple[Part, int], int] = field(default_factory=dict)
    """Next source page by part and source rank."""
    last_piece: dict[int, int] = field(default_factory=dict)
    """Number of the last piece that came, by source rank."""
    pieces: dict[Part, list[MovedPiece]] = field(default_factory=dict)
    """What came, by part, in own pages."""
    undigested: dict[tuple[int, int], int] = field(default_factory=dict)
    """First page of what came without digests, by piece and source rank: DONE brings them."""
    found: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Digests of what was read of it."""
    piece_count: int = 0
    page_count: int = 0
    byte_count: int = 0

    @classmethod
    def of(
        cls, settings: HandoffSettings, source: RankLayout, target: RankLayout, routes: Routes,
        spans: tuple[PageSpan, ...], held: int, prompt_tokens: int,
    ) -> ArrivalAccount:  # fmt: skip
        """At the beginning: everything is due."""
        size = source.page_size
        account = cls(
            source=source, target=target, routes=routes, end=-(-prompt_tokens // size),
            spans={span.part: span for span in spans if span.part in target.parts},
        )  # fmt: skip
        for part in source.parts:
            first = settings.first_needed(part, held, prompt_tokens) // size
            for rank in source.senders(part):
                account.due[part, rank] = first
        return account

    @property
    def is_whole(self) -> bool:
        """Every page of every part came from every rank."""
        return all(first == self.end for first in self.due.values())

    def fault(self, data: Data) -> str:
        """Why this is not what must come next, in words; empty = it is. Changes nothing."""
        due = self.due.get((Part(data.part), data.rank)) if data.part < len(Part) else None
        if due is None:
            return f"part {data.part} of rank {data.rank}, expected one of {sorted(self.due)}"
        each = 8 * self.routes.digest_count(data.rank, Part(data.part))
        count = self._count(data)
        if len(data.digests) % each or not count or not (data.digests or is_same(self.source, self.target)):
            return f"{len(data.digests)} bytes of digests, expected {each} per page"
        if data.piece <= self.last_piece.get(data.rank, -1):
            return f"piece {data.piece} of rank {data.rank}, expected one after {self.last_piece[data.rank]}"
        if data.first != due or data.first + count > self.end:
            return f"pages {data.first}..{data.first + count}, expected the next from {due} on, up to {self.end}"
        if count > PIECE_PAGES_MAX:
            return f"{count} pages, expected at most {PIECE_PAGES_MAX}"
        wanted = count * self.source.page_bytes(data.rank, Part(data.part))
        if data.byte_count != wanted:
            return f"{data.byte_count} bytes, expected {wanted}"
        if data.pages and len(data.pages) != count:
            return f"{len(data.pages)} source pages, expected {count}"
        if data.pages and max(data.pages) >= 1 << 31:
            return f"source page {max(data.pages)}, expected one below 2^31"
        return ""

    def take(self, data: Data) -> PageSpan:
        """Count what came (a Data without fault); returns our pages that it reaches into."""
        part = Part(data.part)
        count = self._count(data)
        self.due[part, data.rank] += count
        self.last_piece[data.rank] = data.piece
        self.piece_count += 1
        self.page_count += count
        self.byte_count += data.byte_count
        if not data.digests:
            self.undigested[data.piece, data.rank] = data.first
        span = self.spans[part]
        into = target_range(self.source, self.target, data.first, count)
        first = max(into.start, span.first)
        piece = MovedPiece(first=first, end=into.stop, rank=data.rank, number=data.piece)
        self.pieces.setdefault(part, []).append(piece)
        return PageSpan(part=part, first=first, pages=span.pages[first - span.first : into.stop - span.first])

    def done_fault(self, done: Done) -> str:
        """Why this is not the end of what came, in words; empty = it is."""
        sent = (done.piece_count, done.page_count, done.byte_count)
        took = (self.piece_count, self.page_count, self.byte_count)
        if sent != took or not self.is_whole:
            missing = {
                f"{part.name} of rank {rank}": first for (part, rank), first in self.due.items() if first != self.end
            }
            return f"sent {sent}, landed {took} (pieces, pages, bytes), missing {missing or 'nothing'} up to {self.end}"
        return ""

    def _count(self, data: Data) -> int:
        """Source pages that it brings."""
        return len(data.digests) // (8 * self.routes.digest_count(data.rank, Part(data.part))) or len(data.pages)

    def check_digests(self, done: Done) -> None:
        """Compare what was read, all of it, with the digests that come with DONE. Raises DigestMismatch."""
        sent = {(each.piece, each.rank): each.digests for each in done.digests}
        for key, first in self.undigested.items():
            assert self.found.get(key), f"pd: piece {key[0]} of rank {key[1]} was taken in without digests"
            check_digests(self.found[key], sent.get(key, b""), first)
