"""Every handoff of one decode engine: asks, grants, takes in, and ends each one exactly once. Pure.

What ends a handoff is in decode_table.py, with the rule that makes a closed grant safe. Messages that still come for
one are answered (the sender wants its staging bytes back), counted and dropped; a TakeIn that was asked for before is
reported whenever it has ended, and answered then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from serinus.core.addresses import PEERS_MAX
from serinus.core.errors import InvariantError
from serinus.core.handoff import HandoffFinding
from serinus.core.ids import new_xid
from serinus.core.parts import PageSpan
from serinus.core.request import Request
from serinus.pd.actions import (
    ClosePeer,
    DecodeAction,
    Recompute,
    Send,
)
from serinus.pd.arrival_account import ArrivalAccount, span_fault
from serinus.pd.decode_handoff import DecodeHandoff
from serinus.pd.decode_table import REASON_CHARS, DecodeTable, taken
from serinus.pd.events import (
    CancelHandoff,
    DecodeEvent,
    PeerFenced,
    PrepareHandoff,
    Shutdown,
    StartHandoff,
    Tick,
    WantPeer,
)
from serinus.pd.findings import ended_there, heard, sends
from serinus.pd.integrity import digest_seed
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.pages import PagesGranted, TakeIn, TakenIn, no_bytes
from serinus.pd.registry import Peer, PeerState, Registry
from serinus.pd.settings import HandoffSettings
from serinus.wire import Gone, PeerMessage
from serinus.wire.messages import (
    AbortAck,
    ConfirmOk,
    Data,
    DataOk,
    Done,
    Drained,
    Expired,
    Fail,
    HelloAgain,
    HelloNo,
    HelloOk,
    Keepalive,
    KvFound,
)

_CODES: Final = frozenset(
    {"aborted", "deadline", "error", "expired", "grammar", "kv_canary", "mismatch", "peer_gone", "rejected", "shutdown",
     "timeout", "transfer"}
)  # fmt: skip
"""Reasons a prefill engine may give; they become labels of a metric, so a peer does not invent new ones."""

_About = Data | Done | Fail | Expired | ConfirmOk


@dataclass(slots=True, kw_only=True)
class _Taking:
    """A Data message that own ranks are taking in."""

    peer: str
    answer: DataOk | None
    """Receiver-checked: the sender gets its staging bytes back with it, once all ranks are done."""
    left: int
    """Ranks that have not answered."""
    seconds: float = 0.0
    """Time that the slowest rank took."""
    error: str = ""
    code: str = ""


class DecodeSide:
    """The decode engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    def __init__(self, settings: HandoffSettings, *, mint: Callable[[], str] = new_xid) -> None:
        """`mint`: names for handoffs (and nonces), never the same twice; a simulation gives its own."""
        self._settings = settings
        self._layout = RankLayout(settings.layout)
        self._mint = mint
        self._registry = Registry(settings, lambda: mint().encode()[:64])
        self._table = DecodeTable(settings, self._layout, self._registry)
        self._taking: dict[tuple[str, int, int], _Taking] = {}
        """Data under way at ranks, by handoff, piece and source rank, whatever became of its handoff."""
        self._stopped = ""
        """Why nothing new is begun any more; empty = it is."""
        self.rejects: Counter[str] = Counter()
        """What was refused or dropped without effect, by reason."""

    # ---- what the engine asks ---------------------------------------------------------------------------------------

    def refusal(self, address: str) -> tuple[str, str]:
        """(code, reason) why a request should not be sent to this prefill engine; ("", "") = StartHandoff may work.

        Codes: peer_gone, peer_slow (HELLO is unanswered for long), refused (wrong layout...). An address never
        heard of may be tried.
        """
        peer = self._registry.at(address)
        return peer.refusal if peer is not None else ("", "")

    def least_loaded(self) -> str:
        """Of the configured prefill engines that are up, the address of the one with the least load, which counts one
        request more from now on; one that stands still only where all do. Empty = none is up."""
        up = [peer for peer in self._registry if peer.pinned and peer.state is PeerState.UP]
        if not up:
            return ""
        still = self.still
        least = min(up, key=lambda peer: (peer.address in still, peer.load))
        least.load += 1
        return least.address

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All known prefill engines; read only."""
        return tuple(self._registry)

    @property
    def still(self) -> frozenset[str]:
        """Addresses of the prefill engines that stand still."""
        every_s = self._settings.keepalive_s
        return frozenset(peer.address for peer in self._registry if peer.pulse.stands_still(every_s))

    @property
    def handoff_count(self) -> int:
        """Number of handoffs under way."""
        return len(self._table)

    @property
    def quarantined_pages(self) -> int:
        """Pages of closed grants that may still be written."""
        return self._table.quarantines.page_count

    def granted(self, rid: str) -> tuple[PageSpan, ...]:
        """Pages that a peer may fill for this request; empty = no open grant."""
        handoff = self._table.get(rid)
        return handoff.spans if handoff is not None else ()

    def landed_pages(self, rid: str) -> int:
        """Pages that came so far, summed over parts and source ranks."""
        handoff = self._table.get(rid)
        return handoff.account.page_count if handoff is not None and handoff.account is not None else 0

    # ---- the one way in -----------------------------------------------------------------------------------------

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        """Take one event; returns what must be done, in order.

        Raises InvariantError where the engine breaks the contract of StartHandoff; never for what a peer does.
        """
        out: list[DecodeAction] = []
        match event:
            case PeerMessage():
                self._received(event, now, out)
            case TakenIn():
                self._taken_in(event, now, out)
            case StartHandoff():
                self._start(event, now, out)
            case PrepareHandoff():
                self._prepare(event, now, out)
            case CancelHandoff():
                handoff = self._table.get(event.rid)
                if handoff is not None:
                    self._table.close(handoff, event.code, event.reason, now, out)
            case Gone():
                self._peer_lost(event, now, out)
            case PeerFenced():
                self._peer_fenced(event, now, out)
            case Tick():
                self._tick(event, now, out)
            case WantPeer():
                self._registry.want(event.address, now, out, pinned=True)
            case HandoffFinding():
                up = [peer for peer in self._registry if peer.state is PeerState.UP]
                out.extend(sends(event, {peer.name: peer.engine for peer in up}))
            case Shutdown():
                self._stop(event, now, out)
        return out

    # ---- what the engine wants ----------------------------------------------------------------------------------

    def _prepare(self, event: PrepareHandoff, now: float, out: list[DecodeAction]) -> None:
        if self._table.get(event.rid) is not None:
            raise InvariantError(f"pd: request {event.rid} is being handed over already, expected a new one")
        handoff = self._begin(event.rid, event.request, event.address, now, out)
        if handoff is not None:
            self._ask_if_up(handoff, now, out)

    def _start(self, event: StartHandoff, now: float, out: list[DecodeAction]) -> None:
        handoff = self._table.get(event.rid)
        self._check(event, handoff)
        if handoff is None:
            handoff = self._begin(event.rid, event.request, event.address, now, out)
            if handoff is None:
                return
        handoff.held, handoff.started = event.held, now
        if (peer := self._registry.at(event.address)) is not None:
            peer.queue_s += peer.token_s * (len(event.request.prompt) - event.held)
        handoff.spans = tuple(PageSpan(part=s.part, first=s.first, pages=s.pages.copy()) for s in event.spans)
        if handoff.peer:
            self._open_grant(handoff, out)
            out.append(Send(peer=handoff.peer, message=handoff.permission()))
        else:
            self._ask_if_up(handoff, now, out)

    def _begin(
        self, rid: str, request: Request, address: str, now: float, out: list[DecodeAction]
    ) -> DecodeHandoff | None:  # fmt: skip
        """A new handoff; None = it ended at once, and was told so."""
        peer = self._registry.want(address, now, out) if not self._stopped else None
        code, reason = peer.refusal if peer is not None else ("refused", f"pd: {PEERS_MAX} peers are known already")
        if self._stopped:
            code, reason = "shutdown", self._stopped
        if code:
            out.append(Recompute(rid=rid, code=code, reason=reason))
            return None
        grant = self._table.next_grant()
        handoff = DecodeHandoff(
            xid=self._mint(), rid=rid, request=request, address=address, grant=grant, begun=now, started=now,
            seed=digest_seed(self._settings.incarnation, grant),
        )  # fmt: skip
        self._table.add(handoff)
        return handoff

    def _check(self, event: StartHandoff, prepared: DecodeHandoff | None) -> None:
        size, length = self._settings.layout.page_size, len(event.request.prompt)
        if prepared is not None and (prepared.spans or prepared.address != event.address):
            raise InvariantError(f"pd: request {event.rid} is being handed over already, expected a new one")
        if event.held % size or not 0 <= event.held < length:
            raise InvariantError(f"pd: held is {event.held}, expected a multiple of {size} below {length}")
        wrong = span_fault(event.spans, self._settings, self._layout, event.held, length)
        if wrong:
            raise InvariantError(f"pd: {event.rid} came with pages that do not fit: {wrong}")

    def _ask_if_up(self, handoff: DecodeHandoff, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.at(handoff.address)
        if peer is not None and peer.state is PeerState.UP:
            self._ask(handoff, peer, now, out)

    def _ask(self, handoff: DecodeHandoff, peer: Peer, now: float, out: list[DecodeAction]) -> None:
        handoff.peer, handoff.mode, handoff.asked_at = peer.name, peer.mode, now
        if handoff.spans:
            self._open_grant(handoff, out)
        out.append(Send(peer=peer.name, message=handoff.prepare(self._settings.handoff_s_max, now)))

    def _open_grant(self, handoff: DecodeHandoff, out: list[DecodeAction]) -> None:
        """Its pages may be filled from now on; ranks hear of it before the peer does."""
        peer = self._registry.named(handoff.peer)
        assert peer is not None, f"pd: {handoff.rid} outlived its peer {handoff.peer}"
        assert peer.layout is not None, f"pd: {handoff.peer} was never greeted, expected its layout"
        length = len(handoff.request.prompt)
        assert peer.routes is not None, f"pd: {handoff.peer} was never greeted, expected its routes"
        handoff.account = ArrivalAccount.of(
            self._settings, peer.layout, self._layout, peer.routes, handoff.spans, handoff.held, length
        )  # fmt: skip
        if handoff.mode is Mode.PULL:
            out.append(PagesGranted(peer=handoff.peer, xid=handoff.xid))

    def _stop(self, event: Shutdown, now: float, out: list[DecodeAction]) -> None:
        self._stopped = event.reason
        for handoff in self._table:
            self._table.fail(handoff, "shutdown", event.reason, now, out)
        out.extend(ClosePeer(peer=peer.name) for peer in self._registry if peer.state is PeerState.UP)

    # ---- what the world does --------------------------------------------------------------------------------------

    def _peer_lost(self, event: Gone, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.named(event.peer)
        if peer is not None:
            self._lose(peer, event.reason, now, out, hang_up=False)
        self.rejects["unknown_peer"] += peer is None

    def _lose(self, peer: Peer, reason: str, now: float, out: list[DecodeAction], *, hang_up: bool) -> None:
        """Its connection is of no use any more: its handoffs fail, and where it could write, it is cut off."""
        self._registry.lose(peer, reason, now, out, hang_up=hang_up)
        self._recompute_all(peer, "peer_gone", now, out)

    def _recompute_all(self, peer: Peer, code: str, now: float, out: list[DecodeAction]) -> None:
        for handoff in self._table.at(peer.address):
            self._table.fail(handoff, code, peer.reason, now, out)
        if self._table.quarantines.awaited(peer.name) and peer.fencing != peer.name:
            self._registry.fence(peer, out)

    def _peer_fenced(self, event: PeerFenced, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.fenced(event.peer)
        if peer is None:
            self.rejects["unknown_peer"] += 1
            return
        if event.endpoints is not None:
            self._registry.moved(peer.backend, event.endpoints)
        self._table.quarantines.fenced(event.peer, now, out)
        if not event.all_peers:
            return
        for other in [p for p in self._registry if p.state is PeerState.UP and p.backend == peer.backend]:
            name = other.name
            self._registry.lose(other, f"cut off together with {peer.address}", now, out, hang_up=True)
            for handoff in [h for h in self._table if h.peer == name]:
                self._table.fail(handoff, "peer_gone", other.reason, now, out)
            self._table.quarantines.fenced(name, now, out)

    def _tick(self, event: Tick, now: float, out: list[DecodeAction]) -> None:
        if self._stopped:
            return
        for handoff in self._table:
            if now - handoff.started > self._settings.handoff_s_max:
                reason = f"pd: not landed within {self._settings.handoff_s_max} s"
                self._table.fail(handoff, "deadline", reason, now, out)
        for peer in self._registry.tick(event, now, self._table.floor, out):
            self._recompute_all(peer, "peer_gone", now, out)
        for entry in self._table.quarantines:
            named = self._registry.named(entry.peer)
            if named is not None and entry.writers and now - entry.since > self._settings.abort_s_max:
                reason = f"pd: ABORT of grant {entry.grant} unanswered for {self._settings.abort_s_max} s"
                self._lose(named, reason, now, out, hang_up=True)
        for peer in [peer for peer in self._registry if peer.slow]:
            code, reason = peer.refusal
            for handoff in self._table.at(peer.address):
                self._table.fail(handoff, code, f"pd: {reason}", now, out)

    def _received(self, event: PeerMessage, now: float, out: list[DecodeAction]) -> None:
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
                peer.queue_s, peer.token_s = message.queue_s, message.token_s
            case AbortAck() if peer.state is PeerState.UP:
                if not self._table.quarantines.acknowledged(message.grant, event.peer, message.ranks, now, out):
                    self.rejects["unknown_grant"] += 1
            case KvFound() if peer.state is PeerState.UP:
                out.append(heard(message, peer.engine, peer.name))
            case Data() | Done() | Fail() | Expired() | ConfirmOk() if peer.state is PeerState.UP:
                self._about_handoff(event, message, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _greeted(
        self, peer: Peer, event: PeerMessage, message: HelloAgain | HelloOk | HelloNo, now: float,
        out: list[DecodeAction],
    ) -> None:  # fmt: skip
        if isinstance(message, HelloOk):
            welcome = self._registry.welcome(peer, message, event.incarnation, now, out)
            for handoff in self._table.at(peer.address):
                if welcome:
                    self._ask(handoff, peer, now, out)
                else:
                    self._table.fail(handoff, "refused", peer.reason, now, out)
            return
        reason = self._registry.prove(peer, message, out) if isinstance(message, HelloAgain) else message.reason
        if reason or isinstance(message, HelloNo):
            self._registry.refuse(peer, reason[:REASON_CHARS], now, out)
            self._recompute_all(peer, "refused", now, out)

    def _about_handoff(self, event: PeerMessage, message: _About, now: float, out: list[DecodeAction]) -> None:
        handoff = self._table.of_xid(message.xid)
        if handoff is not None and handoff.peer != event.peer:
            self.rejects["wrong_peer"] += 1
            handoff = None
        if isinstance(message, Fail):
            if handoff is not None:
                code = message.code if message.code in _CODES else "error"
                if code == "kv_canary":
                    peer = self._registry.named(event.peer)
                    out.append(ended_there(message, peer.engine if peer else "", event.peer, handoff.rid))
                self._table.failed_there(handoff, code, message.reason[:REASON_CHARS], now, out)
            return
        if handoff is None or message.grant != handoff.grant or handoff.account is None:
            self.rejects["closed_grant"] += 1
            if isinstance(message, Data):
                self._table.give_back(event.peer, message, out)
            return
        match message:
            case Data():
                self._data(handoff, handoff.account, event, message, now, out)
            case Done():
                if handoff.done is None:
                    handoff.done = message
                    self._table.land_if_whole(handoff, now, out)
            case Expired():
                self._table.failed_there(handoff, "expired", "pd: the source pages are not kept any longer", now, out)
            case ConfirmOk() if handoff.confirming_since is not None and handoff.done is not None:
                self._table.land(handoff, handoff.done, handoff.account, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _data(
        self, handoff: DecodeHandoff, account: ArrivalAccount, event: PeerMessage, data: Data, now: float,
        out: list[DecodeAction],
    ) -> None:  # fmt: skip
        wrong = account.fault(data)
        if not wrong and handoff.done is not None:
            wrong = "data after done"
        elif not wrong and bool(data.pages) != (handoff.mode is Mode.PULL):
            wrong = f"{len(data.pages)} source pages in mode {handoff.mode.value}"
        if wrong:
            self.rejects["bad_data"] += 1
            self._table.fail(handoff, "mismatch", f"pd: {wrong}", now, out)
            self._table.give_back(event.peer, data, out)
            return
        if not account.piece_count:
            handoff.first_data_at = now
        handoff.last_data_at = now
        span = account.take(data)
        handoff.copying += 1
        takers = account.routes.takers(data.rank, span.part)
        answer = taken(data) if handoff.mode is Mode.RECEIVER_CHECKED else None
        taking = _Taking(peer=event.peer, answer=answer, left=len(takers))
        self._taking[data.xid, data.piece, data.rank] = taking
        payload = np.frombuffer(event.payload, np.uint8) if event.payload else no_bytes()
        digests, payloads = [data.digests] * len(takers), [payload] * len(takers)
        if account.routes.digest_count(data.rank, span.part) > 1:  # each taker has its own
            digests = [column.tobytes() for column in np.frombuffer(data.digests, "<u8").reshape(-1, len(takers)).T]
            payloads = np.array_split(payload, len(takers))
        for rank, own_digests, own_payload in zip(takers, digests, payloads, strict=True):
            out.append(
                TakeIn(
                    peer=event.peer, xid=data.xid, piece=data.piece, source=data.rank, rank=rank, mode=handoff.mode,
                    part=span.part, first=data.first, digests=own_digests, digest_seed=handoff.seed, pages=span.pages,
                    target_first=span.first, byte_count=data.byte_count, shm_name=data.shm_name,
                    shm_offset=data.shm_offset, payload=own_payload, sources=np.array(data.pages, np.int32),
                )
            )  # fmt: skip

    def _taken_in(self, event: TakenIn, now: float, out: list[DecodeAction]) -> None:
        """A rank has ended its part of a Data message; it is over when all ranks have, and failed when one has."""
        key = event.xid, event.piece, event.source
        taking = self._taking.get(key)
        if taking is None:
            self.rejects["unknown_copy"] += 1
            return
        taking.left -= 1
        taking.seconds = max(taking.seconds, event.seconds)
        if event.error and not taking.error:
            taking.error, taking.code = event.error, event.code or "transfer"
        if taking.left:
            return
        del self._taking[key]
        if taking.answer is not None and self._registry.named(taking.peer) is not None:
            out.append(Send(peer=taking.peer, message=taking.answer))
        handoff = self._table.of_xid(event.xid)
        if handoff is None:
            entry = self._table.quarantines.read_ended(event.xid, now, out)
            if entry is not None and not entry.reads and self._registry.named(entry.peer) is not None:
                out.append(Send(peer=entry.peer, message=Drained(xid=entry.xid, grant=entry.grant)))
            return
        handoff.copying -= 1
        handoff.copy_seconds += taking.seconds
        if event.digests and handoff.account is not None:
            handoff.account.found[event.piece, event.source] = event.digests
        if taking.error:
            self._table.fail(handoff, taking.code, taking.error, now, out)
            return
        self._table.land_if_whole(handoff, now, out)
