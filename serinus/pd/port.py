"""HandoffPort: the border between a handoff machine and its engine. It owns no socket, no clock and no thread.

Messages and lost connections of peers come in as data; what is to be told to peers is collected until the caller takes
it (`take_outgoing`). Commands about pages go down the leader's line to the ranks, their answers come back to the
machine; everything else that the machine asks for is for the engine, and is returned. One per engine, on the leader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from serinus.core.errors import ConfigError
from serinus.core.handoff import HandoffFinding
from serinus.core.ids import new_xid
from serinus.core.line import CommandLine
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
from serinus.pd.backends import AnyBackend
from serinus.pd.events import PeerFenced, Tick
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.page_worker import PAGE_ANSWERS, PageAnswer, one_sided_backends
from serinus.pd.pages import (
    DigestPiece,
    HandoffOver,
    MemoryShared,
    MovePiece,
    PagesGranted,
    PeerUnreachable,
    PieceDigested,
    PieceMoved,
    PieceStatus,
    RankFenced,
    ShareMemory,
    TakeIn,
    TakenIn,
    Unstage,
)
from serinus.pd.pulse import Pace
from serinus.pd.settings import HandoffSettings
from serinus.wire import Gone, PeerMessage

TICK_S = 0.25
"""An idle loop takes a turn at least this often."""
MOVING_S = 0.001
"""...and this often while the own rank's one-sided operations are under way: no message tells when they end."""
GATHER_S = 0.0002
"""...and this often where they take less than that (Capabilities.whole_chunks)."""

OFFENCES = frozenset({"bad_data", "repeated_grant", "repeated_xid", "second_hello", "unexpected", "wrong_peer"})
"""Reasons for which a machine drops a message that a peer which keeps to the protocol never sends, however late."""
OFFENCES_MAX = 8
"""A peer that sends so many over one connection is given up."""

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


M = TypeVar("M", bound=Machine)


