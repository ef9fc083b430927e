"""A rank's hand in handoffs: obeys orders with the rank's own pages, and answers. Decides nothing.

It stands at every rank, the leader's included, and knows neither machines nor messages: only what orders.py says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, DigestMismatch, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.actions import HandoffOver, OfferPiece, StagePiece, Unstage
from serinus.pd.backends import Backend, Receiver, Sender
from serinus.pd.events import PieceStaged, StageFailed, StageFull, no_bytes
from serinus.pd.integrity import check_digests, copy_in, copy_out, digest_stored, take
from serinus.pd.layout import RankLayout
from serinus.pd.orders import FillPages, HandAnswer, HandOrder, JoinPeer, LeavePeer, PagesFilled
from serinus.pd.stores import Intake, PageStore, check_stores

__all__ = ["Hand"]


@dataclass(slots=True, kw_only=True)
class _Dock:
    """What is staged here for one peer."""

    sender: Sender
    keys: dict[tuple[str, int], int] = field(default_factory=dict)
    """By handoff and piece."""


@dataclass(slots=True, kw_only=True)
class _Source:
    """Where pages of one peer come from."""

    receiver: Receiver
    intake: Intake


class Hand:
    """One rank's stores, and the bytes it stages or maps for peers. Single-threaded; `obey` never waits."""

    def __init__(
        self, rank: int, *, layout: RankLayout, stores: Mapping[Part, PageStore], backends: Sequence[Backend],
        clock: Clock,
    ) -> None:  # fmt: skip
        """`layout`: of the whole engine; `stores`: of this rank; `backends`: those that move frames, as the leader's.

        Raises ConfigError where the stores are not those of the layout.
        """
        check_stores(layout, rank, stores)
        self.rank = rank
        self._layout = layout
        self._stores = stores
        self._backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._docks: dict[str, _Dock] = {}
        self._sources: dict[str, _Source] = {}

    @property
    def staged_count(self) -> int:
        """Pieces staged here, over all peers."""
        return sum(len(dock.keys) for dock in self._docks.values())

    def obey(self, order: HandOrder) -> HandAnswer | None:
        """Do it now; what there is to answer. Cost: that of the copying.

        Raises InvariantError for an order that no leader gives; what peers do wrong is in the answer.
        """
        match order:
            case StagePiece():
                return self._stage(order)
            case FillPages():
                return self._fill(order)
            case Unstage():
                self._unstage(order)
            case OfferPiece():
                return self._offer(order)
            case JoinPeer():
                receiver = self._backend(order.backend).receiver()
                self._sources[order.peer] = _Source(
                    receiver=receiver, intake=Intake(RankLayout(order.layout), self._layout, self.rank, self._stores)
                )
            case LeavePeer():
                self._leave(order.peer)
            case HandoffOver():
                source = self._sources.get(order.peer)
                if source is not None:
                    source.intake.forget(order.xid)
        return None

    def close(self) -> None:
        """Give everything back."""
        for peer in [*self._docks, *self._sources]:
            self._leave(peer)

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name)
        if backend is None:
            raise ConfigError(f"pd: rank {self.rank} has no backend {name!r}, expected one of {list(self._backends)}")
        return backend

    def _leave(self, peer: str) -> None:
        dock, source = self._docks.pop(peer, None), self._sources.pop(peer, None)
        if dock is not None:
            dock.sender.close()
        if source is not None:
            source.receiver.close()

    def _stage(self, order: StagePiece) -> PieceStaged | StageFull | StageFailed:
        dock = self._docks.get(order.peer)
        if dock is None:
            try:
                sender = self._backend(order.backend).sender()
            except TransferFailed as error:
                return StageFailed(
                    peer=order.peer, xid=order.xid, piece=order.piece, rank=self.rank, reason=str(error)
                )  # fmt: skip
            dock = self._docks[order.peer] = _Dock(sender=sender)
        store = self._stores[order.part]
        size = store.page_bytes
        staged = dock.sender.stage(len(order.pages) * size)
        if staged is None:
            return StageFull(
                peer=order.peer, xid=order.xid, piece=order.piece, rank=self.rank, others=len(dock.keys)
            )  # fmt: skip
        dock.keys[order.xid, order.piece] = staged.key
        rows = staged.room.reshape(len(order.pages), size)
        return PieceStaged(
            peer=order.peer,
            xid=order.xid,
            piece=order.piece,
            rank=self.rank,
            digests=copy_out(store, order.pages, rows, order.digest_seed),
            byte_count=staged.room.nbytes,
            payload=staged.room if staged.inline else no_bytes(),
            shm_name=staged.shm_name,
            shm_offset=staged.shm_offset,
        )

    def _offer(self, order: OfferPiece) -> PieceStaged:
        store = self._stores[order.part]
        return PieceStaged(
            peer=order.peer, xid=order.xid, piece=order.piece, rank=self.rank,
            digests=digest_stored(store, order.pages, order.digest_seed),
            byte_count=len(order.pages) * store.page_bytes,
        )  # fmt: skip

    def _unstage(self, order: Unstage) -> None:
        dock = self._docks.get(order.peer)
        if dock is None:
            return  # given back when the peer was left
        key = dock.keys.pop((order.xid, order.piece), None)
        if key is None:
            raise InvariantError(
                f"pd: piece {order.piece} of {order.xid} is not staged at rank {self.rank}, expected it"
            )
        dock.sender.release(key)

    def _fill(self, order: FillPages) -> PagesFilled:
        """What is digested is what was written, or is to be cut: bytes that change under our hands cannot pass."""
        start = self._clock.now()
        error, code = "", ""
        source = self._sources.get(order.peer)
        try:
            if source is None:
                raise TransferFailed(f"pd: {order.peer} was left before its pages were taken in")
            rows = source.intake.rows_of(order, source.receiver.fetch(order, order.payload.data))
            if source.intake.is_same:
                found = copy_in(self._stores[order.part], order.pages, rows, order.digest_seed)
                check_digests(found, order.digests, order.first)
            else:
                kept, found = take(rows, order.digest_seed)
                check_digests(found, order.digests, order.first)
                source.intake.fill(order, kept)
        except DigestMismatch as mismatch:
            error, code = str(mismatch), "digest"
        except TransferFailed as failed:
            error, code = str(failed), "transfer"
        return PagesFilled(
            xid=order.xid, piece=order.piece, source=order.source, rank=self.rank, error=error, code=code,
            seconds=self._clock.now() - start,
        )  # fmt: skip
