"""Every handoff of one prefill engine: takes prompts, sends pages as they are computed, ends each exactly once. Pure.

What ends a handoff is in prefill_table.py. Pages of a chunk are asked for only between its ChunkReady and its
ReleaseChunk, or the end of the handoff; a rank that was asked before reads them before whatever comes later to it, and
says so at any time, also after the end: its bytes are given back then. Staged bytes stay until the peer says it took or
dropped them, or is gone: a failed handoff never makes a peer read something else. A peer that takes nothing holds up
its own pieces only.

PREPARE, GRANT, FAIL and ABORT of one handoff may overtake each other: they all carry the number of its grant, and a
number that has ended (or lies below the client's floor) is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from serinus.core.handoff import ChunkReady, HandoffFinding
from serinus.core.ids import new_xid
from serinus.pd.actions import ClosePeer, PrefillAction, ReleaseChunk, Send
from serinus.pd.clients import EARLY_BYTES_MAX, TOMBSTONES_MAX, Client, Clients, Lane, Piece
from serinus.pd.events import Drain, EndPrefill, PrefillEvent, ReclaimParked, Shutdown, Tick
from serinus.pd.findings import ended_there, heard, sends
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.pages import PieceDigested, PieceMoved, PieceStatus, Unstage
from serinus.pd.prefill_handoff import PrefillHandoff, prepare_fault
from serinus.pd.prefill_table import PrefillTable
from serinus.pd.settings import HandoffSettings
from serinus.wire import Gone, PeerMessage
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
    KvFound,
    PieceDigests,
    Prepare,
)

_CODES: Final = frozenset(
    {"aborted", "deadline", "digest", "error", "expired", "kept", "kv_canary", "mismatch", "peer_gone", "peer_slow",
     "rejected", "refused", "shutdown", "timeout", "transfer"}
)  # fmt: skip
"""Reasons a decode engine may give; they become labels of a metric."""


class PrefillSide:
    """The prefill engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    def __init__(self, settings: HandoffSettings, *, mint: Callable[[], str] = new_xid) -> None:
        """`mint`: nonces, never the same twice; a simulation gives its own."""
        self._settings = settings
        self._layout = RankLayout(settings.layout)
        self._clients = Clients(settings, lambda: mint().encode()[:64])
        self._table = PrefillTable(settings, self._layout, self._clients)
        self._closed = ""
        """Why nothing new is taken any more; empty = it is."""
        self.rejects: Counter[str] = Counter()
        """What was refused or dropped without effect, by reason."""

    # ---- what the engine asks ---------------------------------------------------------------------------------------

    @property
    def clients(self) -> tuple[Client, ...]:
        """The greeted decode engines; read only."""
        return tuple(self._clients)

    def client(self, peer: str) -> Client | None:
        """The greeted decode engine of a connection; read only."""
        return self._clients.get(peer)

    @property
    def handoff_count(self) -> int:
        """Handoffs under way, and those that have ended while their pages are still being read."""
        return len(self._table.under_way) + len(self._table.draining)

    @property
    def staged_count(self) -> int:
        """Pieces staged and not yet taken, over all peers and ranks."""
        return sum(len(client.staged) for client in self._clients)

    @property
    def ungranted(self) -> list[str]:
        """Prepared but not granted (the bootstrap queue), by their xids."""
        return [xid for xid, handoff in self._table.under_way.items() if handoff.granted_at is None]

    @property
    def ungranted_count(self) -> int:
        """How many these are."""
        return len(self.ungranted)

    @property
    def parked_tokens(self) -> int:
        """Prompt tokens of finished handoffs that keep their pages and wait for a grant."""
        return sum(handoff.tokens for handoff in self._table.under_way.values() if handoff.is_parked)

    # ---- the one way in -----------------------------------------------------------------------------------------

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """Take one event; returns what must be done, in order.

        Raises InvariantError where the engine announces pages that do not follow on each other; never for what a peer
        does.
        """
        out: list[PrefillAction] = []
        match event:
            case PeerMessage():
                self._received(event, now, out)
            case PieceMoved():
                self._moved(event, now, out)
            case PieceDigested():
                self._digested(event, now, out)
            case ChunkReady():
                self._computed(event, now, out)
            case EndPrefill():
                ended = self._table.under_way.get(event.xid)
                if ended is not None:
                    self._table.fail(ended, event.code, event.reason, now, out)
            case Gone():
                self._clients.forget_stranger(event.peer)
                self._table.lose(event.peer, event.reason, now, out)
            case Tick():
                self._tick(event, now, out)
            case ReclaimParked():
                early = [handoff for handoff in self._table.under_way.values() if handoff.early]
                if early:
                    self._table.give_up_pages(max(early, key=lambda handoff: handoff.prepared_at), out)
            case HandoffFinding():
                out.extend(sends(event, {client.peer: client.engine for client in self._clients}))
            case Drain():
                self._closed = self._closed or event.reason
            case Shutdown():
                self._stop(event, now, out)
        return out

    # ---- what the engine says -----------------------------------------------------------------------------------

    def _computed(self, event: ChunkReady, now: float, out: list[PrefillAction]) -> None:
        handoff = self._table.under_way.get(event.xid)
        if handoff is None or handoff.is_forgotten:
            out.append(ReleaseChunk(xid=event.xid, spans=event.spans))
            return
        handoff.announce(event)
        if handoff.granted_at is not None:
            client = self._clients.get(handoff.peer)
            assert client is not None, f"pd: handoff {handoff.xid} outlived its peer {handoff.peer}"
            self._table.queue.queue(handoff, event, client, out)
            self._table.queue.send_done(handoff, client, now, out)
            self._table.queue.pump(client, out)
            return
        handoff.early.append(event)
        if handoff.is_parked and self.parked_tokens > self._settings.park_tokens:
            self._table.give_up_pages(handoff, out)

    def _stop(self, event: Shutdown, now: float, out: list[PrefillAction]) -> None:
        self._closed = event.reason
        for handoff in list(self._table.under_way.values()):
            self._table.fail(handoff, "shutdown", event.reason, now, out)
        for client in self._clients:
            self._table.hang_up(client, event.reason, now, out)

    def _moved(self, event: PieceMoved, now: float, out: list[PrefillAction]) -> None:
        handoff = self._table.under_way.get(event.xid) or self._table.draining.get(event.xid)
        if handoff is not None and handoff.peer == event.peer and handoff.outstanding:
            self._written(handoff, event, now, out)
            return
        found = self._table.queue.moved(event.peer, event.xid, event.piece, event.rank)
        if found is None:
            self.rejects["unknown_piece"] += self._clients.get(event.peer) is not None
            return
        client, lane, piece = found
        handoff = self._table.under_way.get(piece.xid)
        if event.status is PieceStatus.DONE:
            self._staged(handoff, event, client, lane, piece, now, out)
        elif handoff is not None and event.status is PieceStatus.FAILED:
            self._table.fail(
                handoff, "transfer", f"pd: rank {event.rank} cannot stage its pages: {event.reason}", now, out
            )
        elif handoff is not None and event.others:
            lane.again.append(piece)
        elif handoff is not None:
            wrong = f"pd: {len(piece.pages)} pages do not fit into the empty staging area"
            self._table.fail(handoff, "error", wrong, now, out)
        self._table.queue.pump(client, out)

    def _staged(
        self, handoff: PrefillHandoff | None, event: PieceMoved, client: Client, lane: Lane, piece: Piece, now: float,
        out: list[PrefillAction],
    ) -> None:  # fmt: skip
        """Staged or offered; `handoff` is None where it has ended meanwhile."""
        if handoff is not None and not lane.again:
            if client.mode is Mode.RECEIVER_CHECKED:
                client.staged.add((event.xid, event.piece, event.rank))
            self._table.queue.announce(handoff, piece, event, client, now, out)
        elif client.mode is Mode.RECEIVER_CHECKED:  # of no use: the handoff has ended, or one before it found no room
            out.append(Unstage(peer=event.peer, xid=event.xid, piece=event.piece, rank=event.rank))
            if handoff is not None:
                lane.again.append(piece)

    def _digested(self, event: PieceDigested, now: float, out: list[PrefillAction]) -> None:
        """The peer was told of the piece before; the handoff may have ended meanwhile."""
        handoff, client = self._table.under_way.get(event.xid), self._clients.get(event.peer)
        key = event.piece, event.rank
        if handoff is None or client is None or handoff.peer != event.peer or key not in handoff.digests_due:
            self.rejects["unknown_piece"] += client is not None
            return
        handoff.digests_due.remove(key)
        handoff.digests.append(PieceDigests(piece=event.piece, rank=event.rank, digests=event.digests))
        self._table.queue.send_done(handoff, client, now, out)

    def _written(self, handoff: PrefillHandoff, event: PieceMoved, now: float, out: list[PrefillAction]) -> None:
        """A write has ended, well or not; the handoff may have ended before it."""
        handoff.outstanding -= 1
        found = self._table.queue.moved(event.peer, event.xid, event.piece, event.rank)
        if event.xid in self._table.draining:
            self._table.abort_if_drained(handoff, out)
        elif event.status is not PieceStatus.DONE:
            self._table.fail(handoff, "transfer", f"pd: a write failed: {event.reason}", now, out)
        elif found is not None:
            self._table.queue.announce(handoff, found[2], event, found[0], now, out)
        if found is not None:
            self._table.queue.pump(found[0], out)

    # ---- what the world does --------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float, out: list[PrefillAction]) -> None:
        for handoff in list(self._table.under_way.values()):
            if now > handoff.deadline:
                self._table.fail(
                    handoff, "deadline", "pd: prefill did not finish within the deadline of decode", now, out
                )
            elif handoff.chunks and handoff.done_sent and now > handoff.lease_until:
                out.append(Send(peer=handoff.peer, message=Expired(xid=handoff.xid, grant=handoff.grant)))
                self._table.end(
                    handoff, "expired", f"decode did not confirm within {self._settings.lease_s} s", now, out
                )
        for handoff in list(self._table.draining.values()):
            client = self._clients.get(handoff.peer)
            if client is not None and not handoff.outstanding and now > handoff.drain_until:
                self._table.hang_up(client, f"pd: you never said that {handoff.xid} is drained", now, out)
        for client in self._clients:
            if len(client.closed) + len(client.early) > TOMBSTONES_MAX:
                self._table.hang_up(
                    client, f"pd: you hold {client.floor} open over {TOMBSTONES_MAX} ended grants", now, out
                )
        for client in self._clients.tick(event, now, out):
            self._table.hang_up(client, f"pd: you were silent for {client.pulse.silent_s:.0f} s", now, out)

    def _received(self, event: PeerMessage, now: float, out: list[PrefillAction]) -> None:
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
                self._done_ok(client, message, now, out)
            case Confirm():
                self._confirm(client, message, now, out)
            case Drained():
                ended = self._table.draining.get(message.xid)
                if ended is not None and ended.peer == client.peer and client.mode is Mode.PULL:
                    self._table.abort_if_drained(ended, out)
            case Fail():
                self._failed_there(client, message, now, out)
            case AbortGrant():
                self._abort_grant(client, message, now, out)
            case KvFound():
                out.append(heard(message, client.engine, client.peer))
            case Keepalive():
                client.pulse.step_s = message.step_s_max
                self._below_floor(client, message.grant_floor, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _of(self, client: Client, xid: str) -> PrefillHandoff | None:
        handoff = self._table.under_way.get(xid)
        if handoff is None or handoff.peer != client.peer:
            self.rejects["unknown_xid"] += 1
            return None
        return handoff

    def _hello(self, event: PeerMessage, message: Hello, now: float, out: list[PrefillAction]) -> None:
        if self._clients.get(event.peer) is not None:
            self.rejects["second_hello"] += 1
            return
        if self._closed:
            out.append(Send(peer=event.peer, message=HelloNo(reason=self._closed)))
            return
        if not self._clients.proves_itself(event.peer, event.incarnation, message, out):
            return
        ours = message.engine, event.incarnation, message.address
        for old in [c for c in self._clients if (c.engine, c.incarnation, c.address) == ours]:
            # Whichever connection is the older one: the other side hears that it ended, and greets again if it cares.
            self._table.hang_up(old, "pd: you connected anew", now, out)
        self._clients.greet(event.peer, event.incarnation, message, now, out)

    def _prepare(self, client: Client, message: Prepare, now: float, out: list[PrefillAction]) -> None:
        if message.xid in self._table.under_way or message.xid in self._table.draining or message.grant in client.live:
            self.rejects["repeated_xid"] += 1
            return
        if client.is_over(message.grant):  # its end came first
            self.rejects["old_grant"] += 1
            return
        code, wrong = ("shutdown", self._closed) if self._closed else ("rejected", "")
        wrong = wrong or prepare_fault(message)
        if wrong:
            self.rejects["bad_prepare"] += code == "rejected"
            client.close_grant(message.grant)
            out.append(
                Send(peer=client.peer, message=Fail(xid=message.xid, grant=message.grant, code=code, reason=wrong))
            )
            return
        handoff = PrefillHandoff.of(message, client.peer, self._settings, now)
        handoff.due = self._table.queue.first_pages(handoff.held, handoff.tokens)
        self._table.under_way[message.xid] = handoff
        client.live[message.grant] = message.xid
        out.append(handoff.add())
        early = client.take_early(message.grant)
        granted = message if message.spans else early
        if granted is not None:
            self._granted(client, granted, now, out)

    def _granted(self, client: Client, message: Grant | Prepare, now: float, out: list[PrefillAction]) -> None:
        """Pages to fill, by a message of their own or by PREPARE."""
        if client.is_over(message.grant):
            self.rejects["old_grant"] += 1
            return
        handoff = self._table.under_way.get(message.xid)
        if handoff is None:
            if not client.keep_early(message):
                reason = f"pd: you granted over {EARLY_BYTES_MAX >> 20} MiB of pages for what you did not ask for"
                self._table.hang_up(client, reason, now, out)
            return
        if handoff.peer != client.peer or handoff.grant != message.grant or handoff.granted_at is not None:
            self.rejects["repeated_grant"] += 1
            return
        wrong = handoff.grant_fault(message.spans, self._settings, self._layout, client.layout)
        if wrong:
            self._table.fail(handoff, "mismatch", f"pd: {wrong}", now, out)
            return
        handoff.granted_at, handoff.seed = now, message.digest_seed
        handoff.deadline = now + handoff.deadline_s
        for span in message.spans:
            handoff.spans[span.part] = span
            lowest = self._settings.first_needed(span.part, handoff.held, handoff.tokens)
            handoff.first[span.part] = max(span.first * client.layout.page_size, lowest) // self._layout.page_size
        if handoff.is_forgotten:
            handoff.is_forgotten = False
            out.append(handoff.add())
        chunks, handoff.early = handoff.early, []
        for chunk in chunks:
            self._table.queue.queue(handoff, chunk, client, out)
        self._table.queue.send_done(handoff, client, now, out)
        self._table.queue.pump(client, out)

    def _data_ok(self, client: Client, message: DataOk, out: list[PrefillAction]) -> None:
        key = (message.xid, message.piece, message.rank)
        if key not in client.staged:
            self.rejects["unknown_piece"] += 1
            return
        client.staged.remove(key)
        client.lanes[message.rank].is_full = False
        out.append(Unstage(peer=client.peer, xid=message.xid, piece=message.piece, rank=message.rank))
        self._table.queue.pump(client, out)

    def _done_ok(self, client: Client, message: DoneOk, now: float, out: list[PrefillAction]) -> None:
        """Decode has everything. Pull: perhaps of a handoff that has ended here, and only the end of its reads was
        awaited."""
        ended = self._table.draining.get(message.xid)
        if ended is not None and (ended.peer, ended.grant) == (client.peer, message.grant) and client.mode is Mode.PULL:
            self._table.abort_if_drained(ended, out)
            return
        handoff = self._of(client, message.xid)
        if handoff is not None and handoff.done_sent and handoff.grant == message.grant:
            self._table.drained(handoff, now, out)

    def _confirm(self, client: Client, message: Confirm, now: float, out: list[PrefillAction]) -> None:
        """Decode has read everything: was it there all the time?"""
        handoff = self._table.under_way.get(message.xid)
        kept = (
            handoff is not None and handoff.peer == client.peer and handoff.grant == message.grant and handoff.done_sent
        )
        if handoff is None or not kept or client.mode is not Mode.PULL:
            out.append(Send(peer=client.peer, message=Expired(xid=message.xid, grant=message.grant)))
            return
        out.append(Send(peer=client.peer, message=ConfirmOk(xid=message.xid, grant=message.grant)))
        self._table.drained(handoff, now, out)

    def _failed_there(self, client: Client, message: Fail, now: float, out: list[PrefillAction]) -> None:
        code = message.code if message.code in _CODES else "error"
        handoff = self._table.under_way.get(message.xid)
        if handoff is not None and handoff.peer == client.peer:
            if code == "kv_canary":
                out.append(ended_there(message, client.engine, client.peer, handoff.rid))
            self._table.end(handoff, code, message.reason, now, out, reading=message.reading)
            return
        self.rejects["unknown_xid"] += 1
        ended = self._table.draining.get(message.xid)
        if ended is not None and ended.peer == client.peer and client.mode is Mode.PULL and not message.reading:
            self._table.abort_if_drained(ended, out)
        if message.grant and message.grant not in client.live:
            client.close_grant(message.grant)

    def _abort_grant(self, client: Client, message: AbortGrant, now: float, out: list[PrefillAction]) -> None:
        """Write nothing more for it; say so when nothing is outstanding."""
        handoff = self._table.under_way.get(client.live.get(message.grant, ""))
        if handoff is not None:
            self._table.end(handoff, "aborted", "decode closed the grant", now, out)
        else:
            client.close_grant(message.grant)
        ended = next(
            (o for o in self._table.draining.values() if (o.peer, o.grant) == (client.peer, message.grant)), None
        )
        if ended is not None and ended.outstanding:
            ended.must_ack = True
        else:
            out.append(Send(peer=client.peer, message=AbortAck(grant=message.grant, ranks=client.ranks)))
        self._below_floor(client, message.floor, now, out)

    def _below_floor(self, client: Client, floor: int, now: float, out: list[PrefillAction]) -> None:
        """Decode holds no grant below its floor: it has forgotten what is left there."""
        if floor <= client.floor:
            return
        for handoff in [self._table.under_way[xid] for grant, xid in client.live.items() if grant < floor]:
            self.rejects["below_floor"] += 1
            self._table.end(handoff, "peer_gone", f"decode closed all grants below {floor}", now, out)
        client.raise_floor(floor)
