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
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import CudaFailed, load
from serinus.pool import DeviceMover, DevicePool, HostPool, LayerGate, PoolSpec, device_mover
from serinus.testing.fake_cuda import FakeCuda

FULL, SWA = Part.FULL, Part.SWA
LAYERS = (SWA, FULL, SWA, SWA, FULL, SWA)
PAGES = 25
COMPUTE = 0


class Gpu(FakeCuda):
    """Its streams as a mover has them: 1 and 2 for loads, 3 and 4 for backups. It goes on while the host asks."""

    def __init__(self, seed: int, *, stamped: bool = True) -> None:
        super().__init__(Rng(seed), 5, slow=seed % 5)
        self.on, self.stamped = COMPUTE, stamped
        self.cuda, self.compute = self, COMPUTE

    def has_passed(self, event: int) -> bool:
        self.step()
        return super().has_passed(event)

    def of(self, kind: MoveKind) -> tuple[Any, Any]:
        at = 1 if kind is MoveKind.LOAD else 3
        return SimpleNamespace(cuda_stream=at), SimpleNamespace(cuda_stream=at + 1) if self.stamped else None

    @contextmanager
    def queued(self, stream: Any) -> Iterator[None]:
        before, self.on = self.on, stream.cuda_stream
        try:
            yield
        finally:
            self.on = before


class QueuedPool(DevicePool):
    """A page-first pool of which copies are done when their stream comes to them."""

    def __init__(self, spec: PoolSpec, gpu: Gpu) -> None:
        super().__init__(spec, load("cpu", "ref"))
        self.gpu = gpu
        self.fails: Exception = OSError("not now")
        self.fails_at: int | None = None
        """So many calls later one fails, once."""

    def _queue(self, copy: Callable[..., None], *arguments: Any) -> None:
        if self.fails_at is not None:
            self.fails_at = self.fails_at - 1 if self.fails_at else None
            if self.fails_at is None:
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

    def __init__(self, seed: int, *, stamped: bool = True) -> None:
        self.gpu = Gpu(seed, stamped=stamped)
        self.pools: dict[Part, QueuedPool] = {}
        self.host: dict[Part, HostPool] = {}
        for part in (FULL, SWA):
            spec = PoolSpec(
                layer_count=LAYERS.count(part), kv_head_count=1, head_size=8, page_size=4, page_count=PAGES,
                dtype=torch.bfloat16, stamped=stamped, page_first=True,
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
        self.mover.submit(moves(op, kind, source, target))


def moves(op: int, kind: MoveKind, source: dict[Part, Any], target: dict[Part, Any]) -> list[Move]:
    ids = {part: [np.array(each[part], np.int32) for each in (source, target)] for part in source}
    return [Move(op=op, kind=kind, part=part, source=here, target=there) for part, (here, there) in ids.items()]


def some(rng: np.random.Generator, engine: Engine, part: Part, count: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (count, engine.pools[part].page_bytes), np.uint8)


@pytest.fixture(autouse=True)
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mover, "_GROUP_BYTES", 1)
    monkeypatch.setattr(device_mover, "_ROW_BYTES", 1)
    monkeypatch.setattr(device_mover, "_BACKUP_PAGES_MAX", 5)
    monkeypatch.setattr(device_mover, "_COPY_PAGES_MIN", 1)


def random_worlds(seeds: range = range(16)) -> None:
    """Steps write pages, which go to the host and come back elsewhere, while others do; chance says when each runs.
    Pages and rows are used again as soon as the engine may."""
    for seed in seeds:
        random_world(seed)


