"""The books of one decode engine's handoffs, and how each of them ends, exactly once. Pure.

decode.py takes events in; whatever ends a handoff passes through here. Safety, by the mode of the backend (modes.py):
in A bytes reach our pages only through CopyIn, which is asked for only while the grant is open, and a rank performs
what it is asked in order, so closing a grant is local and its pages are free at once: whatever comes later on that rank
finds the copying done. In B and C the pages of a closed grant stay in quarantine until an event says that nobody can
write them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from serinus.core.ids import GrantCounter, new_xid
from serinus.core.parts import PageSpan
from serinus.pd.actions import CancelReads, DecodeAction, HandoffOver, Quarantine, Recompute, Send
from serinus.pd.asked import Asked
from serinus.pd.landing import Landing
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.quarantine import Quarantines, ward_of
from serinus.pd.registry import Peer, Registry
from serinus.pd.settings import PdSettings
from serinus.wire.messages import AbortGrant, Confirm, Data, DataOk, Done, DoneOk, Drained, Fail

__all__ = ["REASON_CHARS", "DecodeEnds", "taken"]

REASON_CHARS: Final = 2000
"""A reason is no longer on the wire."""


class DecodeEnds:
    """The books of one decode engine, and the ways in which an entry ends."""

    def __init__(self, settings: PdSettings, *, mint_xid: Callable[[], str] = new_xid) -> None:
        """`mint_xid`: names for handoffs (and nonces), never the same twice; a simulation gives its own."""
        self._settings = settings
        self._layout = RankLayout(settings.layout)
        self._mint_xid = mint_xid
        self._registry = Registry(settings, lambda: mint_xid().encode()[:64])
        self._grants = GrantCounter()
        self._handoffs: dict[str, Asked] = {}
        self._xids: dict[str, str] = {}
        self._quarantines = Quarantines()
        self._copying: dict[tuple[str, int, int], tuple[str, DataOk]] = {}
        """Receiver-checked: what to answer when a CopyIn is done, whatever became of its handoff."""
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

    @property
    def quarantined_pages(self) -> int:
        """Pages of closed grants that somebody may still write."""
        return self._quarantines.page_count

    def granted(self, rid: str) -> tuple[PageSpan, ...]:
        """Pages that a peer may fill for this request; empty = no open grant."""
        return self._handoffs[rid].spans if rid in self._handoffs else ()

    def landed_pages(self, rid: str) -> int:
        """Pages that came so far, summed over parts and source ranks."""
        handoff = self._handoffs.get(rid)
        return handoff.landing.page_count if handoff is not None and handoff.landing is not None else 0

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def _close(self, handoff: Asked, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        """Close the grant and say so to the peer. From here on nothing is written for it, or its pages are held."""
        self._forget(handoff, out)
        reading = self._seclude(handoff, now, out)
        if self._registry.named(handoff.peer) is None:
            return
        fail = Fail(
            xid=handoff.xid, grant=handoff.grant, code=code, reason=reason[:REASON_CHARS], reading=reading
        )  # fmt: skip
        out.append(Send(peer=handoff.peer, message=fail))
        self._ask_to_stop(handoff, out)

    def _fail(self, handoff: Asked, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        self._close(handoff, code, reason, now, out)
        out.append(Recompute(rid=handoff.rid, code=code, reason=reason))

    def _forget(self, handoff: Asked, out: list[DecodeAction]) -> None:
        del self._handoffs[handoff.rid]
        del self._xids[handoff.xid]
        if self._layout.signature.stamp_bytes and handoff.mode is Mode.RECEIVER_CHECKED and handoff.landing is not None:
            out.append(HandoffOver(peer=handoff.peer, xid=handoff.xid))

    def _seclude(self, handoff: Asked, now: float, out: list[DecodeAction]) -> bool:
        """Quarantine what somebody may still write; whether that is we ourselves (reads under way)."""
        ward = ward_of(handoff, now)
        if ward is None:
            return False
        self._quarantines.add(ward)
        out.append(Quarantine(rid=handoff.rid, grant=handoff.grant, spans=ward.spans))
        if ward.reads:
            out.append(CancelReads(peer=handoff.peer, xid=handoff.xid))
        return bool(ward.reads)

    def _ask_to_stop(self, handoff: Asked, out: list[DecodeAction]) -> None:
        if handoff.mode is Mode.PUSH and handoff.landing is not None:
            floor = self._floor(handoff.address)
            abort = AbortGrant(grant=handoff.grant, floor=floor, xid=handoff.xid)
            out.append(Send(peer=handoff.peer, message=abort))

    def _land_if_whole(self, handoff: Asked, now: float, out: list[DecodeAction]) -> None:
        done, landing = handoff.done, handoff.landing
        if done is None or landing is None or handoff.copying or handoff.confirming_since is not None:
            return
        wrong = landing.done_fault(done)
        if not wrong and done.token >= self._settings.vocab_size:
            wrong = f"first token is {done.token}, expected less than {self._settings.vocab_size}"
        if wrong:
            self._fail(handoff, "mismatch", f"pd: {wrong}", now, out)
        elif handoff.mode is Mode.PULL:
            handoff.confirming_since = now
            out.append(Send(peer=handoff.peer, message=Confirm(xid=handoff.xid, grant=handoff.grant)))
        else:
            self._land(handoff, done, landing, now, out)

    def _land(self, handoff: Asked, done: Done, landing: Landing, now: float, out: list[DecodeAction]) -> None:
        self._forget(handoff, out)
        peer = self._registry.named(handoff.peer)
        out.append(Send(peer=handoff.peer, message=DoneOk(xid=handoff.xid, grant=handoff.grant)))
        out.append(handoff.landed(done, landing, peer.engine if peer is not None else "", now))

    def _failed_there(self, handoff: Asked, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        """The peer gave it up: say what it still waits for, and recompute."""
        self._forget(handoff, out)
        reading = self._seclude(handoff, now, out)
        self._ask_to_stop(handoff, out)
        if handoff.mode is Mode.PULL and not reading:
            out.append(Send(peer=handoff.peer, message=Drained(xid=handoff.xid, grant=handoff.grant)))
        out.append(Recompute(rid=handoff.rid, code=code, reason=reason))

    def _taken(self, peer: str, data: Data, out: list[DecodeAction]) -> None:
        """The sender may have its staging bytes back: nobody will read them."""
        named = self._registry.named(peer)
        if named is not None and named.mode is Mode.RECEIVER_CHECKED:
            out.append(Send(peer=peer, message=taken(data)))

    def _floor(self, address: str) -> int:
        """Lowest grant of a peer that is open or in quarantine."""
        held = self._quarantines.floor(address, self._grants.last + 1)
        return min((h.grant for h in self._handoffs.values() if h.address == address and h.grant < held), default=held)


def taken(data: Data) -> DataOk:
    """The word that a piece's staging bytes may be reused."""
    return DataOk(xid=data.xid, grant=data.grant, piece=data.piece, rank=data.rank)
