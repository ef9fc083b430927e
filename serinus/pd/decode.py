"""Every handoff of one decode engine: asks, grants, takes in, and ends each one exactly once. Pure.

What ends a handoff is in decode_ends.py, with the rule that makes a closed grant safe. What still comes for one is
answered (the sender wants its staging bytes back), counted and dropped; a CopyIn that was asked for before is reported
whenever it has ended, and answered then.
"""

from __future__ import annotations

from typing import Any, Final

from serinus.core.errors import InvariantError
from serinus.core.parts import PageSpan
from serinus.core.request import Request
from serinus.pd.actions import (
    CheckIn,
    ClosePeer,
    CopyIn,
    DecodeAction,
    ReadIn,
    Recompute,
    Send,
)
from serinus.pd.asked import Asked
from serinus.pd.decode_ends import REASON_CHARS, DecodeEnds, taken
from serinus.pd.events import (
    CancelHandoff,
    Copied,
    DecodeEvent,
    PeerFenced,
    PeerLost,
    PrepareHandoff,
    Received,
    Shutdown,
    StartHandoff,
    Tick,
    WantPeer,
)
from serinus.pd.integrity import digest_seed
from serinus.pd.landing import Landing, span_fault
from serinus.pd.modes import Mode
from serinus.pd.registry import PEERS_MAX, Peer, PeerState
from serinus.wire.messages import (
    AbortAck,
    ConfirmOk,
    Data,
    Done,
    Drained,
    Expired,
    Fail,
    HelloAgain,
    HelloNo,
    HelloOk,
    Keepalive,
    Lease,
)

__all__ = ["DecodeSide"]

_CODES: Final = frozenset(
    {"aborted", "deadline", "error", "expired", "mismatch", "peer_gone", "rejected", "shutdown", "transfer"}
)
"""Reasons a prefill engine may give; they become labels of a metric, so a peer does not invent new ones."""

_About = Data | Done | Fail | Expired | ConfirmOk | Lease


