"""One-sided transports of the simulation: a rank reads or writes another engine's pages, later, page by page.

What real ones do to us: bytes move while the process that asked is busy; a paused writer goes on when it wakes; a dead
one has writes in flight; only cutting the connection at the target stops what was begun over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.pd import Capabilities, Fence, Fenced, Mode, OpResult, OpState, Region
from serinus.sim.timeline import Timeline

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine
    from serinus.sim.options import Options

__all__ = ["CAPABILITIES", "Fabric", "SimOneSided"]

CAPABILITIES = {
    "push": Capabilities(mode=Mode.PUSH, needs_registration=True, fence=Fence.CLOSE),
    "pull": Capabilities(mode=Mode.PULL, needs_registration=True),
}
_MOVE_S = 0.001
_AGAIN_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class _Tie:
    """One connection between two ranks: what was begun over it lands until it is cut."""

    source: SimEngine
    source_life: int
    target: SimEngine
    target_life: int
    target_rank: int
    cut: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Op:
    tie: _Tie
    part: Part
    moves: int
    """Pages still to be moved."""
    error: str = ""
    cancelled: bool = False
    lost: bool = False
    """Its end is not awaited any more; what of it lands, lands."""
    pages: list[int] = field(default_factory=list)
    """The own pages that it moves."""
    in_flight: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    """Bytes of own pages that the network has already when their process is killed."""


class Fabric:
    """All ties of a cluster, and what is under way over them."""

    def __init__(self, timeline: Timeline, options: Options, rng: Rng) -> None:
        self.timeline = timeline
        self.options = options
        self.rng = rng
        self.calm = False
        self.blocked: set[tuple[str, str]] = set()
        """Pairs of engines between which nothing passes; the network's own."""
        self.engines: dict[str, SimEngine] = {}
        self.ties: list[_Tie] = []
        self.moving = 0
        """Pages that are still to be moved, over all operations."""
        self.lost_count = 0
        """Operations that were reported as lost."""
        self.late_count = 0
        """Writes that landed after the process that asked for them was killed."""

    def delay(self) -> float:
        """When the next page is moved."""
        late = 0.0 if self.calm else self.options.write_late_s
        return _MOVE_S + (self.rng.random() * late if late else 0.0)

    def tie(self, source: SimEngine, endpoint: bytes) -> _Tie:
        """Connect to a rank. Raises TransferFailed: it is gone."""
        name, life, rank, epoch = endpoint.decode().split("|")
        target = self.engines[name]
        if not target.alive or target.life != int(life) or target.epoch != int(epoch):
            raise TransferFailed(f"sim: nothing is at {endpoint!r}")
        tie = _Tie(
            source=source, source_life=source.life, target=target, target_life=target.life, target_rank=int(rank)
        )
        self.ties = [other for other in self.ties if not other.cut]
        self.ties.append(tie)
        return tie

    def cut(self, target: SimEngine, source: str = "") -> None:
        """Cut what comes from an engine (or from all) to this one: nothing that was begun lands any more."""
        for tie in self.ties:
            if tie.target is target and (not source or tie.source.name == source):
                tie.cut = True


