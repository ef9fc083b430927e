"""From the projections of latent attention to attention in one pass; see the reference. Digests of what is stored are
made of the values in registers.

The first program of a token norms, rotates and stores its row, the others rotate some heads of its queries each. T =
tokens, N = query heads, W = elements of a row, R = those of its latent, O = W - R, S = slots, P = positions.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_latent_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.pool_rows import row_starts
from serinus.kernels.triton.qk_rope_store import add_sum, format_of, in_fp8, weighed
from serinus.kernels.triton.rms_norm import normed

_HEADS = 16
"""Heads of one program."""


def latent_rope_store(
    rows_TW: Tensor, norm_R: Tensor, eps: float, queries_TNQ: Tensor, cos_PF: Tensor, sin_PF: Tensor,
    positions_T: Tensor, pool_S1W: Tensor, slots_T: Tensor, written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Store rows and add their digests, rotate queries. Slots outside of the pool are left alone. Cost: one read of the
    rows and of what rotates of queries, one write of as much; no host wait."""
    check_latent_rope_store(rows_TW, norm_R, queries_TNQ, cos_PF, sin_PF, positions_T, pool_S1W, slots_T, written)
    (tokens, width), heads, rank = rows_TW.shape, queries_TNQ.shape[1], len(norm_R)
    if not tokens:
        return
    sums, factors, lanes = rows_TW, rows_TW, 0
    if written is not None:
        factors, lanes = written.coefficients_22W, written.coefficients_22W.shape[-1]
        sums = written.sums_T2.view(written.coefficients_22W.dtype)
    half, (page_slots, gap) = (width - rank) // 2, page_gap(pool_S1W)
    mantissa, bias, largest = format_of(pool_S1W.dtype)
    _latent_store[(tokens, 1 + triton.cdiv(heads, _HEADS))](
        rows_TW, norm_R, queries_TNQ, cos_PF, sin_PF, positions_T, slots_T, pool_S1W, factors, sums,
        slot_count(pool_S1W), gap, eps, rows_TW.stride(0), queries_TNQ.stride(0), queries_TNQ.stride(1),
        HEADS=heads, RANK=rank, RANK_UP=triton.next_power_of_2(rank), HALF=half, HALF_UP=triton.next_power_of_2(half),
        PLAIN=queries_TNQ.shape[2] - 2 * half, EACH=_HEADS, IN_FP32=norm_R.dtype != rows_TW.dtype, WIDTH=lanes,
        SLOTS=page_slots, MANTISSA=mantissa, BIAS=bias, LARGEST=largest, num_warps=2,
    )  # fmt: skip


_jit: Any = triton.jit


@_jit
def _latent_store(
    rows, norm, queries, cos, sin, positions, slots, pool, factors, sums, slot_count, gap, eps, row_stride,
    token_stride, head_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr,
    PLAIN: tl.constexpr, EACH: tl.constexpr, IN_FP32: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    t, f = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_UP)
    dtype: tl.constexpr = queries.dtype.element_ty
    ROW: tl.constexpr = RANK + 2 * HALF
    place = tl.load(positions + t) * HALF + f
    cos_F = tl.load(cos + place, mask=f < HALF, other=0.0)
    sin_F = tl.load(sin + place, mask=f < HALF, other=0.0)
    if tl.program_id(1) == 0:
        r, row = tl.arange(0, RANK_UP), rows + t * row_stride
        wide_R = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        weight_R = tl.load(norm + r, mask=r < RANK, other=0.0)
        latent_R = normed(wide_R, weight_R, tl.sum(wide_R * wide_R, 0), eps, RANK, IN_FP32, dtype)
        one_F = tl.load(row + RANK + f, mask=f < HALF, other=0.0).to(tl.float32)
        two_F = tl.load(row + RANK + HALF + f, mask=f < HALF, other=0.0).to(tl.float32)
        low_F, high_F = (one_F * cos_F - two_F * sin_F).to(dtype), (two_F * cos_F + one_F * sin_F).to(dtype)
        if MANTISSA:
            latent_R = in_fp8(latent_R, pool, MANTISSA, BIAS, LARGEST)
            low_F = in_fp8(low_F, pool, MANTISSA, BIAS, LARGEST)
            high_F = in_fp8(high_F, pool, MANTISSA, BIAS, LARGEST)
        slot = tl.load(slots + t)
        is_there = (slot >= 0) & (slot < slot_count)
        kept, turned = tl.where(is_there, RANK, 0), tl.where(is_there, HALF, 0)
        if WIDTH:  # before the stores, which no load may overtake
            for which in tl.static_range(2):
                mine = factors + which * WIDTH
                total = add_sum(weighed(latent_R, mine, r, r < RANK, WIDTH))
                total += add_sum(weighed(low_F, mine, RANK + f, f < HALF, WIDTH))
                total += add_sum(weighed(high_F, mine, RANK + HALF + f, f < HALF, WIDTH))
                total = (total & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
                tl.atomic_add(sums + t * 4 + which, total, sem="relaxed")
        kept_at = pool + row_starts(slot, gap, ROW, SLOTS)
        tl.store(kept_at + r, latent_R, mask=r < kept)
        tl.store(kept_at + RANK + f, low_F, mask=f < turned)
        tl.store(kept_at + RANK + HALF + f, high_F, mask=f < turned)
    else:
        h = (tl.program_id(1) - 1) * EACH + tl.arange(0, EACH)
        inside = (h < HEADS)[:, None] & (f < HALF)[None, :]
        at = queries + t * token_stride + h[:, None] * head_stride + PLAIN + f[None, :]
        low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
        low, high = low.to(tl.float32), high.to(tl.float32)
        tl.store(at, (low * cos_F[None, :] - high * sin_F[None, :]).to(dtype), mask=inside)
        tl.store(at + HALF, (high * cos_F[None, :] + low * sin_F[None, :]).to(dtype), mask=inside)
