"""Pieces on their way from the ranks of a prefill engine to its clients: cut, queued, moved one by one. Pure.

What a move is depends on the client's mode: staged (receiver-checked), written (push), or offered (pull).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.pd.actions import PrefillAction, ReleaseChunk, Send
from serinus.pd.clients import Client, Clients, Lane, Piece
from serinus.pd.layout import RankLayout, is_same
from serinus.pd.modes import Mode
from serinus.pd.pages import DigestPiece, MovePiece, PieceMoved
from serinus.pd.prefill_handoff import PrefillHandoff
from serinus.pd.settings import PIECE_PAGES_MAX, HandoffSettings
from serinus.wire.messages import Data

_FIRST_BYTES: Final = 2 << 20
"""Of the first piece of a handoff."""


class PieceQueue:
    """Reads the handoffs of one prefill engine, counts in them what it moves, and ends none of them."""

    def __init__(
        self, settings: HandoffSettings, layout: RankLayout, clients: Clients, handoffs: Mapping[str, PrefillHandoff]
    ) -> None:  # fmt: skip
        self._settings = settings
        self._layout = layout
        self._clients = clients
        self._handoffs = handoffs
        self._senders = {part: layout.senders(part) for part in layout.parts}
        self._pages_per_piece = {part: self._pages_of_pieces(part) for part in layout.parts}

    def _whole_chunks(self, client: Client) -> dict[Part, tuple[int, ...]]:
        """A chunk is one piece, as far as the digests and stamps go into a message that each taker gets of it."""
        pages = PIECE_PAGES_MAX
        if not is_same(self._layout, client.layout):
            takers, stamp_bytes = len(client.layout.shards), self._layout.signature.stamp_bytes
            stamps = self._settings.piece_bytes_max // (takers * self._layout.page_size * max(1, stamp_bytes))
            pages = max(1, min(PIECE_PAGES_MAX // takers, stamps if stamp_bytes else PIECE_PAGES_MAX))
        return dict.fromkeys(self._layout.parts, (pages,))

    def _pages_of_pieces(self, part: Part) -> tuple[int, ...]:
        """Pages of the first pieces of a handoff, and (the last number) of all others. The first is small, as far as
        a message costs less than it hides: while the peer takes one in, the next, of twice the size, is brought on its
        way."""
        largest = max(self._layout.page_bytes(rank, part) for rank in self._senders[part])
        whole = self._settings.piece_bytes_max
        sizes = [min(_FIRST_BYTES, whole)]
        while sizes[-1] < whole:
            sizes.append(min(2 * sizes[-1], whole))
        return tuple(min(max(1, size // largest), PIECE_PAGES_MAX) for size in sizes)

    def first_pages(self, held: int, tokens: int) -> dict[Part, int]:
        """First own page that is to be announced, by part: FULL always, SWA where there are such layers."""
        size = self._layout.page_size
        parts = {Part.FULL, *self._layout.parts}
        return {part: self._settings.first_needed(part, held, tokens) // size for part in parts}

    def queue(self, handoff: PrefillHandoff, event: ChunkReady, client: Client, out: list[PrefillAction]) -> None:
        """Cut a chunk into pieces and queue them, for each rank that has bytes of them."""
        whole = self._settings.capabilities_of(client.backend).whole_chunks
        chunk, pieces = handoff.cut(event, self._whole_chunks(client) if whole else self._pages_per_piece)
        for piece in pieces:
            for rank in self._senders[piece.part]:
                client.lanes[rank].outbox.append(piece)
                chunk.left += 1
                handoff.moves_due += 1
        if client.mode is Mode.PULL:
            handoff.chunks.append(chunk)
        elif not chunk.left:
            out.append(ReleaseChunk(xid=handoff.xid, spans=chunk.spans))

    def pump(self, client: Client | None, out: list[PrefillAction]) -> None:
        """Ask each rank for its next pieces, as many as may be on their way."""
        if client is None:
            return
        for lane in client.lanes:
            if lane.again and not lane.moving:
                lane.outbox.extendleft(reversed(lane.again))
                lane.again.clear()
                lane.is_full = any(rank == lane.rank for _, _, rank in client.staged)
            while lane.outbox and not lane.is_full and not lane.again and self._has_room(lane, client.mode):
                piece = lane.outbox.popleft()
                handoff = self._handoffs.get(piece.xid)
                if handoff is not None:  # else it ended meanwhile
                    lane.moving.append(piece)
                    lane.moving_bytes += self._bytes(piece, lane)
                    self._move(handoff, piece, lane, client, out)

    def _has_room(self, lane: Lane, mode: Mode) -> bool:
        """Whether the next piece may be asked for already. The leader's own rank stages in the leader's thread, before
        any of it is announced: it is asked for as many bytes as one piece has at most, and of each handoff for one
        piece of a part, which its peer takes in while the next is staged."""
        if mode is not Mode.RECEIVER_CHECKED or not lane.moving:
            return not lane.moving
        if lane.rank:
            return len(lane.moving) < self._settings.staging_pieces
        piece = lane.outbox[0]
        if any(moving.xid == piece.xid and moving.part is piece.part for moving in lane.moving):
            return False
        return lane.moving_bytes + self._bytes(piece, lane) <= self._settings.piece_bytes_max

    def _bytes(self, piece: Piece, lane: Lane) -> int:
        return len(piece.pages) * self._layout.page_bytes(lane.rank, piece.part)

    def _move(
        self, handoff: PrefillHandoff, piece: Piece, lane: Lane, client: Client, out: list[PrefillAction]
    ) -> None:
        targets = {}
        if client.mode is Mode.PUSH:
            handoff.outstanding += 1  # counted before anything looks whether the grant is open
            targets["targets"] = handoff.targets(piece, self._layout, client.layout).pages
        out.append(
            MovePiece(
                peer=client.peer, xid=piece.xid, piece=piece.number, rank=lane.rank, mode=client.mode, part=piece.part,
                pages=piece.pages, digest_seed=handoff.seed, **targets,
            )
        )  # fmt: skip

    def moved(self, peer: str, xid: str, number: int, rank: int) -> tuple[Client, Lane, Piece] | None:
        """Where a reported piece was moving, taken off it; None = it is not the next to be reported there."""
        client = self._clients.get(peer)
        lane = client.lanes[rank] if client is not None and 0 <= rank < len(client.lanes) else None
        piece = lane.moving[0] if lane is not None and lane.moving else None
        if client is None or lane is None or piece is None or (piece.xid, piece.number) != (xid, number):
            return None
        lane.moving.popleft()
        lane.moving_bytes -= self._bytes(piece, lane)
        return client, lane, piece

    def announce(
        self, handoff: PrefillHandoff, piece: Piece, event: PieceMoved, client: Client, now: float,
        out: list[PrefillAction],
    ) -> None:  # fmt: skip
        """Tell the peer of a piece that it can take, or has. Where it has no digests yet, they are made when the peer
        was told, and come with DONE."""
        if not handoff.sent_pieces:
            handoff.first_sent_at = now
        handoff.moves_due -= 1
        handoff.sent_pieces += 1
        handoff.sent_pages += len(piece.pages)
        handoff.sent_bytes += event.byte_count
        data = Data(
            xid=handoff.xid, grant=handoff.grant, piece=piece.number, rank=event.rank, part=int(piece.part),
            first=piece.first, digests=event.digests, byte_count=event.byte_count, shm_name=event.shm_name,
            shm_offset=event.shm_offset, pages=piece.pages.tolist() if client.mode is Mode.PULL else [],
        )  # fmt: skip
        payload = event.payload.data if event.payload.size else b""
        out.append(Send(peer=client.peer, message=data, payload=payload))
        if client.mode is Mode.PULL and not event.digests:
            handoff.digests_due.add((piece.number, event.rank))
            out.append(
                DigestPiece(
                    peer=client.peer, xid=piece.xid, piece=piece.number, rank=event.rank, part=piece.part,
                    pages=piece.pages, digest_seed=handoff.seed,
                )
            )  # fmt: skip
        piece.chunk.left -= 1
        if not piece.chunk.left and client.mode is not Mode.PULL:
            out.append(ReleaseChunk(xid=handoff.xid, spans=piece.chunk.spans))
        self.send_done(handoff, client, now, out)

    def send_done(self, handoff: PrefillHandoff, client: Client, now: float, out: list[PrefillAction]) -> None:
        if handoff.last is None or handoff.moves_due or handoff.digests_due or handoff.done_sent:
            return
        handoff.done_sent = True
        handoff.lease_until = now + self._settings.lease_s
        out.append(Send(peer=client.peer, message=handoff.done()))