class SimOneSided:
    """One rank's end (pd's OneSided)."""

    def __init__(self, fabric: Fabric, engine: SimEngine, rank: int, name: str) -> None:
        self.name = name
        self.capabilities = CAPABILITIES[name]
        self._fabric = fabric
        self._engine = engine
        self._life = engine.life
        self._rank = rank
        self._ties: dict[str, _Tie] = {}
        self._peers: dict[str, str] = {}
        self._ops: dict[int, _Op] = {}
        self._last = 0

    def register(self, regions: Sequence[Region]) -> bytes:
        return self._endpoint()

    def _endpoint(self) -> bytes:
        return f"{self._engine.name}|{self._life}|{self._rank}|{self._engine.epoch}".encode()

    def deregister(self) -> None:
        self._fabric.cut(self._engine)

    def connect(self, peer: str, endpoint: bytes) -> None:
        self._peers[peer] = endpoint.decode().split("|")[0]
        self._ties[peer] = self._fabric.tie(self._engine, endpoint)

    def disconnect(self, peer: str) -> None:
        self._ties.pop(peer, None)

    def fence(self, peer: str) -> Fenced:
        """Cut this peer off, or (every other engine of the cluster, by its name) all peers, with a new endpoint."""
        if int(self._engine.name[-1]) % 2:
            self._engine.epoch += self._rank == 0
            self._fabric.cut(self._engine)
            self._end_reads("")
            return Fenced(all_peers=True, endpoint=self._endpoint())
        self._fabric.cut(self._engine, self._peers.get(peer, "nobody"))
        self._end_reads(self._peers.get(peer, "nobody"))
        return Fenced(all_peers=False, endpoint=b"")

    def _end_reads(self, name: str) -> None:
        """What this rank reads from an engine (or from all) fills nothing any more."""
        for peer, tie in self._ties.items():
            if self.name == "pull" and (not name or self._peers[peer] == name):
                tie.cut = True

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        return self._begin(peer, part, pages, targets, self._write_page)

    def read(self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32]) -> int:
        return self._begin(peer, part, pages, sources, self._read_page)

    def _begin(self, peer: str, part: Part, pages: NDArray[np.int32], others: NDArray[np.int32], move: object) -> int:
        tie = self._ties.get(peer)
        if tie is None:
            raise TransferFailed(f"sim: {self._engine.name} is not connected to {peer}")
        op = _Op(tie=tie, part=part, moves=len(pages), pages=pages.tolist())
        self._last += 1
        self._ops[self._last] = op
        at = 0.0
        for own, other in zip(pages.tolist(), others.tolist(), strict=True):
            at = max(at, self._fabric.delay())
            self._fabric.moving += 1
            self._fabric.timeline.after(at, move, op, own, other, None)  # type: ignore[arg-type]
        return self._last

    # ---- what happens later -----------------------------------------------------------------------------------------

    def _over(self, op: _Op, error: str = "") -> None:
        self._fabric.moving -= 1
        op.moves -= 1
        op.error = op.error or error
        if not op.moves and self._engine.life == self._life:
            self._engine.process.wake()

    def stands(self, tie: _Tie) -> bool:
        return not tie.cut and tie.target.alive and tie.target.life == tie.target_life

    def _write_page(self, op: _Op, own: int, other: int, captured: NDArray[np.uint8] | None) -> None:
        fabric, tie = self._fabric, op.tie
        if not self.stands(tie):
            self._over(op, "the peer is gone")
            return
        alive = self._engine.alive and self._engine.life == self._life
        if captured is None:
            paused_until = self._engine.process.paused_until
            if alive and fabric.timeline.now_s < paused_until:
                fabric.timeline.at(paused_until, self._write_page, op, own, other, None)
                return
            if not alive:
                captured = op.in_flight.get(own)
            else:
                if not op.lost:
                    self._engine.watch.check_read(op.part, np.array([own]))
                captured = self._page(op.part, own)
            if captured is None:
                self._over(op)
                return
        if (self._engine.name, tie.target.name) in fabric.blocked:
            fabric.timeline.after(_AGAIN_S, self._write_page, op, own, other, captured)
            return
        fabric.late_count += not alive
        target = tie.target
        target.stores[tie.target_rank][op.part].write_pages(np.array([other]), captured)
        self._over(op)

    def _read_page(self, op: _Op, own: int, other: int, captured: None) -> None:
        tie = op.tie
        if self._engine.life != self._life or not self._engine.alive:
            self._over(op)
            return
        if not self.stands(tie):
            self._over(op, "the peer is gone")
            return
        if op.cancelled and self._fabric.rng.random() < 0.5:
            self._over(op, "cancelled")
            return
        if (self._engine.name, tie.target.name) in self._fabric.blocked:
            self._fabric.timeline.after(_AGAIN_S, self._read_page, op, own, other, None)
            return
        data = tie.target.ranks[tie.target_rank].pools[op.part].read_pages(np.array([other]))
        self._engine.stores[self._rank][op.part].write_pages(np.array([own]), data)
        self._over(op)

    # ---- for the port -----------------------------------------------------------------------------------------------

    def poll(self, op: int) -> OpResult:
        found, fabric = self._ops[op], self._fabric
        if found.moves:
            chance = 0.0 if fabric.calm else fabric.options.lose_op
            if not chance or fabric.rng.random() >= chance:
                return OpResult(state=OpState.PENDING)
            found.lost = True
            fabric.lost_count += 1
            del self._ops[op]
            return OpResult(state=OpState.LOST, error="what became of it is unknown")
        del self._ops[op]
        return OpResult(state=OpState.FAILED if found.error else OpState.DONE, error=found.error)

    def cancel(self, op: int) -> None:
        if op in self._ops:
            self._ops[op].cancelled = True

    def close(self) -> None:
        """The process is gone: its memory cannot be reached, and what its network card has taken over lands still."""
        self._fabric.cut(self._engine)
        for op in self._ops.values():
            op.in_flight = {page: self._page(op.part, page) for page in op.pages}

    def _page(self, part: Part, page: int) -> NDArray[np.uint8]:
        """A copy of an own page."""
        return self._engine.ranks[self._rank].pools[part].read_pages(np.array([page]))