def random_world(seed: int) -> None:
    rng, engine = np.random.default_rng(seed), Engine(seed)
    gpu, mover = engine.gpu, engine.mover
    under_way: dict[int, tuple[MoveKind, Part, list[int], list[int], NDArray[np.uint8]]] = {}
    kept: list[tuple[Part, list[int], NDArray[np.uint8]]] = []
    free = {part: list(range(1, PAGES)) for part in (FULL, SWA)}
    free_rows = {part: list(range(1, PAGES)) for part in (FULL, SWA)}
    told: list[int] = []

    def take(ids: list[int], count: int) -> list[int]:
        taken = rng.permutation(ids)[:count].tolist()
        ids[:] = [each for each in ids if each not in taken]
        return taken

    def ended(ends: list[MoveDone]) -> None:
        for done in ends:
            assert done.ok, done.error
            kind, part, pages, rows, data = under_way.pop(done.op)
            assert done.byte_count == data.nbytes
            assert not any(op < done.op and each[0] is kind for op, each in under_way.items()), "told out of order"
            told.append(done.op)
            if kind is MoveKind.LOAD:
                free_rows[part] += rows
                continue
            assert np.array_equal(engine.host[part].data_PY[rows], data), "it had ended, and bytes were missing"
            free[part] += pages
            kept.append((part, rows, data))

    for op in range(1, 41):
        part, count = (FULL, SWA)[int(rng.integers(2))], int(rng.integers(1, 4))
        if kept and rng.random() < 0.6 and len(free[kept[0][0]]) >= len(kept[0][1]):
            part, rows, data = kept.pop(0)
            pages = take(free[part], len(rows))
            engine.copy(op, MoveKind.LOAD, {part: rows}, {part: pages})
            engine.reads(part, np.array(pages, np.int32), data)
            free[part] += pages  # for what is queued behind the step that reads them
            under_way[op] = MoveKind.LOAD, part, pages, rows, data
        elif len(free[part]) >= count and len(free_rows[part]) >= count:
            pages, rows, data = take(free[part], count), take(free_rows[part], count), some(rng, engine, part, count)
            engine.write(part, np.array(pages, np.int32), data)
            engine.copy(op, MoveKind.BACKUP, {part: pages}, {part: rows})
            under_way[op] = MoveKind.BACKUP, part, pages, rows, data
        for _ in range(int(rng.integers(12))):
            gpu.step()
        ended(mover.wait([op]) if rng.random() < 0.1 else mover.poll())
    ended(mover.wait(list(under_way)))
    gpu.run()
    assert not under_way, "a copy never ended"
    assert len(told) > 20
    for part, ids, expected, found in engine.read:
        assert found == expected, f"part {part.name}, pages {ids.tolist()}: a layer was read before it was there"
    mover.close()


@pytest.mark.slow
def test_whatever_runs_when_a_step_reads_what_was_loaded_and_a_backup_what_was_computed() -> None:
    random_worlds()


def _deaf(stream: int) -> tuple[Any, str, Any]:
    wait = Gpu.wait
    return Gpu, "wait", lambda self, on, event: None if on == stream else wait(self, on, event)


def _unstamped_gate() -> tuple[Any, str, Any]:
    wait = DeviceMover.wait_layer

    def waits(self: Any, copy: Any, layer: int) -> None:
        copy.stamped = None
        wait(self, copy, layer)

    return DeviceMover, "wait_layer", waits


def _layer_early() -> tuple[Any, str, Any]:
    wait = DeviceMover.wait_layer
    return DeviceMover, "wait_layer", lambda self, copy, layer: wait(self, copy, max(layer - 1, 0))


def _ends(which: Callable[[Any], list[Any]]) -> tuple[Any, str, Any]:
    begin = DeviceMover._begin

    def begun(self: Any, copy: Any) -> None:
        begin(self, copy)
        copy.ends = which(copy)

    return DeviceMover, "_begin", begun


WEAKENED: dict[str, tuple[Any, str, Any]] = {
    "the compute stream waits for nothing": _deaf(COMPUTE), "loads wait for nothing": _deaf(1),
    "stamps of loads wait for nothing": _deaf(2), "backups wait for nothing": _deaf(3),
    "stamps of backups wait for nothing": _deaf(4), "stamps are not waited for": _unstamped_gate(),
    "the layer before is waited for": _layer_early(), "ends before its stamps": _ends(lambda copy: copy.ends[:1]),
    "ends before its pages": _ends(lambda copy: copy.ends[1:]), "ends at its begin": _ends(lambda copy: [copy.begin]),
}  # fmt: skip


@pytest.mark.parametrize("weakness", WEAKENED)
def test_a_mover_that_forgets_one_of_its_waits_is_found(weakness: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WEAKENED[weakness])
    with pytest.raises(AssertionError, match=r"bytes were missing|before it was there|out of order"):
        random_worlds(range(200))


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


