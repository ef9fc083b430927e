"""The table of one prefill engine's handoffs, and how each of them ends, exactly once. Pure.

prefill.py takes events in; whatever ends a handoff passes through here. Where the bytes are staged, its pages are free
as soon as it ends: a rank obeys its commands in order, so a piece that was asked for before is copied out before
anything new comes to its pages; its bytes are given back when the rank says where they are.
"""

from __future__ import annotations

from serinus.pd.actions import AbortPrefill, ClosePeer, ForgetPrefill, PrefillAction, Send, StopPrefill
from serinus.pd.clients import Client, Clients
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.piece_queue import PieceQueue
from serinus.pd.prefill_handoff import PrefillHandoff
from serinus.pd.settings import HandoffSettings
from serinus.wire.messages import AbortAck, Fail, HelloNo


class PrefillTable:
    """Handoffs by xid, and the pieces that wait to be moved for them. Methods append what must be done to `out`."""

    def __init__(self, settings: HandoffSettings, layout: RankLayout, clients: Clients) -> None:
        self._settings = settings
        self._clients = clients
        self.under_way: dict[str, PrefillHandoff] = {}
        self.draining: dict[str, PrefillHandoff] = {}
        """Ended, and their pages are still being read."""
        self.queue = PieceQueue(settings, layout, clients, self.under_way)

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def fail(self, handoff: PrefillHandoff, code: str, reason: str, now: float, out: list[PrefillAction]) -> None:
        """End it, and say so to the peer."""
        fail = Fail(xid=handoff.xid, grant=handoff.grant, code=code, reason=reason[:2000])
        out.append(Send(peer=handoff.peer, message=fail))
        self.end(handoff, code, reason, now, out)

    def end(
        self, handoff: PrefillHandoff, code: str, reason: str, now: float, out: list[PrefillAction], *,
        reading: bool = True,
    ) -> None:  # fmt: skip
        """End it: at once, or (StopPrefill first) when its pages are not read any more.

        `reading`: pull, decode may still read what was offered to it.
        """
        self._remove(handoff)
        client = self._clients.get(handoff.peer)
        offered = client is not None and client.mode is Mode.PULL and handoff.sent_pieces > 0 and reading
        if handoff.outstanding or offered:
            handoff.end_code, handoff.end_reason = code, reason
            handoff.drain_until = now + self._settings.handoff_s_max
            self.draining[handoff.xid] = handoff
            out.append(StopPrefill(xid=handoff.xid, reason=reason))
        else:
            self._abort(handoff, code, reason, out)

    def _abort(self, handoff: PrefillHandoff, code: str, reason: str, out: list[PrefillAction]) -> None:
        had_grant = handoff.granted_at is not None
        out.append(AbortPrefill(xid=handoff.xid, code=code, reason=reason, had_grant=had_grant, rid=handoff.rid))

    def abort_if_drained(self, handoff: PrefillHandoff, out: list[PrefillAction]) -> None:
        """Decode does not read its pages any more: end it, unless writes of ours are still outstanding."""
        if handoff.outstanding:
            return
        del self.draining[handoff.xid]
        self._abort(handoff, handoff.end_code, handoff.end_reason, out)
        client = self._clients.get(handoff.peer)
        if handoff.must_ack and client is not None:
            out.append(Send(peer=client.peer, message=AbortAck(grant=handoff.grant, ranks=client.ranks)))

    def _remove(self, handoff: PrefillHandoff) -> None:
        del self.under_way[handoff.xid]
        client = self._clients.get(handoff.peer)
        if client is not None:
            client.live.pop(handoff.grant, None)
            client.close_grant(handoff.grant)
            for lane in client.lanes:
                lane.outbox = type(lane.outbox)(piece for piece in lane.outbox if piece.xid != handoff.xid)

    def drained(self, handoff: PrefillHandoff, now: float, out: list[PrefillAction]) -> None:
        """The good end: decode has everything."""
        self._remove(handoff)
        out.append(handoff.drained(now))

    def lose(self, peer: str, reason: str, now: float, out: list[PrefillAction]) -> None:
        """A connection is over: all handoffs of it end. Unknown peers change nothing."""
        if self._clients.get(peer) is None:
            return
        self._clients.remove(peer, reason, out)
        for handoff in [o for o in self.under_way.values() if o.peer == peer]:
            self.end(handoff, "peer_gone", reason, now, out)
        for handoff in [o for o in self.draining.values() if o.peer == peer]:
            self.abort_if_drained(handoff, out)

    def hang_up(self, client: Client, reason: str, now: float, out: list[PrefillAction]) -> None:
        """End a connection from this side, and tell why."""
        out.append(Send(peer=client.peer, message=HelloNo(reason=reason)))
        self.lose(client.peer, reason, now, out)
        out.append(ClosePeer(peer=client.peer))

    def give_up_pages(self, handoff: PrefillHandoff, out: list[PrefillAction]) -> None:
        """Free the pages of a handoff that waits for its grant. Its KV stays in the cache; when the grant comes it is
        computed again, from there."""
        handoff.early.clear()
        handoff.last, handoff.is_forgotten = None, True
        handoff.due = self.queue.first_pages(handoff.held, handoff.tokens)
        out.append(ForgetPrefill(xid=handoff.xid))
