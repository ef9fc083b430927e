"""The canary's stamps are lanes of the pool: every way a page can go, they go with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from serinus.core.clock import WallClock
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part
from serinus.core.stamps import STAMP_BYTES
from serinus.kernels import load
from serinus.pool import DevicePool, HostPool, Mover, PoolSpec

SPEC = PoolSpec(
    layer_count=2, kv_head_count=2, head_size=8, page_size=4, page_count=9, dtype=torch.bfloat16, stamped=True
)


def filled(column: str, halves: int = 2) -> DevicePool:
    pool = DevicePool(dataclasses.replace(SPEC, halves=halves), load("cpu", column))
    rng = torch.Generator().manual_seed(3)
    for lane in (*pool.k, *pool.v):
        lane.copy_(torch.randn(lane.shape, generator=rng))
    assert pool.stamps_LS4 is not None
    pool.stamps_LS4.copy_(torch.randint(-(1 << 62), 1 << 62, pool.stamps_LS4.shape, generator=rng))
    return pool


def stamps_of(pool: DevicePool, pages: list[int]) -> torch.Tensor:
    assert pool.stamps_LS4 is not None
    return pool.stamps_LS4.view(2 * pool.spec.halves, SPEC.page_count, -1)[:, pages]


def test_a_pool_without_a_canary_keeps_no_stamps() -> None:
    pool = DevicePool(dataclasses.replace(SPEC, stamped=False), load("cpu"))
    assert pool.stamps_LS4 is None
    assert pool.page_bytes == SPEC.kv_bytes


def test_a_part_without_layers_has_neither_bytes_nor_stamps() -> None:
    pool = DevicePool(dataclasses.replace(SPEC, layer_count=0), load("cpu"))
    assert (pool.page_bytes, pool.stamps_LS4) == (0, None)
    assert pool.read_pages(np.array([1, 2])).shape == (2, 0)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_stamps_travel_in_the_bytes_of_their_page(column: str, halves: int) -> None:
    source = filled(column, halves)
    target = DevicePool(source.spec, load("cpu", column))
    assert source.page_bytes == source.spec.kv_bytes + 4 * halves * STAMP_BYTES
    target.write_pages(np.array([1, 8, 2]), source.read_pages(np.array([3, 4, 7])))
    assert torch.equal(stamps_of(target, [1, 8, 2]), stamps_of(source, [3, 4, 7]))
    assert not stamps_of(target, [0, 3, 4, 5, 6, 7]).any()
    assert torch.equal(target.k[1][4:8], source.k[1][12:16])


@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_stamps_go_to_the_host_tier_and_come_back(column: str) -> None:
    pool = filled(column)
    assert pool.stamps_LS4 is not None
    host = HostPool(SPEC, 6)
    before = stamps_of(pool, [5, 2]).clone()
    mover = Mover({Part.FULL: pool}, {Part.FULL: host}, (Part.FULL, Part.FULL), WallClock())
    try:
        for op, kind, source, goal in ((1, MoveKind.BACKUP, [5, 2], [4, 1]), (2, MoveKind.LOAD, [4, 1], [7, 8])):
            ends = np.array(source, np.int32), np.array(goal, np.int32)
            mover.submit([Move(op=op, kind=kind, part=Part.FULL, source=ends[0], target=ends[1])])
            assert all(done.ok for done in mover.wait([op]))
            if kind is MoveKind.BACKUP:
                pool.stamps_LS4.zero_()
    finally:
        mover.close()
    assert torch.equal(stamps_of(pool, [7, 8]), before)
