"""The books of one prefill engine's handoffs, and how each of them ends, exactly once. Pure.

prefill.py takes events in; whatever ends a handoff passes through here. Where the bytes are staged, its pages are free
as soon as it ends: a rank performs what it is asked in order, so that a piece which was asked for before is copied out
before anything new comes to its pages; its bytes are given back when the rank says where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from serinus.core.ids import new_xid
from serinus.pd.actions import (
    AbortPrefill,
    ClosePeer,
    ForgetPrefill,
    PrefillAction,
    Send,
    StopPrefill,
)
from serinus.pd.clients import Client, Clients
from serinus.pd.dispatch import Dispatch
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.order import Order
from serinus.pd.settings import PdSettings
from serinus.wire.messages import AbortAck, Fail, HelloNo

__all__ = ["PrefillEnds"]


class PrefillEnds:
    """The books of one prefill engine, and the ways in which an entry ends."""

    def __init__(self, settings: PdSettings, *, mint: Callable[[], str] = new_xid) -> None:
        """`mint`: nonces, never the same twice; a simulation gives its own."""
        self._settings = settings
        self._layout = RankLayout(settings.layout)
        self._clients = Clients(settings, lambda: mint().encode()[:64])
        self._orders: dict[str, Order] = {}
        self._draining: dict[str, Order] = {}
        """Ended, and their pages are still being read."""
        self._closed = ""
        """Why nothing new is taken any more; empty = it is."""
        self._dispatch = Dispatch(settings, self._layout, self._clients, self._orders)
        self.rejects: Counter[str] = Counter()
        """What was refused or dropped without effect, by reason."""

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def clients(self) -> tuple[Client, ...]:
        """The greeted decode engines; read only."""
        return tuple(self._clients)

    @property
    def handoff_count(self) -> int:
        """Handoffs under way, those included that have ended and whose pages are still being read."""
        return len(self._orders) + len(self._draining)

    @property
    def ungranted(self) -> list[str]:
        """Prepared but not granted (the bootstrap queue), by their xids."""
        return [xid for xid, order in self._orders.items() if order.granted_at is None]

    @property
    def ungranted_count(self) -> int:
        """How many these are."""
        return len(self.ungranted)

    @property
    def parked_tokens(self) -> int:
        """Prompt tokens of finished orders that keep their pages and wait for a grant."""
        return sum(order.tokens for order in self._orders.values() if order.is_parked)

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def _fail(self, order: Order, code: str, reason: str, now: float, out: list[PrefillAction]) -> None:
        """End it, and say so to the peer."""
        fail = Fail(xid=order.xid, grant=order.grant, code=code, reason=reason[:2000])
        out.append(Send(peer=order.peer, message=fail))
        self._end(order, code, reason, now, out)

    def _end(
        self, order: Order, code: str, reason: str, now: float, out: list[PrefillAction], *, reading: bool = True
    ) -> None:  # fmt: skip
        """`reading`: pull, decode may still read what was offered to it."""
        self._forget(order)
        client = self._clients.get(order.peer)
        offered = client is not None and client.mode is Mode.PULL and order.sent_pieces > 0 and reading
        if order.outstanding or offered:
            order.end_code, order.end_reason = code, reason
            order.drain_until = now + self._settings.handoff_s_max
            self._draining[order.xid] = order
            out.append(StopPrefill(xid=order.xid, code=code, reason=reason))
        else:
            self._abort(order, code, reason, out)

    def _abort(self, order: Order, code: str, reason: str, out: list[PrefillAction]) -> None:
        had_grant = order.granted_at is not None
        out.append(AbortPrefill(xid=order.xid, code=code, reason=reason, had_grant=had_grant))

    def _abort_if_drained(self, order: Order, out: list[PrefillAction]) -> None:
        """Nobody reads its pages any more, and we write nothing more for it."""
        if order.outstanding:
            return
        del self._draining[order.xid]
        self._abort(order, order.end_code, order.end_reason, out)
        client = self._clients.get(order.peer)
        if order.must_ack and client is not None:
            out.append(Send(peer=client.peer, message=AbortAck(grant=order.grant, ranks=client.ranks)))

    def _forget(self, order: Order) -> None:
        del self._orders[order.xid]
        client = self._clients.get(order.peer)
        if client is not None:
            client.live.pop(order.grant, None)
            client.bury(order.grant)
            for lane in client.lanes:
                lane.outbox = type(lane.outbox)(piece for piece in lane.outbox if piece.xid != order.xid)

    def _drained(self, order: Order, now: float, out: list[PrefillAction]) -> None:
        self._forget(order)
        out.append(order.drained(now))

    def _lose(self, peer: str, reason: str, now: float, out: list[PrefillAction]) -> None:
        if self._clients.get(peer) is None:
            return
        self._clients.remove(peer, reason, out)
        for order in [o for o in self._orders.values() if o.peer == peer]:
            self._end(order, "peer_gone", reason, now, out)
        for order in [o for o in self._draining.values() if o.peer == peer]:
            self._abort_if_drained(order, out)

    def _hang_up(self, client: Client, reason: str, now: float, out: list[PrefillAction]) -> None:
        out.append(Send(peer=client.peer, message=HelloNo(reason=reason)))
        self._lose(client.peer, reason, now, out)
        out.append(ClosePeer(peer=client.peer))

    def _give_up_pages(self, order: Order, out: list[PrefillAction]) -> None:
        """Its KV stays in the cache; it is computed again, from there, when the grant comes."""
        order.early.clear()
        order.last, order.is_forgotten = None, True
        order.due = self._dispatch.first_pages(order.held, order.tokens)
        out.append(ForgetPrefill(xid=order.xid))
