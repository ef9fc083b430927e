"""Mover: carries pages between the device pools and the host pools of one engine. Decides nothing.

Workers do it (threads), beside the forward passes. A load fills its pages a group of layers at a time, in the
order of the model, and LayerGate lets a forward pass start on layer 0 while layer 5 is still under way. Loads overtake
backups: a request waits for a load, and only an eviction for a backup. That is safe because no page is in two copies.

On the CPU one worker copies by itself. On an accelerator there are two for each direction, which queue in turns copies
of whole pages for its copy engines, on one stream for each direction, behind what the compute stream was told before
the copy was submitted; the gate makes the compute stream wait, not the host. Stamps pass by a kernel, on another
stream: it waits for a place between the kernels of a step, and the pages of the next copy must not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.pool.device import DevicePool
from serinus.pool.host import HostPool
from serinus.pool.workers import Task, ThreadWorkers, Workers

_GROUP_BYTES = 1 << 18
"""Layers of a load are copied in groups of at least so many bytes: less costs more to ask for than to copy."""
_ROW_BYTES = 1 << 19
"""...and on an accelerator of at least so many bytes of each page: each is a transfer, microseconds to queue."""
_BACKUP_BYTES = 1 << 24
"""A backup on the CPU looks after so many bytes whether a load is waiting."""
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


@dataclass(eq=False, slots=True)
class _Copy:
    """One op on its way."""

    index: int
    """Its place in the order of submission."""
    op: int
    kind: MoveKind
    moves: tuple[Move, ...]
    fence: Any = None
    """Event of the compute stream; the copy begins after it."""
    layers: int = 0
    """Of a load: so many layers of the model are there (or, on an accelerator, queued)."""
    events: list[tuple[int, Any]] = field(default_factory=list)
    """Of a load on an accelerator: (layers, event that is behind them), ascending."""
    stamped: Any = None
    """Of a load on an accelerator: the event behind its stamps, where there are some."""
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
            workers: what copies; None = a thread, on an accelerator four.
        Raises:
            InvariantError: the pools of a part differ, or its layers are not the model's.
        """
        for part, pool in device.items():
            count = sum(p is part for p in layer_parts)
            if part not in host or host[part].page_bytes != pool.page_bytes or count != pool.spec.layer_count:
                raise InvariantError(
                    f"pool: part {part.name} has {pool.spec.layer_count} layers of {pool.page_bytes} bytes a page on "
                    f"the device, {count} layers in the model, host pool {host.get(part)}; expected the same in all"
                )
        self._device, self._host, self._clock = device, host, clock
        self._layer_count = len(layer_parts)
        self._before = {part: _counts(layer_parts, part) for part in device}
        self._on_cpu = all(pool.spec.device == "cpu" for pool in device.values())
        self._streams: dict[MoveKind, Any] = {}
        """On an accelerator: one for each direction."""
        self._stamp_streams: dict[MoveKind, Any] = {}
        """And one for the kernels of each, which go before those of a step, where there are stamps."""
        if not self._on_cpu:
            self._streams = {kind: _Stream() for kind in MoveKind}
            if any(pool.spec.stamp_bytes for pool in device.values()):
                self._stamp_streams = {kind: _Stream(priority=-1) for kind in MoveKind}
        self._loads: deque[_Copy] = deque()
        self._backups: deque[_Copy] = deque()
        self._open: dict[int, _Copy] = {}
        self._ended: list[_Copy] = []
        self._submitted = 0
        self._under_way = dict.fromkeys(MoveKind, 0)
        self._under_way_max = 1 if self._on_cpu else 2
        """Of each direction at a time. On an accelerator the next one is queued while the first is copied, and neither
        direction takes all workers."""
        self._closed = False
        self._workers: Workers = workers or ThreadWorkers("serinus-mover", 1 if self._on_cpu else 4)
        self._workers.start(self._take, torch.inference_mode)

    # ---- the engine's side --------------------------------------------------------------------------------------

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin copies; all moves of one op come in one call and are of one kind. Returns at once.

        Raises InvariantError: an op is submitted twice or of two kinds, or the mover is closed or broken.
        """
        by_op: dict[int, list[Move]] = {}
        for move in moves:
            by_op.setdefault(move.op, []).append(move)
        fence = None
        if not self._on_cpu:
            fence = _Event()
            fence.record()
        with self._workers:
            self._check()
            for op, own in by_op.items():
                if op in self._open or any(move.kind is not own[0].kind for move in own):
                    raise InvariantError(f"pool: copy {op} submitted twice or of two kinds, expected neither")
                self._submitted += 1
                copy = _Copy(index=self._submitted, op=op, kind=own[0].kind, moves=tuple(own), fence=fence)
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

    @property
    def open_count(self) -> int:
        """Copies that have not ended."""
        with self._workers:
            return len(self._open)

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

    def wait_layer(self, copy: _Copy, layer: int) -> None:
        """Let nothing that is computed from now on run before this layer of the load is there (or it has failed)."""
        if copy.layers <= layer:
            with self._workers:
                self._workers.wait_for(lambda: copy.layers > layer or copy.done is not None)
                self._check()
        if layer == 0 and copy.stamped is not None:
            torch.cuda.current_stream().wait_event(copy.stamped)
        for layers, event in copy.events:
            if layers > layer:
                torch.cuda.current_stream().wait_event(event)
                break

    # ---- the worker ---------------------------------------------------------------------------------------------

    def _take(self) -> Task | None:
        """Loads go before backups. With the lock held."""
        for waiting in (self._loads, self._backups):
            if waiting and self._under_way[waiting[0].kind] < self._under_way_max:
                copy = waiting.popleft()
                self._under_way[copy.kind] += 1
                return partial(self._carry, copy)
        return None

    def _carry(self, copy: _Copy) -> None:
        begin = self._clock.now()
        error = ""
        try:
            with self._until_it_ends(copy):
                self._load(copy) if copy.kind is MoveKind.LOAD else self._back_up(copy)
        except (ValueError, RuntimeError, MemoryError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        seconds = self._clock.now() - begin
        moved = sum(len(move.source) * self._host[move.part].page_bytes for move in copy.moves)
        with self._workers:
            copy.done = MoveDone(
                op=copy.op, ok=not error, error=error, seconds=seconds, byte_count=0 if error else moved
            )
            copy.layers = self._layer_count
            self._under_way[copy.kind] -= 1
            del self._open[copy.op]
            self._ended.append(copy)
            self._workers.notify()

    @contextmanager
    def _until_it_ends(self, copy: _Copy) -> Iterator[None]:
        """What an accelerator was told inside has ended behind it, also what was told before an error."""
        try:
            yield
        finally:
            if copy.fence is not None:
                ends = []
                for streams in filter(None, (self._streams, self._stamp_streams)):
                    ends.append(_Event(blocking=True))
                    ends[-1].record(streams[copy.kind])
                for end in ends:
                    if not end.query():
                        end.synchronize()

    @contextmanager
    def _queued(self, copy: _Copy, streams: Mapping[MoveKind, Any]) -> Iterator[None]:
        """What an accelerator is told inside goes to this stream of the direction, behind the fence."""
        if not streams:
            yield
            return
        with torch.cuda.stream(streams[copy.kind]):
            streams[copy.kind].wait_event(copy.fence)
            yield

    def _load(self, copy: _Copy) -> None:
        layer_bytes = [len(move.source) * self._device[move.part].spec.layer_bytes for move in copy.moves]
        step = max(1, -(-_GROUP_BYTES // max(1, *layer_bytes)))
        if copy.fence is not None:
            step = max(step, -(-_ROW_BYTES // max(1, *(self._device[m.part].spec.layer_bytes for m in copy.moves))))
        with self._queued(copy, self._stamp_streams):
            for move in copy.moves:
                self._device[move.part].copy_stamps_in(move.target, self._host[move.part].tensor_PY, move.source)
            if self._stamp_streams:
                copy.stamped = _Event()
                copy.stamped.record()
        with self._queued(copy, self._streams):
            for first in range(0, self._layer_count, step):
                end = min(first + step, self._layer_count)
                for move in copy.moves:
                    before = self._before[move.part]
                    host = self._host[move.part].tensor_PY
                    self._device[move.part].copy_in(move.target, host, move.source, before[first], before[end])
                if copy.fence is not None:
                    event = _Event()
                    event.record()
                    copy.events.append((end, event))
                with self._workers:
                    copy.layers = end
                    self._workers.notify()

    def _back_up(self, copy: _Copy) -> None:
        with self._queued(copy, self._streams):
            for move in copy.moves:
                host = self._host[move.part]
                step = max(1, len(move.source) if copy.fence is not None else _BACKUP_BYTES // max(1, host.page_bytes))
                for at in range(0, len(move.source), step):
                    if copy.fence is None:
                        self._loads_first()
                    span = slice(at, at + step)
                    self._device[move.part].copy_out(move.source[span], host.tensor_PY, move.target[span])
        with self._queued(copy, self._stamp_streams):
            for move in copy.moves:
                self._device[move.part].copy_stamps_out(move.source, self._host[move.part].tensor_PY, move.target)

    def _loads_first(self) -> None:
        while True:
            with self._workers:
                if not self._loads:
                    return
                load = self._loads.popleft()
                self._under_way[load.kind] += 1
            self._carry(load)


class LayerGate:
    """The forward hook that keeps a layer from being computed before the loads submitted earlier have filled it.

    Costs one lock a forward pass while nothing is loaded.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._loads: tuple[_Copy, ...] = ()

    def can_replay(self, room: int) -> bool:
        """Whether nothing is being loaded: a recorded pass waits for no layer."""
        return not self._mover.open_loads()

    def stage(self, batch: object, put: object) -> None:
        """The gate reads nothing of the step."""

    def replayed(self) -> None:
        """Nothing was loaded in this step."""

    def before(self, batch: object) -> None:
        """Take down which loads this forward pass waits for."""
        self._loads = self._mover.open_loads()

    def before_layer(self, layer_index: int) -> None:
        """Wait for the layer; on an accelerator its stream does."""
        for copy in self._loads:
            self._mover.wait_layer(copy, layer_index)

    def writes(self, layer_index: int) -> None:
        """Nothing that is stored is digested for it."""

    def reads(self, layer_index: int, attention: object) -> None:
        """Nothing of it is digested for the gate."""

    def layer_digests(self, attention: object) -> tuple[()]:
        """No layer of it is digested for the gate."""
        return ()

    def after(self, batch: object) -> None:
        """Nothing is waited for any more."""
        self._loads = ()


def _counts(layer_parts: Sequence[Part], part: Part) -> tuple[int, ...]:
    """For each layer of the model, and its end: how many layers of `part` come before it."""
    counts = [0]
    for own in layer_parts:
        counts.append(counts[-1] + (own is part))
    return tuple(counts)
