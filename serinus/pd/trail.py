"""HandoffTrail: what became of the latest handoffs, piece by piece, for people. It listens to a port, decides nothing.

A port tells it every event that its machine took and the actions that came of it. Bounded: so many handoffs, so many
pieces of each; where there is no more room the oldest that has ended goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan
from serinus.pd.actions import AbortPrefill, AddPrefill, Landed, PeerChanged, PrefillDrained, Recompute, Send
from serinus.pd.events import CancelHandoff
from serinus.pd.pages import PieceMoved, PieceStatus, TakeIn, TakenIn
from serinus.wire.messages import Grant, Prepare

_PIECES_MAX: Final = 256


@dataclass(slots=True, kw_only=True)
class _Passage:
    xid: str
    rid: str
    began: float
    peer: str = ""
    engine: str = ""
    tokens: int = 0
    held: int = 0
    granted: float | None = None
    pages: int = 0
    byte_count: int = 0
    pieces: list[tuple[float, int, int, int]] = field(default_factory=list)
    coming: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of pieces that are being taken in, by rank and number."""
    ended: float | None = None
    code: str = ""
    reason: str = ""

    def grant(self, spans: Sequence[PageSpan], now: float) -> None:
        self.granted, self.pages = now, sum(len(span.pages) for span in spans)

    def piece(self, now: float, rank: int, number: int, byte_count: int) -> None:
        self.byte_count += byte_count
        if len(self.pieces) < _PIECES_MAX:
            self.pieces.append((now, rank, number, byte_count))

    def end(self, now: float, code: str, reason: str = "") -> None:
        if self.ended is None:
            self.ended, self.code, self.reason = now, code, reason
            self.coming.clear()


class HandoffTrail:
    """The latest handoffs of one engine, on either side."""

    def __init__(self, kept: int = 48) -> None:
        """`kept`: handoffs at most."""
        self._kept = kept
        self._passages: dict[str, _Passage] = {}
        self._xid_of: dict[str, str] = {}
        """By request, of those that have not ended: a decode engine ends handoffs by it."""
        self._engines: dict[str, str] = {}
        """Names of engines by their connection."""

    def hear(self, event: object, actions: Sequence[object], now: float) -> None:
        """What the machine was told, and what it asks for."""
        match event:
            case TakenIn() if (passage := self._passages.get(event.xid)) is not None:
                byte_count = passage.coming.pop((event.source, event.piece), 0)
                if not event.error:
                    passage.piece(now, event.source, event.piece, byte_count)
            case PieceMoved(status=PieceStatus.DONE) if (passage := self._passages.get(event.xid)) is not None:
                passage.piece(now, event.rank, event.piece, event.byte_count)
            case ChunkReady() if (passage := self._passages.get(event.xid)) is not None:
                passage.pages += sum(len(span.pages) for span in event.spans)
            case CancelHandoff() if (xid := self._xid_of.get(event.rid)) is not None:
                self._end(xid, now, event.code, event.reason)
        for action in actions:
            self._asked(action, now)

    def as_json(self) -> list[dict[str, Any]]:
        """Oldest first; times are those of the engine's clock."""
        return [
            {
                "xid": each.xid, "rid": each.rid, "engine": each.engine or self._engines.get(each.peer, ""),
                "tokens": each.tokens, "held": each.held, "began": each.began, "granted": each.granted,
                "pages": each.pages, "bytes": each.byte_count, "pieces": each.pieces, "ended": each.ended,
                "code": each.code, "reason": each.reason,
            }
            for each in self._passages.values()
        ]  # fmt: skip

    def _asked(self, action: object, now: float) -> None:
        match action:
            case Send(message=Prepare() as prepare):
                passage = self._begin(prepare.xid, prepare.request.rid, now, peer=action.peer)
                passage.tokens, passage.held = len(prepare.request.prompt), prepare.held
                if prepare.spans:
                    passage.grant(prepare.spans, now)
            case Send(message=Grant() as grant) if (found := self._passages.get(grant.xid)) is not None:
                found.grant(grant.spans, now)
            case AddPrefill() if action.xid not in self._passages:
                passage = self._begin(action.xid, action.rid, now, peer=action.peer)
                passage.tokens, passage.held = len(action.request.prompt), action.held
            case TakeIn() if (found := self._passages.get(action.xid)) is not None:
                found.coming[action.source, action.piece] = action.byte_count
            case Landed():
                if action.xid in self._passages:
                    self._passages[action.xid].engine = action.engine
                self._end(action.xid, now, "landed")
            case Recompute():
                self._end(action.xid or self._xid_of.get(action.rid, ""), now, action.code, action.reason)
            case PrefillDrained():
                self._end(action.xid, now, "drained")
            case AbortPrefill():
                self._end(action.xid, now, action.code, action.reason)
            case PeerChanged() if action.engine:
                self._engines[action.peer] = action.engine

    def _begin(self, xid: str, rid: str, now: float, *, peer: str) -> _Passage:
        if len(self._passages) >= self._kept:
            ended = (each.xid for each in self._passages.values() if each.ended is not None)
            self._forget(next(ended, None) or next(iter(self._passages)))
        passage = self._passages[xid] = _Passage(xid=xid, rid=rid, began=now, peer=peer)
        self._xid_of[rid] = xid
        return passage

    def _end(self, xid: str, now: float, code: str, reason: str = "") -> None:
        passage = self._passages.get(xid)
        if passage is not None:
            passage.end(now, code, reason)
            if self._xid_of.get(passage.rid) == xid:
                del self._xid_of[passage.rid]

    def _forget(self, xid: str) -> None:
        passage = self._passages.pop(xid)
        if self._xid_of.get(passage.rid) == xid:
            del self._xid_of[passage.rid]
