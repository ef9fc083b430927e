"""Copies between device and host pages of a simulated engine (the PageMover of the cache): they end some time later.

Every rank copies its own bytes, once it has come to the copy on its line. A forward pass waits for the loads that were
submitted before it, as real ones do; a copy may fail, and then its targets hold something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine
    from serinus.testing.world.ranks import Rank

__all__ = ["SimMover"]

_COPY_S = 0.001
_BROKEN = 0xBB


@dataclass(slots=True, kw_only=True)
class _Op:
    moves: tuple[Move, ...]
    ends_at: float
    begun: set[int] = field(default_factory=set)
    """Ranks that have come to it on their lines."""
    moved: set[int] = field(default_factory=set)
    """Ranks on which its bytes have moved."""
    ok: bool | None = None


class SimMover:
    """All copies of one life of one engine, in the order in which they were submitted."""

    def __init__(self, engine: Engine, host_pages: int, fails: Callable[[], bool]) -> None:
        self._engine = engine
        self._fails = fails
        self._host: list[dict[Part, NDArray[np.uint8]]] = [
            {part: np.zeros((host_pages, own.page_bytes), np.uint8) for part, own in rank.parts.items()}
            for rank in engine.ranks
        ]
        self._ops: dict[int, _Op] = {}
        self.failed_count = 0

    def host(self, rank: Rank, part: Part) -> NDArray[np.uint8]:
        """A rank's pages of a part on the host."""
        return self._host[rank.number][part]

    def submit(self, moves: Sequence[Move]) -> None:
        engine = self._engine
        late = 0.0 if engine.calm else engine.options.late_s
        ends_at = engine.timeline.now_s + _COPY_S + (engine.rng.random() * late * 0.1 if late else 0.0)
        by_op: dict[int, list[Move]] = {}
        for move in moves:
            by_op.setdefault(move.op, []).append(move)
        for number, own in by_op.items():
            op = self._ops[number] = _Op(moves=tuple(own), ends_at=ends_at)
            for rank in engine.ranks:
                engine.tell(rank, partial(self._begin, op, rank))
        engine.timeline.at(ends_at, engine.wake)

    def _begin(self, op: _Op, rank: Rank) -> None:
        op.begun.add(rank.number)
        if rank.number:
            self._engine.wake()

    def gate(self, rank: Rank) -> None:
        """A forward pass begins on a rank: what is to be loaded there before it is loaded now."""
        for op in self._ops.values():
            if op.moves[0].kind is MoveKind.LOAD and rank.number in op.begun:
                self._move(op, rank)

    def _move(self, op: _Op, rank: Rank) -> None:
        if rank.number in op.moved:
            return
        op.moved.add(rank.number)
        if op.ok is None:
            op.ok = not self._fails()
            self.failed_count += not op.ok
        for move in op.moves:
            host, own = self._host[rank.number][move.part], rank.parts[move.part]
            if move.kind is MoveKind.BACKUP:
                host[move.target] = own.take_pages(move.source) if op.ok else _BROKEN
            else:
                broken = np.full((len(move.target), own.page_bytes), _BROKEN, np.uint8)
                own.write_pages(move.target, host[move.source] if op.ok else broken)

    def _take(self, numbers: Sequence[int]) -> list[MoveDone]:
        done: list[MoveDone] = []
        for number in numbers:
            op = self._ops.pop(number)
            for rank in self._engine.ranks:
                self._move(op, rank)
            done.append(MoveDone(op=number, ok=bool(op.ok), error="" if op.ok else "the copy failed"))
        return done

    def poll(self) -> list[MoveDone]:
        now, everybody = self._engine.timeline.now_s, len(self._engine.ranks)
        over: list[int] = []
        for number, op in self._ops.items():
            if op.ends_at > now or len(op.begun) < everybody:
                break
            over.append(number)
        return self._take(over)

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        numbers = list(self._ops)
        last = max((numbers.index(number) for number in ops if number in self._ops), default=-1)
        if last >= 0:
            self._engine.settle()
        return self._take(numbers[: last + 1])
