"""Every handoff of one prefill engine: takes orders, sends pages as they are computed, ends each exactly once. Pure.

What ends a handoff is in prefill_ends.py. Pages of a chunk are asked for only between its ChunkReady and its
ReleaseChunk, or the end of the handoff; a rank that was asked before reads them before whatever comes later to it, and
says so at any time, also after the end: its bytes are given back then. Staged bytes stay until the peer says it took or
dropped them, or is gone: a failed handoff never makes a peer read something else. A peer that takes nothing holds up
its own pieces only.

PREPARE, GRANT, FAIL and ABORT of one handoff may overtake each other: they all carry the number of its grant, and a
number that has ended (or lies below the client's floor) is never used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from serinus.core.errors import BadSampling
from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan, Part
from serinus.pd.actions import (
    ClosePeer,
    PrefillAction,
    ReleaseChunk,
    Send,
    Unstage,
)
from serinus.pd.clients import TOMBSTONES_MAX, Client
from serinus.pd.events import (
    Drain,
    EndPrefill,
    PeerLost,
    PieceStaged,
    PieceWritten,
    PrefillEvent,
    Received,
    Shutdown,
    Squeeze,
    StageFailed,
    StageFull,
    Tick,
)
from serinus.pd.modes import Mode
from serinus.pd.order import Order, prepare_fault
from serinus.pd.prefill_ends import PrefillEnds
from serinus.wire.convert import sampling_from_wire
from serinus.wire.messages import (
    AbortAck,
    AbortGrant,
    Confirm,
    ConfirmOk,
    DataOk,
    DoneOk,
    Drained,
    Expired,
    Fail,
    Grant,
    Hello,
    HelloNo,
    Keepalive,
    Lease,
    Prepare,
)

__all__ = ["PrefillSide"]

_CODES: Final = frozenset(
    {"aborted", "deadline", "digest", "error", "expired", "mismatch", "peer_gone", "peer_slow", "rejected", "refused",
     "shutdown", "transfer"}
)  # fmt: skip
"""Reasons a decode engine may give; they become labels of a metric."""


class PrefillSide(PrefillEnds):
    """The prefill engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    # ---- the one way in -----------------------------------------------------------------------------------------

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """Take one event; returns what must be done, in order.

        Raises InvariantError where the engine announces pages that do not follow on each other; never for what a peer
        does.
        """
        out: list[PrefillAction] = []
        match event:
            case Received():
                self._received(event, now, out)
            case PieceStaged():
                self._staged(event, now, out)
            case StageFull() | StageFailed():
                self._not_staged(event, now, out)
            case PieceWritten():
                self._written(event, now, out)
            case ChunkReady():
                self._computed(event, now, out)
            case EndPrefill():
                ended = self._orders.get(event.xid)
                if ended is not None:
                    self._fail(ended, event.code, event.reason, now, out)
            case PeerLost():
                self._clients.forget_stranger(event.peer)
                self._lose(event.peer, event.reason, now, out)
            case Tick():
                self._tick(event, now, out)
            case Squeeze():
                early = [order for order in self._orders.values() if order.early]
                if early:
                    self._give_up_pages(max(early, key=lambda order: order.prepared_at), out)
            case Drain():
                self._closed = self._closed or event.reason
            case Shutdown():
                self._stop(event, now, out)
        return out

    # ---- what the engine says -----------------------------------------------------------------------------------

    def _computed(self, event: ChunkReady, now: float, out: list[PrefillAction]) -> None:
        order = self._orders.get(event.xid)
        if order is None or order.is_forgotten:
            out.append(ReleaseChunk(xid=event.xid, spans=event.spans))
            return
        order.announce(event)
        if order.granted_at is not None:
            client = self._clients.get(order.peer)
            assert client is not None, f"pd: handoff {order.xid} outlived its peer {order.peer}"
            self._dispatch.queue(order, event, client, out)
            self._dispatch.send_done(order, client, now, out)
            self._dispatch.pump(client, out)
            return
        order.early.append(event)
        if order.is_parked and self.parked_tokens > self._settings.park_tokens:
            self._give_up_pages(order, out)

    def _stop(self, event: Shutdown, now: float, out: list[PrefillAction]) -> None:
        self._closed = event.reason
        for order in list(self._orders.values()):
            self._fail(order, "shutdown", event.reason, now, out)
        for client in self._clients:
            self._hang_up(client, event.reason, now, out)

    def _staged(self, event: PieceStaged, now: float, out: list[PrefillAction]) -> None:
        found = self._dispatch.moved(event.peer, event.xid, event.piece, event.rank)
        if found is None:
            self.rejects["unknown_piece"] += self._clients.get(event.peer) is not None
            return
        client, lane, piece = found
        order = self._orders.get(piece.xid)
        if order is not None and not lane.again:
            if client.mode is Mode.RECEIVER_CHECKED:
                client.staged.add((event.xid, event.piece, event.rank))
            self._dispatch.announce(order, piece, event, client, now, out)
        elif client.mode is Mode.RECEIVER_CHECKED:  # ended while it was being staged, or one before it found no room
            out.append(Unstage(peer=event.peer, xid=event.xid, piece=event.piece, rank=event.rank))
            if order is not None:
                lane.again.append(piece)
        self._dispatch.pump(client, out)

    def _not_staged(self, event: StageFull | StageFailed, now: float, out: list[PrefillAction]) -> None:
        found = self._dispatch.moved(event.peer, event.xid, event.piece, event.rank)
        if found is None:
            self.rejects["unknown_piece"] += self._clients.get(event.peer) is not None
            return
        client, lane, piece = found
        order = self._orders.get(piece.xid)
        if order is not None:
            if isinstance(event, StageFailed):
                wrong = f"pd: rank {event.rank} cannot stage its pages: {event.reason}"
                self._fail(order, "transfer", wrong, now, out)
            elif event.others:
                lane.again.append(piece)
            else:
                wrong = f"pd: {len(piece.pages)} pages do not fit into the empty staging area"
                self._fail(order, "error", wrong, now, out)
        self._dispatch.pump(client, out)

    def _written(self, event: PieceWritten, now: float, out: list[PrefillAction]) -> None:
        order = self._orders.get(event.xid) or self._draining.get(event.xid)
        if order is None or order.peer != event.peer or not order.outstanding:
            self.rejects["unknown_piece"] += 1
            return
        order.outstanding -= 1
        found = self._dispatch.moved(event.peer, event.xid, event.piece, event.rank)
        if event.xid in self._draining:
            self._abort_if_drained(order, out)
        elif event.error:
            self._fail(order, "transfer", f"pd: a write failed: {event.error}", now, out)
        elif found is not None:
            self._dispatch.announce(order, found[2], event, found[0], now, out)
        if found is not None:
            self._dispatch.pump(found[0], out)

    # ---- what the world does --------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float, out: list[PrefillAction]) -> None:
        for order in list(self._orders.values()):
            if now > order.deadline:
                self._fail(order, "deadline", "pd: prefill did not finish within the deadline of decode", now, out)
            elif order.chunks and order.done_sent and now > order.lease_until:
                out.append(Send(peer=order.peer, message=Expired(xid=order.xid, grant=order.grant)))
                self._end(order, "expired", f"decode did not confirm within {self._settings.lease_s} s", now, out)
        for order in list(self._draining.values()):
            client = self._clients.get(order.peer)
            if client is not None and not order.outstanding and now > order.drain_until:
                self._hang_up(client, f"pd: you never said that {order.xid} is drained", now, out)
        for client in self._clients:
            if len(client.closed) + len(client.early) > TOMBSTONES_MAX:
                self._hang_up(client, f"pd: you hold {client.floor} open over {TOMBSTONES_MAX} ended grants", now, out)
        for client in self._clients.tick(event, now, out):
            self._hang_up(client, f"pd: you were silent for {client.pulse.silent_s:.0f} s", now, out)

    def _received(self, event: Received, now: float, out: list[PrefillAction]) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event, message, now, out)
            return
        client = self._clients.get(event.peer)
        if client is None:
            self.rejects["no_hello"] += 1
            out.append(Send(peer=event.peer, message=HelloNo(reason="pd: not greeted, expected HELLO first")))
            out.append(ClosePeer(peer=event.peer))
            return
        client.pulse.heard()
        match message:
            case Prepare():
                self._prepare(client, message, now, out)
            case Grant():
                self._granted(client, message, now, out)
            case DataOk():
                self._data_ok(client, message, out)
            case DoneOk():
                order = self._of(client, message.xid)
                if order is not None and order.done_sent and order.grant == message.grant and not order.chunks:
                    self._drained(order, now, out)
            case Confirm():
                self._confirm(client, message, now, out)
            case Drained():
                ended = self._draining.get(message.xid)
                if ended is not None and ended.peer == client.peer and client.mode is Mode.PULL:
                    self._abort_if_drained(ended, out)
            case Fail():
                self._failed_there(client, message, now, out)
            case AbortGrant():
                self._abort_grant(client, message, now, out)
            case Keepalive():
                client.pulse.step_s = message.step_s_max
                self._below_floor(client, message.grant_floor, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _of(self, client: Client, xid: str) -> Order | None:
        order = self._orders.get(xid)
        if order is None or order.peer != client.peer:
            self.rejects["unknown_xid"] += 1
            return None
        return order

    def _hello(self, event: Received, message: Hello, now: float, out: list[PrefillAction]) -> None:
        if self._clients.get(event.peer) is not None:
            self.rejects["second_hello"] += 1
            return
        if self._closed:
            out.append(Send(peer=event.peer, message=HelloNo(reason=self._closed)))
            return
        if not self._clients.proves_itself(event.peer, event.incarnation, message, out):
            return
        for old in [c for c in self._clients if c.engine == message.engine and c.incarnation == event.incarnation]:
            # Whichever connection is the older one: the other side hears that it ended, and greets again if it cares.
            self._hang_up(old, "pd: you connected anew", now, out)
        self._clients.greet(event.peer, event.incarnation, message, now, out)

    def _prepare(self, client: Client, message: Prepare, now: float, out: list[PrefillAction]) -> None:
        if message.xid in self._orders or message.xid in self._draining or message.grant in client.live:
            self.rejects["repeated_xid"] += 1
            return
        if client.is_over(message.grant):  # its end came first
            self.rejects["old_grant"] += 1
            return
        code, wrong = ("shutdown", self._closed) if self._closed else ("rejected", "")
        wrong = wrong or prepare_fault(message)
        try:
            sampling = sampling_from_wire(message.sampling)
        except BadSampling as error:
            wrong = wrong or f"pd: {error}"
        if wrong:
            self.rejects["bad_prepare"] += code == "rejected"
            client.bury(message.grant)
            out.append(
                Send(peer=client.peer, message=Fail(xid=message.xid, grant=message.grant, code=code, reason=wrong))
            )
            return
        order = Order.of(message, sampling, client.peer, self._settings, now)
        order.due = self._dispatch.first_pages(order.held, order.tokens)
        self._orders[message.xid] = order
        client.live[message.grant] = message.xid
        out.append(order.add())
        early = client.early.pop(message.grant, None)
        if early is not None:
            self._granted(client, early, now, out)

    def _granted(self, client: Client, message: Grant, now: float, out: list[PrefillAction]) -> None:
        if client.is_over(message.grant):
            self.rejects["old_grant"] += 1
            return
        order = self._orders.get(message.xid)
        if order is None:
            client.early[message.grant] = message
            return
        if order.peer != client.peer or order.grant != message.grant or order.granted_at is not None:
            self.rejects["repeated_grant"] += 1
            return
        wrong = order.grant_fault(message, self._settings, self._layout, client.layout)
        if wrong:
            self._fail(order, "mismatch", f"pd: {wrong}", now, out)
            return
        order.granted_at, order.seed = now, message.digest_seed
        for span in message.spans:
            part = Part(span.part)
            order.spans[part] = PageSpan(part=part, first=span.first, pages=np.array(span.pages, dtype=np.int32))
            lowest = self._settings.first_needed(part, order.held, order.tokens)
            order.first[part] = max(span.first * client.layout.page_size, lowest) // self._layout.page_size
        if client.mode is Mode.PULL:
            lease = Lease(xid=order.xid, grant=order.grant, lease_s=self._settings.lease_s)
            out.append(Send(peer=client.peer, message=lease))
        if order.is_forgotten:
            order.is_forgotten = False
            out.append(order.add())
        chunks, order.early = order.early, []
        for chunk in chunks:
            self._dispatch.queue(order, chunk, client, out)
        self._dispatch.send_done(order, client, now, out)
        self._dispatch.pump(client, out)

    def _data_ok(self, client: Client, message: DataOk, out: list[PrefillAction]) -> None:
        key = (message.xid, message.piece, message.rank)
        if key not in client.staged:
            self.rejects["unknown_piece"] += 1
            return
        client.staged.remove(key)
        client.lanes[message.rank].is_full = False
        out.append(Unstage(peer=client.peer, xid=message.xid, piece=message.piece, rank=message.rank))
        self._dispatch.pump(client, out)

    def _confirm(self, client: Client, message: Confirm, now: float, out: list[PrefillAction]) -> None:
        """Decode has read everything: was it there all the time?"""
        order = self._orders.get(message.xid)
        kept = order is not None and order.peer == client.peer and order.grant == message.grant and order.done_sent
        if order is None or not kept or client.mode is not Mode.PULL:
            out.append(Send(peer=client.peer, message=Expired(xid=message.xid, grant=message.grant)))
            return
        out.append(Send(peer=client.peer, message=ConfirmOk(xid=message.xid, grant=message.grant)))
        self._drained(order, now, out)

    def _failed_there(self, client: Client, message: Fail, now: float, out: list[PrefillAction]) -> None:
        code = message.code if message.code in _CODES else "error"
        order = self._orders.get(message.xid)
        if order is not None and order.peer == client.peer:
            self._end(order, code, message.reason, now, out, reading=message.reading)
            return
        self.rejects["unknown_xid"] += 1
        ended = self._draining.get(message.xid)
        if ended is not None and ended.peer == client.peer and client.mode is Mode.PULL and not message.reading:
            self._abort_if_drained(ended, out)
        if message.grant and message.grant not in client.live:
            client.bury(message.grant)

    def _abort_grant(self, client: Client, message: AbortGrant, now: float, out: list[PrefillAction]) -> None:
        """Write nothing more for it; say so when nothing is outstanding."""
        order = self._orders.get(client.live.get(message.grant, ""))
        if order is not None:
            self._end(order, "aborted", "decode closed the grant", now, out)
        else:
            client.bury(message.grant)
        ended = next((o for o in self._draining.values() if (o.peer, o.grant) == (client.peer, message.grant)), None)
        if ended is not None and ended.outstanding:
            ended.must_ack = True
        else:
            out.append(Send(peer=client.peer, message=AbortAck(grant=message.grant, ranks=client.ranks)))
        self._below_floor(client, message.floor, now, out)

    def _below_floor(self, client: Client, floor: int, now: float, out: list[PrefillAction]) -> None:
        """Decode owes nothing below its floor: whatever is left there was forgotten by it."""
        if floor <= client.floor:
            return
        lost: Iterable[Order] = [self._orders[xid] for grant, xid in client.live.items() if grant < floor]
        for order in lost:
            self.rejects["below_floor"] += 1
            self._end(order, "peer_gone", f"decode closed all grants below {floor}", now, out)
        client.raise_floor(floor)
