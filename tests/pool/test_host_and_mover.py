"""The host tier: its pages, and the mover that carries them."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.kernels import load
from serinus.pool import DevicePool, HostPool, LayerGate, Mover, PoolSpec, host_page_counts, map_ahead

FULL, SWA = Part.FULL, Part.SWA
LAYERS = (SWA, FULL, SWA, SWA, FULL)
"""A model that mixes both."""
SPEC = PoolSpec(layer_count=2, kv_head_count=2, head_size=8, page_size=4, page_count=9, dtype=torch.float32)
SPECS = {FULL: SPEC, SWA: dataclasses.replace(SPEC, layer_count=3, page_count=7)}
WAIT_S = 20.0


def pools(column: str = "cpu") -> tuple[dict[Part, DevicePool], dict[Part, HostPool]]:
    """Device pools of random bytes, empty host pools of 12 pages."""
    device = {part: DevicePool(spec, load("cpu", column)) for part, spec in SPECS.items()}
    rng = torch.Generator().manual_seed(5)
    for pool in device.values():
        for lane in (*pool.k, *pool.v):
            lane.copy_(torch.randn(lane.shape, generator=rng))
    return device, {part: HostPool(spec, 12) for part, spec in SPECS.items()}


@contextmanager
def moving(device: dict[Part, DevicePool], host: dict[Part, HostPool]) -> Iterator[Mover]:
    mover = Mover(device, host, LAYERS, WallClock())
    try:
        yield mover
    finally:
        mover.close()


def move(op: int, kind: MoveKind, part: Part, source: list[int], target: list[int]) -> Move:
    return Move(op=op, kind=kind, part=part, source=np.array(source, np.int32), target=np.array(target, np.int32))


def backup(op: int, part: Part, source: list[int], target: list[int]) -> Move:
    return move(op, MoveKind.BACKUP, part, source, target)


def loading(op: int, part: Part, source: list[int], target: list[int]) -> Move:
    return move(op, MoveKind.LOAD, part, source, target)


class HeldPool(DevicePool):
    """A device pool of which each copy waits for a permit of the test, and fails where the test says so."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec, load("cpu"))
        self.permits = threading.Semaphore(0)
        self.begun: list[str] = []
        self.arrived = threading.Semaphore(0)
        self.fail_with: BaseException | None = None

    def _wait(self, what: str) -> None:
        self.begun.append(what)
        self.arrived.release()
        assert self.permits.acquire(timeout=WAIT_S), "the test forgot a permit"
        if self.fail_with is not None:
            raise self.fail_with

    def copy_out(self, pages, bytes_RY, rows) -> None:  # type: ignore[no-untyped-def]
        self._wait(f"out {pages.tolist()}")
        super().copy_out(pages, bytes_RY, rows)

    def copy_in(self, pages, bytes_RY, rows, first, end) -> None:  # type: ignore[no-untyped-def]
        self._wait(f"in {first}-{end}")
        super().copy_in(pages, bytes_RY, rows, first, end)


def held() -> tuple[HeldPool, dict[Part, DevicePool], dict[Part, HostPool], tuple[Part, ...]]:
    """One part of three layers of 256 KiB a page, so that every layer is a copy of its own."""
    spec = dataclasses.replace(SPEC, layer_count=3, kv_head_count=8, head_size=128, page_size=32, page_count=6)
    pool = HeldPool(spec)
    return pool, {FULL: pool}, {FULL: HostPool(spec, 6)}, (FULL, FULL, FULL)


@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_pages_of_both_parts_go_to_the_host_and_come_back_elsewhere(column: str) -> None:
    device, host = pools(column)
    want = {FULL: device[FULL].read_pages(np.array([7, 2, 5])), SWA: device[SWA].read_pages(np.array([6, 1]))}
    with moving(device, host) as mover:
        mover.submit([backup(1, FULL, [7, 2, 5], [3, 11, 4]), backup(1, SWA, [6, 1], [9, 2])])
        (done,) = mover.wait([1])
        assert (done.op, done.ok, done.error) == (1, True, "")
        assert done.byte_count == sum(data.nbytes for data in want.values())
        assert np.array_equal(host[FULL].data_PY[[3, 11, 4]], want[FULL])
        assert np.array_equal(host[SWA].data_PY[[9, 2]], want[SWA])
        for part in (FULL, SWA):
            device[part].write_pages(
                np.arange(1, SPECS[part].page_count),
                np.zeros((SPECS[part].page_count - 1, SPECS[part].page_bytes), np.uint8),
            )
        mover.submit([loading(2, FULL, [4, 3, 11], [1, 2, 3]), loading(2, SWA, [2, 9], [5, 4])])
        (done,) = mover.wait([2])
        assert done.ok
    assert np.array_equal(device[FULL].read_pages(np.array([2, 3, 1])), want[FULL])
    assert np.array_equal(device[SWA].read_pages(np.array([4, 5])), want[SWA])
    assert not device[FULL].read_pages(np.array([4, 5, 6, 7, 8])).any()
    assert not device[SWA].read_pages(np.array([1, 2, 3, 6])).any()
    assert not host[FULL].data_PY[[0, 1, 2, 5, 6, 7, 8, 9, 10]].any()


