"""Where the rows of slots begin in a pool, for the kernels that read and write them; see `kernels.pool_rows`."""

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
