"""DeviceMover: carries pages between the pools of an accelerator and pinned memory. Decides nothing.

Its copy engines do it, and no thread: `submit` queues copies, on one stream for each direction, behind what the compute
stream was told before. So loads wait for no backup. Only so many backups are queued at a time, and `poll` queues the
next ones, as a call waits where the queue of a stream is full. A load fills its pages a group of layers at a time, in
the order of the model, and LayerGate makes the compute stream wait for each, not the host. Stamps pass by a kernel, on
another stream: it waits for a place between the kernels of a step, and the pages of the next copy must not.

Threads that queued copies beside the one that computes were in its way and it in theirs: each call that gives up the
interpreter's lock waited some 0.1 ms for it. A copy of 64 pages took 5 ms to ask for there, and 3 to carry out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.kernels import CudaFailed, CudaLibrary, CudaMark, current_stream
from serinus.pool.device import DevicePool
from serinus.pool.host import HostPool
from serinus.pool.tier_pools import TierPools, by_op

_GROUP_BYTES = 1 << 26
"""Layers of a load are copied in groups, each of twice as many as the one before, the first of at least so many bytes
(1.3 ms) of all pages..."""
_ROW_BYTES = 1 << 19
"""...and of so many of each page: each is a transfer, of which the copy engine begins one in 0.4 us."""
_BACKUP_PAGES_MAX = 2048
"""Backups that are queued at a time, in pages: 48 copies of 64 were queued in 5.6 ms on an H200, and none waited."""
_COPY_PAGES_MIN = 16
"""As so many a smaller copy counts: it has events, and stamps."""
_Stream: Any = torch.cuda.Stream


@dataclass(eq=False, slots=True)
class _Copy:
    """One op on its way."""

    index: int
    """Its place in the order of submission."""
    op: int
    kind: MoveKind
    moves: Sequence[Move]
    fence: CudaMark
    """Of the compute stream; the copy begins after it."""
    begin: CudaMark | None = None
    """Passes when its pages come to their turn."""
    ends: list[CudaMark] = field(default_factory=list)
    """Behind its pages, and behind its stamps where there are some, once it is queued."""
    stamped: CudaMark | None = None
    """Of a load: behind its stamps, where there are some."""
    layers: list[tuple[int, CudaMark]] = field(default_factory=list)
    """Of a load: (layers, behind them), ascending."""
    error: str = "pool: it was not queued to its end"

    @property
    def weight(self) -> int:
        """What it counts of _BACKUP_PAGES_MAX."""
        return max(_COPY_PAGES_MIN, sum(len(move.source) for move in self.moves))


class CopyStreams:
    """The streams of a mover on the current device."""

    def __init__(self, stamped: bool) -> None:
        """`stamped`: there are stamps. Their kernels have streams of high priority."""
        self._pages: dict[MoveKind, Any] = {kind: _Stream() for kind in MoveKind}
        self._stamps: dict[MoveKind, Any] = {kind: _Stream(priority=-1) for kind in MoveKind} if stamped else {}
        self.cuda = CudaLibrary(self._pages[MoveKind.LOAD].cuda_stream)

    def of(self, kind: MoveKind) -> tuple[Any, Any]:
        """Those of a direction, for pages and for stamps; of stamps None where there are none."""
        return self._pages[kind], self._stamps.get(kind)

    @property
    def compute(self) -> int:
        """The stream on which the model runs."""
        return current_stream()

    @contextmanager
    def queued(self, stream: Any) -> Iterator[None]:
        """What is queued inside goes to this stream. (torch.cuda.stream takes 30 us.)"""
        before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch._C._cuda_setStream(stream_id=before[0], device_index=before[1], device_type=before[2])


class DeviceMover:
    """The PageMover of an engine on an accelerator. All of it belongs to the engine's thread.

    Cost of a copy of 64 pages of 2.4 MB, 3 ms of the copy engine: 0.4 ms of that thread.
    """

    def __init__(
        self,
        device: Mapping[Part, DevicePool],
        host: Mapping[Part, HostPool],
        layer_parts: Sequence[Part],
        streams: CopyStreams | None = None,
    ) -> None:
        """
        Args:
            device, host: the pools of each part, page first and pinned; equal page bytes.
            layer_parts: the part of each layer of the model, in order.
            streams: None = some of the current device.
        Raises:
            InvariantError: the pools of a part differ, or its layers are not the model's.
        """
        self._pools = TierPools(device, host, layer_parts)
        self.streams = CopyStreams(self._pools.are_stamped) if streams is None else streams
        self._cuda = self.streams.cuda
        self._open: dict[int, _Copy] = {}
        self._queued: dict[MoveKind, deque[_Copy]] = {kind: deque() for kind in MoveKind}
        self._waiting: deque[_Copy] = deque()
        """Backups that are not queued yet."""
        self._submitted = 0
        self._closed = False

    # ---- the engine's side --------------------------------------------------------------------------------------

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin copies; all moves of one op come in one call and are of one kind. Waits for no copy, unless loads are
        more than the queue of a stream holds.

        Raises InvariantError: an op is submitted twice or of two kinds, the mover is closed, or the device is lost.
        """
        ops = by_op(moves, self._open)
        with self._device() as cuda:
            fence = cuda.mark(self.streams.compute)
            for op, own in ops.items():
                self._submitted += 1
                copy = self._open[op] = _Copy(self._submitted, op, own[0].kind, own, fence)
                if copy.kind is MoveKind.LOAD:
                    self._begin(copy)
                else:
                    self._waiting.append(copy)
            self._begin_backups()

    def poll(self) -> list[MoveDone]:
        """The copies that ended since the last poll or wait, in the order in which they were submitted.

        Raises InvariantError: the device is lost, or the mover is closed.
        """
        ended: list[_Copy] = []
        with self._device() as cuda:
            for queue in self._queued.values():
                while queue and all(cuda.has_passed(end.event) for end in queue[0].ends):
                    ended.append(queue.popleft())
                    del self._open[ended[-1].op]
            self._begin_backups()
            return [self._done(copy) for copy in sorted(ended, key=attrgetter("index"))]

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        """Block until these copies have ended; returns everything that `poll` would return then."""
        with self._device() as cuda:
            waited = [self._open[op] for op in ops if op in self._open]
            self._begin_backups(max((copy.index for copy in waited if not copy.ends), default=0))
            for copy in waited:
                for end in copy.ends:
                    cuda.synchronize(end.event)
        return self.poll()

    def close(self) -> None:
        """Wait for all that was queued; what was not never will be. May be called again."""
        self._closed = True
        with suppress(CudaFailed), self._cuda as cuda:  # a device that is lost copies nothing
            for stream in [each for kind in MoveKind for each in self.streams.of(kind) if each is not None]:
                cuda.synchronize(cuda.mark(stream.cuda_stream, sleeps=True).event)

    @contextmanager
    def _device(self) -> Iterator[CudaLibrary]:
        if self._closed:
            raise InvariantError("pool: the mover is closed, expected no more copies")
        try:
            with self._cuda as cuda:
                yield cuda
        except CudaFailed as failure:
            raise InvariantError(f"pool: the device of copies is lost, {failure}") from failure

    # ---- the gate's side ----------------------------------------------------------------------------------------

    def open_loads(self) -> tuple[_Copy, ...]:
        """The loads that a forward pass which begins now must wait for."""
        return tuple(self._queued[MoveKind.LOAD])

    def wait_layer(self, load: _Copy, layer: int) -> None:
        """Let nothing that is queued on the compute stream from now on run before this layer of the load is there."""
        behind = next((mark for layers, mark in load.layers if layers > layer), None)
        with self._device() as cuda:
            for mark in (load.stamped if layer == 0 else None, behind):
                if mark is not None:
                    cuda.wait(self.streams.compute, mark.event)

    # ---- one copy -----------------------------------------------------------------------------------------------

    def _begin_backups(self, last: int = 0) -> None:
        """Queue backups that wait, in the order of submission: up to the copy `last`, and as many as may be queued."""
        queued = self._queued[MoveKind.BACKUP]
        weight = sum(copy.weight for copy in queued)
        while self._waiting:
            copy = self._waiting[0]
            weight += copy.weight
            if weight > max(copy.weight, _BACKUP_PAGES_MAX) and copy.index > last:
                return
            self._begin(self._waiting.popleft())

    def _begin(self, copy: _Copy) -> None:
        """Queue it. Also what was queued before an error has ended behind the marks."""
        cuda = self._cuda
        streams = [stream for stream in self.streams.of(copy.kind) if stream is not None]
        for stream in streams:
            cuda.wait(stream.cuda_stream, copy.fence.event)
        copy.begin = cuda.mark(streams[0].cuda_stream, timed=True)
        try:
            self._load(copy) if copy.kind is MoveKind.LOAD else self._back_up(copy.moves)
            copy.error = ""
        except (ValueError, RuntimeError, MemoryError, OSError, CudaFailed) as failure:
            copy.error = f"{type(failure).__name__}: {failure}"
        finally:
            copy.ends = [cuda.mark(stream.cuda_stream, timed=True, sleeps=True) for stream in streams]
            self._queued[copy.kind].append(copy)

    def _done(self, copy: _Copy) -> MoveDone:
        assert copy.begin is not None, "pool: a copy ended before it began"
        seconds = self._cuda.seconds(copy.begin.event, copy.ends[0].event)
        moved = 0 if copy.error else self._pools.byte_count(copy.moves)
        return MoveDone(op=copy.op, ok=not copy.error, error=copy.error, seconds=seconds, byte_count=moved)

    def _load(self, copy: _Copy) -> None:
        pages, stamps = self.streams.of(MoveKind.LOAD)
        if stamps is not None:
            with self.streams.queued(stamps):
                self._pools.load_stamps(copy.moves)
            copy.stamped = self._cuda.mark(stamps.cuda_stream)
        row_bytes, layer_bytes = self._pools.layer_bytes(copy.moves)
        step = max(-(-_GROUP_BYTES // max(1, layer_bytes)), -(-_ROW_BYTES // row_bytes))
        with self.streams.queued(pages):
            end = 0
            while end < self._pools.layer_count:
                first, end = end, min(end + step, self._pools.layer_count)
                self._pools.load_layers(copy.moves, first, end)
                copy.layers.append((end, self._cuda.mark(pages.cuda_stream)))
                step *= 2

    def _back_up(self, moves: Sequence[Move]) -> None:
        pages, stamps = self.streams.of(MoveKind.BACKUP)
        with self.streams.queued(pages):
            for move in moves:
                self._pools.back_up(move)
        if stamps is not None:
            with self.streams.queued(stamps):
                self._pools.back_up_stamps(moves)