def test_backups_are_queued_so_many_pages_at_a_time_or_up_to_the_one_that_is_waited_for() -> None:
    engine = Engine(9)
    mover, held = engine.mover, [False]
    engine.gpu.streams[3].append(lambda: held[0])
    for op, count in enumerate((9, 2, 3, 1, 1, 4, 5), 1):
        ids = list(range(1, count + 1))
        engine.copy(op, MoveKind.BACKUP, {FULL: ids}, {FULL: ids})
    engine.copy(8, MoveKind.LOAD, {FULL: [20]}, {FULL: [20]})

    def queued() -> list[int]:
        return sorted(copy.op for copies in mover._queued.values() for copy in copies)

    assert queued() == [1, 8], "one that is larger goes alone, and loads wait for none"
    assert mover.poll() == []
    held[0] = True
    engine.gpu.run()
    assert [done.op for done in mover.poll()] == [1, 8]
    assert queued() == [2, 3]
    held[0] = False
    engine.gpu.streams[3].appendleft(lambda: held[0])
    engine.copy(9, MoveKind.LOAD, {FULL: [20]}, {FULL: [20]})
    assert [done.op for done in mover.wait([9])] == [9]
    assert queued() == [2, 3]
    held[0] = True
    assert [done.op for done in mover.wait([5])][:4] == [2, 3, 4, 5]
    assert 7 in mover._open, "it was not waited for"
    assert 7 in [done.op for _ in range(3) for done in mover.wait([7])]


@pytest.mark.parametrize("broken", [AssertionError("specialized"), TypeError("no such argument")])
def test_an_error_that_is_no_failure_of_a_copy_is_raised_and_the_copy_is_no_good(broken: Exception) -> None:
    engine = Engine(10)
    engine.pools[FULL].fails_at, engine.pools[FULL].fails = 1, broken
    with pytest.raises(type(broken)):
        engine.copy(1, MoveKind.LOAD, {FULL: [1]}, {FULL: [1]})
    assert [(done.op, done.ok) for done in engine.mover.wait([1])] == [(1, False)]


@pytest.mark.parametrize("stamped", [True, False])
def test_copies_of_one_call_go_both_ways_and_one_that_fails_leaves_the_others_alone(stamped: bool) -> None:
    engine, rng = Engine(5, stamped=stamped), np.random.default_rng(5)
    data = {part: some(rng, engine, part, 6) for part in (FULL, SWA)}
    for part in (FULL, SWA):
        engine.write(part, np.array([1, 2], np.int32), data[part][:2])
        engine.host[part].data_PY[[5, 6, 7, 8]] = data[part][2:]
    ids = {part: [np.array([at, at + 1], np.int32) for at in (1, 3, 5, 9)] for part in (FULL, SWA)}
    written, filled, rows, backed = ({part: each[at] for part, each in ids.items()} for at in range(4))
    engine.pools[SWA].fails_at = 2
    engine.mover.submit([
        *moves(1, MoveKind.LOAD, {FULL: [7], SWA: [7]}, {FULL: [9], SWA: [9]}),
        *moves(2, MoveKind.BACKUP, written, backed), *moves(3, MoveKind.LOAD, rows, filled),
    ])  # fmt: skip
    done = {each.op: each for each in engine.mover.wait([1, 2, 3])}
    assert [done[op].ok for op in (1, 2, 3)] == [False, True, True]
    assert all(each.seconds > 0 for each in done.values())
    assert done[3].byte_count == 2 * sum(pool.page_bytes for pool in engine.pools.values())
    for part in (FULL, SWA):
        assert np.array_equal(engine.host[part].data_PY[[9, 10]], data[part][:2])
        assert np.array_equal(engine.pools[part].read_pages(filled[part]), data[part][2:4])


