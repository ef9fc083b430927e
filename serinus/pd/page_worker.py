"""The page worker of a rank: obeys the commands of handoffs (pages.py) with the rank's own pages, and answers.

One stands at every rank, the leader's included. It decides nothing and knows neither machines nor messages. Where bytes
are staged it answers at once; what a one-sided backend does goes on beside the line from the command on, and is
answered when it is over (`answers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, DigestMismatch, InvariantError, TransferFailed
from serinus.core.parts import PageStore, Part
from serinus.pd.actions import AttachPeer, CancelReads, ClosePeer, FencePeer
from serinus.pd.backends import AnyBackend, Backend, OneSided, OpResult, OpState, Receiver, Sender
from serinus.pd.integrity import check_digests, copy_in, copy_out, digest_stored, take
from serinus.pd.layout import RankLayout, is_same
from serinus.pd.modes import Mode
from serinus.pd.one_sided_ops import OneSidedOps
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
    no_bytes,
)
from serinus.pd.staged_reads import STAGING_BYTES, StagedRead, StagedReads
from serinus.pd.stores import Intake, Outlet, check_stores

PageCommand: TypeAlias = (
    AttachPeer | ClosePeer | MovePiece | DigestPiece | Unstage | PagesGranted | TakeIn | HandoffOver | ShareMemory
    | CancelReads | FencePeer
)  # fmt: skip
PageAnswer: TypeAlias = PieceMoved | PieceDigested | TakenIn | MemoryShared | PeerUnreachable | RankFenced
PAGE_COMMANDS: Final[tuple[type, ...]] = get_args(PageCommand)
"""Types that a page worker obeys."""
PAGE_ANSWERS: Final[tuple[type, ...]] = get_args(PageAnswer)
"""What it answers; which to what is in pages.py."""


@dataclass(slots=True, kw_only=True)
class _Attached:
    """One peer: what is staged here for it, and how its pages are taken in."""

    peer: AttachPeer
    sender: Sender | None = None
    staged: dict[tuple[str, int], int] = field(default_factory=dict)
    """Keys of the sender, by handoff and piece."""
    receiver: Receiver | None = None
    intake: Intake | None = None
    outlet: Outlet | None = None
    """Its ranks read slices of own pages."""


class PageWorker:
    """One rank's stores, and the bytes it stages or maps for peers. Single-threaded; `obey` never waits."""

    def __init__(
        self, rank: int, *, layout: RankLayout, stores: Mapping[Part, PageStore], backends: Sequence[AnyBackend],
        clock: Clock, staging_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        """`layout`: of the whole engine; `stores`: of this rank; `backends`: this rank's own; `staging_bytes`: for
        pages that are read to be cut.

        Raises ConfigError: the stores are not those of the layout.
        """
        check_stores(layout, rank, stores)
        self.rank = rank
        self._layout = layout
        self._stores = stores
        self._backends = {backend.name: backend for backend in frame_backends(backends)}
        self._ops: OneSidedOps[PieceMoved | TakeIn | StagedRead] = OneSidedOps(one_sided_backends(backends))
        self._staged = StagedReads(staging_bytes)
        self._late: list[PageAnswer] = []
        """Of reads that ended without having begun."""
        self._clock = clock
        self._peers: dict[str, _Attached] = {}

    @property
    def staged_count(self) -> int:
        """Pieces staged here, over all peers."""
        return sum(len(attached.staged) for attached in self._peers.values())

    def obey(self, command: PageCommand) -> PageAnswer | None:
        """Do it now; the answer, where the command has one. Cost: that of the copying.

        Raises InvariantError: a command that no leader gives. What peers do wrong is in the answer.
        """
        match command:
            case MovePiece():
                return self._move(command)
            case DigestPiece():
                return self._digest(command)
            case PagesGranted():
                self._ops.granted(command)
            case TakeIn():
                return self._take_in(command)
            case Unstage():
                self._unstage(command)
            case AttachPeer():
                return self._attach(command)
            case ClosePeer():
                self._detach(command.peer)
            case ShareMemory():
                return MemoryShared(endpoints=self._ops.register(self._stores))
            case CancelReads():
                self._cancel(command.xid)
            case FencePeer():
                return self._ops.fence(command)
            case HandoffOver():
                self._staged.cancel(command.xid)
                attached = self._peers.get(command.peer)
                if attached is not None and attached.intake is not None:
                    attached.intake.forget(command.xid)
        return None

    @property
    def busy(self) -> bool:
        """Whether a one-sided operation is under way, or waits for room: its end is an answer."""
        return self._ops.is_busy or self._staged.is_waiting or bool(self._late)

    def answers(self) -> list[PageAnswer]:
        """Of operations that have ended since the last call. Never waits."""
        if not self.busy:
            return []
        ended = [self._ended(token, result) for token, result in self._ops.poll()]
        self._read_staged()
        late, self._late = self._late, []
        return [*ended, *late]

    def close(self) -> None:
        """Give back what is staged and mapped for all peers; then none reaches this rank's memory."""
        for peer in list(self._peers):
            self._detach(peer)
        self._ops.close()

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name)
        if backend is None:
            raise ConfigError(f"pd: rank {self.rank} has no backend {name!r}, expected one of {list(self._backends)}")
        return backend

    def _attach(self, command: AttachPeer) -> PeerUnreachable | None:
        attached = self._peers[command.peer] = _Attached(peer=command)
        if not self._ops.has(command.backend):
            return None
        theirs, slices = RankLayout(command.layout), self._ops.has_slices(command.backend)
        try:
            if command.sends:
                attached.intake = Intake(theirs, self._layout, self.rank, self._stores)
                self._ops.join(command, attached.intake.sources())
                if not attached.intake.is_same and not slices:
                    self._ops.lend(command.peer, self._staged.area)
            else:  # one that reads is not reached by us: what it named may have ended since, as after a failed read
                is_equal = is_same(self._layout, theirs)
                self._ops.join(command, (self.rank,) if is_equal and self._ops.writes(command.backend) else ())
                if slices and not is_equal:
                    attached.outlet = Outlet(self._layout, theirs, self.rank, self._stores)
        except TransferFailed as error:
            return PeerUnreachable(peer=command.peer, reason=str(error))
        return None

    def _detach(self, peer: str) -> None:
        self._ops.leave(peer)
        attached = self._peers.pop(peer, None)
        if attached is not None and attached.sender is not None:
            attached.sender.close()
        if attached is not None and attached.receiver is not None:
            attached.receiver.close()

    # ---- pages on their way out -------------------------------------------------------------------------------------

    def _move(self, command: MovePiece) -> PieceMoved | None:
        moved: dict[str, Any] = {"peer": command.peer, "xid": command.xid, "piece": command.piece, "rank": self.rank}
        attached, store = self._peers.get(command.peer), self._stores[command.part]
        size = store.page_bytes
        if attached is not None and attached.outlet is not None:
            digests = self._ops.slice_digests(command, attached.outlet.slices[command.part])
            digests, stamps = attached.outlet.with_stamps(command, digests)
            return PieceMoved(**moved, digests=digests, byte_count=len(command.pages) * size, payload=stamps)
        if command.mode is not Mode.RECEIVER_CHECKED:
            # The leader's own rank alone is sure to come to a DigestPiece before the next step.
            late = command.mode is Mode.PULL and not self.rank and self._ops.digests_beside(command.peer)
            digests = b"" if late else self._digests(command)
            there = PieceMoved(**moved, digests=digests, byte_count=len(command.pages) * size)
            return there if command.mode is Mode.PULL else self._write(command, there)
        if attached is None:
            reason = f"pd: {command.peer} is not attached to rank {self.rank}"
            return PieceMoved(**moved, status=PieceStatus.FAILED, reason=reason)
        try:
            if attached.sender is None:
                attached.sender = self._backend(attached.peer.backend).sender()
        except TransferFailed as error:
            return PieceMoved(**moved, status=PieceStatus.FAILED, reason=str(error))
        staged = attached.sender.stage(len(command.pages) * size)
        if staged is None:
            others = len(attached.staged)
            return PieceMoved(**moved, status=PieceStatus.FULL, others=others)
        attached.staged[command.xid, command.piece] = staged.key
        rows = staged.room.reshape(len(command.pages), size)
        return PieceMoved(
            **moved,
            digests=copy_out(store, command.pages, rows, command.digest_seed),
            byte_count=staged.room.nbytes,
            payload=staged.room if staged.inline else no_bytes(),
            shm_name=staged.shm_name,
            shm_offset=staged.shm_offset,
        )

    def _digest(self, command: DigestPiece) -> PieceDigested:
        return PieceDigested(
            peer=command.peer, xid=command.xid, piece=command.piece, rank=self.rank, digests=self._digests(command)
        )  # fmt: skip

    def _digests(self, command: MovePiece | DigestPiece) -> bytes:
        """Of whole pages, by the backend, or by their store."""
        stored = self._stores[command.part]
        return self._ops.digests(command) or digest_stored(stored, command.pages, command.digest_seed)

    def _write(self, command: MovePiece, written: PieceMoved) -> PieceMoved | None:
        """Begin to write a piece into the pages of the peer; `written`: the answer if that ends well."""
        try:
            self._ops.write(command, written)
        except TransferFailed as error:
            return replace(written, status=PieceStatus.FAILED, reason=str(error))
        return None

    def _unstage(self, command: Unstage) -> None:
        attached = self._peers.get(command.peer)
        if attached is None:
            return  # given back when the peer was closed
        key = attached.staged.pop((command.xid, command.piece), None)
        if key is None or attached.sender is None:
            raise InvariantError(
                f"pd: piece {command.piece} of {command.xid} is not staged at rank {self.rank}, expected it"
            )
        attached.sender.release(key)

    # ---- pages on their way in --------------------------------------------------------------------------------------

    def _take_in(self, command: TakeIn) -> TakenIn | None:
        if command.mode is not Mode.PULL:
            return self._taken(command, OpResult(state=OpState.DONE))
        attached, sliced = self._peers.get(command.peer), self._sliced(command)
        if attached is not None and attached.intake is not None and not (attached.intake.is_same or sliced):
            wrong = self._staged.add(command, len(command.sources) * attached.intake.page_bytes(command))
            self._read_staged()
            return self._taken(command, OpResult(state=OpState.FAILED, error=wrong)) if wrong else None
        try:
            if sliced is None:
                self._ops.read(command, command)
            else:
                self._ops.read_slice(command, sliced.begin_slice(command), command)
        except TransferFailed as error:
            return self._taken(command, OpResult(state=OpState.FAILED, error=str(error)))
        return None

    def _read_staged(self) -> None:
        """Begin with reads that find room; those that cannot begin are over."""
        while (read := self._staged.next()) is not None:
            error = "" if read.is_wanted else _UNWANTED
            try:
                if not error:
                    self._ops.read_rows(read, read)
                    continue
            except TransferFailed as failed:
                error = str(failed)
            self._staged.end(read)
            self._late.append(self._taken(read.command, OpResult(state=OpState.FAILED, error=error)))

    def _cancel(self, xid: str) -> None:
        self._staged.cancel(xid)
        self._ops.cancel(lambda token: not isinstance(token, PieceMoved) and _command(token).xid == xid)

    def _ended(self, token: PieceMoved | TakeIn | StagedRead, result: OpResult) -> PieceMoved | TakenIn:
        """The answer for an operation that is over. Raises InvariantError: a read may still write into own pages."""
        if isinstance(token, StagedRead):
            if not token.is_wanted:
                result = OpResult(state=OpState.FAILED, error=_UNWANTED)
            answer = self._taken(token.command, result, token.rows)
            self._staged.end(token)
            return answer
        if isinstance(token, TakeIn):
            if result.state is OpState.LOST:
                raise InvariantError(f"pd: a read from {token.peer} is lost ({result.error}), expected its end")
            return self._taken(token, result)
        if result.state is OpState.DONE:
            return token
        status = PieceStatus.LOST if result.state is OpState.LOST else PieceStatus.FAILED
        return replace(token, status=status, reason=result.error)

    def _taken(self, command: TakeIn, result: OpResult, rows: NDArray[np.uint8] | None = None) -> TakenIn:
        """Check what is in own pages, or is to be copied there; `result`: of the read, where there was one; `rows`:
        where it ended, if not in own pages."""
        start = self._clock.now()
        error, code, unchecked = "", "", b""
        try:
            if result.state is not OpState.DONE:
                raise TransferFailed(result.error or "the read failed")
            if command.mode is Mode.RECEIVER_CHECKED or rows is not None:
                self._fill(command, rows)
            else:
                stored = self._stores[command.part]
                found = result.digests or digest_stored(stored, command.pages, command.digest_seed)
                sliced = self._sliced(command)
                if command.mode is Mode.PULL and sliced is None and not command.digests:
                    unchecked = found
                else:
                    own = sliced.slice_digests(command, found) if sliced else found
                    check_digests(own, command.digests, command.first)
                if sliced is not None:
                    sliced.land_stamps(command)
        except DigestMismatch as mismatch:
            error, code = str(mismatch), "digest"
        except TransferFailed as failed:
            error, code = str(failed), "transfer"
        return TakenIn(
            xid=command.xid, piece=command.piece, source=command.source, rank=self.rank, error=error, code=code,
            seconds=result.seconds + self._clock.now() - start, digests=unchecked,
        )  # fmt: skip

    def _sliced(self, command: TakeIn) -> Intake | None:
        """What its pages are taken in by, where slices of them are read in place."""
        attached = self._peers.get(command.peer)
        if attached is None or attached.intake is None or attached.intake.is_same:
            return None
        return attached.intake if self._ops.has_slices(attached.peer.backend) else None

    def _fill(self, command: TakeIn, rows: NDArray[np.uint8] | None) -> None:
        """Copy source pages, from `rows` or where a receiver finds them, into own pages.

        What is digested is what was written, or is to be cut: bytes that change meanwhile cannot pass. Raises
        TransferFailed: the bytes are not there; DigestMismatch: they are not what was sent.
        """
        attached = self._peers.get(command.peer)
        if attached is None:
            raise TransferFailed(f"pd: {command.peer} was closed before its pages were taken in")
        if attached.intake is None:
            attached.intake = Intake(RankLayout(attached.peer.layout), self._layout, self.rank, self._stores)
        intake = attached.intake
        if rows is None:
            if attached.receiver is None:
                attached.receiver = self._backend(attached.peer.backend).receiver()
            rows = intake.rows_of(command, attached.receiver.fetch(command, command.payload.data))
        if intake.is_same:
            found = copy_in(self._stores[command.part], command.pages, rows, command.digest_seed)
            check_digests(found, command.digests, command.first)
        else:
            kept, found = take(rows, command.digest_seed)
            check_digests(found, command.digests, command.first)
            intake.fill(command, kept)


_UNWANTED: Final = "pd: the handoff is over"


def _command(token: TakeIn | StagedRead) -> TakeIn:
    return token.command if isinstance(token, StagedRead) else token


def frame_backends(backends: Sequence[AnyBackend]) -> list[Backend]:
    """Those whose bytes a page worker stages and takes in."""
    return [each for each in backends if each.capabilities.mode is Mode.RECEIVER_CHECKED]  # type: ignore[misc]


def one_sided_backends(backends: Sequence[AnyBackend]) -> list[OneSided]:
    """The others: they reach from pool to pool."""
    return [each for each in backends if each.capabilities.mode is not Mode.RECEIVER_CHECKED]  # type: ignore[misc]
