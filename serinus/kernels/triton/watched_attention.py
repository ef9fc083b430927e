"""Paged decode attention that digests the KV it reads; see the reference for what it means.

A program has one sequence, one KV head and one stretch of its tokens; sums of the digest are added atomically, in a
buffer of 16 bytes a slot that stays in the second cache.

The sums of (lane * coefficient) modulo 2**32 are made by the matrix unit, exactly: both bytes of a lane less 128, times
the four balanced bytes of a coefficient, are integers of at most 2**14, of which fp32 adds up 2 * D without rounding.
Byte planes are then put together modulo 2**32; what the 128 took off is the same for every token. (Products of int8
were slower: 403 us a layer where these take 291, and attention alone 258.)

B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of req_to_token,
E = slots digested, P = stretches of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_pack_factors, check_watched_attention
from serinus.kernels.contracts import LayerDigest, Tiling
from serinus.kernels.packed import PackedFactors

__all__ = ["pack_factors", "watched_attention"]

_GROUP = 16
"""Query heads of one KV head, padded to what a matrix unit takes."""
_PLAIN = Tiling(block=128, warps=4, stages=3, stretches=4)
_WATCHED = Tiling(block=64, warps=2, stages=3, stretches=4)
"""The fastest on an H200 (benchmarks/canary_gpu_step.py)."""
_COLUMNS = 16
"""Byte planes of both sums, padded to what a matrix unit takes: sum 0 in columns 0-3, sum 1 in 4-7."""
_HEAD_SIZE_MAX = 512
"""Up to which the sums of fp32 are exact: 2 * 512 * 2**14 = 2**24."""


def pack_factors(coefficients_22W: Tensor, kv_heads: int) -> PackedFactors:
    """Cut coefficients into byte planes. Raises ValueError: heads are too large for exact sums."""
    check_pack_factors(coefficients_22W, kv_heads)
    lanes = coefficients_22W.shape[-1]
    size = lanes // kv_heads
    if size > _HEAD_SIZE_MAX:
        raise ValueError(f"kernels: heads of {size}, expected at most {_HEAD_SIZE_MAX}")
    left = coefficients_22W.long().view(2, 2, kv_heads, size).permute(0, 2, 3, 1) & 0xFFFFFFFF  # half, head, D, sum
    bias = (128 * 257 * left.sum(2)) & 0xFFFFFFFF
    planes = torch.zeros((2, kv_heads, 2, size, _COLUMNS), dtype=torch.float16, device=left.device)
    for place in range(4):
        digit = ((left & 0xFF) + 128) % 256 - 128
        left = (left - digit) >> 8
        for which in range(2):
            planes[:, :, 0, :, 4 * which + place] = digit[..., which].half()
            if place < 3:  # the high byte of a lane is worth 256 more
                planes[:, :, 1, :, 4 * which + place + 1] = digit[..., which].half()
    bias = torch.where(bias >> 31 > 0, bias - (1 << 32), bias).int()
    return PackedFactors(factors=planes, bias=bias.contiguous(), plain_22W=coefficients_22W)


def watched_attention(
    q_BND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    digest: LayerDigest | None = None,
    tiling: Tiling | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one layer, [B, N, D]; with a digest that of what is due is added to its sums.

    Raises:
        ValueError: as in the reference; or KV not of 16 bits, or a head size or group that this kernel does not serve,
            or several queries of a sequence, or a window or a cap.
    Cost: one read of the KV; no host wait.
    """
    check_watched_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, digest)
    count, heads, size = q_BND.shape
    sets = 1 if digest is None else digest.due_7B.shape[1] // count
    if count != batch.sequence_count or sets != 1 or window is not None or softcap is not None:
        raise ValueError(
            f"kernels: {count} queries of {batch.sequence_count} sequences, {sets} sets of columns, window {window}, "
            f"softcap {softcap}; expected one query of each, one set, and neither"
        )
    kv_heads = k_pool_SHD.shape[1]
    group = heads // kv_heads
    if group > _GROUP or size < 16 or size != triton.next_power_of_2(size) or k_pool_SHD.element_size() != 2:
        raise ValueError(
            f"kernels: {group} query heads a KV head, of {size} {k_pool_SHD.dtype}; expected at most {_GROUP}, a power "
            "of 2 from 16 on, and 16 bits"
        )
    cut = tiling or (_PLAIN if digest is None else _WATCHED)
    parts = cut.stretches
    stretch = triton.cdiv(triton.cdiv(req_to_token_RC.shape[1], parts), cut.block) * cut.block
    out_BND = torch.empty_like(q_BND)
    partial_PBND = torch.empty((parts, count, heads, size), dtype=torch.float32, device=q_BND.device)
    stats_P2BN = torch.empty((parts, 2, count, heads), dtype=torch.float32, device=q_BND.device)
    watched: tuple[Any, ...] = (*(batch.rows_B,) * 4, 0)  # not read where nothing is watched
    if digest is not None:
        if digest.factors.bias is None:
            raise ValueError("kernels: watched_attention of column triton got factors packed by another column")
        sums_P22E = digest.sums_P22E
        watched = (digest.factors.factors, digest.factors.bias, digest.due_7B, sums_P22E, sums_P22E.shape[-1])
    _attend[(count, kv_heads, parts)](
        q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, req_to_token_RC.stride(0), batch.rows_B, batch.context_B,
        partial_PBND, stats_P2BN, *watched, scale * 1.4426950408889634, stretch, count,
        HEADS=kv_heads, QUERIES=group, GROUP=_GROUP, SIZE=size, PAGE=1 if digest is None else digest.page_size,
        BLOCK=cut.block, WATCHED=digest is not None, COLUMNS=_COLUMNS, IN_ASSEMBLY=_IN_ASSEMBLY, num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip
    _join[(count, heads)](
        partial_PBND, stats_P2BN, out_BND, count, HEADS=heads, SIZE=size, STRETCHES=parts, num_warps=1
    )
    return out_BND


_jit: Any = triton.jit
_IN_ASSEMBLY = not triton.knobs.runtime.interpret
"""Triton's interpreter knows none."""


@_jit
def _attend(
    q, k, v, table, columns, rows, contexts, partial, stats, planes, bias, due, sums, entries, scale, stretch, batch,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, WATCHED: tl.constexpr, COLUMNS: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    b, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + b).to(tl.int32)
    row = table + tl.load(rows + b) * columns
    g, d = tl.arange(0, GROUP), tl.arange(0, SIZE)
    query = b * HEADS * QUERIES + h * QUERIES + g
    inside = g < QUERIES
    q_GD = tl.load(q + query[:, None] * SIZE + d[None, :], mask=inside[:, None], other=0.0)
    best_G = tl.full((GROUP,), -1e30, tl.float32)
    total_G = tl.zeros((GROUP,), tl.float32)
    mixed_GD = tl.zeros((GROUP, SIZE), tl.float32)
    begin = part * stretch
    end = tl.minimum(begin + stretch, context)
    k_head, v_head = k + h * SIZE + d[None, :], v + h * SIZE + d[None, :]
    if WATCHED:
        c = tl.arange(0, COLUMNS)
        mine = planes + h * 2 * SIZE * COLUMNS + d[:, None] * COLUMNS + c[None, :]
        k_low, k_high = tl.load(mine), tl.load(mine + SIZE * COLUMNS)
        mine += HEADS * 2 * SIZE * COLUMNS
        v_low, v_high = tl.load(mine), tl.load(mine + SIZE * COLUMNS)
        # A column's place in each sum; 0 where it is none of it.
        place = (tl.full((COLUMNS,), 1, tl.uint32) << ((c % 4) * 8).to(tl.uint32)).to(tl.uint32)
        one, other = tl.where(c < 4, place, 0).to(tl.uint32), tl.where((c >= 4) & (c < 8), place, 0).to(tl.uint32)
        k_one, k_other = tl.load(bias + h * 2), tl.load(bias + h * 2 + 1)
        v_one, v_other = tl.load(bias + (HEADS + h) * 2), tl.load(bias + (HEADS + h) * 2 + 1)
        low, high = tl.load(due + 2 * batch + b).to(tl.int32), tl.load(due + 3 * batch + b).to(tl.int32)
        first, stride = tl.load(due + 4 * batch + b).to(tl.int32), tl.load(due + 5 * batch + b).to(tl.int32)
        entry = tl.load(due + 6 * batch + b).to(tl.int32)
    for at in range(begin, end, BLOCK):
        t = at + tl.arange(0, BLOCK)
        slot = tl.load(row + t, mask=t < end, other=0).to(tl.int64)[:, None] * (HEADS * SIZE)
        k_TD = tl.load(k_head + slot)
        scores_GT = tl.dot(q_GD, tl.trans(k_TD)) * scale
        scores_GT = tl.where((t < end)[None, :], scores_GT, -1e30)
        v_TD = tl.load(v_head + slot)
        better_G = tl.maximum(best_G, tl.max(scores_GT, 1))
        weights_GT = tl.exp2(scores_GT - better_G[:, None])
        fade_G = tl.exp2(best_G - better_G)
        total_G = total_G * fade_G + tl.sum(weights_GT, 1)
        mixed_GD = tl.dot(weights_GT.to(v_TD.dtype), v_TD, mixed_GD * fade_G[:, None])
        best_G = better_G
        if WATCHED:
            # The first due page not before this block's first; a block without a due page is left alone.
            page = at // PAGE
            turns = tl.maximum(page - first + stride - 1, 0) // stride
            if first + turns * stride < page + (BLOCK + PAGE - 1) // PAGE:
                turn = t // PAGE - first
                is_due = (t >= low) & (t < high) & (t < end) & (turn >= 0) & (turn % stride == 0)
                spot = sums + entry + turn // stride * PAGE + t % PAGE
                k_sums = _sums(k_TD, k_low, k_high, IN_ASSEMBLY)
                _add(spot, k_sums, one, k_one, is_due)
                _add(spot + entries, k_sums, other, k_other, is_due)
                v_sums = _sums(v_TD, v_low, v_high, IN_ASSEMBLY)
                _add(spot + 2 * entries, v_sums, one, v_one, is_due)
                _add(spot + 3 * entries, v_sums, other, v_other, is_due)
    where = part * batch * HEADS * QUERIES
    tl.store(partial + (where + query)[:, None] * SIZE + d[None, :], mixed_GD, mask=inside[:, None])
    tl.store(stats + 2 * where + query, best_G, mask=inside)
    tl.store(stats + 2 * where + batch * HEADS * QUERIES + query, total_G, mask=inside)


@_jit
def _sums(rows_TD, low_DC, high_DC, IN_ASSEMBLY: tl.constexpr):
    """Byte planes of both sums, [T, C] integers in fp32. In assembly two lanes are taken apart at a time: 0x6400 | byte
    is 1024 + byte in fp16."""
    words = rows_TD.to(tl.uint16, bitcast=True)
    if IN_ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $2, 0x00FF00FF; or.b32 t, t, 0x64006400; sub.f16x2 $0, t, $3;"
            " shr.b32 t, $2, 8; and.b32 t, t, 0x00FF00FF; or.b32 t, t, 0x64006400; sub.f16x2 $1, t, $3; }",
            "=&r,=&r,r,r", [words, tl.full(words.shape, 1152.0, tl.float16)], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = (words & 0xFF).to(tl.float16) - 128.0, (words >> 8).to(tl.float16) - 128.0
    return tl.dot(high.to(tl.float16), high_DC, tl.dot(low.to(tl.float16), low_DC))


@_jit
def _add(spot, sums_TC, places_C, bias, mask):
    whole = sums_TC.to(tl.int32).to(tl.uint32, bitcast=True) * places_C[None, :]
    total = tl.sum(whole, 1).to(tl.uint32).to(tl.int32, bitcast=True) + bias
    tl.atomic_add(spot, total, mask=mask, sem="relaxed")


@_jit
def _join(partial, stats, out, batch, HEADS: tl.constexpr, SIZE: tl.constexpr, STRETCHES: tl.constexpr):
    b, n = tl.program_id(0), tl.program_id(1)
    d, query = tl.arange(0, SIZE), b * HEADS + n
    every = batch * HEADS
    best = tl.full((), -1e30, tl.float32)
    for part in range(STRETCHES):
        best = tl.maximum(best, tl.load(stats + 2 * part * every + query))
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((SIZE,), tl.float32)
    for part in range(STRETCHES):
        weight = tl.exp2(tl.load(stats + 2 * part * every + query) - best)
        total += tl.load(stats + (2 * part + 1) * every + query) * weight
        mixed += tl.load(partial + (part * every + query) * SIZE + d) * weight
    tl.store(out + query * SIZE + d, (mixed / total).to(out.dtype.element_ty))
