"""Where the rows of slots begin in a pool, for the kernels that read and write them (see `kernels.pool_rows`), and of
which sequence a tile is."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_jit: Any = triton.jit


@_jit
def row_starts(slot, gap, ROW: tl.constexpr, SLOTS: tl.constexpr):
    """In elements, int64. Slots: not negative, below 2**31. ROW: elements of a row; SLOTS: slots of a page; gap:
    elements from the end of a page to the next one. Of a gap that is a multiple of 16 the compiler knows that it is
    one, and loads 16 bytes at a time."""
    return slot.to(tl.int64) * ROW + (slot.to(tl.uint32) // SLOTS).to(tl.int64) * gap


@_jit
def owner_of(starts, at, first, count, EACH: tl.constexpr, TILE: tl.constexpr, NUMBERED: tl.constexpr):
    """The last of `count` sequences, from `first` on, that begins at or before `at`. Sequence b begins at
    starts[b] * EACH // TILE, and where tiles are NUMBERED b behind that, as no tile is of two sequences."""
    b, behind = at * 0 + first, at * 0 + first + count
    while b + 1 < behind:
        middle = (b + behind) // 2
        begins = tl.load(starts + middle).to(tl.int32) * EACH // TILE
        if NUMBERED:
            begins += middle
        b, behind = tl.where(begins <= at, middle, b), tl.where(begins <= at, behind, middle)
    return b
