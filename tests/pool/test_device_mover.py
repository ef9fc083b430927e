"""The mover of an accelerator, on one that runs what is queued in any order that its streams and events leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import load
from serinus.pool import DeviceMover, DevicePool, HostPool, LayerGate, PoolSpec, device_mover
from serinus.testing.fake_cuda import FakeCuda

FULL, SWA = Part.FULL, Part.SWA
LAYERS = (SWA, FULL, SWA, SWA, FULL, SWA)
PAGES = 25
COMPUTE = 0


class Gpu(FakeCuda):
    """Its streams as a mover has them."""

    def __init__(self, seed: int) -> None:
        super().__init__(Rng(seed), 5, slow=seed % 5)
        self.on = COMPUTE
        self.cuda, self.compute = self, COMPUTE

    def of(self, kind: MoveKind) -> tuple[Any, Any]:
        at = 1 if kind is MoveKind.LOAD else 3
        return SimpleNamespace(cuda_stream=at), SimpleNamespace(cuda_stream=at + 1)

    @contextmanager
    def queued(self, stream: Any) -> Iterator[None]:
        before, self.on = self.on, stream.cuda_stream
        yield
        self.on = before


class QueuedPool(DevicePool):
    """A page-first pool of which copies are done when their stream comes to them."""

    def __init__(self, spec: PoolSpec, gpu: Gpu) -> None:
        super().__init__(spec, load("cpu", "ref"))
        self.gpu = gpu
        self.fails: Exception | None = None

    def _queue(self, copy: Callable[..., None], *arguments: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.gpu.queue(self.gpu.on, lambda: copy(*arguments))

    def copy_out(self, *arguments: Any) -> None:
        self._queue(super().copy_out, *arguments)

    def copy_in(self, *arguments: Any) -> None:
        self._queue(super().copy_in, *arguments)

    def copy_stamps_out(self, *arguments: Any) -> None:
        self._queue(super().copy_stamps_out, *arguments)

    def copy_stamps_in(self, *arguments: Any) -> None:
        self._queue(super().copy_stamps_in, *arguments)


class Engine:
    """Pools of two parts, a mover between them, and steps that write and read pages on the compute stream."""

    def __init__(self, seed: int) -> None:
        self.gpu = Gpu(seed)
        self.pools: dict[Part, QueuedPool] = {}
        self.host: dict[Part, HostPool] = {}
        for part in (FULL, SWA):
            spec = PoolSpec(
                layer_count=LAYERS.count(part), kv_head_count=1, head_size=8, page_size=4, page_count=PAGES,
                dtype=torch.bfloat16, stamped=True, page_first=True,
            )  # fmt: skip
            self.pools[part], self.host[part] = QueuedPool(spec, self.gpu), HostPool(spec, PAGES)
        streams: Any = self.gpu
        self.mover = DeviceMover(self.pools, self.host, LAYERS, streams)
        self.gate = LayerGate(self.mover)
        self.read: list[tuple[Part, NDArray[np.int32], list[bytes], list[bytes]]] = []
        """By a step: what it expected, and layer by layer what it read."""

    def write(self, part: Part, pages: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """What a step computes."""
        self.gpu.queue(COMPUTE, lambda: self.pools[part].write_pages(pages, data))

    def reads(self, part: Part, pages: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """A step that reads these pages, which must hold this, in the order of its layers."""
        pool, found, inside = self.pools[part], list[bytes](), 0
        size, kv_bytes = pool.spec.layer_bytes, pool.spec.kv_bytes
        columns = [slice(kv_bytes, None)] + [slice(at, at + size) for at in range(0, kv_bytes, size)]
        expected = [data[:, each].tobytes() for each in columns]

        def look(at: slice) -> None:
            found.append(pool.read_pages(pages)[:, at].tobytes())

        self.gate.before(None)
        for layer, own in enumerate(LAYERS):
            self.gate.before_layer(layer)
            if layer == 0:
                self.gpu.queue(COMPUTE, lambda: look(columns[0]))
            if own is part:
                inside += 1
                self.gpu.queue(COMPUTE, lambda at=columns[inside]: look(at))  # type: ignore[misc]
        self.gate.after(None)
        self.read.append((part, pages, expected, found))

    def copy(self, op: int, kind: MoveKind, source: dict[Part, Any], target: dict[Part, Any]) -> None:
        ids = {part: [np.array(each[part], np.int32) for each in (source, target)] for part in source}
        moves = [Move(op=op, kind=kind, part=part, source=here, target=there) for part, (here, there) in ids.items()]
        self.mover.submit(moves)


def some(rng: np.random.Generator, engine: Engine, part: Part, count: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (count, engine.pools[part].page_bytes), np.uint8)


@pytest.fixture(autouse=True)
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mover, "_GROUP_BYTES", 1)
    monkeypatch.setattr(device_mover, "_ROW_BYTES", 1)


def random_worlds(seeds: range = range(60)) -> None:
    """Steps write pages, which go to the host and come back elsewhere, while others do; chance says when each runs."""
    for seed in seeds:
        random_world(seed)


def random_world(seed: int) -> None:
    rng, engine = np.random.default_rng(seed), Engine(seed)
    gpu, mover = engine.gpu, engine.mover
    backups: dict[int, tuple[Part, NDArray[np.int32], NDArray[np.uint8]]] = {}
    kept: list[tuple[Part, NDArray[np.int32], NDArray[np.uint8]]] = []
    free = {part: rng.permutation(np.arange(1, PAGES, dtype=np.int32)) for part in (FULL, SWA)}
    free_rows = {part: rng.permutation(np.arange(1, PAGES, dtype=np.int32)) for part in (FULL, SWA)}
    told: list[int] = []
    for op in range(1, 13):
        part = (FULL, SWA)[int(rng.integers(2))]
        count = int(rng.integers(1, 4))
        if kept and rng.random() < 0.5 and len(free[kept[-1][0]]) >= len(kept[-1][1]):
            part, rows, data = kept.pop()
            pages, free[part] = free[part][: len(rows)], free[part][len(rows) :]
            engine.copy(op, MoveKind.LOAD, {part: rows}, {part: pages})
            engine.reads(part, pages, data)
        elif len(free[part]) >= count and len(free_rows[part]) >= count:
            pages, free[part] = free[part][:count], free[part][count:]
            rows, free_rows[part] = free_rows[part][:count], free_rows[part][count:]
            data = some(rng, engine, part, count)
            engine.write(part, pages, data)
            engine.copy(op, MoveKind.BACKUP, {part: pages}, {part: rows})
            backups[op] = (part, rows, data)
        for _ in range(int(rng.integers(8))):
            gpu.step()
        ended = mover.wait([op]) if rng.random() < 0.2 else mover.poll()
        for done in ended:
            assert done.ok, done.error
            told.append(done.op)
            if done.op in backups:
                part, rows, data = backups.pop(done.op)
                assert np.array_equal(engine.host[part].data_PY[rows], data), "it had ended, and bytes were missing"
                kept.append((part, rows, data))
    gpu.run()
    told += [done.op for done in mover.poll()]
    assert len(told) == len(set(told))
    assert mover.open_count == 0
    for part, pages, expected, found in engine.read:
        assert found == expected, f"part {part.name}, pages {pages.tolist()}: a layer was read before it was there"
    mover.close()


def test_whatever_runs_when_a_step_reads_what_was_loaded_and_a_backup_what_was_computed() -> None:
    random_worlds()


def _unfenced(engine: type[DeviceMover]) -> tuple[Any, str, Any]:
    begin = engine._begin

    def begun(self: Any, op: int, moves: Any, fence: Any) -> Any:
        return begin(self, op, moves, self._cuda.mark(1 if moves[0].kind is MoveKind.LOAD else 3))

    return engine, "_begin", begun


def _unstamped_gate(engine: type[DeviceMover]) -> tuple[Any, str, Any]:
    wait = engine.wait_layer

    def waits(self: Any, copy: Any, layer: int) -> None:
        copy.stamped = None
        wait(self, copy, layer)

    return engine, "wait_layer", waits


def _layer_early(engine: type[DeviceMover]) -> tuple[Any, str, Any]:
    wait = engine.wait_layer
    return engine, "wait_layer", lambda self, copy, layer: wait(self, copy, max(layer - 1, 0))


def _ends_without_stamps(engine: type[DeviceMover]) -> tuple[Any, str, Any]:
    begin = engine._begin

    def begun(self: Any, *rest: Any) -> Any:
        copy = begin(self, *rest)
        del copy.ends[1:]
        return copy

    return engine, "_begin", begun


@pytest.mark.parametrize("weakened", [_unfenced, _unstamped_gate, _layer_early, _ends_without_stamps])
def test_a_mover_that_forgets_one_of_its_waits_is_found(weakened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*weakened(DeviceMover))
    with pytest.raises(AssertionError, match=r"bytes were missing|before it was there"):
        random_worlds()


def test_loads_do_not_wait_for_backups_and_ends_are_told_in_the_order_of_submission() -> None:
    engine = Engine(1)
    gpu, mover = engine.gpu, engine.mover
    held = [False]
    gpu.streams[3].append(lambda: held[0])  # the copy engine of the other direction is busy
    engine.copy(1, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})
    engine.copy(2, MoveKind.BACKUP, {FULL: [2]}, {FULL: [2]})
    engine.copy(3, MoveKind.LOAD, {FULL: [3]}, {FULL: [3]})
    assert [copy.op for copy in mover.open_loads()] == [3]
    assert [done.op for done in mover.wait([3])] == [3]
    assert mover.open_loads() == ()
    assert mover.poll() == []
    held[0] = True
    assert [done.op for done in mover.wait([2])] == [1, 2]
    assert mover.wait([1, 2, 3]) == []


@pytest.mark.parametrize("error", [ValueError("no such page"), RuntimeError("device lost"), MemoryError("full")])
def test_a_copy_that_fails_says_so_when_what_was_queued_before_has_ended(error: Exception) -> None:
    engine = Engine(2)
    mover = engine.mover
    engine.pools[SWA].fails = error
    engine.copy(1, MoveKind.LOAD, {FULL: [2], SWA: [2]}, {FULL: [3], SWA: [3]})
    engine.gate.before(None)
    engine.gate.before_layer(5)  # waits for nothing that never comes
    engine.gate.after(None)
    assert mover.poll() == []
    (done,) = mover.wait([1])
    assert (done.ok, done.error, done.byte_count) == (False, f"{type(error).__name__}: {error}", 0)
    engine.pools[SWA].fails = None
    engine.copy(2, MoveKind.BACKUP, {SWA: [3]}, {SWA: [4]})
    assert [done.ok for done in mover.wait([2])] == [True]


def test_closing_waits_for_all_that_is_queued_and_nothing_may_follow() -> None:
    engine = Engine(3)
    data = some(np.random.default_rng(0), engine, FULL, 2)
    pages = np.array([4, 5], np.int32)
    engine.write(FULL, pages, data)
    engine.copy(1, MoveKind.BACKUP, {FULL: pages}, {FULL: [8, 9]})
    engine.mover.close()
    assert np.array_equal(engine.host[FULL].data_PY[[8, 9]], data)
    engine.mover.close()
    with pytest.raises(InvariantError, match="mover is closed"):
        engine.copy(2, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})


def test_an_op_that_is_under_way_cannot_be_submitted_again_and_a_long_life_makes_no_more_events() -> None:
    engine = Engine(4)
    engine.copy(1, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})
    with pytest.raises(InvariantError, match="copy 1 submitted twice"):
        engine.copy(1, MoveKind.BACKUP, {FULL: [2]}, {FULL: [2]})
    engine.mover.wait([1])
    made = set[int]()
    for op in range(2, 12):
        engine.copy(op, MoveKind.LOAD, {FULL: [1]}, {FULL: [1]})
        engine.mover.wait([op])
        made.add(len(engine.gpu.recorded))
    assert len(made) == 1, "each copy made events, and no later one used them"
