"""Where the rows of slots lie in the pool of one layer: keys, values or latent rows.

A pool is [S, H, D] (or [S, W]), contiguous: slot s is row s. Or it is page first, [P, T, H, D]: slot s is row s % T of
page s // T; a page is contiguous, and from one page to the next it is as far as the rows of all layers take.
P = pages, T = slots of a page, S = slots, H = KV heads, D = head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serinus.kernels.fp8 import FP8_FORMATS


def slot_count(pool: Tensor) -> int:
    """S: its slots, those of the padding page included."""
    return pool.shape[0] * pool.shape[1] if pool.dim() == 4 else pool.shape[0]


def row_elements(pool: Tensor) -> int:
    """Elements of the row of one slot."""
    return math.prod(pool.shape[2 if pool.dim() == 4 else 1 :])


def page_gap(pool: Tensor) -> tuple[int, int]:
    """Slots of a page, and elements from the end of a page to the next one; a contiguous pool is one of pages of one
    slot without gaps."""
    slots = pool.shape[1] if pool.dim() == 4 else 1
    return slots, pool.stride(0) - slots * row_elements(pool)


def row_of(pool: Tensor, slot: int) -> Tensor:
    """The row of one slot, [H, D], itself and no copy."""
    return pool[slot // pool.shape[1], slot % pool.shape[1]] if pool.dim() == 4 else pool[slot]


def rows_of(pool: Tensor, slots_E: Tensor) -> Tensor:
    """A copy of the rows of these slots, [E, H, D]. Slots: int64, all in the pool."""
    if pool.dtype in FP8_FORMATS:  # torch indexes no tensors of them
        return rows_of(pool.view(torch.uint8), slots_E).view(pool.dtype)
    if pool.dim() == 4:
        return pool[slots_E // pool.shape[1], slots_E % pool.shape[1]]
    return pool.index_select(0, slots_E)


def put_rows(pool: Tensor, slots_T: Tensor, rows_THD: Tensor) -> None:
    """Write the rows of these slots, in place; they are of the type of the pool."""
    if pool.dtype in FP8_FORMATS:
        put_rows(pool.view(torch.uint8), slots_T, rows_THD.view(torch.uint8))
    elif pool.dim() == 4:
        pool[slots_T // pool.shape[1], slots_T % pool.shape[1]] = rows_THD
    else:
        pool[slots_T] = rows_THD


def is_laid_out(pool: Tensor) -> bool:
    """Whether the rows lie as said above."""
    if pool.dim() != 4:
        return pool.is_contiguous()
    _, _, heads, size = pool.shape
    return pool.stride()[1:] == (heads * size, size, 1)
