"""The routed experts of a mixture: two grouped products over tokens sorted by expert; see the reference.

The pairs of a token and one of its experts are sorted by expert, on the device. A program takes a tile of rows of one
expert and a stretch of outputs; which expert its tile belongs to it finds from the ends of the experts' tiles. As many
programs are started as any choice could need, and those without a tile end at once: shapes are those of the batch
alone, so that a step can be captured. A tile reads its expert's weights once; experts that no token chose are not read.

T = tokens, K = experts of a token, P = T K pairs, X = experts, E = width of the stream, F = width inside an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_fused_moe
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.packed import PackedExperts
from serinus.kernels.triton.gates import gated

__all__ = ["fused_moe"]

_ALPHA, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


def fused_moe(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate) -> Tensor:
    """The experts' sums. Cost: one read of the weights of the experts that are hit for each tile of their rows; P rows
    of the stream written and read once; no host wait."""
    check_fused_moe(x_TE, weights_TK, ids_TK, packed)
    x_TE = x_TE.contiguous()
    (tokens, width), chosen = x_TE.shape, ids_TK.shape[1]
    count, inner, pairs = len(packed.gate_up), packed.down.shape[2], tokens * ids_TK.shape[1]
    if not pairs:
        return torch.zeros_like(x_TE)
    rows = 16 if pairs <= 16 * count else 64
    outs = 64 if rows == 16 else 128
    tiles = min(pairs, count) + pairs // rows
    flat_P = ids_TK.reshape(-1)
    order_P = flat_P.argsort(stable=True)
    counts_X = torch.zeros(count, dtype=torch.int64, device=x_TE.device)
    counts_X.scatter_add_(0, flat_P, torch.ones_like(flat_P))
    ends_X, tile_ends_X = counts_X.cumsum(0), ((counts_X + rows - 1) // rows).cumsum(0)
    weights_P = weights_TK.contiguous()
    inner_PF, added_PE = x_TE.new_empty((pairs, inner)), x_TE.new_empty((pairs, width))
    shared: dict[str, Any] = {
        "COUNT": count, "COUNT_UP": max(16, int(triton.next_power_of_2(count))), "CHOSEN": chosen, "ROWS": rows,
        "num_warps": 4 if rows == 16 else 8, "num_stages": 3,
    }  # fmt: skip
    for down, left, stack, bias, out in (
        (False, x_TE, packed.gate_up, packed.gate_up_bias, inner_PF),
        (True, inner_PF, packed.down, packed.down_bias, added_PE),
    ):
        _experts[(tiles, triton.cdiv(out.shape[1], outs))](
            left, stack, stack if bias is None else bias, weights_P, order_P, ends_X, tile_ends_X, out, left.shape[1],
            out.shape[1], DOWN=down, OAI=gate == "swiglu_oai", HAS_BIAS=bias is not None, OUTS=outs,
            BLOCK=64 if x_TE.element_size() == 2 else 32, **shared,
        )  # fmt: skip
    return added_PE.view(tokens, chosen, width).sum(1) if chosen > 1 else added_PE


_jit: Any = triton.jit


@_jit
def _swiglu(gate, up):
    gate = tl.minimum(gate, _LIMIT)
    up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
    return (up + 1.0) * gate / (1.0 + tl.exp(-gate * _ALPHA))


@_jit
def _experts(
    left, stack, bias, weights, order, ends, tile_ends, out, inner, outs,
    COUNT: tl.constexpr, COUNT_UP: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    BLOCK: tl.constexpr, DOWN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Gate, up and activation of rows of the stream; or with DOWN the down projection, times the expert's weight, to
    the place of its pair."""
    tile = tl.program_id(0)
    x = tl.arange(0, COUNT_UP)
    tile_ends_X = tl.load(tile_ends + x, mask=x < COUNT, other=1 << 40)
    expert = tl.sum((tile_ends_X <= tile).to(tl.int64), 0)
    if expert < COUNT:
        before = tl.maximum(expert - 1, 0)
        first_tile = tl.where(expert == 0, 0, tl.load(tile_ends + before))
        first_row = tl.where(expert == 0, 0, tl.load(ends + before))
        row = first_row + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        has_row = row < tl.load(ends + expert)
        pair = tl.load(order + row, mask=has_row, other=0)
        source = row if DOWN else pair // CHOSEN
        o, i = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, BLOCK)
        has_out = o < outs
        base = expert * outs * (1 if DOWN else 2)
        total, upper = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
        rows_at = left + source[:, None] * inner
        weights_at = stack + (base + o)[:, None] * inner
        for begin in range(0, inner, BLOCK):
            has_in = begin + i < inner
            rows_RI = tl.load(rows_at + begin + i[None, :], mask=has_row[:, None] & has_in[None, :], other=0.0)
            inside = has_out[:, None] & has_in[None, :]
            one_OI = tl.load(weights_at + begin + i[None, :], mask=inside, other=0.0)
            total = tl.dot(rows_RI, tl.trans(one_OI), total, input_precision="ieee")
            if not DOWN:
                other_OI = tl.load(weights_at + outs.to(tl.int64) * inner + begin + i[None, :], mask=inside, other=0.0)
                upper = tl.dot(rows_RI, tl.trans(other_OI), upper, input_precision="ieee")
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
        spot = out + place[:, None] * outs + o[None, :]
        tl.store(spot, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_out[None, :])
