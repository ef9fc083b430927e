"""Every handoff of one decode engine: asks, grants, takes in, and ends each one exactly once. Pure.

Safety (mode A of the protocol): bytes reach our pages only through CopyIn, which exists only while the grant is open
and is performed before the next event is handled. Closing a grant is local, so its pages are free at once; what still
comes for it is answered (the sender wants its staging bytes back), counted and dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.ids import GrantCounter, new_xid
from serinus.core.request import Request
from serinus.pd.events import (
    CancelHandoff,
    ClosePeer,
    Copied,
    CopyIn,
    DecodeAction,
    DecodeEvent,
    Landed,
    PeerLost,
    Received,
    Recompute,
    Send,
    Shutdown,
    StartHandoff,
    Tick,
    WantPeer,
)
from serinus.pd.integrity import digest_seed
from serinus.pd.registry import PEERS_MAX, Peer, PeerState, Registry
from serinus.pd.settings import PdSettings
from serinus.wire.convert import logprobs_from_wire, sampling_to_wire
from serinus.wire.messages import (
    Data,
    DataOk,
    Done,
    DoneOk,
    Fail,
    Grant,
    HelloNo,
    HelloOk,
    Keepalive,
    Prepare,
    ids_to_bytes,
)

__all__ = ["DecodeSide"]

_REASON_CHARS: Final = 2000
_CODES: Final = frozenset({"aborted", "deadline", "error", "mismatch", "peer_gone", "rejected", "shutdown"})
"""Reasons a prefill engine may give; they become labels of a metric, so a peer does not invent new ones."""

_TIERS: Final = frozenset({"device", "host", "storage"})


@dataclass(slots=True, kw_only=True)
class _Handoff:
    xid: str
    rid: str
    request: Request
    address: str
    held: int
    pages: NDArray[np.int32]
    started: float
    peer: str = ""
    """Name of the connection it was asked over; empty = the peer is not greeted yet."""
    grant: int = 0
    seed: int = 0
    chunk_count: int = 0
    page_count: int = 0
    """Pages filled so far: always the first ones."""
    byte_count: int = 0
    copying: int = 0
    """CopyIns not yet reported."""
    copy_seconds: float = 0.0
    first_data_at: float = 0.0
    done: Done | None = None


class DecodeSide:
    """The decode engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    def __init__(self, settings: PdSettings, *, mint_xid: Callable[[], str] = new_xid) -> None:
        """`mint_xid`: names for handoffs, never the same twice; a simulation gives its own."""
        self._settings = settings
        self._mint_xid = mint_xid
        self._registry = Registry(settings)
        self._grants = GrantCounter()
        self._handoffs: dict[str, _Handoff] = {}
        self._xids: dict[str, str] = {}
        self._stopped = ""
        self.rejects: Counter[str] = Counter()
        """What was refused or dropped without effect, by reason."""

    # ---- questions ----------------------------------------------------------------------------------------------

    def refusal(self, address: str) -> tuple[str, str]:
        """(code, reason) why a request should not be sent to this prefill engine; ("", "") = StartHandoff may work.

        Codes: peer_gone, peer_slow (HELLO is unanswered for long), refused (wrong layout...). An address never
        heard of may be tried.
        """
        peer = self._registry.at(address)
        return peer.refusal if peer is not None else ("", "")

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All known prefill engines; read only."""
        return tuple(self._registry)

    @property
    def handoff_count(self) -> int:
        """Handoffs under way."""
        return len(self._handoffs)

    def granted_pages(self, rid: str) -> NDArray[np.int32] | None:
        """Pages that a peer may fill for this request; None = no open grant."""
        handoff = self._handoffs.get(rid)
        return handoff.pages if handoff is not None else None

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
            case CancelHandoff():
                self._cancel(event, out)
            case PeerLost():
                self._peer_lost(event, now, out)
            case Tick():
                self._tick(event, now, out)
            case WantPeer():
                self._registry.want(event.address, now, out, pinned=True)
            case Shutdown():
                self._stop(event, out)
        return out

    # ---- what the engine wants ----------------------------------------------------------------------------------

    def _start(self, event: StartHandoff, now: float, out: list[DecodeAction]) -> None:
        self._check(event)
        if self._stopped:
            out.append(Recompute(rid=event.rid, code="shutdown", reason=self._stopped))
            return
        peer = self._registry.want(event.address, now, out)
        if peer is None:
            out.append(Recompute(rid=event.rid, code="refused", reason=f"pd: {PEERS_MAX} peers are known already"))
            return
        code, reason = peer.refusal
        if code:
            out.append(Recompute(rid=event.rid, code=code, reason=reason))
            return
        handoff = _Handoff(
            xid=self._mint_xid(), rid=event.rid, request=event.request, address=event.address, held=event.held,
            pages=event.pages.copy(), started=now, grant=self._grants.take(),
        )  # fmt: skip
        handoff.seed = digest_seed(self._settings.incarnation, handoff.grant)
        self._handoffs[handoff.rid] = handoff
        self._xids[handoff.xid] = handoff.rid
        if peer.state is PeerState.UP:
            self._ask(handoff, peer, out)

    def _check(self, event: StartHandoff) -> None:
        size, length = self._settings.layout.page_size, len(event.request.prompt)
        if event.rid in self._handoffs:
            raise InvariantError(f"pd: request {event.rid} is being handed over already, expected a new one")
        if event.held % size or not 0 <= event.held < length:
            raise InvariantError(f"pd: held is {event.held}, expected a multiple of {size} below {length}")
        wanted = -(-length // size) - event.held // size
        if len(event.pages) != wanted or len(np.unique(event.pages)) != wanted:
            raise InvariantError(f"pd: {event.rid} came with {len(event.pages)} pages, expected {wanted} distinct ones")

    def _ask(self, handoff: _Handoff, peer: Peer, out: list[DecodeAction]) -> None:
        handoff.peer = peer.name
        request = handoff.request
        prepare = Prepare(
            xid=handoff.xid,
            rid=handoff.rid[:256],
            prompt=ids_to_bytes(request.prompt),
            sampling=sampling_to_wire(request.sampling),
            seed=request.seed,
            held=handoff.held,
            cache_salt=request.cache_salt,
            deadline_s=self._settings.handoff_s_max,
        )
        grant = Grant(xid=handoff.xid, grant=handoff.grant, pages=handoff.pages.tolist(), digest_seed=handoff.seed)
        out.append(Send(peer=peer.name, message=prepare))
        out.append(Send(peer=peer.name, message=grant))

    def _cancel(self, event: CancelHandoff, out: list[DecodeAction]) -> None:
        handoff = self._handoffs.get(event.rid)
        if handoff is not None:
            self._close(handoff, "aborted", event.reason, out)

    def _stop(self, event: Shutdown, out: list[DecodeAction]) -> None:
        self._stopped = event.reason
        for handoff in list(self._handoffs.values()):
            self._fail(handoff, "shutdown", event.reason, out)
        out.extend(ClosePeer(peer=peer.name) for peer in self._registry if peer.state is PeerState.UP)

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def _close(self, handoff: _Handoff, code: str, reason: str, out: list[DecodeAction]) -> None:
        """Close the grant and say so to the peer. From here on nothing is written for it."""
        self._forget(handoff)
        if handoff.peer and self._registry.named(handoff.peer) is not None:
            fail = Fail(xid=handoff.xid, code=code, reason=reason[:_REASON_CHARS])
            out.append(Send(peer=handoff.peer, message=fail))

    def _fail(self, handoff: _Handoff, code: str, reason: str, out: list[DecodeAction]) -> None:
        self._close(handoff, code, reason, out)
        out.append(Recompute(rid=handoff.rid, code=code, reason=reason))

    def _forget(self, handoff: _Handoff) -> None:
        del self._handoffs[handoff.rid]
        del self._xids[handoff.xid]

    def _land_if_whole(self, handoff: _Handoff, now: float, out: list[DecodeAction]) -> None:
        done = handoff.done
        if done is None or handoff.copying:
            return
        sent = (done.chunk_count, done.page_count, done.byte_count)
        took = (handoff.chunk_count, handoff.page_count, handoff.byte_count)
        if sent != took or handoff.page_count != len(handoff.pages):
            reason = f"pd: sent {sent}, landed {took} (chunks, pages, bytes), granted {len(handoff.pages)} pages"
            self._fail(handoff, "mismatch", reason, out)
            return
        if done.token >= self._settings.vocab_size:
            reason = f"pd: first token is {done.token}, expected less than {self._settings.vocab_size}"
            self._fail(handoff, "mismatch", reason, out)
            return
        self._forget(handoff)
        peer = self._registry.named(handoff.peer)
        out.append(Send(peer=handoff.peer, message=DoneOk(xid=handoff.xid, grant=handoff.grant)))
        out.append(
            Landed(
                rid=handoff.rid,
                token=done.token,
                logprobs=logprobs_from_wire(done.logprobs) if done.logprobs is not None else None,
                page_count=handoff.page_count,
                byte_count=handoff.byte_count,
                seconds=now - handoff.first_data_at,
                copy_seconds=handoff.copy_seconds,
                wait_seconds=handoff.first_data_at - handoff.started,
                engine=peer.engine if peer is not None else "",
                cached_tokens=_believable(done.cached_tokens, len(handoff.request.prompt)),
                queue_seconds=done.queue_seconds,
                compute_seconds=done.compute_seconds,
            )
        )

    # ---- what the world does --------------------------------------------------------------------------------------

    def _peer_lost(self, event: PeerLost, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.named(event.peer)
        if peer is None:
            self.rejects["unknown_peer"] += 1
            return
        self._registry.lose(peer, event.reason, now, out, hang_up=False)
        self._recompute_all(peer, "peer_gone", out)

    def _recompute_all(self, peer: Peer, code: str, out: list[DecodeAction]) -> None:
        for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
            self._fail(handoff, code, peer.reason, out)

    def _tick(self, event: Tick, now: float, out: list[DecodeAction]) -> None:
        if self._stopped:
            return
        floors: dict[str, int] = {}
        for handoff in list(self._handoffs.values()):
            if now - handoff.started > self._settings.handoff_s_max:
                reason = f"pd: not landed within {self._settings.handoff_s_max} s"
                self._fail(handoff, "deadline", reason, out)
            else:
                floors[handoff.address] = min(handoff.grant, floors.get(handoff.address, handoff.grant))
        floors = {peer.address: floors.get(peer.address, self._grants.last + 1) for peer in self._registry}
        for peer in self._registry.tick(event, now, floors, out):
            self._recompute_all(peer, "peer_gone", out)
        for peer in [peer for peer in self._registry if peer.slow]:
            code, reason = peer.refusal
            for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
                self._fail(handoff, code, f"pd: {reason}", out)

    def _received(self, event: Received, now: float, out: list[DecodeAction]) -> None:
        peer = self._registry.named(event.peer)
        if peer is None:
            self.rejects["unknown_peer"] += 1
            return
        peer.pulse.heard()
        message = event.message
        match message:
            case HelloOk() if peer.state is PeerState.CONNECTING:
                welcome = self._registry.welcome(peer, message, event.incarnation, now, out)
                for handoff in [h for h in self._handoffs.values() if h.address == peer.address]:
                    if welcome:
                        self._ask(handoff, peer, out)
                    else:
                        self._fail(handoff, "refused", peer.reason, out)
            case HelloNo() if peer.state is PeerState.CONNECTING:
                self._registry.refuse(peer, message.reason[:_REASON_CHARS], now, out)
                self._recompute_all(peer, "refused", out)
            case HelloNo():
                self._registry.lose(peer, message.reason[:_REASON_CHARS], now, out, hang_up=True)
                self._recompute_all(peer, "peer_gone", out)
            case Keepalive():
                peer.load, peer.pulse.step_s = message.load, message.step_s_max
            case Data() | Done() | Fail() if peer.state is PeerState.UP:
                self._about_handoff(event, message, now, out)
            case _:
                self.rejects["unexpected"] += 1

    def _about_handoff(self, event: Received, message: Data | Done | Fail, now: float, out: list[DecodeAction]) -> None:
        handoff = self._handoffs.get(self._xids.get(message.xid, ""))
        if handoff is not None and handoff.peer != event.peer:
            self.rejects["wrong_peer"] += 1
            handoff = None
        if isinstance(message, Fail):
            if handoff is not None:
                self._forget(handoff)
                code = message.code if message.code in _CODES else "error"
                out.append(Recompute(rid=handoff.rid, code=code, reason=message.reason[:_REASON_CHARS]))
            return
        if handoff is None or message.grant != handoff.grant:
            self.rejects["closed_grant"] += 1
            if isinstance(message, Data):
                out.append(_taken(event.peer, message))
            return
        if isinstance(message, Data):
            self._data(handoff, event, message, now, out)
        elif handoff.done is None:
            handoff.done = message
            self._land_if_whole(handoff, now, out)

    def _data(self, handoff: _Handoff, event: Received, data: Data, now: float, out: list[DecodeAction]) -> None:
        count, odd = divmod(len(data.digests), 8)
        end = data.first + count
        wrong = ""
        if odd or not count:
            wrong = f"{len(data.digests)} bytes of digests, expected 8 per page"
        elif data.chunk != handoff.chunk_count or data.first != handoff.page_count:
            wrong = f"chunk {data.chunk} at page {data.first}, expected {handoff.chunk_count} at {handoff.page_count}"
        elif end > len(handoff.pages):
            wrong = f"pages up to {end}, granted {len(handoff.pages)}"
        elif data.byte_count != count * self._settings.page_bytes:
            wrong = f"{data.byte_count} bytes, expected {count * self._settings.page_bytes}"
        elif handoff.done is not None:
            wrong = "data after done"
        if wrong:
            self.rejects["bad_data"] += 1
            self._fail(handoff, "mismatch", f"pd: {wrong}", out)
            out.append(_taken(event.peer, data))
            return
        if not handoff.chunk_count:
            handoff.first_data_at = now
        handoff.chunk_count += 1
        handoff.page_count = end
        handoff.byte_count += data.byte_count
        handoff.copying += 1
        pages = handoff.pages[data.first : end]
        out.append(
            CopyIn(
                peer=event.peer,
                xid=handoff.xid,
                data=data,
                pages=pages,
                digest_seed=handoff.seed,
                payload=event.payload,
            )
        )

    def _copied(self, event: Copied, now: float, out: list[DecodeAction]) -> None:
        handoff = self._handoffs.get(self._xids.get(event.xid, ""))
        if handoff is None or not handoff.copying:
            self.rejects["unknown_copy"] += 1
            return
        handoff.copying -= 1
        handoff.copy_seconds += event.seconds
        out.append(Send(peer=handoff.peer, message=DataOk(xid=handoff.xid, grant=handoff.grant, chunk=event.chunk)))
        if event.error:
            self._fail(handoff, event.code or "transfer", event.error, out)
            return
        self._land_if_whole(handoff, now, out)


def _believable(cached_tokens: Mapping[str, int], prompt_tokens: int) -> dict[str, int]:
    """What a peer says it found cached, as far as it can be: names become labels, values go into the usage."""
    return {tier: count for tier, count in cached_tokens.items() if tier in _TIERS and 0 <= count <= prompt_tokens}


def _taken(peer: str, data: Data) -> Send:
    return Send(peer=peer, message=DataOk(xid=data.xid, grant=data.grant, chunk=data.chunk))
