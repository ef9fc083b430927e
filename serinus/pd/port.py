"""HandoffPort: the border between a handoff machine and its engine. It owns no socket, no clock and no thread.

Messages and lost connections of peers come in as data; what is to be told to peers is collected until the caller takes
it (`take_outgoing`). Commands about pages go down the leader's line to the ranks, their answers come back to the
machine; everything else that the machine asks for is for the engine, and is returned. One-sided backends move bytes
without the ranks: the port starts their operations and looks when they end. One per engine, on the leader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.handoff import HandoffFinding
from serinus.core.ids import new_xid
from serinus.core.line import CommandLine
from serinus.core.parts import PageStore
from serinus.pd.actions import (
    AbortPrefill,
    AddPrefill,
    AttachPeer,
    CancelReads,
    ClosePeer,
    FencePeer,
    ForgetPrefill,
    Landed,
    OpenPeer,
    PeerAction,
    PeerChanged,
    PrefillDrained,
    Quarantine,
    QuarantineOver,
    Recompute,
    ReleaseChunk,
    Send,
    StopPrefill,
)
from serinus.pd.backends import Backend, OneSided, OpState
from serinus.pd.events import PeerFenced, Tick
from serinus.pd.integrity import digest_stored
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.one_sided_ops import Ended, OneSidedOps
from serinus.pd.page_worker import PageAnswer
from serinus.pd.pages import HandoffOver, MovePiece, PieceMoved, PieceStatus, TakeIn, TakenIn, Unstage
from serinus.pd.pulse import Pace
from serinus.pd.settings import HandoffSettings
from serinus.pd.stores import Stores, StoresOf
from serinus.wire import Gone, PeerMessage

__all__ = [
    "MOVING_S",
    "TICK_S",
    "AnyBackend",
    "DecodeResult",
    "HandoffPort",
    "Machine",
    "PrefillResult",
    "frame_backends",
]

TICK_S = 0.25
"""An idle loop takes a turn at least this often."""
MOVING_S = 0.001
"""...and this often while operations of a one-sided backend are under way: no message tells when they end."""
GATHER_S = 0.0002
"""...and this often where they take less than that (Capabilities.whole_chunks)."""

OFFENCES = frozenset({"bad_data", "repeated_grant", "repeated_xid", "second_hello", "unexpected", "wrong_peer"})
"""Reasons for which a machine drops a message that a peer which keeps to the protocol never sends, however late."""
OFFENCES_MAX = 8
"""A peer that sends so many over one connection is given up."""

AnyBackend: TypeAlias = Backend | OneSided

DecodeResult: TypeAlias = Landed | Recompute | Quarantine | QuarantineOver | PeerChanged | HandoffFinding
"""What a decode engine must act on."""
PrefillResult: TypeAlias = (
    AddPrefill
    | StopPrefill
    | ForgetPrefill
    | AbortPrefill
    | PrefillDrained
    | ReleaseChunk
    | PeerChanged
    | HandoffFinding
)
"""What a prefill engine must act on."""


class Machine(Protocol):
    """What a port needs of a DecodeSide or PrefillSide."""

    rejects: Counter[str]

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Take one event; returns what must be done, in order."""
        ...


