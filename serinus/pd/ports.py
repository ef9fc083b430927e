"""The border between the pure machines and the world: posts messages, moves pages, hands the rest to the engine.

One port per engine and role. Everything happens in the caller's thread, inside `poll` and `handle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, DigestMismatch, TransferFailed
from serinus.core.ids import new_xid
from serinus.core.parts import Part
from serinus.pd.actions import (
    AbortPrefill,
    AddPrefill,
    AttachPeer,
    CancelReads,
    CheckIn,
    ClosePeer,
    CopyIn,
    FencePeer,
    ForgetPrefill,
    Landed,
    OfferPiece,
    OpenPeer,
    PeerChanged,
    PrefillDrained,
    Quarantine,
    QuarantineOver,
    ReadIn,
    Recompute,
    ReleaseChunk,
    Send,
    StagePiece,
    StopPrefill,
    Unstage,
    WritePiece,
)
from serinus.pd.backends import Backend, OneSided, OpState, Receiver, Sender
from serinus.pd.decode import DecodeSide
from serinus.pd.events import (
    Copied,
    DecodeEvent,
    PeerFenced,
    PeerLost,
    PieceStaged,
    PieceWritten,
    PrefillEvent,
    Received,
    StageFull,
    Tick,
)
from serinus.pd.integrity import check_pages, digest_pages
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.prefill import PrefillSide
from serinus.pd.pulse import Pace
from serinus.pd.reach import Reach
from serinus.pd.settings import PdSettings
from serinus.pd.stores import Intake, Stores, StoresOf
from serinus.wire import Letter, Post

__all__ = ["MOVING_S", "TICK_S", "AnyBackend", "DecodePort", "DecodeResult", "PrefillPort", "PrefillResult"]

TICK_S = 0.25
"""An idle loop polls at least this often."""
MOVING_S = 0.001
"""...and this often while operations of a one-sided backend are under way: nothing wakes it when they end."""

AnyBackend: TypeAlias = Backend | OneSided
DecodeResult: TypeAlias = Landed | Recompute | Quarantine | QuarantineOver | PeerChanged
"""What a decode engine must act on."""
PrefillResult: TypeAlias = (
    AddPrefill | StopPrefill | ForgetPrefill | AbortPrefill | PrefillDrained | ReleaseChunk | PeerChanged
)
"""What a prefill engine must act on."""

Event = TypeVar("Event")
Result = TypeVar("Result")
Token = TypeVar("Token")


class _Port(ABC, Generic[Event, Result, Token]):
    """What both ports do alike: take letters in turn, tell the machine the time, watch operations, count."""

    machine: DecodeSide | PrefillSide

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], store: StoresOf, clock: Clock,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """`store`: see StoresOf; `follower_backends`: those of ranks 1, 2..., where one-sided ones are used; `mint`:
        names and nonces, never the same twice."""
        _check(settings, backends)
        self._post = post
        self._backends: dict[str, Backend] = {b.name: b for b in backends if _moves_frames(b)}  # type: ignore[misc]
        self._stores = Stores(RankLayout(settings.layout), store)
        one_sided = [{b.name: b for b in backends if not _moves_frames(b)}]
        one_sided.extend({b.name: b for b in others} for others in follower_backends)
        self._reach: Reach[Token] = Reach(one_sided if one_sided[0] else [])  # type: ignore[arg-type]
        self._reach.register(self._stores)
        self.settings = replace(settings, endpoints={**settings.endpoints, **self._reach.endpoints})
        self._mint = mint
        self._clock = clock
        self._pace = Pace()
        self._ticked_at = -1.0
        self._peers: dict[str, AttachPeer] = {}

    def poll(self, timeout_s: float, *, load: int = 0, turn: int = 0) -> list[Result]:
        """Wait up to timeout_s for news (0 = do not wait), deal with it, and return what the engine must act on.

        `load`, `turn`: see events.Tick. Pages that came are copied in here: that is the time it takes.
        """
        out: list[Result] = []
        self._pace.look(self._clock.now())
        for item in self._post.poll(min(timeout_s, MOVING_S) if self._reach.is_busy else timeout_s):
            if isinstance(item, Letter):
                event: Received | PeerLost = Received(
                    peer=item.peer, incarnation=item.incarnation, message=item.message, payload=item.payload
                )
            else:
                self._leave(item.peer)
                event = PeerLost(peer=item.peer, reason=item.reason)
            self._run(event, out)
        if self._reach.is_busy:
            self._reap(out)
        now = self._clock.now()
        if now - self._ticked_at >= TICK_S / 2:
            self._ticked_at = now
            self._run(Tick(load=load, turn=turn, step_s=self._pace.longest_s), out)
        self._post.flush()
        return out

    def handle(self, event: Event) -> list[Result]:
        """Give the machine an event of the engine; chunks that were computed are copied out here."""
        out: list[Result] = []
        self._run(event, out)
        return out

    @property
    def rejects(self) -> Counter[str]:
        """Frames refused and messages dropped without effect, by reason."""
        return self._post.rejects + self.machine.rejects

    @property
    def resent_count(self) -> int:
        """Frames that were sent again."""
        return self._post.resent_count

    @property
    def is_moving(self) -> bool:
        """Whether operations are under way whose end wakes nobody: poll again within MOVING_S."""
        return self._reach.is_busy

    def close(self) -> None:
        """End all connections; give Shutdown first, so that the peers hear of it."""
        for peer in [*self._peers, *self._held()]:
            self._leave(peer)
        self._post.close()
        self._reach.close()

    def _reap(self, out: list[Result]) -> None:
        """Operations that are over are reported. Where one was lost its peer is given up first: decode fences then, and
        holds its pages until that is done, so whatever still moves harms nobody."""
        for item in self._reach.poll():
            if item.result.state is OpState.LOST:
                self._lost(item.peer, item.result.error, out)
            error = "" if item.result.state is OpState.DONE else item.result.error or "it failed"
            self._run(self._report(item.token, error), out)

    def _lost(self, peer: str, error: str, out: list[Result]) -> None:
        if peer in self._peers:
            self._give_up(peer, error, out)

    def _give_up(self, peer: str, reason: str, out: list[Result]) -> None:
        self._leave(peer)
        self._post.disconnect(peer)
        self._run(PeerLost(peer=peer, reason=reason), out)

    def _attach(self, action: AttachPeer) -> tuple[PeerLost, ...]:
        """Join the data backend of a peer; where that fails the peer is given up, and said to be lost."""
        self._peers[action.peer] = action
        if action.backend in self._backends:
            return ()
        try:
            self._reach.join(action.peer, action.backend, action.endpoints)
        except TransferFailed as error:
            self._leave(action.peer)
            self._post.disconnect(action.peer)
            return (PeerLost(peer=action.peer, reason=str(error)),)
        return ()

    def _leave(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            self._reach.leave(peer)
        self._let_go(peer)

    @abstractmethod
    def _report(self, token: Token, error: str) -> Event:
        """The event that says that an operation is over."""

    @abstractmethod
    def _run(self, event: Event | Received | PeerLost | Tick, out: list[Result]) -> None:
        """Give one event to the machine and perform what it asks."""

    @abstractmethod
    def _held(self) -> list[str]:
        """Peers for which memory is held."""

    @abstractmethod
    def _let_go(self, peer: str) -> None:
        """Give it back."""


class DecodePort(_Port[DecodeEvent, DecodeResult, ReadIn]):
    """The decode side of one engine; events: PrepareHandoff, StartHandoff, CancelHandoff, WantPeer, Shutdown."""

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], store: StoresOf, clock: Clock,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """Takes the post over. Raises ConfigError where settings, backends and store disagree."""
        super().__init__(
            settings, post=post, backends=backends, store=store, clock=clock, follower_backends=follower_backends,
            mint=mint,
        )  # fmt: skip
        self.machine: DecodeSide = DecodeSide(self.settings, mint_xid=mint)
        self._receivers: dict[str, Receiver] = {}
        self._intakes: dict[str, Intake] = {}
        self._fences: dict[str, int] = {}
        """Ranks of peers that may have to be cut off."""

    def _run(self, event: DecodeEvent, out: list[DecodeResult]) -> None:
        events: deque[DecodeEvent] = deque((event,))
        while events:
            for action in self.machine.handle(events.popleft(), self._clock.now()):
                match action:
                    case Send():
                        self._post.send(action.peer, action.message, action.payload)
                    case CopyIn():
                        events.appendleft(self._copy_in(action))
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
                        source = RankLayout(action.layout)
                        self._intakes[action.peer] = Intake(source, self._stores)
                        self._fences[action.peer] = len(source.shards)
                        events.extend(self._attach(action))
                    case ClosePeer():
                        self._leave(action.peer)
                        self._post.disconnect(action.peer)
                    case Landed() | Recompute() | Quarantine() | QuarantineOver() | PeerChanged():
                        out.append(action)

    def _copy_in(self, action: CopyIn) -> Copied:
        """Copy first, then digest the source: bytes that changed under our hands cannot pass."""
        start = self._clock.now()
        data, error, code = action.data, "", ""
        try:
            found = self._receiver(action.peer).fetch(data, action.payload)
            intake = self._intakes[action.peer]
            rows = intake.rows_of(data, found)
            intake.fill(data, rows, action.pages, action.target_first)
            check_pages(rows, action.digest_seed, data.digests, data.first)
        except DigestMismatch as mismatch:
            error, code = str(mismatch), "digest"
        except TransferFailed as failed:
            error, code = str(failed), "transfer"
        seconds = self._clock.now() - start
        return Copied(xid=action.xid, piece=data.piece, rank=data.rank, seconds=seconds, error=error, code=code)

    def _check_in(self, action: CheckIn | ReadIn, seconds: float) -> Copied:
        """What somebody else put into our pages is what was sent, or not. Layouts are equal here."""
        start = self._clock.now()
        data, error = action.data, ""
        try:
            rows = self._stores.read(data.rank, Part(data.part), action.pages)
            check_pages(rows, action.digest_seed, data.digests, data.first)
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

    def _receiver(self, peer: str) -> Receiver:
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = self._receivers[peer] = self._backends[self._peers[peer].backend].receiver()
        return receiver

    def _held(self) -> list[str]:
        return list(self._receivers)

    def _let_go(self, peer: str) -> None:
        self._intakes.pop(peer, None)
        receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            receiver.close()


@dataclass(slots=True, kw_only=True)
class _Dock:
    """What is staged for one peer."""

    sender: Sender
    keys: dict[tuple[str, int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write under way."""

    action: WritePiece
    digests: bytes
    byte_count: int