class HandoffPort(Generic[M]):
    """The port of one engine; `machine` is its DecodeSide or PrefillSide."""

    def __init__(
        self, machine: Callable[..., M], settings: HandoffSettings, *, line: CommandLine,
        backends: Sequence[AnyBackend], mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """
        Args:
            machine: DecodeSide or PrefillSide.
            line: to the page workers of all ranks (page_worker.py); it subscribes to their answers. Where a backend is
                one-sided, it waits here until all ranks have said how their memory is reached.
            backends: those of the leader's own page worker.
            mint: names and nonces, never the same twice.
        Raises ConfigError: settings, backends and line disagree; and what the line's `pump` raises.
        """
        _check(settings, backends)
        layout = RankLayout(settings.layout)
        if line.size != len(layout.shards):
            raise ConfigError(f"pd: a line of {line.size} ranks, the layout has {len(layout.shards)}")
        self._line = line
        self._answers: list[tuple[int, PageAnswer]] = []
        """Of ranks, not yet reported to the machine."""
        self._unsent = False
        """Commands were given since the last pump."""
        self._own_pieces = 0
        """Pieces that the leader's own rank is to stage or digest, not reported yet: it obeys in this thread."""
        self._own_moves: set[tuple[str, int, int]] = set()
        """One-sided operations of the leader's own rank that were asked for and not reported."""
        self._fences: dict[str, dict[int, RankFenced]] = {}
        """By peer: what ranks have answered to its FencePeer."""
        for answer_type in PAGE_ANSWERS:
            line.subscribe(answer_type, self._take)
        one_sided = one_sided_backends(backends)
        self._endpoints = self._share() if one_sided else {}
        self._moving_s = min((GATHER_S if b.capabilities.whole_chunks else MOVING_S for b in one_sided), default=TICK_S)
        self.settings = replace(
            settings, endpoints={**settings.endpoints, **{name: tuple(own) for name, own in self._endpoints.items()}},
            refusals={backend.name: backend.refusal for backend in one_sided},
            holds={backend.name: backend.holds for backend in one_sided if backend.holds is not None},
        )  # fmt: skip
        self.machine = machine(self.settings, mint=mint)
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
        has pieces to stage or digest and peers are to be told something: they hear of one piece while the next is
        staged, or it is digested, which is done when the caller flushes the line.

        Returns what the engine must act on. Raises as CommandLine.pump.
        """
        out: list[Any] = []
        if self._unsent and not (self._own_pieces and self._outgoing):
            self._pump(now, out)
        return out

    @property
    def is_staging(self) -> bool:
        """The own rank has pieces to stage or digest before the next step: end the turn without one, deliver, flush
        the line."""
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
        return self._moving_s if self._own_moves else TICK_S

    def close(self) -> None:
        """Give everything back; hand in Shutdown before, so that the peers hear of it."""
        for peer in list(self._peers):
            self._detach(peer)

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _share(self) -> dict[str, list[bytes]]:
        """How the memory of all ranks is reached, by backend. Raises what the line's `pump` raises."""
        self._line.command(ShareMemory())
        shared: dict[int, MemoryShared] = {}
        while len(shared) < self._line.size:
            self._line.pump(TICK_S)
            shared |= {rank: answer for rank, answer in self._answers if isinstance(answer, MemoryShared)}
            self._answers.clear()
        return {name: [shared[rank].endpoints[name] for rank in sorted(shared)] for name in shared[0].endpoints}

    def _command(self, command: object, rank: int | None) -> None:
        if rank == 0 and isinstance(command, (MovePiece, TakeIn)) and (move := _beside_the_line(command)):
            self._own_moves.add(move)
        else:
            self._own_pieces += rank == 0 and isinstance(command, (MovePiece, DigestPiece))
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
            match answer:
                case PeerUnreachable():
                    self._give_up(answer.peer, answer.reason, now, out)
                case RankFenced():
                    self._fenced(rank, answer, now, out)
                case PieceMoved() | TakenIn():
                    source = answer.source if isinstance(answer, TakenIn) else _OUT
                    if not rank and (move := (answer.xid, answer.piece, source)) in self._own_moves:
                        self._own_moves.remove(move)
                    else:
                        self._own_pieces -= not rank and isinstance(answer, PieceMoved)
                    if isinstance(answer, PieceMoved) and answer.status is PieceStatus.LOST:
                        # Given up first: decode fences then, and holds its pages until that is done, so whatever of it
                        # still lands harms no other request.
                        self._give_up(answer.peer, answer.reason, now, out)
                    self._run(answer, now, out)
                case _:
                    self._own_pieces -= not rank and isinstance(answer, PieceDigested)
                    self._run(answer, now, out)

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _run(self, event: object, now: float, out: list[Any]) -> None:
        """Give one event to the machine, perform what it asks."""
        actions = self.machine.handle(event, now)
        if self.tap is not None:
            self.tap(event, actions, now)
        for action in actions:
            self._perform(action, out)

    def _perform(self, action: Any, out: list[Any]) -> None:
        match action:
            case Send() | OpenPeer():
                self._outgoing.append(action)
            case ClosePeer():
                self._detach(action.peer)
                self._outgoing.append(action)
            case MovePiece() | DigestPiece() | TakeIn() | Unstage():
                self._command(action, action.rank)
            case PagesGranted() | CancelReads() | FencePeer():
                self._command(action, None)
            case HandoffOver():
                if action.peer in self._peers:
                    self._command(action, None)
            case AttachPeer():
                self._peers[action.peer] = action
                self._outgoing.append(action)
                self._command(action, None)
            case _:
                out.append(action)

    def _detach(self, peer: str) -> None:
        """Every rank gives back what it has for the peer, once it has done what it was told before."""
        self._blamed.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._command(ClosePeer(peer=peer), None)

    def _give_up(self, peer: str, reason: str, now: float, out: list[Any]) -> None:
        if peer not in self._peers:
            return
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
        if self._blamed[peer] >= OFFENCES_MAX:
            self._give_up(peer, f"pd: {OFFENCES_MAX} messages that make no sense", now, out)

    def _fenced(self, rank: int, answer: RankFenced, now: float, out: list[Any]) -> None:
        """The machine hears of it when all ranks have cut the peer off."""
        ranks = self._fences.setdefault(answer.peer, {})
        ranks[rank] = answer
        if len(ranks) < self._line.size:
            return
        del self._fences[answer.peer]
        own, all_peers = self._endpoints[answer.backend], any(each.all_peers for each in ranks.values())
        for number, each in ranks.items():
            own[number] = each.endpoint or own[number]
        endpoints = tuple(own) if all_peers else None
        self._run(PeerFenced(peer=answer.peer, all_peers=all_peers, endpoints=endpoints), now, out)


_OUT: Final = -1
"""In place of a source rank: a write of our own."""


def _beside_the_line(command: MovePiece | TakeIn) -> tuple[str, int, int] | None:
    """Names what a rank begins with this command and answers when it is over; None = it answers at once."""
    if isinstance(command, TakeIn):
        return (command.xid, command.piece, command.source) if command.mode is Mode.PULL else None
    return (command.xid, command.piece, _OUT) if command.mode is Mode.PUSH else None


def _check(settings: HandoffSettings, backends: Sequence[AnyBackend]) -> None:
    names = tuple(backend.name for backend in backends)
    if names != settings.backends:
        raise ConfigError(f"pd: settings name the backends {settings.backends}, expected {names}, those given")
    for backend in backends:
        said = settings.capabilities_of(backend.name)
        if said != backend.capabilities:
            raise ConfigError(f"pd: settings say {said} of {backend.name}, expected {backend.capabilities}")
