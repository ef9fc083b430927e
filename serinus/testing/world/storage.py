"""The storage of a simulated engine (the PageStorage of the cache): each rank has a folder of its own that outlives it.

Operations go down the ranks' lines and end some time later, rank by rank, also while the engine stands still in a step:
a read fills host pages until it has ended, whatever became of the request that it is for. Pages get lost, reads and
writes end midway. Engines of equal layout share their folders, as those on one disk do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import StorageDone
from serinus.core.parts import Part
from serinus.testing.world.mover import SimMover
from serinus.testing.world.ranks import Rank

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine

__all__ = ["Folder", "SimStorage"]

Folder = dict[tuple[int, Part, bytes], NDArray[np.uint8]]
"""What is stored, by rank, part and key."""
_TORN = 0xAA
_OP_S = 0.002


@dataclass(slots=True, kw_only=True, eq=False)
class _Op:
    act: Callable[[_Op, Rank], None]
    keys: tuple[bytes, ...]
    parts: tuple[Part, ...]
    pages: NDArray[np.int32]
    present: tuple[NDArray[np.bool_], ...]
    """For each of the parts."""
    good: int
    left: int
    """Ranks that have not come to their end with it."""
    cancelled: bool = False


class SimStorage:
    """All operations of one life of one engine."""

    def __init__(self, engine: Engine, mover: SimMover, folder: Folder) -> None:
        self._engine = engine
        self._life = engine.life
        self._mover = mover
        self._folder = folder
        self._ops: dict[int, _Op] = {}

    def keep(self, keys: Sequence[bytes], tokens: NDArray[np.int32]) -> None:
        """Somebody stored these pages before: KV of the tokens, whole pages from position 0."""
        for rank in self._engine.ranks:
            for part, own in rank.parts.items():
                for key, page in zip(keys, own.pages_of(tokens), strict=True):
                    self._folder.setdefault((rank.number, part, key), page)

    # ---- PageStorage ------------------------------------------------------------------------------------------------

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        self._begin(op, parts, keys, np.empty(0, np.int32), self._query)

    def read(self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32]) -> None:
        self._begin(op, (part,), keys, pages.copy(), self._read)

    def write(self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32]) -> None:
        self._begin(op, (part,), keys, pages.copy(), self._write)

    def cancel(self, op: int) -> None:
        if op in self._ops:
            self._ops[op].cancelled = True

    def poll(self) -> list[StorageDone]:
        over = [number for number, op in self._ops.items() if not op.left]
        return [self._done(number, self._ops.pop(number)) for number in over]

    def _done(self, number: int, op: _Op) -> StorageDone:
        if op.act == self._query:
            return StorageDone(op=number, present=op.present)
        return StorageDone(op=number, good=op.good, error="" if op.good == len(op.keys) else "it ended midway")

    # ---- on the ranks -----------------------------------------------------------------------------------------------

    def _begin(
        self, number: int, parts: Sequence[Part], keys: Sequence[bytes], pages: NDArray[np.int32],
        act: Callable[[_Op, Rank], None],
    ) -> None:  # fmt: skip
        engine = self._engine
        op = self._ops[number] = _Op(
            act=act, keys=tuple(keys), parts=tuple(parts), pages=pages,
            present=tuple(np.ones(len(keys), np.bool_) for _ in parts), good=len(keys), left=len(engine.ranks),
        )  # fmt: skip
        for rank in engine.ranks:
            engine.tell(rank, partial(self._reached, op, rank))

    def _reached(self, op: _Op, rank: Rank) -> None:
        engine = self._engine
        late = 0.0 if engine.calm else engine.options.late_s
        engine.timeline.after(_OP_S + (engine.rng.random() * late * 0.5 if late else 0.0), self._act, op, rank)

    def _act(self, op: _Op, rank: Rank) -> None:
        """On a thread of its own, so beside whatever the rank does."""
        engine = self._engine
        if engine.life != self._life or not engine.alive:
            return
        if engine.timeline.now_s < engine.paused_until:
            engine.timeline.at(engine.paused_until, self._act, op, rank)
            return
        op.act(op, rank)
        op.left -= 1
        engine.wake()

    def _limit(self, op: _Op) -> int:
        """Pages of it that this rank gets to."""
        engine, count = self._engine, len(op.keys)
        if op.cancelled and engine.rng.random() < 0.5:
            return 0
        chance = 0.0 if engine.calm else engine.options.restore
        return engine.rng.randrange(count) if chance and engine.rng.random() < chance else count

    def _query(self, op: _Op, rank: Rank) -> None:
        limit = self._limit(op)
        for part, present in zip(op.parts, op.present, strict=True):
            present &= [i < limit and (rank.number, part, key) in self._folder for i, key in enumerate(op.keys)]

    def _read(self, op: _Op, rank: Rank) -> None:
        part, limit = op.parts[0], self._limit(op)
        host = self._mover.host(rank, part)
        for index, (key, page) in enumerate(zip(op.keys, op.pages.tolist(), strict=True)):
            found = self._folder.get((rank.number, part, key))
            if index >= limit or found is None:
                host[op.pages[index:]] = _TORN
                op.good = min(op.good, index)
                return
            host[page] = found

    def _write(self, op: _Op, rank: Rank) -> None:
        part, limit = op.parts[0], self._limit(op)
        host = self._mover.host(rank, part)
        for key, page in zip(op.keys[:limit], op.pages[:limit].tolist(), strict=True):
            there = self._folder.setdefault((rank.number, part, key), host[page].copy())
            assert np.array_equal(there, host[page]), (
                f"testing: I6: key {key.hex()} of {self._engine.name} stands for two contents of part {part.name} on"
                f" rank {rank.number}"
            )
        op.good = min(op.good, limit)