def test_a_part_without_layers_moves_no_bytes_but_its_copies_end() -> None:
    bare = dataclasses.replace(SPEC, layer_count=0)
    device = {FULL: DevicePool(bare, load("cpu")), SWA: DevicePool(SPEC, load("cpu"))}
    host = {FULL: HostPool(bare, 5), SWA: HostPool(SPEC, 5)}
    assert device[FULL].page_bytes == host[FULL].page_bytes == 0
    assert device[FULL].read_pages(np.array([1, 2])).shape == (2, 0)
    device[FULL].write_pages(np.array([1]), np.zeros((1, 0), np.uint8))
    mover = Mover(device, host, (SWA, SWA), WallClock())
    mover.submit([backup(1, FULL, [1], [1])])
    mover.submit([loading(2, FULL, [1, 2], [3, 4]), loading(2, SWA, [1], [2])])
    assert [(d.op, d.ok, d.byte_count) for d in mover.wait([1, 2])] == [(1, True, 0), (2, True, SPEC.page_bytes)]
    mover.close()


def test_a_forward_pass_starts_on_the_first_layer_while_later_ones_are_loading() -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    gate = LayerGate(mover)
    host[FULL].data_PY[2] = 7
    mover.submit([loading(1, FULL, [2], [4])])
    gate.before(None)
    pool.permits.release()
    gate.before_layer(0)
    page = slice(4 * 32, 5 * 32)
    assert pool.k[0][page].any()
    assert not pool.k[1][page].any()
    assert mover.poll() == []
    pool.permits.release(2)
    gate.before_layer(1)
    assert pool.k[1][page].any()
    gate.before_layer(2)
    assert pool.v[2][page].any()
    gate.after(None)
    assert [done.ok for done in mover.wait([1])] == [True]
    assert pool.begun == ["in 0-1", "in 1-2", "in 2-3"]
    mover.close()


def test_a_gate_waits_for_no_load_that_was_submitted_later() -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    gate = LayerGate(mover)
    gate.before(None)
    mover.submit([loading(1, FULL, [2], [4])])
    assert pool.arrived.acquire(timeout=WAIT_S)
    for layer in range(3):
        gate.before_layer(layer)  # would wait for ever: there is no permit
    gate.after(None)
    assert mover.poll() == []
    pool.permits.release(3)
    mover.wait([1])
    mover.close()


def test_a_load_overtakes_backups_and_completions_are_told_in_the_order_of_submission() -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    mover.submit([backup(1, FULL, [1], [1])])
    assert pool.arrived.acquire(timeout=WAIT_S)
    mover.submit([backup(2, FULL, [2], [2])])
    mover.submit([loading(3, FULL, [3], [3])])
    pool.permits.release(5)
    assert [done.op for done in mover.wait([3, 2])] == [1, 2, 3]
    assert pool.begun == ["out [1]", "in 0-1", "in 1-2", "in 2-3", "out [2]"]
    assert mover.wait([1, 2, 3]) == []
    mover.close()


@pytest.mark.parametrize("error", [ValueError("no such page"), RuntimeError("device lost"), MemoryError("full")])
def test_a_copy_that_fails_says_so_and_lets_the_forward_pass_through(error: BaseException) -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    gate = LayerGate(mover)
    pool.fail_with = error
    mover.submit([loading(1, FULL, [2], [4])])
    gate.before(None)
    pool.permits.release()
    gate.before_layer(2)
    gate.after(None)
    (done,) = mover.wait([1])
    assert done == MoveDone(op=1, ok=False, error=f"{type(error).__name__}: {error}", seconds=done.seconds)
    pool.fail_with = None
    pool.permits.release(1)
    mover.submit([backup(2, FULL, [1], [1])])
    assert [d.ok for d in mover.wait([2])] == [True]
    mover.close()


def test_pages_that_are_none_of_ours_fail_the_copy_and_touch_nothing() -> None:
    device, host = pools()
    before = host[FULL].data_PY.copy()
    with moving(device, host) as mover:
        mover.submit([backup(1, FULL, [9], [1])])
        mover.submit([backup(2, FULL, [1], [12])])
        mover.submit([backup(3, FULL, [1, 2], [3])])
        done = mover.wait([1, 2, 3])
    assert [d.ok for d in done] == [False, False, False]
    assert "pages 9" in done[0].error
    assert "rows 12" in done[1].error
    assert "1 rows for 2 pages" in done[2].error
    assert np.array_equal(host[FULL].data_PY, before)


def test_closing_does_not_wait_for_copies_that_have_not_begun() -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    mover.submit([backup(1, FULL, [1], [1])])
    assert pool.arrived.acquire(timeout=WAIT_S)
    mover.submit([backup(2, FULL, [2], [2])])
    pool.permits.release(1)
    mover.close()
    mover.close()
    assert pool.begun == ["out [1]"]
    with pytest.raises(InvariantError, match="mover is closed"):
        mover.submit([backup(3, FULL, [1], [1])])


