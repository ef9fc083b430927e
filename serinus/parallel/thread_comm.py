"""ThreadComm: the Comm of ranks that are threads of one process, which is enough to prove that they add up.

For the self-test of the canary and for tests: on the CPU, or all ranks on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, TypeVar

import torch
from torch import Tensor

from serinus.core.clock import WallClock
from serinus.core.errors import PeerGone, StepAbandoned
from serinus.parallel.comm import StagePeers
from serinus.parallel.mesh import Mesh

_T = TypeVar("_T")


class _NoTensor(Enum):
    """Why no tensor comes from the stage before: a rank has closed its end, or has abandoned the step."""

    CLOSED = 0
    ABANDONED = 1


_Line = SimpleQueue[Tensor | _NoTensor]
"""To one rank from the stage before."""


class _Table:
    """A meeting point of threads: each puts a value into its place, waits for the others and reads all values."""

    def __init__(self, size: int) -> None:
        self._places: list[Any] = [None] * size
        self._turn = Condition()
        self._turns = 0
        self._arrived = 0
        self._closed = False
        self._steps = [0] * size
        self._abandoned = 0
        """The last step that a thread has abandoned; 0 = there was none."""

    def begin(self, index: int, step: int, timeout_s: float) -> None:
        """Where a step before this one was abandoned, wait until all threads have left it. Raises PeerGone."""
        with self._turn:
            self._steps[index] = step
            self._turn.notify_all()
            if self._abandoned and not self._turn.wait_for(lambda: min(self._steps) >= step or self._closed, timeout_s):
                raise PeerGone("parallel: a rank did not leave a step that was abandoned, expected all of its mesh")

    def abandon(self, step: int) -> None:
        """Let every thread go that waits in this step."""
        with self._turn:
            self._abandoned = step
            self._turn.notify_all()

    def exchange(self, index: int, value: _T, read: Callable[[list[_T]], _T], timeout_s: float) -> _T:
        """`read` of the values of all threads. Returns when all have read. Raises PeerGone: a thread does not come;
        StepAbandoned: it has abandoned the step."""
        self._places[index] = value
        self._meet(index, timeout_s)
        found = read(list(self._places))
        self._meet(index, timeout_s)
        return found

    def close(self) -> None:
        """Fail every thread that waits here, now or later, with PeerGone."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _meet(self, index: int, timeout_s: float) -> None:
        with self._turn:
            turn, step = self._turns, self._steps[index] or -1
            self._arrived += 1
            if self._arrived == len(self._places):
                self._arrived, self._turns = 0, turn + 1
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._turns != turn or self._closed or self._abandoned == step, timeout_s)
            if self._turns == turn and self._abandoned == step:
                self._arrived -= 1
                raise StepAbandoned("parallel: a rank of this stage has abandoned this step")
            if self._turns == turn:
                raise PeerGone("parallel: a rank left or did not come, expected all of its mesh")


class ThreadComm:
    """One rank's end of a mesh of threads. Contracts of the calls: Comm."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        tables: tuple[_Table, _Table],
        lines: list[_Line],
        timeout_s: float,
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.waited_s = 0.0
        self.peers: StagePeers | None = None
        self._clock = WallClock()
        self._index = mesh.tp_rank(rank)
        self._stage, self._all = tables
        self._lines = lines
        self._timeout_s = timeout_s
        self._step = 0
        self._owes_recv = self._owes_send = False

    can_abandon = True

    @staticmethod
    def ranks_of(mesh: Mesh, timeout_s: float = 60.0) -> tuple[ThreadComm, ...]:
        """One for each rank. A rank that waits longer than `timeout_s` for another gets PeerGone."""
        stages = [_Table(mesh.tp) for _ in range(mesh.pp)]
        all_ranks = _Table(mesh.size)
        lines: list[_Line] = [_Line() for _ in range(mesh.size)]
        return tuple(
            ThreadComm(mesh, rank, (stages[mesh.pp_rank(rank)], all_ranks), lines, timeout_s)
            for rank in range(mesh.size)
        )

    def begin(self, step: int) -> None:
        stage = self.mesh.pp_rank(self.rank)
        self._step, self._owes_recv, self._owes_send = step, stage > 0, stage < self.mesh.pp - 1
        self._stage.begin(self._index, step, self._timeout_s)

    def abandon(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._stage.abandon(self._step)
        if self._owes_recv:
            with suppress(StepAbandoned):
                self.recv(shape, dtype)
        if self._owes_send:
            self._lines[self.rank + self.mesh.tp].put(_NoTensor.ABANDONED)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self._meet(x, lambda found: torch.stack(found).sum(0, dtype=x.dtype)))

    def gather_last(self, x: Tensor) -> Tensor | None:
        found = self._meet(x, lambda found: torch.cat(found, dim=-1) if self._index == 0 else x)
        return found if self._index == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._meet(x, lambda found: found[0].clone()))

    def send(self, x: Tensor) -> None:
        self._lines[self.rank + self.mesh.tp].put(x)
        self._owes_send = False

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As Comm says. Raises ValueError: a tensor of another shape or dtype came; PeerGone: nothing came;
        StepAbandoned: the stage before has abandoned the step."""
        began = self._clock.now()
        try:
            x = self._lines[self.rank].get(timeout=self._timeout_s)
            self.waited_s += self._clock.now() - began
        except Empty:
            raise PeerGone(f"parallel: nothing came for {self.mesh.name(self.rank)} in {self._timeout_s:g} s") from None
        if x is _NoTensor.CLOSED:
            self._lines[self.rank].put(_NoTensor.CLOSED)
            raise PeerGone(
                f"parallel: {self.mesh.name(self.rank)} waits for a stage that left, expected all of its mesh"
            )
        self._owes_recv = False
        if x is _NoTensor.ABANDONED:
            raise StepAbandoned("parallel: the stage before has abandoned this step")
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
            raise ValueError(f"parallel: {list(x.shape)} {x.dtype} came, expected {list(shape)} {dtype}")
        return x.clone()  # across processes the receiver cannot write into the sender's tensor either

    def smallest(self, values: Sequence[int]) -> tuple[int, ...]:

        def least(found: list[tuple[int, ...]]) -> tuple[int, ...]:
            return tuple(map(min, zip(*found, strict=True)))

        return self._all.exchange(self.rank, tuple(values), least, self._timeout_s)

    def close(self) -> None:
        self._stage.close()
        self._all.close()
        for line in self._lines:
            line.put(_NoTensor.CLOSED)

    def _meet(self, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        began = self._clock.now()
        found = self._stage.exchange(self._index, x, read, self._timeout_s)
        self.waited_s += self._clock.now() - began
        return found
