"""What the kernels of experts share: cuts, which pairs a tile has, and what becomes of sums. See `fused_moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from serinus.kernels.triton.gates import gated


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCut:
    """How a product is cut."""

    rows: int
    """Pairs of one tile: the same for both products."""
    outputs: int
    """Outputs of one program."""
    inner: int = 64
    """Inputs of one block."""
    warps: int = 4
    """Warps of one program."""
    stages: int = 3
    """Blocks that are loaded ahead."""
    bulk: bool = False
    """Whether weights come through the bulk copy engine."""
    together: int = 0
    """Tiles whose programs follow each other, all outputs of them, so that what they read stays in the cache; 0: the
    programs of all tiles do, output by output."""
    widened: bool = False
    """Whether quantized experts are written out as floats first."""


_jit: Any = triton.jit
_ALPHA, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


@_jit
def _swiglu(gate, up):
    gate = tl.minimum(gate, _LIMIT)
    up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
    return (up + 1.0) * gate / (1.0 + tl.exp(-gate * _ALPHA))


@_jit
def rows_of(order, ends, tiles_of, tiles, tile, expert, ROWS: tl.constexpr):
    """Of a tile the rows in the order of experts, whether there are so many, and their pairs."""
    row = tl.load(tiles_of + tiles + tile) + tl.arange(0, ROWS)
    has_row = row < tl.load(ends + expert)
    return row, has_row, tl.load(order + row, mask=has_row, other=0)


@_jit
def put(
    total, upper, bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN: tl.constexpr, OAI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and activation of gate and up, to their row; or with DOWN bias and the expert's weight, to the place of the
    pair."""
    if HAS_BIAS:
        total += tl.load(bias + base + o, mask=has_out, other=0.0).to(tl.float32)[None, :]
    if DOWN:
        total *= tl.load(weights + pair, mask=has_row, other=0.0)[:, None]
        place = pair
    else:
        if HAS_BIAS:
            upper += tl.load(bias + base + outs + o, mask=has_out, other=0.0).to(tl.float32)[None, :]
        total = _swiglu(total, upper) if OAI else gated(total, upper, 1)
        place = row
    spot = out + place[:, None].to(tl.int64) * outs + o[None, :]
    tl.store(spot, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_out[None, :])
