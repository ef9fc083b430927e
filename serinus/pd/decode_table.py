"""The table of one decode engine's handoffs, and how each of them ends, exactly once. Pure.

decode.py takes events in; whatever ends a handoff passes through here. Safety, by the mode of the backend (modes.py):
in A bytes reach our pages only through TakeIn, which is asked for only while the grant is open, and a rank obeys its
commands in order, so closing a grant is local and its pages are free at once: a later command finds the copying done.
In B and C the pages of a closed grant stay in quarantine until an event says that they can be written no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from serinus.core.errors import DigestMismatch
from serinus.core.ids import GrantCounter
from serinus.pd.actions import CancelReads, DecodeAction, Quarantine, Send
from serinus.pd.arrival_account import ArrivalAccount
from serinus.pd.decode_handoff import DecodeHandoff
from serinus.pd.layout import RankLayout, is_same
from serinus.pd.modes import Mode
from serinus.pd.pages import HandoffOver
from serinus.pd.quarantine import Quarantines, entry_of
from serinus.pd.registry import Registry
from serinus.pd.settings import HandoffSettings
from serinus.wire.messages import AbortGrant, Confirm, Data, DataOk, Done, DoneOk, Drained, Fail

REASON_CHARS: Final = 2000
"""A reason is no longer on the wire."""


class DecodeTable:
    """Handoffs under way by request, and the closed ones in quarantine. Methods append what must be done to `out`."""

    def __init__(self, settings: HandoffSettings, layout: RankLayout, registry: Registry) -> None:
        self._settings = settings
        self._layout = layout
        self._registry = registry
        self._grants = GrantCounter()
        self._by_rid: dict[str, DecodeHandoff] = {}
        self._rids: dict[str, str] = {}
        """Request of each handoff, by the xid of the handoff."""
        self.quarantines = Quarantines()
        """Pages of closed grants."""

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[DecodeHandoff]:
        return iter(list(self._by_rid.values()))

    def get(self, rid: str) -> DecodeHandoff | None:
        """The handoff of a request."""
        return self._by_rid.get(rid)

    def of_xid(self, xid: str) -> DecodeHandoff | None:
        """The handoff of this name."""
        return self._by_rid.get(self._rids.get(xid, ""))

    def at(self, address: str) -> list[DecodeHandoff]:
        """Those of the prefill engine at an address."""
        return [handoff for handoff in self._by_rid.values() if handoff.address == address]

    def next_grant(self) -> int:
        """A number that was never used before."""
        return self._grants.take()

    def add(self, handoff: DecodeHandoff) -> None:
        """Enter a new handoff."""
        self._by_rid[handoff.rid] = handoff
        self._rids[handoff.xid] = handoff.rid

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def close(self, handoff: DecodeHandoff, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        """Close the grant and say so to the peer. From here on nothing is written for it, or its pages are held."""
        self._remove(handoff, out)
        reading = self._quarantine(handoff, now, out)
        if self._registry.named(handoff.peer) is None:
            return
        fail = Fail(
            xid=handoff.xid, grant=handoff.grant, code=code, reason=reason[:REASON_CHARS], reading=reading
        )  # fmt: skip
        out.append(Send(peer=handoff.peer, message=fail))
        self._ask_to_stop(handoff, out)

    def fail(self, handoff: DecodeHandoff, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        """Close it, and have the prompt computed here."""
        self.close(handoff, code, reason, now, out)
        out.append(handoff.recompute(code, reason))

    def _remove(self, handoff: DecodeHandoff, out: list[DecodeAction]) -> None:
        del self._by_rid[handoff.rid]
        del self._rids[handoff.xid]
        account = handoff.account
        if self._layout.signature.stamp_bytes and account is not None and not is_same(account.source, account.target):
            out.append(HandoffOver(peer=handoff.peer, xid=handoff.xid))

    def _quarantine(self, handoff: DecodeHandoff, now: float, out: list[DecodeAction]) -> bool:
        """Quarantine what may still be written; True = by reads of our own, which are under way."""
        entry = entry_of(handoff, now)
        if entry is None:
            return False
        self.quarantines.add(entry)
        out.append(Quarantine(rid=handoff.rid, grant=handoff.grant, spans=entry.spans))
        if entry.reads:
            out.append(CancelReads(peer=handoff.peer, xid=handoff.xid))
        return bool(entry.reads)

    def _ask_to_stop(self, handoff: DecodeHandoff, out: list[DecodeAction]) -> None:
        if handoff.mode is Mode.PUSH and handoff.account is not None:
            floor = self.floor(handoff.address)
            abort = AbortGrant(grant=handoff.grant, floor=floor, xid=handoff.xid)
            out.append(Send(peer=handoff.peer, message=abort))

    def land_if_whole(self, handoff: DecodeHandoff, now: float, out: list[DecodeAction]) -> None:
        """Everything is taken in and DONE has come: land it, or fail it where the totals disagree, or the digests that
        came with DONE. Pull: the source must have been there all the time, as its hold says; else the peer is asked."""
        done, account = handoff.done, handoff.account
        if done is None or account is None or handoff.copying or handoff.confirming_since is not None:
            return
        wrong, code = account.done_fault(done), "mismatch"
        if not wrong and done.token >= self._settings.vocab_size:
            wrong = f"first token is {done.token}, expected less than {self._settings.vocab_size}"
        wrong = wrong and f"pd: {wrong}"
        try:
            if not wrong:
                account.check_digests(done)
        except DigestMismatch as mismatch:
            wrong, code = str(mismatch), "digest"
        if wrong:
            self.fail(handoff, code, wrong, now, out)
        elif handoff.mode is Mode.PULL and not self._is_held(handoff):
            handoff.confirming_since = now
            out.append(Send(peer=handoff.peer, message=Confirm(xid=handoff.xid, grant=handoff.grant)))
        else:
            self.land(handoff, done, account, now, out)

    def _is_held(self, handoff: DecodeHandoff) -> bool:
        """Whether the peer holds its pages still, now that all reads of them have ended."""
        peer = self._registry.named(handoff.peer)
        holds = self._settings.holds.get(peer.backend) if peer is not None else None
        return peer is not None and holds is not None and holds.lasts(peer.hold)

    def land(
        self, handoff: DecodeHandoff, done: Done, account: ArrivalAccount, now: float, out: list[DecodeAction]
    ) -> None:
        """The good end: the peer may drop its holds, the request runs."""
        self._remove(handoff, out)
        peer = self._registry.named(handoff.peer)
        assert peer is not None, f"pd: {handoff.rid} outlived its peer {handoff.peer}"
        if handoff.confirming_since is None:  # else the peer knows since CONFIRM
            out.append(Send(peer=handoff.peer, message=DoneOk(xid=handoff.xid, grant=handoff.grant)))
        out.append(handoff.landed(done, account, peer.engine, peer.backend, now))

    def failed_there(self, handoff: DecodeHandoff, code: str, reason: str, now: float, out: list[DecodeAction]) -> None:
        """The peer gave it up: tell it what it still waits for, and recompute."""
        self._remove(handoff, out)
        reading = self._quarantine(handoff, now, out)
        self._ask_to_stop(handoff, out)
        if handoff.mode is Mode.PULL and not reading:
            out.append(Send(peer=handoff.peer, message=Drained(xid=handoff.xid, grant=handoff.grant)))
        out.append(handoff.recompute(code, reason))

    def give_back(self, peer: str, data: Data, out: list[DecodeAction]) -> None:
        """The sender may have its staging bytes back: they will not be read."""
        named = self._registry.named(peer)
        if named is not None and named.mode is Mode.RECEIVER_CHECKED:
            out.append(Send(peer=peer, message=taken(data)))

    def floor(self, address: str) -> int:
        """Lowest grant of a peer that is open or in quarantine."""
        held = self.quarantines.floor(address, self._grants.last + 1)
        return min((h.grant for h in self._by_rid.values() if h.address == address and h.grant < held), default=held)


def taken(data: Data) -> DataOk:
    """The word that a piece's staging bytes may be reused."""
    return DataOk(xid=data.xid, grant=data.grant, piece=data.piece, rank=data.rank)