def test_a_part_without_layers_moves_no_bytes_but_its_copies_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LAYERS", (SWA, SWA))
    engine = Engine(6)
    assert engine.pools[FULL].page_bytes == 0
    engine.copy(1, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})
    engine.copy(2, MoveKind.LOAD, {FULL: [1, 2], SWA: [1]}, {FULL: [3, 4], SWA: [2]})
    found = {done.op: (done.ok, done.byte_count) for done in engine.mover.wait([1, 2])}
    assert found == {1: (True, 0), 2: (True, engine.pools[SWA].page_bytes)}


@pytest.mark.parametrize(
    ("row_bytes", "group_bytes", "pages", "ends"),
    [(1, 1, 1, [1, 3, 6]), (256, 1, 1, [2, 6]), (1, 384, 1, [3, 6]), (1, 384, 3, [1, 3, 6]), (1, 9999, 3, [6])],
)
def test_layers_of_a_load_go_in_groups_that_double(
    monkeypatch: pytest.MonkeyPatch, row_bytes: int, group_bytes: int, pages: int, ends: list[int]
) -> None:
    """A layer of a page has 128 bytes here."""
    monkeypatch.setattr(device_mover, "_ROW_BYTES", row_bytes)
    monkeypatch.setattr(device_mover, "_GROUP_BYTES", group_bytes)
    engine = Engine(7)
    ids = list(range(1, pages + 1))
    engine.copy(1, MoveKind.LOAD, {SWA: ids}, {SWA: ids})
    (load_,) = engine.mover.open_loads()
    assert [end for end, _ in load_.layers] == ends


ERRORS = ValueError("no such page"), RuntimeError("device lost"), MemoryError("full"), CudaFailed("no launch")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_copy_that_fails_says_so_when_what_was_queued_before_has_ended(error: Exception, calls: int) -> None:
    """At its stamps, at its first layers, or behind those."""
    engine = Engine(2)
    mover, gpu = engine.mover, engine.gpu
    engine.pools[SWA].fails_at, engine.pools[SWA].fails = calls, error
    engine.copy(1, MoveKind.LOAD, {FULL: [2], SWA: [2]}, {FULL: [3], SWA: [3]})
    engine.gate.before(None)
    engine.gate.before_layer(0)
    engine.gate.before_layer(5)  # waits for nothing that never comes
    engine.gate.after(None)
    (done,) = mover.wait([1])
    assert not gpu.streams[1], "pages were still to be copied"
    assert not gpu.streams[2], "stamps were still to be copied"
    assert (done.ok, done.error, done.byte_count) == (False, f"{type(error).__name__}: {error}", 0)
    gpu.run()
    engine.copy(2, MoveKind.BACKUP, {SWA: [3]}, {SWA: [4]})
    assert [done.ok for done in mover.wait([2])] == [True]


def test_a_device_that_is_lost_ends_the_engine_in_words_and_closing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(8)
    engine.copy(1, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})

    def lost(*_: Any) -> Any:
        raise CudaFailed("cuEventQuery: an illegal address was met (700)")

    for call in ("record", "has_passed", "synchronize"):
        monkeypatch.setattr(Gpu, call, lost)
    for ask in (engine.mover.poll, lambda: engine.mover.wait([1]), lambda: engine.mover.submit([])):
        with pytest.raises(InvariantError, match=r"device of copies is lost, cuEventQuery: an illegal address"):
            ask()
    engine.mover.close()


def test_closing_waits_for_all_that_is_queued_and_nothing_may_follow() -> None:
    engine = Engine(3)
    data = some(np.random.default_rng(0), engine, FULL, 2)
    pages = np.array([4, 5], np.int32)
    engine.write(FULL, pages, data)
    engine.copy(1, MoveKind.BACKUP, {FULL: pages}, {FULL: [8, 9]})
    ids = [10, 11, 12, 13]
    engine.copy(2, MoveKind.BACKUP, {FULL: ids}, {FULL: ids})  # not queued yet
    engine.mover.close()
    assert not any(engine.gpu.streams)
    assert np.array_equal(engine.host[FULL].data_PY[[8, 9]], data)
    engine.mover.close()
    with pytest.raises(InvariantError, match="mover is closed"):
        engine.copy(3, MoveKind.BACKUP, {FULL: [1]}, {FULL: [1]})
    with pytest.raises(InvariantError, match="mover is closed"):
        engine.mover.poll()  # would queue what waits


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
