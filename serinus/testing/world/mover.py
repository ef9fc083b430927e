"""Copies between device and host pages of a simulated engine (the PageMover of the cache): they end some time later.

Every rank copies its own bytes. A forward pass waits for the loads that were submitted before it, as real ones do; a
copy may fail, and then its targets hold something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine

__all__ = ["SimMover"]

_COPY_S = 0.001
_BROKEN = 0xBB


@dataclass(slots=True, kw_only=True)
class _Op:
    moves: tuple[Move, ...]
    ends_at: float
    moved: bool = False
    ok: bool = True


class SimMover:
    """All copies of one life of one engine, in the order in which they were submitted."""

    def __init__(self, engine: Engine, host_pages: int, fails: Callable[[], bool]) -> None:
        self._engine = engine
        self._fails = fails
        self._host: list[NDArray[np.uint8]] = [
            np.zeros((host_pages, rank.page_bytes), np.uint8) for rank in engine.ranks
        ]  # fmt: skip
        self._ops: dict[int, _Op] = {}
        self.failed_count = 0

    def submit(self, moves: Sequence[Move]) -> None:
        engine = self._engine
        late = 0.0 if engine.calm else engine.options.late_s
        ends_at = engine.timeline.now_s + _COPY_S + (engine.rng.random() * late * 0.1 if late else 0.0)
        assert all(move.part is Part.FULL for move in moves), f"testing: moves of other parts: {moves}"
        by_op: dict[int, list[Move]] = {}
        for move in moves:
            by_op.setdefault(move.op, []).append(move)
        for number, own in by_op.items():
            self._ops[number] = _Op(moves=tuple(own), ends_at=ends_at)
        engine.timeline.at(ends_at, engine.wake)

    def gate(self) -> None:
        """A forward pass begins: what is to be loaded before it is loaded now."""
        for op in self._ops.values():
            if op.moves[0].kind is MoveKind.LOAD:
                self._move(op)

    def _move(self, op: _Op) -> None:
        if op.moved:
            return
        op.moved = True
        op.ok = not self._fails()
        self.failed_count += not op.ok
        for move in op.moves:
            for rank, host in zip(self._engine.ranks, self._host, strict=True):
                source, target = (rank.bytes, host) if move.kind is MoveKind.BACKUP else (host, rank.bytes)
                target[move.target] = source[move.source] if op.ok else _BROKEN

    def _take(self, until: float, also: Collection[int] = ()) -> list[MoveDone]:
        done: list[MoveDone] = []
        for number, op in list(self._ops.items()):
            if op.ends_at <= until or number in also:
                self._move(op)
                del self._ops[number]
                done.append(MoveDone(op=number, ok=op.ok, error="" if op.ok else "the copy failed"))
        return done

    def poll(self) -> list[MoveDone]:
        now = self._engine.timeline.now_s
        first_late = next((number for number, op in self._ops.items() if op.ends_at > now), None)
        if first_late is None:
            return self._take(now)
        numbers = list(self._ops)
        return self._take(-1.0, numbers[: numbers.index(first_late)])

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        numbers = list(self._ops)
        last = max((numbers.index(number) for number in ops if number in self._ops), default=-1)
        return self._take(-1.0, numbers[: last + 1])