class PrefillPort(_Port[PrefillEvent, PrefillResult, _Write]):
    """The prefill side of one engine; events: ChunkReady, EndPrefill, Drain, Shutdown."""

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], store: StoresOf, clock: Clock,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """Takes the post over; its channel must accept connections. Raises ConfigError where things disagree."""
        super().__init__(
            settings, post=post, backends=backends, store=store, clock=clock, follower_backends=follower_backends,
            mint=mint,
        )  # fmt: skip
        self.machine: PrefillSide = PrefillSide(self.settings, mint=mint)
        self._docks: dict[str, _Dock] = {}

    @property
    def staged_count(self) -> int:
        """Pieces staged and not yet taken, over all peers and ranks."""
        return sum(len(dock.keys) for dock in self._docks.values())

    def _run(self, event: PrefillEvent, out: list[PrefillResult]) -> None:
        events: deque[PrefillEvent] = deque((event,))
        while events:
            for action in self.machine.handle(events.popleft(), self._clock.now()):
                match action:
                    case Send():
                        self._post.send(action.peer, action.message, action.payload)
                    case StagePiece():
                        events.append(self._stage(action))
                    case OfferPiece():
                        events.append(self._offer(action))
                    case WritePiece():
                        self._write(action, events)
                    case Unstage():
                        self._unstage(action)
                    case AttachPeer():
                        events.extend(self._attach(action))
                    case ClosePeer():
                        self._leave(action.peer)
                        self._post.disconnect(action.peer)
                    case _:
                        out.append(action)

    def _stage(self, action: StagePiece) -> PieceStaged | StageFull:
        dock = self._docks.get(action.peer)
        if dock is None:
            dock = self._docks[action.peer] = _Dock(sender=self._backends[action.backend].sender())
        store = self._stores.at(action.rank, action.part)
        size = store.page_bytes
        staged = dock.sender.stage(len(action.pages) * size)
        if staged is None:
            return StageFull(peer=action.peer, xid=action.xid, piece=action.piece, rank=action.rank)
        dock.keys[action.xid, action.piece, action.rank] = staged.key
        rows = staged.room.reshape(len(action.pages), size)
        store.read_pages(action.pages, rows)
        return PieceStaged(
            peer=action.peer,
            xid=action.xid,
            piece=action.piece,
            rank=action.rank,
            digests=digest_pages(rows, action.digest_seed),
            byte_count=staged.room.nbytes,
            payload=staged.room.data if staged.inline else b"",
            shm_name=staged.shm_name,
            shm_offset=staged.shm_offset,
        )

    def _offer(self, action: OfferPiece) -> PieceStaged:
        rows = self._stores.read(action.rank, action.part, action.pages)
        return PieceStaged(
            peer=action.peer, xid=action.xid, piece=action.piece, rank=action.rank,
            digests=digest_pages(rows, action.digest_seed), byte_count=rows.nbytes,
        )  # fmt: skip

    def _write(self, action: WritePiece, events: deque[PrefillEvent]) -> None:
        rows = self._stores.read(action.rank, action.part, action.pages)
        write = _Write(action=action, digests=digest_pages(rows, action.digest_seed), byte_count=rows.nbytes)
        backend = self._reach.at(action.rank, action.backend)
        try:
            number = backend.write(f"{action.peer}/{action.rank}", action.part, action.pages, action.targets)
        except TransferFailed as error:
            events.append(self._report(write, str(error)))
        else:
            self._reach.watch(backend, number, action.peer, write)

    def _report(self, token: _Write, error: str) -> PrefillEvent:
        action = token.action
        return PieceWritten(
            peer=action.peer, xid=action.xid, piece=action.piece, rank=action.rank, digests=token.digests,
            byte_count=token.byte_count, error=error,
        )  # fmt: skip

    def _unstage(self, action: Unstage) -> None:
        dock = self._docks.get(action.peer)
        if dock is not None:
            dock.sender.release(dock.keys.pop((action.xid, action.piece, action.rank)))

    def _held(self) -> list[str]:
        return list(self._docks)

    def _let_go(self, peer: str) -> None:
        dock = self._docks.pop(peer, None)
        if dock is not None:
            dock.sender.close()


def _is_of(xid: str, read: ReadIn) -> bool:
    return read.xid == xid


def _moves_frames(backend: AnyBackend) -> bool:
    return backend.capabilities.mode is Mode.RECEIVER_CHECKED


def _check(settings: PdSettings, backends: Sequence[AnyBackend]) -> None:
    names = tuple(backend.name for backend in backends)
    if names != settings.backends:
        raise ConfigError(f"pd: settings name the backends {settings.backends}, expected {names}, those given")
    for backend in backends:
        said = settings.capabilities_of(backend.name)
        if said != backend.capabilities:
            raise ConfigError(f"pd: settings say {said} of {backend.name}, expected {backend.capabilities}")