class DecodeSide(DecodeEnds):
    """The decode engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    # ---- the one way in -----------------------------------------------------------------------------------------

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        """Take one event; returns what must be done, in order.

        Raises InvariantError where the engine breaks the contract of StartHandoff; never for what a peer does.
        """
        out: list[DecodeAction] = []
        match event:
            case Received():
                self._received(event, now, out)
            case Copied():
                self._copied(event, now, out)
            case StartHandoff():
                self._start(event, now, out)
            case PrepareHandoff():
                self._prepare(event, now, out)
            case CancelHandoff():
                handoff = self._handoffs.get(event.rid)
                if handoff is not None:
                    self._close(handoff, "aborted", event.reason, now, out)
            case PeerLost():
                self._peer_lost(event, now, out)
            case PeerFenced():
                self._peer_fenced(event, now, out)
            case Tick():
                self._tick(event, now, out)
            case WantPeer():
                self._registry.want(event.address, now, out, pinned=True)
            case Shutdown():
                self._stop(event, now, out)
        return out

    # ---- what the engine wants ----------------------------------------------------------------------------------

    def _prepare(self, event: PrepareHandoff, now: float, out: list[DecodeAction]) -> None:
        if event.rid in self._handoffs:
            raise InvariantError(f"pd: request {event.rid} is being handed over already, expected a new one")
        handoff = self._begin(event.rid, event.request, event.address, now, out)
        if handoff is not None:
            self._ask_if_up(handoff, now, out)

    def _start(self, event: StartHandoff, now: float, out: list[DecodeAction]) -> None:
        handoff = self._handoffs.get(event.rid)
        self._check(event, handoff)
        if handoff is None:
            handoff = self._begin(event.rid, event.request, event.address, now, out)
            if handoff is None:
                return
        handoff.held, handoff.started = event.held, now
        handoff.spans = tuple(PageSpan(part=s.part, first=s.first, pages=s.pages.copy()) for s in event.spans)
        if handoff.peer:
            self._grant(handoff, out)
        else:
            self._ask_if_up(handoff, now, out)

    def _begin(
        self, rid: str, request: Request, address: str, now: float, out: list[DecodeAction]
    ) -> Asked | None:  # fmt: skip
        """A new handoff; None = it ended at once, and was told so."""
        peer = self._registry.want(address, now, out) if not self._stopped else None
        code, reason = peer.refusal if peer is not None else ("refused", f"pd: {PEERS_MAX} peers are known already")
        if self._stopped:
            code, reason = "shutdown", self._stopped
        if code:
            out.append(Recompute(rid=rid, code=code, reason=reason))
            return None
        grant = self._grants.take()
        handoff = Asked(
            xid=self._mint_xid(), rid=rid, request=request, address=address, grant=grant, begun=now, started=now,
            seed=digest_seed(self._settings.incarnation, grant),
        )  # fmt: skip
        self._handoffs[rid] = handoff
        self._xids[handoff.xid] = rid
        return handoff

    def _check(self, event: StartHandoff, prepared: Asked | None) -> None:
        size, length = self._settings.layout.page_size, len(event.request.prompt)
        if prepared is not None and (prepared.spans or prepared.address != event.address):
            raise InvariantError(f"pd: request {event.rid} is being handed over already, expected a new one")
        if event.held % size or not 0 <= event.held < length:
            raise InvariantError(f"pd: held is {event.held}, expected a multiple of {size} below {length}")
        wrong = span_fault(event.spans, self._settings, event.held, length)
        if wrong:
            raise InvariantError(f"pd: {event.rid} came with pages that do not fit: {wrong}")

    def _ask_if_up(self, handoff: Asked, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.at(handoff.address)
        if peer is not None and peer.state is PeerState.UP:
            self._ask(handoff, peer, now, out)

    def _ask(self, handoff: Asked, peer: Peer, now: float, out: list[DecodeAction]) -> None:
        handoff.peer, handoff.mode, handoff.asked_at = peer.name, peer.mode, now
        out.append(Send(peer=peer.name, message=handoff.prepare(self._settings.handoff_s_max)))
        if handoff.spans:
            self._grant(handoff, out)

    def _grant(self, handoff: Asked, out: list[DecodeAction]) -> None:
        peer = self._registry.named(handoff.peer)
        assert peer is not None, f"pd: {handoff.rid} outlived its peer {handoff.peer}"
        assert peer.layout is not None, f"pd: {handoff.peer} was never greeted, expected its layout"
        length = len(handoff.request.prompt)
        landing = Landing.of(self._settings, peer.layout, self._layout, handoff.spans, handoff.held, length)
        out.append(Send(peer=handoff.peer, message=handoff.open(landing)))

    def _stop(self, event: Shutdown, now: float, out: list[DecodeAction]) -> None:
        self._stopped = event.reason
        for handoff in list(self._handoffs.values()):
            self._fail(handoff, "shutdown", event.reason, now, out)
        out.extend(ClosePeer(peer=peer.name) for peer in self._registry if peer.state is PeerState.UP)

    # ---- what the world does --------------------------------------------------------------------------------------

    def _peer_lost(self, event: PeerLost, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.named(event.peer)
        if peer is not None:
            self._lose(peer, event.reason, now, out, hang_up=False)
        self.rejects["unknown_peer"] += peer is None

    def _lose(self, peer: Peer, reason: str, now: float, out: list[DecodeAction], *, hang_up: bool) -> None:
        """Its connection is of no use any more: its handoffs fail, and where it could write, it is cut off."""
        self._registry.lose(peer, reason, now, out, hang_up=hang_up)
        self._recompute_all(peer, "peer_gone", now, out)

    def _recompute_all(self, peer: Peer, code: str, now: float, out: list[DecodeAction]) -> None:
        for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
            self._fail(handoff, code, peer.reason, now, out)
        if self._quarantines.awaited(peer.name) and peer.fencing != peer.name:
            self._registry.fence(peer, out)

    def _peer_fenced(self, event: PeerFenced, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.fenced(event.peer)
        if peer is None:
            self.rejects["unknown_peer"] += 1
            return
        if event.endpoints is not None:
            self._registry.moved(peer.backend, event.endpoints)
        self._quarantines.fenced(event.peer, now, out)
        if not event.everybody:
            return
        for other in [p for p in self._registry if p.state is PeerState.UP and p.backend == peer.backend]:
            name = other.name
            self._registry.lose(other, f"cut off together with {peer.address}", now, out, hang_up=True)
            for handoff in [h for h in self._handoffs.values() if h.peer == name]:
                self._fail(handoff, "peer_gone", other.reason, now, out)
            self._quarantines.fenced(name, now, out)

    def _tick(self, event: Tick, now: float, out: list[DecodeAction]) -> None:
        if self._stopped:
            return
        for handoff in list(self._handoffs.values()):
            if now - handoff.begun > self._settings.handoff_s_max:
                reason = f"pd: not landed within {self._settings.handoff_s_max} s"
                self._fail(handoff, "deadline", reason, now, out)
        for peer in self._registry.tick(event, now, self._floor, out):
            self._recompute_all(peer, "peer_gone", now, out)
        for ward in self._quarantines:
            named = self._registry.named(ward.peer)
            if named is not None and ward.writers and now - ward.since > self._settings.abort_s_max:
                reason = f"pd: ABORT of grant {ward.grant} unanswered for {self._settings.abort_s_max} s"
                self._lose(named, reason, now, out, hang_up=True)
        for peer in [peer for peer in self._registry if peer.slow]:
            code, reason = peer.refusal
            for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
                self._fail(handoff, code, f"pd: {reason}", now, out)

    def _received(self, event: Received, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.named(event.peer)
        if peer is None:
            self.rejects["unknown_peer"] += 1
            return
        peer.pulse.heard()
        message = event.message
        match message:
            case HelloAgain() | HelloOk() | HelloNo() if peer.state is PeerState.CONNECTING:
                self._greeted(peer, event, message, now, out)
            case HelloNo():
                self._lose(peer, message.reason[:REASON_CHARS], now, out, hang_up=True)
            case Keepalive():
                peer.load, peer.pulse.step_s = message.load, message.step_s_max
            case AbortAck() if peer.state is PeerState.UP:
                if not self._quarantines.acknowledged(message.grant, event.peer, message.ranks, now, out):
                    self.rejects["unknown_grant"] += 1
            case Data() | Done() | Fail() | Expired() | ConfirmOk() | Lease() if peer.state is PeerState.UP:
                self._about_handoff(event, message, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _greeted(
        self, peer: Peer, event: Received, message: HelloAgain | HelloOk | HelloNo, now: float, out: list[DecodeAction]
    ) -> None:  # fmt: skip
        if isinstance(message, HelloOk):
            welcome = self._registry.welcome(peer, message, event.incarnation, now, out)
            for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
                if welcome:
                    self._ask(handoff, peer, now, out)
                else:
                    self._fail(handoff, "refused", peer.reason, now, out)
            return
        reason = self._registry.prove(peer, message, out) if isinstance(message, HelloAgain) else message.reason
        if reason or isinstance(message, HelloNo):
            self._registry.refuse(peer, reason[:REASON_CHARS], now, out)
            self._recompute_all(peer, "refused", now, out)

    def _about_handoff(self, event: Received, message: _About, now: float, out: list[DecodeAction]) -> None:
        handoff = self._handoffs.get(self._xids.get(message.xid, ""))
        if handoff is not None and handoff.peer != event.peer:
            self.rejects["wrong_peer"] += 1
            handoff = None
        if isinstance(message, Fail):
            if handoff is not None:
                code = message.code if message.code in _CODES else "error"
                self._failed_there(handoff, code, message.reason[:REASON_CHARS], now, out)
            return
        if handoff is None or message.grant != handoff.grant or handoff.landing is None:
            self.rejects["closed_grant"] += 1
            if isinstance(message, Data):
                self._taken(event.peer, message, out)
            return
        match message:
            case Data():
                self._data(handoff, handoff.landing, event, message, now, out)
            case Done():
                if handoff.done is None:
                    handoff.done = message
                    self._land_if_whole(handoff, now, out)
            case Expired():
                self._failed_there(handoff, "expired", "pd: the source pages are not kept any longer", now, out)
            case ConfirmOk() if handoff.confirming_since is not None and handoff.done is not None:
                self._land(handoff, handoff.done, handoff.landing, now, out)
            case Lease():
                pass
            case _:
                self.rejects["unexpected"] += 1

    def _data(
        self, handoff: Asked, landing: Landing, event: Received, data: Data, now: float, out: list[DecodeAction]
    ) -> None:  # fmt: skip
        wrong = landing.fault(data)
        if not wrong and handoff.done is not None:
            wrong = "data after done"
        elif not wrong and bool(data.pages) != (handoff.mode is Mode.PULL):
            wrong = f"{len(data.pages)} source pages in mode {handoff.mode.value}"
        if wrong:
            self.rejects["bad_data"] += 1
            self._fail(handoff, "mismatch", f"pd: {wrong}", now, out)
            self._taken(event.peer, data, out)
            return
        if not landing.piece_count:
            handoff.first_data_at = now
        span = landing.take(data)
        handoff.copying += 1
        pages, first = span.pages, span.first
        common: dict[str, Any] = {"peer": event.peer, "xid": handoff.xid, "data": data, "digest_seed": handoff.seed}
        if handoff.mode is Mode.PUSH:
            out.append(CheckIn(**common, pages=pages, target_first=first))
        elif handoff.mode is Mode.PULL:
            out.append(ReadIn(**common, pages=pages, target_first=first))
        else:
            self._copying[data.xid, data.piece, data.rank] = event.peer, taken(data)
            out.append(CopyIn(**common, pages=pages, target_first=first, payload=event.payload))

    def _copied(self, event: Copied, now: float, out: list[DecodeAction]) -> None:
        answer = self._copying.pop((event.xid, event.piece, event.rank), None)
        if answer is not None and self._registry.named(answer[0]) is not None:
            out.append(Send(peer=answer[0], message=answer[1]))
        handoff = self._handoffs.get(self._xids.get(event.xid, ""))
        if handoff is None or not handoff.copying:
            ward = self._quarantines.read_ended(event.xid, now, out)
            if ward is None:
                self.rejects["unknown_copy"] += answer is None
            elif not ward.reads and self._registry.named(ward.peer) is not None:
                out.append(Send(peer=ward.peer, message=Drained(xid=ward.xid, grant=ward.grant)))
            return
        handoff.copying -= 1
        handoff.copy_seconds += event.seconds
        if event.error:
            self._fail(handoff, event.code or "transfer", event.error, now, out)
            return
        self._land_if_whole(handoff, now, out)