M = TypeVar("M", bound=Machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write under way."""

    command: MovePiece
    moved: PieceMoved
    """What to report if it ends well."""


class HandoffPort(Generic[M]):
    """The port of one engine; `machine` is its DecodeSide or PrefillSide."""

    def __init__(
        self, machine: Callable[..., M], settings: HandoffSettings, *, line: CommandLine,
        backends: Sequence[AnyBackend], stores: StoresOf | None = None,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """
        Args:
            machine: DecodeSide or PrefillSide.
            line: to the page workers of all ranks (page_worker.py); it subscribes to their answers.
            stores: the pages of all ranks; only one-sided backends need them.
            follower_backends: one-sided backends of ranks 1, 2..., where one thread stands for all ranks.
            mint: names and nonces, never the same twice.
        Raises ConfigError: settings, backends, stores and line disagree.
        """
        _check(settings, backends)
        layout = RankLayout(settings.layout)
        if line.size != len(layout.shards):
            raise ConfigError(f"pd: a line of {line.size} ranks, the layout has {len(layout.shards)}")
        own = [{b.name: b for b in backends if not _moves_frames(b)}]
        own.extend({b.name: b for b in others} for others in follower_backends)
        if own[0] and stores is None:
            raise ConfigError(
                f"pd: backend {backends[0].name!r} reaches into pools from outside, which an engine of several ranks"
                " cannot allow; expected shm or tcp there"
            )
        self._ops: OneSidedOps[_Write | TakeIn] = OneSidedOps(own if own[0] else [])  # type: ignore[arg-type]
        self._stores = Stores(layout, stores) if own[0] and stores is not None else None
        if self._stores is not None:
            self._ops.register(self._stores)
        self.settings = replace(
            settings, endpoints={**settings.endpoints, **self._ops.endpoints}, refusals=self._ops.refusals
        )
        self.machine = machine(self.settings, mint=mint)
        self._line = line
        self._answers: list[tuple[int, PageAnswer]] = []
        """Of ranks, not yet reported to the machine."""
        self._unsent = False
        """Commands were given since the last pump."""
        self._own_pieces = 0
        """Pieces that the leader's own rank is to stage and that were not reported: it obeys in this thread."""
        for answer_type in (PieceMoved, TakenIn):
            line.subscribe(answer_type, self._take)
        self._outgoing: list[PeerAction] = []
        self._pace = Pace()
        self._ticked_at: float | None = None
        self._peers: dict[str, AttachPeer] = {}
        self._offences = 0
        self._blamed: Counter[str] = Counter()
        """Messages without sense, by peer."""
        self.tap: Callable[[object, Sequence[object], float], None] | None = None
        """Where it is set, it is told every event of the machine, what came of it, and when."""

    def turn(
        self, now: float, messages: Sequence[PeerMessage | Gone] = (), *, load: int = 0, turn: int = 0,
        queue_s: float = 0.0, token_s: float = 0.0,
    ) -> list[Any]:  # fmt: skip
        """Deal with what peers said and ranks answered; returns what the engine must act on, in order.

        Pump the line before, and flush it after `take_outgoing` was delivered. `load` to `token_s`: see events.Tick.
        Pages that came are copied in here on the leader's own rank: that is the time it takes. Raises what the line's
        `pump` raises.
        """
        out: list[Any] = []
        self._pace.look(now)
        for message in messages:  # before the answers: staging room that is given back is used again while it is cached
            if isinstance(message, Gone):
                self._detach(message.peer)
            rejected = self.machine.rejects.total()
            self._run(message, now, out)
            if self.machine.rejects.total() > rejected:
                self._blame(message.peer, now, out)
        self._report(now, out)
        if self._ops.is_busy:
            self._reap(now, out)
        if self._ticked_at is None or now - self._ticked_at >= TICK_S / 2:
            self._ticked_at = now
            step_s = self._pace.longest_s
            self._run(Tick(load=load, turn=turn, step_s=step_s, queue_s=queue_s, token_s=token_s), now, out)
        out.extend(self.settle(now))
        return out

    def handle(self, event: Any, now: float) -> list[Any]:
        """Give the machine an event of the engine (events.py); returns what the engine must act on, in order."""
        out: list[Any] = []
        self._run(event, now, out)
        return out

    def settle(self, now: float) -> list[Any]:
        """Have commands leave before those of a step, and deal with what is answered at once. Not where the own rank
        has pieces to stage and peers are to be told something: they hear of one piece while the next is staged, which
        is done when the caller flushes the line.

        Returns what the engine must act on. Raises as CommandLine.pump.
        """
        out: list[Any] = []
        if self._unsent and not (self._own_pieces and self._outgoing):
            self._pump(now, out)
        return out

    @property
    def is_staging(self) -> bool:
        """The own rank has pieces to stage before the next step: end the turn without one, deliver, flush the line."""
        return self._own_pieces > 0

    def take_outgoing(self) -> list[PeerAction]:
        """What is to be told to peers, or done about connections to them, since the last call, in order."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    @property
    def wait_s(self) -> float:
        """Take the next turn within this: TICK_S, or less where something is under way whose end wakes no one."""
        if self._unsent or self._own_pieces or self._answers:
            return 0.0
        return (GATHER_S if self._ops.is_fast else MOVING_S) if self._ops.is_busy else TICK_S

    def close(self) -> None:
        """Give everything back; hand in Shutdown before, so that the peers hear of it."""
        for peer in list(self._peers):
            self._detach(peer)
        self._ops.close()

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _command(self, command: object, rank: int | None) -> None:
        self._own_pieces += not rank and isinstance(command, MovePiece)
        self._unsent = True
        self._line.command(command, rank)

    def _take(self, rank: int, answer: PageAnswer) -> None:
        self._answers.append((rank, answer))

    def _pump(self, now: float, out: list[Any]) -> None:
        """Have commands leave, and report what was answered."""
        self._unsent = False
        self._line.pump()
        self._report(now, out)

    def _report(self, now: float, out: list[Any]) -> None:
        answers, self._answers = self._answers, []
        for rank, answer in answers:
            self._own_pieces -= not rank and isinstance(answer, PieceMoved)
            self._run(answer, now, out)

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _run(self, event: object, now: float, out: list[Any]) -> None:
        """Give one event to the machine, perform what it asks, and so on with what happens at once."""
        events = deque((event,))
        while events:
            actions = self.machine.handle(next_event := events.popleft(), now)
            if self.tap is not None:
                self.tap(next_event, actions, now)
            for action in actions:
                self._perform(action, events, out)

    def _perform(self, action: Any, events: deque[object], out: list[Any]) -> None:
        match action:
            case Send() | OpenPeer():
                self._outgoing.append(action)
            case ClosePeer():
                self._detach(action.peer)
                self._outgoing.append(action)
            case MovePiece(mode=Mode.PUSH):
                self._write(action, events)
            case TakeIn(mode=Mode.PULL):
                self._read(action, events)
            case MovePiece(mode=Mode.PULL):
                self._offer(action, events)
            case MovePiece() | TakeIn() | Unstage():
                self._command(action, action.rank)
            case HandoffOver():
                if action.peer in self._peers:
                    self._command(action, None)
            case AttachPeer():
                self._attach(action, events)
            case CancelReads():
                self._ops.cancel(partial(_is_of, action.xid))
            case FencePeer():
                all_peers, endpoints = self._ops.fence(action.peer, action.backend, action.ranks)
                events.append(PeerFenced(peer=action.peer, all_peers=all_peers, endpoints=endpoints))
            case _:
                out.append(action)

    def _attach(self, action: AttachPeer, events: deque[object]) -> None:
        """Join the data backend of a peer; where that fails the peer is given up, and reported as lost."""
        self._peers[action.peer] = action
        self._outgoing.append(action)
        self._command(action, None)
        if not self._ops.has(action.backend):
            return
        try:
            self._ops.join(action.peer, action.backend, action.endpoints)
        except TransferFailed as error:
            self._detach(action.peer)
            self._outgoing.append(ClosePeer(peer=action.peer))
            events.append(Gone(peer=action.peer, reason=str(error)))

    def _detach(self, peer: str) -> None:
        """Every rank gives back what it has for the peer, once it has done what it was told before."""
        self._blamed.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._ops.leave(peer)
            self._command(ClosePeer(peer=peer), None)

    def _give_up(self, peer: str, reason: str, now: float, out: list[Any]) -> None:
        self._detach(peer)
        self._outgoing.append(ClosePeer(peer=peer))
        self._run(Gone(peer=peer, reason=reason), now, out)

    def _blame(self, peer: str, now: float, out: list[Any]) -> None:
        """Something of it was rejected. Where every frame of it is sound, and their content is what no sound peer ever
        sends, it is given up after a few of them."""
        offences = sum(self.machine.rejects[reason] for reason in OFFENCES)
        if offences == self._offences:
            return
        self._offences = offences
        self._blamed[peer] += 1
        if self._blamed[peer] >= OFFENCES_MAX and peer in self._peers:
            self._give_up(peer, f"pd: {OFFENCES_MAX} messages that make no sense", now, out)

    # ---- one-sided backends -----------------------------------------------------------------------------------------

    def _store(self, command: MovePiece) -> PageStore:
        assert self._stores is not None, "pd: a one-sided backend without stores, expected a ConfigError at birth"
        return self._stores.at(command.rank, command.part)

    def _offer(self, command: MovePiece, events: deque[object]) -> None:
        """Digest a piece that the peer is to read: by the backend, or by the rank."""
        backend = self._ops.at(command.rank, self._peers[command.peer].backend)
        digests = backend.digests(command.part, command.pages, command.digest_seed)
        if digests is None:
            self._command(command, command.rank)
        else:
            events.append(_moved(command, self._store(command), digests))

    def _write(self, command: MovePiece, events: deque[object]) -> None:
        """Begin to write a piece into the pages of the peer."""
        store = self._store(command)
        moved = _moved(command, store, digest_stored(store, command.pages, command.digest_seed))
        write = _Write(command=command, moved=moved)
        backend = self._ops.at(command.rank, self._peers[command.peer].backend)
        try:
            number = backend.write(f"{command.peer}/{command.rank}", command.part, command.pages, command.targets)
        except TransferFailed as error:
            events.append(_failed(write, str(error)))
        else:
            self._ops.watch(backend, number, command.peer, write)

    def _read(self, command: TakeIn, events: deque[object]) -> None:
        """Begin to read the pages of a source rank; the own rank checks them when they are there."""
        backend = self._ops.at(command.source, self._peers[command.peer].backend)
        try:
            number = backend.read(
                f"{command.peer}/{command.source}", command.part, command.pages, command.sources, command.digest_seed
            )
        except TransferFailed as error:
            events.append(_failed(command, str(error)))
        else:
            self._ops.watch(backend, number, command.peer, command)

    def _reap(self, now: float, out: list[Any]) -> None:
        """Operations that are over are reported. Where one was lost its peer is given up first: decode fences then, and
        holds its pages until that is done, so whatever still moves harms no other request."""
        for item in self._ops.poll():
            if item.result.state is OpState.LOST:
                self._lost(item, now, out)
            if item.result.state is not OpState.DONE:
                self._run(_failed(item.token, item.result.error or "it failed"), now, out)
            elif isinstance(item.token, _Write):
                self._run(item.token.moved, now, out)
            else:
                read = replace(item.token, found=item.result.digests, read_seconds=item.result.seconds)
                self._command(read, read.rank)

    def _lost(self, item: Ended[_Write | TakeIn], now: float, out: list[Any]) -> None:
        """An operation may still move bytes. A write is a matter of its peer, which fences us; a read fills our own
        pages: everything that any peer began on them must end, then all are greeted anew."""
        attached = self._peers.get(item.peer)
        if attached is None:
            return
        lost = [item.peer]
        if isinstance(item.token, TakeIn):
            lost = [peer for peer, other in self._peers.items() if other.backend == attached.backend]
            for peer in lost:  # some backends cut off one peer alone
                other = self._peers[peer]
                all_peers, _ = self._ops.fence(peer, other.backend, len(RankLayout(other.layout).shards))
                if all_peers:
                    break
        for peer in lost:
            self._give_up(peer, item.result.error, now, out)


def frame_backends(backends: Sequence[AnyBackend]) -> list[Backend]:
    """Those whose bytes a page worker stages and takes in."""
    return [backend for backend in backends if _moves_frames(backend)]  # type: ignore[misc]


def _moved(command: MovePiece, store: PageStore, digests: bytes) -> PieceMoved:
    """The answer for a piece that can be read, or will have been written."""
    return PieceMoved(
        peer=command.peer, xid=command.xid, piece=command.piece, rank=command.rank, digests=digests,
        byte_count=len(command.pages) * store.page_bytes,
    )  # fmt: skip


def _failed(token: _Write | TakeIn, error: str) -> PageAnswer:
    """The answer for an operation that did not end well."""
    if isinstance(token, _Write):
        return replace(token.moved, status=PieceStatus.FAILED, reason=error)
    return TakenIn(
        xid=token.xid, piece=token.piece, source=token.source, rank=token.rank, error=error, code="transfer"
    )  # fmt: skip


def _is_of(xid: str, token: _Write | TakeIn) -> bool:
    return isinstance(token, TakeIn) and token.xid == xid


def _moves_frames(backend: AnyBackend) -> bool:
    return backend.capabilities.mode is Mode.RECEIVER_CHECKED


def _check(settings: HandoffSettings, backends: Sequence[AnyBackend]) -> None:
    names = tuple(backend.name for backend in backends)
    if names != settings.backends:
        raise ConfigError(f"pd: settings name the backends {settings.backends}, expected {names}, those given")
    for backend in backends:
        said = settings.capabilities_of(backend.name)
        if said != backend.capabilities:
            raise ConfigError(f"pd: settings say {said} of {backend.name}, expected {backend.capabilities}")