def test_an_op_that_is_under_way_cannot_be_submitted_again_nor_go_both_ways() -> None:
    pool, device, host, parts = held()
    mover = Mover(device, host, parts, WallClock())
    mover.submit([backup(1, FULL, [1], [1])])
    with pytest.raises(InvariantError, match="copy 1 submitted twice"):
        mover.submit([backup(1, FULL, [2], [2])])
    with pytest.raises(InvariantError, match="of two kinds"):
        mover.submit([backup(2, FULL, [2], [2]), loading(2, FULL, [3], [3])])
    pool.permits.release(1)
    mover.wait([1])
    mover.close()


def test_a_mover_refuses_pools_that_do_not_fit_the_model() -> None:
    device, host = pools()
    with pytest.raises(InvariantError, match="expected the same in all"):
        Mover(device, host, (FULL, FULL, SWA), WallClock())
    with pytest.raises(InvariantError, match="part SWA"):
        Mover(device, {FULL: host[FULL]}, LAYERS, WallClock())


def test_many_copies_at_once_end_with_every_page_in_its_place() -> None:
    rng = np.random.default_rng(3)
    spec = dataclasses.replace(SPEC, page_count=65)
    device, host = {FULL: DevicePool(spec, load("cpu"))}, {FULL: HostPool(spec, 65)}
    for round_ in range(20):
        marks = rng.integers(1, 250, 65).astype(np.uint8)
        device[FULL].write_pages(np.arange(1, 65), np.repeat(marks[1:, None], spec.page_bytes, axis=1))
        order, back = rng.permutation(np.arange(1, 65)), rng.permutation(np.arange(1, 65))
        mover = Mover(device, host, (FULL, FULL), WallClock())
        for op in range(16):
            span = slice(op * 4, op * 4 + 4)
            mover.submit([backup(op + 1, FULL, (np.arange(1, 65)[span]).tolist(), order[span].tolist())])
        assert [d.op for d in mover.wait(range(1, 17))] == list(range(1, 17)), round_
        for op in range(16):
            span = slice(op * 4, op * 4 + 4)
            mover.submit([loading(op + 17, FULL, order[span].tolist(), back[span].tolist())])
        mover.wait(range(17, 33))
        mover.close()
        assert np.array_equal(device[FULL].read_pages(back)[:, 0], marks[1:]), round_


def test_the_host_tier_is_sized_by_ratio_or_by_bytes_in_the_proportion_of_the_device_pools() -> None:
    roomy = 10**9
    counts = host_page_counts(SPECS, ratio=2.0, size_gb=0.0, available_bytes=roomy)
    assert counts == {FULL: 17, SWA: 13}
    page = {part: spec.page_bytes for part, spec in SPECS.items()}
    total = 8 * page[FULL] + 6 * page[SWA]
    counts = host_page_counts(SPECS, ratio=2.0, size_gb=total / 2 / 1e9, available_bytes=roomy)
    assert counts == {FULL: 5, SWA: 4}


def test_a_host_tier_that_the_machine_cannot_give_is_refused_with_figures() -> None:
    big = {FULL: dataclasses.replace(SPEC, layer_count=32, head_size=128, page_size=128, page_count=1001)}
    gb = big[FULL].page_bytes * 1000 / 1e9
    with pytest.raises(ConfigError, match=rf"ratio 4 takes {4.001 * gb:.2f} GB.* can give {gb:.2f} GB.*most 1.00"):
        host_page_counts(big, ratio=4.0, size_gb=0, available_bytes=int(gb * 1e9))
    with pytest.raises(ConfigError, match="--hicache-size 100 takes 100"):
        host_page_counts(big, ratio=2.0, size_gb=100.0, available_bytes=int(gb * 1e9))
    with pytest.raises(ConfigError, match="part FULL no host page"):
        host_page_counts(big, ratio=0.0005, size_gb=0, available_bytes=int(gb * 1e9))
    with pytest.raises(ConfigError, match="host tier of 1 pages"):
        HostPool(SPEC, 1)


def test_memory_that_the_system_does_not_give_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="system gives no"):
        HostPool(SPEC, 1 << 45)


def test_host_memory_is_mapped_before_it_is_written() -> None:
    host = HostPool(dataclasses.replace(SPEC, page_size=128, page_count=1024), 256)
    first = ctypes.c_void_p(-(-host.data_PY.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE)
    count = host.data_PY.nbytes // mmap.PAGESIZE - 1
    seen = np.zeros(count, np.uint8)

    def resident() -> int:
        size = ctypes.c_size_t(count * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mincore(first, size, ctypes.c_void_p(seen.ctypes.data)) == 0
        return int((seen & 1).sum())

    assert host.data_PY.nbytes > 3 << 21, "several pieces"
    mapping = map_ahead([host])
    for _ in range(2000):
        if resident() == count:
            break
        threading.Event().wait(0.005)
    assert resident() == count
    assert not host.data_PY.any(), "its content stays"
    mapping.stop()
    host.close()
