"""The decode side's border: posts what its machine says, has its ranks fill pages, folds what they answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from serinus.core.clock import Clock
from serinus.core.errors import DigestMismatch, TransferFailed
from serinus.core.ids import new_xid
from serinus.core.parts import Part
from serinus.pd.actions import (
    AttachPeer,
    CancelReads,
    CheckIn,
    ClosePeer,
    CopyIn,
    FencePeer,
    HandoffOver,
    Landed,
    OpenPeer,
    PeerChanged,
    Quarantine,
    QuarantineOver,
    ReadIn,
    Recompute,
    Send,
)
from serinus.pd.backends import OneSided
from serinus.pd.crew import Crew
from serinus.pd.decode import DecodeSide
from serinus.pd.events import Copied, DecodeEvent, PeerFenced, no_bytes
from serinus.pd.integrity import check_digests, digest_stored
from serinus.pd.layout import RankLayout
from serinus.pd.orders import FillPages, HandAnswer, JoinPeer, PagesFilled
from serinus.pd.ports import AnyBackend, Port
from serinus.pd.settings import PdSettings
from serinus.pd.stores import Routes, StoresOf
from serinus.wire import Post

__all__ = ["DecodePort", "DecodeResult"]

DecodeResult: TypeAlias = Landed | Recompute | Quarantine | QuarantineOver | PeerChanged
"""What a decode engine must act on."""


@dataclass(slots=True, kw_only=True)
class _Filling:
    """A CopyIn that ranks are told of."""

    left: int
    """Ranks that have not answered."""
    seconds: float = 0.0
    """Of the slowest."""
    error: str = ""
    code: str = ""


class DecodePort(Port[DecodeEvent, DecodeResult, ReadIn]):
    """The decode side of one engine; events: PrepareHandoff, StartHandoff, CancelHandoff, WantPeer, Shutdown."""

    machine: DecodeSide

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], clock: Clock,
        store: StoresOf | None = None, crew: Crew | None = None,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """Takes the post over. Raises ConfigError where settings, backends, store and crew disagree."""
        super().__init__(
            settings, post=post, backends=backends, clock=clock, store=store, crew=crew,
            follower_backends=follower_backends, mint=mint,
        )  # fmt: skip
        self.machine = DecodeSide(self.settings, mint_xid=mint)
        self._layout = RankLayout(settings.layout)
        self._routes: dict[str, Routes] = {}
        self._fillings: dict[tuple[str, int, int], _Filling] = {}
        """By handoff, piece and source rank. Each ends: a rank answers every FillPages, whatever became of its peer."""
        self._fences: dict[str, int] = {}
        """Ranks of peers that may have to be cut off."""

    def _perform(self, event: DecodeEvent, events: deque[DecodeEvent], out: list[DecodeResult]) -> None:
        for action in self.machine.handle(event, self._clock.now()):
            match action:
                case Send():
                    self._post.send(action.peer, action.message, action.payload)
                case CopyIn():
                    self._copy_in(action)
                case HandoffOver():
                    for rank in range(self._crew.size if action.peer in self._peers else 0):
                        self._crew.order(rank, action)
                case CheckIn():
                    events.appendleft(self._check_in(action, 0.0))
                case ReadIn():
                    self._read_in(action, events)
                case CancelReads():
                    self._reach.cancel(partial(_is_of, action.xid))
                case FencePeer():
                    events.append(self._fence(action))
                case OpenPeer():
                    self._post.connect(action.peer, action.address)
                case AttachPeer():
                    events.extend(self._join(action))
                case ClosePeer():
                    self._leave(action.peer)
                    self._post.disconnect(action.peer)
                case Landed() | Recompute() | Quarantine() | QuarantineOver() | PeerChanged():
                    out.append(action)

    def _join(self, action: AttachPeer) -> Sequence[DecodeEvent]:
        source = RankLayout(action.layout)
        self._routes[action.peer] = Routes(source, self._layout)
        self._fences[action.peer] = len(source.shards)
        if not self._reach.has(action.backend):
            order = JoinPeer(peer=action.peer, backend=action.backend, layout=action.layout)
            for rank in range(self._crew.size):
                self._crew.order(rank, order)
        return self._attach(action)

    def _leave(self, peer: str) -> None:
        self._routes.pop(peer, None)
        super()._leave(peer)

    def _copy_in(self, action: CopyIn) -> None:
        """Every rank that has some of these bytes takes its own; Copied when all have."""
        data, part = action.data, Part(action.data.part)
        payload = np.frombuffer(action.payload, np.uint8) if action.payload else no_bytes()
        order = FillPages(
            peer=action.peer, xid=action.xid, piece=data.piece, source=data.rank, part=part, first=data.first,
            digests=data.digests, digest_seed=action.digest_seed, pages=action.pages, target_first=action.target_first,
            byte_count=data.byte_count, shm_name=data.shm_name, shm_offset=data.shm_offset, payload=payload,
        )  # fmt: skip
        takers = self._routes[action.peer].takers(data.rank, part)
        self._fillings[action.xid, data.piece, data.rank] = _Filling(left=len(takers))
        for rank in takers:
            self._crew.order(rank, order)

    def _answered(self, answer: HandAnswer) -> DecodeEvent | None:
        assert isinstance(answer, PagesFilled), f"pd: a {type(answer).__name__} at decode, expected PagesFilled"
        key = answer.xid, answer.piece, answer.source
        filling = self._fillings[key]
        filling.left -= 1
        filling.seconds = max(filling.seconds, answer.seconds)
        if answer.error and not filling.error:
            filling.error, filling.code = answer.error, answer.code
        if filling.left:
            return None
        del self._fillings[key]
        return Copied(
            xid=answer.xid, piece=answer.piece, rank=answer.source, seconds=filling.seconds, error=filling.error,
            code=filling.code,
        )  # fmt: skip

    # ---- one-sided backends -----------------------------------------------------------------------------------------

    def _check_in(self, action: CheckIn | ReadIn, seconds: float) -> Copied:
        """What somebody else put into our pages is what was sent, or not. Layouts are equal here."""
        start = self._clock.now()
        data, error = action.data, ""
        try:
            store = self._pool().at(data.rank, Part(data.part))
            check_digests(digest_stored(store, action.pages, action.digest_seed), data.digests, data.first)
        except DigestMismatch as mismatch:
            error = str(mismatch)
        seconds += self._clock.now() - start
        return Copied(
            xid=action.xid, piece=data.piece, rank=data.rank, seconds=seconds, error=error, code="digest" * bool(error)
        )  # fmt: skip

    def _read_in(self, action: ReadIn, events: deque[DecodeEvent]) -> None:
        data = action.data
        backend = self._reach.at(data.rank, self._peers[action.peer].backend)
        try:
            sources = np.array(data.pages, dtype=np.int32)
            number = backend.read(f"{action.peer}/{data.rank}", Part(data.part), action.pages, sources)
        except TransferFailed as error:
            events.append(
                Copied(xid=action.xid, piece=data.piece, rank=data.rank, error=str(error), code="transfer")
            )  # fmt: skip
        else:
            self._reach.watch(backend, number, action.peer, action)

    def _report(self, token: ReadIn, error: str) -> DecodeEvent:
        if not error:
            return self._check_in(token, 0.0)
        return Copied(xid=token.xid, piece=token.data.piece, rank=token.data.rank, error=error, code="transfer")

    def _lost(self, peer: str, error: str, out: list[DecodeResult]) -> None:
        """A read of ours may still fill our pages: end everything that anybody began on them, then greet anew."""
        attached = self._peers.get(peer)
        if attached is None:
            return
        self._reach.fence(peer, attached.backend, self._fences.get(peer, 0))
        for other in [other for other, at in self._peers.items() if at.backend == attached.backend]:
            self._give_up(other, error, out)

    def _fence(self, action: FencePeer) -> PeerFenced:
        everybody, endpoints = self._reach.fence(action.peer, action.backend, self._fences.pop(action.peer, 0))
        return PeerFenced(peer=action.peer, everybody=everybody, endpoints=endpoints)


def _is_of(xid: str, read: ReadIn) -> bool:
    return read.xid == xid
