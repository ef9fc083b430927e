"""The KV pool and the request table."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError
from serinus.core.plan import TableWrite
from serinus.kernels import load
from serinus.pool import DevicePool, PoolSpec, RequestTable

SPEC = PoolSpec(
    layer_count=3, kv_head_count=2, head_size=8, page_size=4, page_count=9, dtype=torch.bfloat16, device="cpu"
)


def filled(seed: int, spec: PoolSpec = SPEC) -> DevicePool:
    pool = DevicePool(spec, load("cpu", "ref"))
    rng = torch.Generator().manual_seed(seed)
    for k, v in pool.layers:
        k.copy_(torch.randn(k.shape, generator=rng))
        v.copy_(torch.randn(v.shape, generator=rng))
    return pool


def heap_with_a_hole(byte_count: int) -> NDArray[np.uint8]:
    """Free memory of the heap that is not mapped, which glibc gives before it asks the system; the block behind it."""
    block, libc, mmap_threshold = 16 << 20, ctypes.CDLL(None), -3
    libc.mallopt(mmap_threshold, 2 * block)
    blocks = [np.zeros(block, dtype=np.uint8) for _ in range(byte_count // block + 1)]
    last = blocks.pop()
    blocks.clear()
    libc.malloc_trim(0)
    return last


def test_a_new_pool_is_zero_and_has_the_shape_of_its_spec() -> None:
    pool = DevicePool(SPEC, load("cpu", "ref"))
    assert len(pool.k) == len(pool.v) == len(pool.layers) == 3
    for k, v in pool.layers:
        assert k.shape == v.shape == (36, 2, 8)
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert k.data_ptr() % 64 == 0
        assert not k.any()
        assert not v.any()
    assert pool.page_bytes == 3 * 2 * 4 * 2 * 8 * 2


def test_lanes_do_not_overlap() -> None:
    pool = DevicePool(SPEC, load("cpu", "ref"))
    for number, lane in enumerate([*pool.k, *pool.v]):
        lane.fill_(number + 1)
    for number, lane in enumerate([*pool.k, *pool.v]):
        assert lane.unique().tolist() == [number + 1]


@pytest.mark.parametrize("where", ["fresh", "in a hole of the heap"])
def test_a_large_pool_costs_no_memory_until_it_is_written(where: str) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    behind = heap_with_a_hole(byte_count=(2 << 30) + (64 << 20)) if where != "fresh" else None
    before = resident()
    spec = dataclasses.replace(SPEC, layer_count=16, kv_head_count=8, head_size=128, page_size=16, page_count=2048)
    pool = DevicePool(spec, load("cpu", "ref"))
    assert spec.page_bytes * spec.page_count == 2 << 30
    assert resident() - before < 64 << 20
    assert not pool.k[15][5].any()
    del behind


@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_pages_read_from_one_pool_and_written_to_another_are_the_same_pages(column: str) -> None:
    source, target = filled(1), DevicePool(SPEC, load("cpu", column))
    data = source.read_pages(np.array([7, 2, 5], dtype=np.int32))
    assert data.shape == (3, SPEC.page_bytes)
    target.write_pages(np.array([1, 8, 3]), data)
    for (k, v), (k_new, v_new) in zip(source.layers, target.layers, strict=True):
        for old, new in ((7, 1), (2, 8), (5, 3)):
            assert torch.equal(k_new[new * 4 : new * 4 + 4], k[old * 4 : old * 4 + 4])
            assert torch.equal(v_new[new * 4 : new * 4 + 4], v[old * 4 : old * 4 + 4])
    assert np.array_equal(target.read_pages(np.array([1, 8, 3])), data)
    assert not target.read_pages(np.array([0, 2, 4, 5, 6, 7])).any()


def test_pages_can_be_read_into_a_given_buffer_and_written_from_a_read_only_one() -> None:
    source, target = filled(2), DevicePool(SPEC, load("cpu"))
    memory = bytearray(2 * SPEC.page_bytes + 8)
    view = np.frombuffer(memory, dtype=np.uint8, count=2 * SPEC.page_bytes, offset=8).reshape(2, -1)
    assert source.read_pages(np.array([4, 6]), view) is view
    frozen = np.frombuffer(bytes(memory[8:]), dtype=np.uint8).reshape(2, -1)
    target.write_pages(np.array([4, 6]), frozen)
    assert torch.equal(target.k[2][16:20], source.k[2][16:20])
    assert torch.equal(target.v[0][24:28], source.v[0][24:28])


def test_no_pages_are_moved_without_complaint() -> None:
    pool = filled(3)
    assert pool.read_pages(np.array([], dtype=np.int64)).shape == (0, SPEC.page_bytes)


def test_pages_that_are_none_of_ours_and_buffers_of_wrong_size_are_refused() -> None:
    pool = filled(4)
    with pytest.raises(ValueError, match="pages 9"):
        pool.read_pages(np.array([9]))
    with pytest.raises(ValueError, match="page buffer"):
        pool.write_pages(np.array([1]), np.zeros((1, 17), dtype=np.uint8))
    with pytest.raises(ValueError, match="page buffer"):
        pool.read_pages(np.array([1]), np.zeros((2, SPEC.page_bytes), dtype=np.uint8))


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_count", -1), ("kv_head_count", 0), ("head_size", -1), ("page_size", 0), ("page_count", 1)],
)
def test_a_spec_without_room_is_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        dataclasses.replace(SPEC, **{field: value})


def test_a_spec_of_a_dtype_that_no_kernel_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch\.float64"):
        dataclasses.replace(SPEC, dtype=torch.float64)


def test_table_writes_are_carried_out_in_order() -> None:
    table = RequestTable(4, 8)
    table.apply(
        [
            TableWrite(row=1, start=2, slots=np.array([5, 6, 7], dtype=np.int64)),
            TableWrite(row=3, start=0, slots=np.array([9], dtype=np.int64)),
            TableWrite(row=1, start=3, slots=np.array([8, 4], dtype=np.int64)),
        ]
    )
    assert table.table.dtype == torch.int32
    assert table.table.tolist() == [[0] * 8, [0, 0, 5, 8, 4, 0, 0, 0], [0] * 8, [9, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(("row", "start"), [(0, 0), (4, 0), (-1, 0), (1, 7), (1, -1)])
def test_a_write_that_leaves_the_table_breaks_a_promise(row: int, start: int) -> None:
    table = RequestTable(4, 8)
    with pytest.raises(InvariantError, match=f"row {row}, positions {start}"):
        table.apply([TableWrite(row=row, start=start, slots=np.array([1, 2], dtype=np.int64))])
    assert not table.table.any()


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="table of 1 rows"):
        RequestTable(1, 8)


@pytest.mark.parametrize("stamped", [False, True])
def test_regions_say_where_the_strips_of_a_page_lie(stamped: bool) -> None:
    spec = PoolSpec(
        layer_count=3, kv_head_count=2, head_size=4, page_size=8, page_count=6, dtype=torch.float32, stamped=stamped
    )
    pool = DevicePool(spec, load("cpu", "ref"))
    data = np.random.default_rng(1).integers(0, 256, (5, pool.page_bytes), dtype=np.uint8)
    pool.write_pages(np.arange(1, 6), data)
    for page in range(1, 6):
        strips = [
            ctypes.string_at(r.address + lane * r.lane_stride + page * r.strip_bytes, r.strip_bytes)
            for r in pool.regions
            for lane in range(r.lane_count)
        ]
        assert b"".join(strips) == data[page - 1].tobytes()
