"""Pieces on their way from the ranks of a prefill engine to its clients: cut, queued, moved one by one. Pure.

What a move is depends on the client's mode: staged (receiver-checked), written (push), or offered (pull).
"""

from __future__ import annotations

from collections.abc import Mapping

from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.pd.actions import OfferPiece, PrefillAction, ReleaseChunk, Send, StagePiece, WritePiece
from serinus.pd.clients import Client, Clients, Lane, Piece
from serinus.pd.events import PieceStaged, PieceWritten
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.order import Order
from serinus.pd.settings import PdSettings
from serinus.wire.messages import Data

__all__ = ["Dispatch"]


class Dispatch:
    """Reads the orders of one prefill engine, counts what it moves in them, and ends none of them."""

    def __init__(
        self, settings: PdSettings, layout: RankLayout, clients: Clients, orders: Mapping[str, Order]
    ) -> None:  # fmt: skip
        self._settings = settings
        self._layout = layout
        self._clients = clients
        self._orders = orders
        self._senders = {part: layout.senders(part) for part in layout.parts}
        self._pages_per_piece = {part: self._pages_of_a_piece(part) for part in layout.parts}

    def _pages_of_a_piece(self, part: Part) -> int:
        largest = max(self._layout.page_bytes(rank, part) for rank in self._senders[part])
        return min(max(1, self._settings.piece_bytes_max // largest), 1 << 16)

    def first_pages(self, held: int, tokens: int) -> dict[Part, int]:
        """First own page that is to be announced, by part: FULL always, SWA where there are such layers."""
        size = self._layout.page_size
        parts = {Part.FULL, *self._layout.parts}
        return {part: self._settings.first_needed(part, held, tokens) // size for part in parts}

    def queue(self, order: Order, event: ChunkReady, client: Client, out: list[PrefillAction]) -> None:
        """Cut a chunk into pieces and queue them, for each rank that has bytes of them."""
        chunk, pieces = order.cut(event, self._pages_per_piece)
        for piece in pieces:
            for rank in self._senders[piece.part]:
                client.lanes[rank].outbox.append(piece)
                chunk.left += 1
                order.moves_due += 1
        if client.mode is Mode.PULL:
            order.chunks.append(chunk)
        elif not chunk.left:
            out.append(ReleaseChunk(xid=order.xid, spans=chunk.spans))

    def pump(self, client: Client | None, out: list[PrefillAction]) -> None:
        """Ask each rank for its next pieces, as many as may be on their way."""
        if client is None:
            return
        for lane in client.lanes:
            if lane.again and not lane.moving:
                lane.outbox.extendleft(reversed(lane.again))
                lane.again.clear()
                lane.is_full = any(rank == lane.rank for _, _, rank in client.staged)
            depth = self._settings.staging_pieces if client.mode is Mode.RECEIVER_CHECKED else 1
            while lane.outbox and len(lane.moving) < depth and not lane.is_full and not lane.again:
                piece = lane.outbox.popleft()
                order = self._orders.get(piece.xid)
                if order is not None:  # else it ended meanwhile
                    lane.moving.append(piece)
                    self._move(order, piece, lane, client, out)

    def _move(self, order: Order, piece: Piece, lane: Lane, client: Client, out: list[PrefillAction]) -> None:
        peer, xid, number, rank = client.peer, piece.xid, piece.number, lane.rank
        part, pages, seed, backend = piece.part, piece.pages, order.seed, client.backend
        if client.mode is Mode.PUSH:
            order.outstanding += 1  # counted before anybody looks whether the grant is open
            into = order.targets(piece, self._layout, client.layout)
            out.append(
                WritePiece(
                    peer=peer, xid=xid, grant=order.grant, piece=number, rank=rank, part=part, first=piece.first,
                    pages=pages, target_first=into.first, targets=into.pages, digest_seed=seed, backend=backend,
                )
            )  # fmt: skip
            return
        kind = OfferPiece if client.mode is Mode.PULL else StagePiece
        out.append(
            kind(
                peer=peer, xid=xid, piece=number, rank=rank, part=part, pages=pages, digest_seed=seed, backend=backend
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
        return client, lane, piece

    def announce(
        self, order: Order, piece: Piece, event: PieceStaged | PieceWritten, client: Client, now: float,
        out: list[PrefillAction],
    ) -> None:  # fmt: skip
        """Tell the peer of a piece that it can take, or has."""
        if not order.sent_pieces:
            order.first_sent_at = now
        order.moves_due -= 1
        order.sent_pieces += 1
        order.sent_pages += len(piece.pages)
        order.sent_bytes += event.byte_count
        staged = event if isinstance(event, PieceStaged) else None
        payload = staged.payload.data if staged is not None and staged.payload.size else b""
        data = Data(
            xid=order.xid, grant=order.grant, piece=piece.number, rank=event.rank, part=int(piece.part),
            first=piece.first, digests=event.digests, byte_count=event.byte_count,
            shm_name=staged.shm_name if staged is not None else "",
            shm_offset=staged.shm_offset if staged is not None else 0,
            pages=piece.pages.tolist() if client.mode is Mode.PULL else [],
        )  # fmt: skip
        out.append(
            Send(
                peer=client.peer,
                message=data,
                payload=payload,
            )
        )
        piece.chunk.left -= 1
        if not piece.chunk.left and client.mode is not Mode.PULL:
            out.append(ReleaseChunk(xid=order.xid, spans=piece.chunk.spans))
        self.send_done(order, client, now, out)

    def send_done(self, order: Order, client: Client, now: float, out: list[PrefillAction]) -> None:
        if order.last is None or order.moves_due or order.done_sent:
            return
        order.done_sent = True
        order.lease_until = now + self._settings.lease_s
        out.append(Send(peer=client.peer, message=order.done()))
