"""Pages from one pool into another of the same device, with a sum over each: the specification.

Shapes: G = pages, P = pages of a pool, W = bytes of one row of a lane, K = sums of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pull_lanes, check_pull_pages
from serinus.kernels.contracts import PoolLane

__all__ = ["KEY_STEP", "MIX", "page_sums", "pull_pages"]

KEY_STEP: Final = 0x1E3779B97F4A7C15
"""Between the keys of two neighbouring words."""
MIX: Final = 0x2545F4914F6CDD1D
"""Odd factor of the mixing."""


def page_sums(rows_GY: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
    """The sum of each page, [G]: over its 64-bit words, modulo 2**64, of mix(word + seed + (index + 1) * KEY_STEP).

    A sum does not depend on an order, so any number of threads make it together; what keeps words apart is the key of
    each place. mix is a bijection of 64 bits: two shifts with exclusive or between multiplications, and one behind.
    """
    x = np.ascontiguousarray(rows_GY).view("<u8").astype(np.uint64)
    keys = np.arange(1, x.shape[1] + 1, dtype=np.uint64) * np.uint64(KEY_STEP) + np.uint64(seed)
    x += keys
    x ^= x >> np.uint64(32)
    x *= np.uint64(MIX)
    x ^= x >> np.uint64(29)
    x *= np.uint64(MIX)
    x ^= x >> np.uint64(32)
    sums: NDArray[np.uint64] = x.sum(axis=1, dtype=np.uint64)
    return sums


@torch.inference_mode()
def pull_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], seed: int, sources: Sequence[Tensor] = (),
    source_pages_G: NDArray[np.int64] | None = None, sums: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Fill pages from those of another pool, and return sums of each (`page_sums`).

    Args:
        lanes: uint8 [P, ..., W] each, W a multiple of 8, rows at any distance: where bytes of a page lie, in their
            order. Whole pages, or the layers and heads of them that one rank takes.
        pages_G: page ids; distinct where pages are filled.
        seed: of the sums, 0 to 2**63 - 1.
        sources: lanes of the other pool, of the same sizes, with any number of pages; it may change meanwhile. None:
            nothing is moved, own pages are summed where they lie.
        source_pages_G: where page pages_G[g] comes from.
        sums: how many lanes each sum is over, the first ones first; none = one sum over all. The places of words count
            from 0 in each.
    Returns: int64 [G, K] on the device, the sums of what was written (of what was read where nothing was). Nothing
        waits.
    Raises:
        ValueError: sizes disagree, or a page lies outside.
    Cost: the bytes read once, and written once; here more often.
    """
    own, theirs = [PoolLane.of(lane) for lane in lanes], [PoolLane.of(lane) for lane in sources]
    check_pull_lanes(own, theirs, sums)
    source_count = min(lane.sizes[0] for lane in theirs) if theirs else None
    check_pull_pages(pages_G, min(lane.sizes[0] for lane in own), source_pages_G, source_count)
    device = lanes[0].device
    ids = torch.from_numpy(np.ascontiguousarray(pages_G, np.int64)).to(device)
    if source_pages_G is not None:
        others = torch.from_numpy(np.ascontiguousarray(source_pages_G, np.int64)).to(device)
        taken = [source[others] for source in sources]
        for lane, rows in zip(lanes, taken, strict=True):
            lane[ids] = rows
    else:
        taken = [lane[ids] for lane in lanes]
    flat = [rows.flatten(1) for rows in taken]
    ends = list(accumulate(sums or (len(lanes),)))
    pieces = [torch.cat(flat[first:end], dim=1).cpu().numpy() for first, end in pairwise((0, *ends))]
    found_GK = np.stack([page_sums(rows_GY, seed) for rows_GY in pieces], axis=1)
    return torch.from_numpy(found_GK.view(np.int64)).to(device)
