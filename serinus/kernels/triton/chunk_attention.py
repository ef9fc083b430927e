"""Paged attention of sequences with several queries: chunks of prompts behind any cached prefix; see the reference.

A program has a tile of queries of one sequence, with all query heads of one KV head side by side, and walks over the
pages that they see. Tiles of all sequences are numbered so that a program finds its own from the offsets alone: tile
q_starts[b] // queries + b is the first of sequence b. So the grid follows from the sizes of the batch, and a few of the
programs have nothing to do. The longest contexts start first. Sequences with one query are left to `decode_attention`.

Of long chunks, where the host knows them, keys and values are copied out of their pages first, and attention goes over
these (`contiguous_attention`, or FlashAttention 3 where it is installed).

B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of req_to_token,
M = rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.contracts import Tiling
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.contiguous_attention import (
    ChunkGroup,
    attend_contiguous,
    chunk_groups,
    gather_rows,
    head_parts,
)
from serinus.kernels.triton.decode_attention import capped, dot, head_block, load_rows, load_slots
from serinus.kernels.triton.flash_attention import flash_attention
from serinus.kernels.triton.pool_rows import owner_of, row_starts

_LOG2_E = 1.4426950408889634
_ROWS = 128
_PAIRS = 8000
"""Queries of a chunk, over all heads of a KV head: for more of them copying a row out of its page takes less than it
saves. A prompt of 8,192 tokens of Qwen3-8B takes 1.12 ms in place of 1.32; eight of 1,024 would take 0.22 in place of
0.25, of which nothing is seen of 64 in a whole engine (an H100)."""
_FLASH_PAIRS = 2000
"""The same where FlashAttention 3 reads them, in half the time."""
_SIZES = (64, 128)
"""Sizes of heads for which that was measured."""


def _tiling(size: int, itemsize: int, group: int) -> tuple[int, Tiling]:
    """Rows of a tile, and how keys are cut."""
    if itemsize > 2:
        rows, block = (32, 32) if size <= 64 else (16, 32) if size <= 128 else (16, 16)
        return max(rows, group), Tiling(block=block, warps=4, stages=1, stretches=1)
    if size > 128:
        return 64, Tiling(block=32, warps=4, stages=2, stretches=1)
    return _ROWS, Tiling(
        block=64, warps=4, stages=3, stretches=1
    )  # two programs share a multiprocessor: 8 warps: +26 %


def attend_many(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
    scale: float, window: int | None, softcap: float | None, sinks_N: Tensor | None, out_TND: Tensor,
) -> None:  # fmt: skip
    """Attention of the sequences with several queries, into `out_TND`; the others are left alone."""
    tokens, heads, size = q_TND.shape
    kv_heads, most = k_pool_SHD.shape[-2], tokens
    is_plain = window is None and softcap is None and sinks_N is None
    if is_plain and batch.chunks is not None and q_TND.element_size() == 2 and size in _SIZES:
        flash = flash_attention(q_TND.device) if q_TND.dtype == torch.bfloat16 else None
        most = (_FLASH_PAIRS if flash else _PAIRS) // (heads // kv_heads)
        attend = attend_contiguous if flash is None else flash.attend
        long = [chunk for chunk in batch.chunks.each if chunk.count > most]
        for neighbours in chunk_groups(long, req_to_token_RC.shape[1]):
            _attend_copied(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, out_TND, neighbours, attend)
        if len(long) == len(batch.chunks.each):
            return
    page_slots, gap = page_gap(k_pool_SHD)
    group = int(triton.next_power_of_2(heads // kv_heads))
    rows, cut = _tiling(size, q_TND.element_size(), group)
    queries = rows // group
    tiles = tokens // queries + batch.sequence_count
    _chunk[(kv_heads, tiles)](
        q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, req_to_token_RC.stride(0), batch.rows_B, batch.q_starts_B1,
        batch.context_B, sinks_N, out_TND, scale * (1.0 if softcap else _LOG2_E), softcap or 0.0, window or 0,
        slot_count(k_pool_SHD), gap, batch.sequence_count, tiles, most,
        HEADS=kv_heads, QUERIES=heads // kv_heads, GROUP=group, SIZE=size, WIDE=head_block(size), TILE=queries,
        BLOCK=cut.block, CAPPED=softcap is not None, WINDOWED=window is not None, SLOTS=page_slots,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def _attend_copied(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
    scale: float, out_TND: Tensor, group: ChunkGroup, attend: Callable[..., None],
) -> None:  # fmt: skip
    """Attention of a group over keys and values that are copied out of their pages, of some heads after the other."""
    kv_heads, size = k_pool_SHD.shape[-2:]
    queries = q_TND.shape[1] // kv_heads
    for some, kv_HLX in head_parts(q_TND, kv_heads, group.rows, req_to_token_RC.shape[1], 2 * size):
        k_HLD, v_HLD = kv_HLX[..., :size], kv_HLX[..., size:]
        gather_rows(k_pool_SHD, req_to_token_RC, batch, group, k_HLD, head=some.start)
        gather_rows(v_pool_SHD, req_to_token_RC, batch, group, v_HLD, head=some.start)
        attend(q_TND, k_HLD, v_HLD, batch, group, scale, out_TND, queries=queries, head=some.start * queries)


_jit: Any = triton.jit
_LOG2_E_C = tl.constexpr(_LOG2_E)


@_jit(do_not_specialize=["batch", "tiles", "most"])
def _chunk(
    q, k, v, table, columns, rows, starts, contexts, sinks, out, scale, cap, window, slot_count, gap, batch, tiles,
    most,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    h, tile = tl.program_id(0), tiles - 1 - tl.program_id(1)
    b = owner_of(starts, tile, 0, batch, 1, TILE, NUMBERED=True)
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(starts + b + 1).to(tl.int32) - start
    first = (tile - start // TILE - b) * TILE
    if (first < count) & (count > 1) & (count <= most):
        context = tl.load(contexts + b).to(tl.int32)
        row = table + tl.load(rows + b) * columns
        r, d, j = tl.arange(0, TILE * GROUP), tl.arange(0, WIDE), tl.arange(0, BLOCK)
        i, g = first + r // GROUP, r % GROUP
        own_M = context - count + i
        head_M = (start + i).to(tl.int64) * (HEADS * QUERIES) + h * QUERIES + g
        spot_MD = head_M[:, None] * SIZE + d[None, :]
        inside_MD = ((i < count) & (g < QUERIES))[:, None] & (d < SIZE)[None, :]
        q_MD = tl.load(q + spot_MD, mask=inside_MD, other=0.0)
        k_head, v_head = k + h * SIZE + d[None, :], v + h * SIZE + d[None, :]
        best_M = tl.full((TILE * GROUP,), -1e30, tl.float32)
        total_M = tl.zeros((TILE * GROUP,), tl.float32)
        if sinks is not None:
            best_M = tl.load(sinks + h * QUERIES + g, mask=g < QUERIES, other=0.0) * _LOG2_E_C
            total_M += 1.0
        mixed_MD = tl.zeros((TILE * GROUP, WIDE), tl.float32)
        own = context - count + first  # position of the first query
        end = tl.minimum(own + TILE, context)
        begin, whole = own * 0, (own + 1) // BLOCK * BLOCK  # blocks that all queries see whole need no mask
        lowest = own * 0
        if WINDOWED:
            lowest = tl.maximum(own - window + 1, 0)
            begin = lowest // BLOCK * BLOCK
            whole = begin
        for at in range(begin, whole, BLOCK):
            at_T1 = row_starts(load_slots(row, at + j, slot_count), gap, HEADS * SIZE, SLOTS)[:, None]
            k_TD = load_rows(k_head + at_T1, d, SIZE, WIDE)
            scores_MT = dot(q_MD, tl.trans(k_TD.to(q_MD.dtype))) * scale
            if CAPPED:
                scores_MT = capped(scores_MT, cap)
            v_TD = load_rows(v_head + at_T1, d, SIZE, WIDE)
            better_M = tl.maximum(best_M, tl.max(scores_MT, 1))
            weights_MT = tl.exp2(scores_MT - better_M[:, None])
            fade_M = tl.exp2(best_M - better_M)
            total_M = total_M * fade_M + tl.sum(weights_MT, 1)
            mixed_MD = tl.dot(
                weights_MT.to(q_MD.dtype), v_TD.to(q_MD.dtype), mixed_MD * fade_M[:, None], input_precision="ieee"
            )
            best_M = better_M
        for at in range(whole, end, BLOCK):
            t = at + j
            read = tl.minimum(t, context - 1)
            if WINDOWED:
                read = tl.maximum(read, lowest)
            at_T1 = row_starts(load_slots(row, read, slot_count), gap, HEADS * SIZE, SLOTS)[:, None]
            k_TD = load_rows(k_head + at_T1, d, SIZE, WIDE)
            scores_MT = dot(q_MD, tl.trans(k_TD.to(q_MD.dtype))) * scale
            if CAPPED:
                scores_MT = capped(scores_MT, cap)
            seen_MT = t[None, :] <= own_M[:, None]
            if WINDOWED:
                seen_MT = seen_MT & (t[None, :] > (own_M - window)[:, None])
            scores_MT = tl.where(seen_MT, scores_MT, -1e30)
            v_TD = load_rows(v_head + at_T1, d, SIZE, WIDE)
            better_M = tl.maximum(best_M, tl.max(scores_MT, 1))
            weights_MT = tl.exp2(scores_MT - better_M[:, None])
            fade_M = tl.exp2(best_M - better_M)
            total_M = total_M * fade_M + tl.sum(weights_MT, 1)
            mixed_MD = tl.dot(
                weights_MT.to(q_MD.dtype), v_TD.to(q_MD.dtype), mixed_MD * fade_M[:, None], input_precision="ieee"
            )
            best_M = better_M
        tl.store(out + spot_MD, (mixed_MD / total_M[:, None]).to(out.dtype.element_ty), mask=inside_MD)
