"""Mover: carries pages between the device pools and the host pools of one engine on a CPU. Decides nothing. Beside an
accelerator DeviceMover does.

A worker (a thread) copies, beside the forward passes. A load fills its pages a group of layers at a time, in the
order of the model, and LayerGate lets a forward pass start on layer 0 while layer 5 is still under way. Loads overtake
backups: a request waits for a load, and only an eviction for a backup. That is safe because no page is in two copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.pool.device import DevicePool
from serinus.pool.host import HostPool
from serinus.pool.tier_pools import TierPools, by_op
from serinus.pool.workers import Task, ThreadWorkers, Workers

_GROUP_BYTES = 1 << 18
"""Layers of a load are copied in groups of at least so many bytes: less costs more to ask for than to copy."""
_BACKUP_BYTES = 1 << 24
"""A backup looks after so many bytes whether a load is waiting."""


@dataclass(eq=False, slots=True)
class _Copy:
    """One op on its way."""

    index: int
    """Its place in the order of submission."""
    op: int
    kind: MoveKind
    moves: tuple[Move, ...]
    layers: int = 0
    """Of a load: so many layers of the model are there."""
    done: MoveDone | None = None


class Mover:
    """The PageMover of an engine. `submit`, `poll`, `wait` and the gate belong to the engine's thread."""

    def __init__(
        self,
        device: Mapping[Part, DevicePool],
        host: Mapping[Part, HostPool],
        layer_parts: Sequence[Part],
        clock: Clock,
        workers: Workers | None = None,
    ) -> None:
        """
        Args:
            device, host: the pools of each part; equal page bytes.
            layer_parts: the part of each layer of the model, in order.
            clock: measures copies.
            workers: what copies, one copy at a time; None = a thread.
        Raises:
            InvariantError: the pools of a part differ, or its layers are not the model's.
        """
        self._pools, self._clock = TierPools(device, host, layer_parts), clock
        self._loads: deque[_Copy] = deque()
        self._backups: deque[_Copy] = deque()
        self._open: dict[int, _Copy] = {}
        self._ended: list[_Copy] = []
        self._submitted = 0
        self._closed = False
        self._workers: Workers = workers or ThreadWorkers("serinus-mover")
        self._workers.start(self._take, torch.inference_mode)

    # ---- the engine's side --------------------------------------------------------------------------------------

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin copies; all moves of one op come in one call and are of one kind. Returns at once.

        Raises InvariantError: an op is submitted twice or of two kinds, or the mover is closed or broken.
        """
        with self._workers:
            self._check()
            for op, own in by_op(moves, self._open).items():
                self._submitted += 1
                copy = _Copy(index=self._submitted, op=op, kind=own[0].kind, moves=tuple(own))
                self._open[op] = copy
                (self._loads if copy.kind is MoveKind.LOAD else self._backups).append(copy)
            self._workers.tasks_added()

    def poll(self) -> list[MoveDone]:
        """The copies that ended since the last poll or wait, in the order in which they were submitted."""
        with self._workers:
            self._check()
            ended, self._ended = self._ended, []
        ended.sort(key=lambda copy: copy.index)
        return [copy.done for copy in ended if copy.done is not None]

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        """Block until these copies have ended; returns everything that `poll` would return then."""
        with self._workers:
            self._workers.wait_for(lambda: not any(op in self._open for op in ops))
        return self.poll()

    def close(self) -> None:
        """End the worker; copies that have not begun never will. May be called again."""
        with self._workers:
            self._closed = True
        self._workers.stop()

    def _check(self) -> None:
        self._workers.check()
        if self._closed:
            raise InvariantError("pool: the mover is closed, expected no more copies")

    # ---- the gate's side ----------------------------------------------------------------------------------------

    def open_loads(self) -> tuple[_Copy, ...]:
        """The loads that a forward pass which begins now must wait for."""
        with self._workers:
            return tuple(copy for copy in self._open.values() if copy.kind is MoveKind.LOAD)

    def wait_layer(self, load: _Copy, layer: int) -> None:
        """Wait until this layer of the load is there, or it has failed."""
        if load.layers <= layer:
            with self._workers:
                self._workers.wait_for(lambda: load.layers > layer or load.done is not None)
                self._check()

    # ---- the worker ---------------------------------------------------------------------------------------------

    def _take(self) -> Task | None:
        """Loads go before backups. With the lock held."""
        for waiting in (self._loads, self._backups):
            if waiting:
                return partial(self._carry, waiting.popleft())
        return None

    def _carry(self, copy: _Copy) -> None:
        begin = self._clock.now()
        error = ""
        try:
            self._load(copy) if copy.kind is MoveKind.LOAD else self._back_up(copy)
        except (ValueError, RuntimeError, MemoryError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        seconds = self._clock.now() - begin
        moved = 0 if error else self._pools.byte_count(copy.moves)
        with self._workers:
            copy.done = MoveDone(op=copy.op, ok=not error, error=error, seconds=seconds, byte_count=moved)
            copy.layers = self._pools.layer_count
            del self._open[copy.op]
            self._ended.append(copy)
            self._workers.notify()

    def _load(self, copy: _Copy) -> None:
        self._pools.load_stamps(copy.moves)
        _, layer_bytes = self._pools.layer_bytes(copy.moves)
        step = -(-_GROUP_BYTES // max(1, layer_bytes))
        for first in range(0, self._pools.layer_count, step):
            end = min(first + step, self._pools.layer_count)
            self._pools.load_layers(copy.moves, first, end)
            with self._workers:
                copy.layers = end
                self._workers.notify()

    def _back_up(self, copy: _Copy) -> None:
        for move in copy.moves:
            step = max(1, _BACKUP_BYTES // max(1, self._pools.page_bytes(move.part)))
            for first in range(0, len(move.source), step):
                self._loads_first()
                self._pools.back_up(move, first, first + step)
        self._pools.back_up_stamps(copy.moves)

    def _loads_first(self) -> None:
        while True:
            with self._workers:
                if not self._loads:
                    return
                load = self._loads.popleft()
            self._carry(load)
