"""The prefill side's border: posts what its machine says, has its ranks stage pages, and tells it what they answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from serinus.core.clock import Clock
from serinus.core.errors import TransferFailed
from serinus.core.ids import new_xid
from serinus.pd.actions import (
    AbortPrefill,
    AddPrefill,
    AttachPeer,
    ClosePeer,
    ForgetPrefill,
    OfferPiece,
    PeerChanged,
    PrefillDrained,
    ReleaseChunk,
    Send,
    StagePiece,
    StopPrefill,
    Unstage,
    WritePiece,
)
from serinus.pd.backends import OneSided
from serinus.pd.crew import Crew
from serinus.pd.events import PieceWritten, PrefillEvent
from serinus.pd.integrity import digest_stored
from serinus.pd.orders import HandAnswer, PagesFilled
from serinus.pd.ports import AnyBackend, Port
from serinus.pd.prefill import PrefillSide
from serinus.pd.settings import PdSettings
from serinus.pd.stores import StoresOf
from serinus.wire import Post

__all__ = ["PrefillPort", "PrefillResult"]

PrefillResult: TypeAlias = (
    AddPrefill | StopPrefill | ForgetPrefill | AbortPrefill | PrefillDrained | ReleaseChunk | PeerChanged
)
"""What a prefill engine must act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write under way."""

    action: WritePiece
    digests: bytes
    byte_count: int


class PrefillPort(Port[PrefillEvent, PrefillResult, _Write]):
    """The prefill side of one engine; events: ChunkReady, EndPrefill, Squeeze, Drain, Shutdown."""

    machine: PrefillSide

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], clock: Clock,
        store: StoresOf | None = None, crew: Crew | None = None,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """Takes the post over; its channel must accept connections. Raises ConfigError where things disagree."""
        super().__init__(
            settings, post=post, backends=backends, clock=clock, store=store, crew=crew,
            follower_backends=follower_backends, mint=mint,
        )  # fmt: skip
        self.machine = PrefillSide(self.settings, mint=mint)

    @property
    def staged_count(self) -> int:
        """Pieces staged and not yet taken, over all peers and ranks."""
        return sum(len(client.staged) for client in self.machine.clients)

    def _perform(self, event: PrefillEvent, events: deque[PrefillEvent], out: list[PrefillResult]) -> None:
        for action in self.machine.handle(event, self._clock.now()):
            match action:
                case Send():
                    self._post.send(action.peer, action.message, action.payload)
                case StagePiece() | OfferPiece() | Unstage():
                    self._crew.order(action.rank, action)
                case WritePiece():
                    self._write(action, events)
                case AttachPeer():
                    events.extend(self._attach(action))
                case ClosePeer():
                    self._leave(action.peer)
                    self._post.disconnect(action.peer)
                case _:
                    out.append(action)

    def _answered(self, answer: HandAnswer) -> PrefillEvent | None:
        assert not isinstance(answer, PagesFilled), "pd: a PagesFilled at prefill, expected PieceStaged or StageFull"
        return answer

    # ---- one-sided backends -----------------------------------------------------------------------------------------

    def _write(self, action: WritePiece, events: deque[PrefillEvent]) -> None:
        store = self._pool().at(action.rank, action.part)
        digests = digest_stored(store, action.pages, action.digest_seed)
        write = _Write(action=action, digests=digests, byte_count=len(action.pages) * store.page_bytes)
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
