"""Pools whose pages are one contiguous run each hold the same rows and the same page bytes as all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from serinus.core.errors import ConfigError
from serinus.core.stamps import digest_coefficients
from serinus.kernels import AttentionBatch, load, put_rows, row_of, rows_of, slot_count
from serinus.pool import DevicePool, PoolSpec

LAYERS, PAGE, PAGES = 3, 4, 7


def both(halves: int = 2, *, stamped: bool = True) -> tuple[DevicePool, DevicePool]:
    """Two pools of the same random pages, the second page first."""
    spec = PoolSpec(
        layer_count=LAYERS, kv_head_count=2, head_size=8, page_size=PAGE, page_count=PAGES, dtype=torch.bfloat16,
        halves=halves, stamped=stamped, page_first=False,
    )  # fmt: skip
    pools = tuple(DevicePool(replace(spec, page_first=first), load("cpu", "ref")) for first in (False, True))
    data = np.random.default_rng(0).integers(0, 256, (PAGES, spec.page_bytes), np.uint8)
    for pool in pools:
        pool.write_pages(np.arange(PAGES), data)
    return pools[0], pools[1]


def words(rows: torch.Tensor) -> torch.Tensor:
    """To compare bits: random bytes are not all numbers."""
    return rows.contiguous().view(torch.int16)


@pytest.mark.parametrize("halves", [1, 2])
def test_a_page_is_one_run_and_every_slot_has_the_row_that_it_has_in_other_pools(halves: int) -> None:
    apart, whole = both(halves)
    assert apart.pages_PY is None
    assert whole.pages_PY is not None
    assert whole.pages_PY.is_contiguous()
    slots = torch.arange(PAGE * PAGES)
    for one, other in zip(apart.layers, whole.layers, strict=True):
        assert len(one) == len(other) == halves
        for rows, same in zip(one, other, strict=True):
            assert slot_count(same) == len(slots)
            assert torch.equal(words(rows), words(rows_of(same, slots)))
            assert torch.equal(words(rows[9]), words(row_of(same, 9)))
    kv_bytes = whole.spec.kv_bytes
    found = whole.read_pages(np.array([5, 2]))
    assert np.array_equal(found, apart.read_pages(np.array([5, 2])))
    assert np.array_equal(found[:, :kv_bytes], whole.pages_PY.numpy()[[5, 2]])
    region = whole.regions[0]
    assert (region.address, region.lane_count, region.strip_bytes) == (whole.pages_PY.data_ptr(), 1, kv_bytes)


def test_pages_go_out_and_come_back_some_layers_at_a_time_to_other_pages() -> None:
    apart, whole = both()
    pages, rows, targets = np.array([6, 1, 3]), np.array([2, 0, 3]), np.array([2, 4, 5])
    buffer = torch.zeros((4, whole.page_bytes), dtype=torch.uint8)
    whole.copy_out(pages, buffer, rows)
    assert not buffer[:, whole.spec.kv_bytes :].any(), "stamps went with the rows"
    whole.copy_stamps_out(pages, buffer[:, whole.spec.kv_bytes :], rows)
    assert np.array_equal(buffer.numpy()[rows], apart.read_pages(pages))
    assert not buffer[1].any()
    before = whole.read_pages(np.arange(PAGES))
    whole.copy_in(targets, buffer, rows, 1, 2)
    columns = slice(whole.spec.layer_bytes, 2 * whole.spec.layer_bytes)
    found = whole.read_pages(np.arange(PAGES))
    assert np.array_equal(found[targets, columns], apart.read_pages(pages)[:, columns])
    found[targets, columns] = before[targets, columns]
    assert np.array_equal(found, before), "more than layer 1 of these pages was written"
    whole.copy_in(targets, buffer, rows, 0, LAYERS)
    whole.copy_stamps_in(targets, buffer[:, whole.spec.kv_bytes :], rows)
    assert np.array_equal(whole.read_pages(targets), apart.read_pages(pages))
    assert whole.hashed_pages(targets, None, 3) == apart.hashed_pages(pages, None, 3)


def test_copies_of_pages_and_rows_that_are_not_there_are_refused() -> None:
    _, whole = both()
    buffer = torch.zeros((4, whole.page_bytes), dtype=torch.uint8)
    for pages, rows in (([PAGES], [0]), ([1], [4]), ([1, 2], [0]), ([-1], [0])):
        with pytest.raises(ValueError, match="pool: "):
            whole.copy_out(np.array(pages), buffer, np.array(rows))
        with pytest.raises(ValueError, match="pool: "):
            whole.copy_in(np.array(pages), buffer, np.array(rows), 0, LAYERS)


def test_the_reference_reads_stores_and_digests_the_same_rows() -> None:
    ops = load("cpu", "ref")
    slots = torch.tensor([17, 4, 26, 9])
    seen = []
    for pool in both(stamped=False):
        for lane in (*pool.k, *pool.v):
            lane.zero_()
            put_rows(
                lane, torch.arange(slot_count(lane)), torch.arange(slot_count(lane) * 16).view(-1, 2, 8).bfloat16()
            )
        qkv, angle = torch.linspace(-1, 1, 4 * 48).view(4, 48).bfloat16(), torch.ones(9, 4)
        q = torch.empty(4, 2, 8, dtype=torch.bfloat16)
        ops.qk_rope_store(qkv, angle, angle, torch.arange(4), None, None, 0.0, *pool.layers[1], slots, q)
        table = torch.zeros((2, 6), dtype=torch.int32)
        table[1, :4] = slots.int()
        batch = AttentionBatch(
            rows_B=torch.tensor([1]), q_starts_B1=torch.tensor([0, 2]), context_B=torch.tensor([4])
        )  # fmt: skip
        factors = torch.from_numpy(digest_coefficients(range(LAYERS), range(2), 8, 2, partial=False))
        seen.append((ops.paged_attention(q[:2], *pool.layers[1], table, batch, 0.1), ops.canary_digest(
            pool.layers, slots, factors
        )))  # fmt: skip
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert seen[0][1].all()


def test_kernels_of_the_cpu_column_are_given_no_such_pool() -> None:
    spec = replace(both()[0].spec, page_first=True)
    with pytest.raises(ConfigError, match="column cpu"):
        DevicePool(spec, load("cpu", "cpu"))
