"""Digests of pages on the host: those of the device pool that the pages came from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serinus.core.stamps import digest_coefficients
from serinus.kernels import Kernels
from serinus.pool import DevicePool, PoolSpec


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "dtype", "halves"),
    [(2, 16, torch.bfloat16, 2), (3, 10, torch.float32, 2), (1, 6, torch.float16, 2), (1, 6, torch.float16, 1)],
)
def test_they_are_the_digests_of_the_slots_that_the_page_was_copied_from(
    either: Kernels, heads: int, size: int, dtype: torch.dtype, halves: int, partial: bool
) -> None:
    spec = PoolSpec(
        layer_count=3, kv_head_count=heads, head_size=size, page_size=4, page_count=9, dtype=dtype, halves=halves,
        stamped=True,
    )  # fmt: skip
    pool = DevicePool(spec, either)
    words = np.random.default_rng(1).integers(0, 1 << 16, spec.kv_bytes * spec.page_count // 2)
    pool.k[0].untyped_storage().copy_(torch.from_numpy(words.astype(np.uint16).view(np.uint8)).untyped_storage())
    pages = np.array([7, 2, 5])
    host = np.full((6, spec.page_bytes), 0xAA, np.uint8)
    rows = np.array([4, 1, 3])
    pool.copy_out(pages, torch.from_numpy(host), rows)
    factors = torch.from_numpy(
        digest_coefficients(range(3), range(heads), size, dtype.itemsize, partial=partial, halves=halves)
    )
    slots = torch.from_numpy((pages[:, None] * 4 + np.arange(4)).reshape(-1))
    expected = either.canary_digest(pool.layers, slots, factors).numpy().reshape(3, 4, 2)
    row_bytes = heads * size * dtype.itemsize
    assert np.array_equal(either.page_digests(host, rows, 4, row_bytes, factors), expected)
    host[1, 2 * row_bytes] ^= 1  # the third slot of the first layer's keys
    assert np.argwhere(either.page_digests(host, rows, 4, row_bytes, factors) != expected).tolist() == [[1, 2, 0]]
    assert either.page_digests(host, rows[:0], 4, row_bytes, factors).shape == (0, 4, 2)


def test_what_does_not_fit_the_buffer_is_refused(either: Kernels) -> None:
    factors = torch.from_numpy(digest_coefficients(range(2), range(1), 8, 2, partial=False))
    host = np.zeros((4, 2 * 2 * 4 * 16), np.uint8)
    with pytest.raises(ValueError, match=r"pages 4 \.\. 4, expected 0 \.\. 3"):
        either.page_digests(host, np.array([4]), 4, 16, factors)
    for page_size, row_bytes in ((8, 16), (4, 32), (4, 14), (4, 15)):
        with pytest.raises(ValueError, match="expected uint8 and"):
            either.page_digests(host, np.array([1]), page_size, row_bytes, factors)
