"""Causal attention of many query heads over latent rows; see the reference for what it means.

Pairs of a query and a head are rows of one product, since all heads see the same KV: a program has some of a sequence's
pairs and walks over the latent rows, of which a block is loaded once and serves as keys and as values. Sequences with
one query are cut into parts, as in `decode_attention`, but a second kernel puts these together, in their order: of
heads of 512 elements that is too much for one program. Tiles of longer chunks are numbered as in `chunk_attention`.
What is due is digested beside: of rows of 576 elements, sums of the matrix unit would not be exact.

For chunks of which the host knows where they are, keys and values of all heads are made of the rows by cuBLAS, and
attention goes over these (`contiguous_attention`): a row costs more, each score of it less.

T = tokens, N = query heads, B = sequences, P = parts, W = elements of a row, V = value_size, O = W - V, S = slots,
R, C = rows and columns of req_to_token, M = pairs of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_latent_attention
from serinus.kernels.contracts import LatentHeads, LayerDigest
from serinus.kernels.fp8 import FP8_FORMATS
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.contiguous_attention import (
    ChunkGroup,
    aligned,
    attend_contiguous,
    chunk_groups,
    gather_rows,
    head_parts,
)
from serinus.kernels.triton.decode_attention import ROWS_LEAST, dot, head_block, load_rows, load_slots
from serinus.kernels.triton.pool_rows import owner_of, row_starts
from serinus.kernels.triton.watched_attention import digest_beside

_LOG2_E = 1.4426950408889634
_PROGRAMS = 264
"""With fewer, sequences with one query are cut into parts: two for each multiprocessor of an H100."""
_PARTS_MAX = 32
_TOKENS_LEAST = 64
"""Tokens of a part at least."""
_JOINED = 128
"""Elements of a head that a program puts together."""
_GAIN = 1.5
"""What keys and values take to be made, and attention over these, is so many times faster than attention over rows: at
DeepSeek's sizes it pays from 114 tokens of a chunk on, where these fill the GPU."""
_PAIRS = 132 * 64
"""Fewer pairs of a query and a head take attention over rows as long as so many, one tile for each multiprocessor of an
H100: a chunk of 16 tokens behind 8,192 takes 704 us with 16 heads, over keys that are made 248."""
_LEAST = 4
"""Tokens of a chunk for which keys and values are made, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCut:
    """How the work of a program is cut."""

    rows: int
    """Pairs of a query and a head."""
    block: int
    """Positions at a time."""
    warps: int
    """Warps of one program."""
    stages: int
    """Twice the blocks that are loaded ahead, and one: the slots of rows are loaded before the rows."""


def cut_of(pairs: int, itemsize: int, *, alone: bool, is_fp8: bool = False) -> LatentCut:
    """By so many pairs of a sequence. `alone`: it has one query; `is_fp8`: rows are widened in registers, of which
    tiles of 64 would spill 376 bytes a thread."""
    if itemsize > 2:
        return LatentCut(rows=16, block=16, warps=4, stages=1)
    if alone and pairs <= ROWS_LEAST:
        return LatentCut(rows=16, block=32, warps=4, stages=5)
    return LatentCut(rows=32 if is_fp8 else 64, block=32, warps=8, stages=5)


def latent_attention(
    q_TNX: Tensor, pool_S1W: Tensor, value_size: int, req_to_token_RC: Tensor, batch: AttentionBatch, scale: float,
    digest: LayerDigest | None = None, heads: LatentHeads | None = None,
) -> Tensor:  # fmt: skip
    """Attention of every token over its own sequence; entries of the table that name no slot of the pool are read as
    slot 0. Cost: one read of each sequence's rows for every 64 pairs of a query and a head (32 over FP8), and one of
    what is due; where keys and values are made of rows (`_expand`) a copy of these, in memory that the longest context
    bounds; no host wait; equal inputs give equal bits."""
    check_latent_attention(q_TNX, pool_S1W, value_size, req_to_token_RC, batch, digest, heads)
    out_TNV = q_TNX.new_empty((*q_TNX.shape[:2], value_size if heads is None else heads.value_NRV.shape[2]))
    if heads is None:
        _over_rows(q_TNX[..., :value_size], q_TNX[..., value_size:], pool_S1W, req_to_token_RC, batch, scale, out_TNV)
    else:
        sequence, token = 0, 0
        for group in expanded_groups(batch, pool_S1W.shape[-1], req_to_token_RC.shape[1], heads):
            others = slice(sequence, group.sequences.start), slice(token, group.tokens.start)
            _absorb(q_TNX, pool_S1W, req_to_token_RC, batch, scale, heads, out_TNV, *others)
            _expand(q_TNX, pool_S1W, req_to_token_RC, batch, scale, heads, out_TNV, group)
            sequence, token = group.sequences.stop, group.tokens.stop
        others = slice(sequence, batch.sequence_count), slice(token, len(q_TNX))
        _absorb(q_TNX, pool_S1W, req_to_token_RC, batch, scale, heads, out_TNV, *others)
    if digest is not None:
        digest_beside((pool_S1W,), req_to_token_RC, batch, digest, is_read=False, window=None)
    return out_TNV


def expanded_groups(batch: AttentionBatch, row: int, columns: int, heads: LatentHeads) -> list[ChunkGroup]:
    """The chunks of which keys and values are made. A group has no more rows than a context may have: what the largest
    step takes is seen where one is run before there is a pool."""
    chunks = () if batch.chunks is None else batch.chunks.each
    idle = _PAIRS // (len(heads.key_NPR) * max(1, len(chunks)))
    made = [each for each in chunks if each.count >= _LEAST and heads.pays(int(_GAIN * max(each.count, idle)), row)]
    return chunk_groups(made, columns)


def _absorb(
    q_TNX: Tensor, pool_S1W: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch, scale: float, heads: LatentHeads,
    out_TNV: Tensor, sequences: slice, tokens: slice,
) -> None:  # fmt: skip
    """Attention of these sequences over rows, by queries in their space."""
    if sequences.start == sequences.stop:
        return
    q_TNX, (_, plain, rank) = q_TNX[tokens], heads.key_NPR.shape
    q_TNR = q_TNX.new_empty((*q_TNX.shape[:2], rank))
    heads.absorb(q_TNX, q_TNR)
    mixed_TNR, some = torch.empty_like(q_TNR), batch.part(sequences.start, sequences.stop)
    _over_rows(q_TNR, q_TNX[..., plain:], pool_S1W, req_to_token_RC, some, scale, mixed_TNR)
    heads.values(mixed_TNR, out_TNV[tokens])


def _expand(
    q_TNX: Tensor, pool_S1W: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch, scale: float, heads: LatentHeads,
    out_TNV: Tensor, group: ChunkGroup,
) -> None:  # fmt: skip
    """Attention of a group over keys and values that are made of its rows, of some heads after the other."""
    (count, plain, rank), value = heads.key_NPR.shape, heads.value_NRV.shape[2]
    rotated, wide = q_TNX.shape[2] - plain, aligned(plain)
    rows_LW = q_TNX.new_empty((group.rows, aligned(rank) + aligned(rotated)))
    gather_rows(pool_S1W, req_to_token_RC, batch, group, rows_LW[None], split=rank)
    latents_LR = rows_LW[:, :rank]
    shared_LO = rows_LW[:, aligned(rank) : aligned(rank) + rotated] if rotated else None
    for some, kv_HLX in head_parts(q_TNX, count, group.rows, req_to_token_RC.shape[1], wide + aligned(value)):
        k_HLP, v_HLV = kv_HLX[..., :plain], kv_HLX[..., wide : wide + value]
        rows_HLR = latents_LR.expand(len(kv_HLX), -1, -1)
        torch.bmm(rows_HLR, heads.key_NPR[some].transpose(1, 2), out=k_HLP)
        torch.bmm(rows_HLR, heads.value_NRV[some], out=v_HLV)
        attend_contiguous(q_TNX, k_HLP, v_HLV, batch, group, scale, out_TNV, head=some.start, shared_LO=shared_LO)


def _over_rows(
    q_TNR: Tensor, rest_TNO: Tensor, pool_S1W: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch, scale: float,
    out_TNV: Tensor,
) -> None:  # fmt: skip
    """Attention of all sequences, those with one query by one launch, those with more by another."""
    count = batch.sequence_count
    inputs = q_TNR, rest_TNO, pool_S1W, req_to_token_RC, batch, scale, out_TNV
    if len(q_TNR) != count:
        attend(*inputs, alone=False)
    if count > 1 or len(q_TNR) == 1:
        attend(*inputs, alone=True)


def attend(
    q_TNR: Tensor, rest_TNO: Tensor, pool_S1W: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch, scale: float,
    out_TNV: Tensor, cut: LatentCut | None = None, *, alone: bool,
) -> None:  # fmt: skip
    """Attention of the sequences with one query (`alone`), or of those with more, into `out_TNV`; others are left.

    `q_TNR`, `rest_TNO`: queries for the value of a row and for the rest of it; `cut`: None = as measured best.
    """
    (tokens, heads, value), rest, count = q_TNR.shape, rest_TNO.shape[2], batch.sequence_count
    cut = cut or cut_of(heads, q_TNR.element_size(), alone=alone, is_fp8=pool_S1W.dtype in FP8_FORMATS)
    rows, parts, tiles = cut.rows, 1, tokens * heads // cut.rows + count
    if alone:
        rows = next(each for each in range(min(heads, cut.rows), 0, -1) if heads % each == 0)
        tiles = count * heads // rows
        parts = min(_PARTS_MAX, int(triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles))))
    kept, least = count if parts > 1 else 0, max(1, _TOKENS_LEAST // cut.block)
    page_slots, gap = page_gap(pool_S1W)
    partial_PBNV = torch.empty((parts, kept, heads, value), dtype=torch.float32, device=q_TNR.device)
    stats_P2BN = torch.empty((parts, 2, kept, heads), dtype=torch.float32, device=q_TNR.device)
    _latent[(tiles, parts)](
        q_TNR, rest_TNO, pool_S1W, req_to_token_RC, req_to_token_RC.stride(0), batch.rows_B, batch.q_starts_B1,
        batch.context_B, out_TNV, partial_PBNV, stats_P2BN, scale * _LOG2_E, slot_count(pool_S1W), gap,
        *q_TNR.stride()[:2], *rest_TNO.stride()[:2], count, tiles,
        HEADS=heads, VALUE=value, VALUE_UP=head_block(value), REST=rest, REST_UP=head_block(rest),
        PAIRS=rows, ROWS=max(ROWS_LEAST, int(triton.next_power_of_2(rows))), BLOCK=cut.block, PARTS=parts, LEAST=least,
        ALONE=alone, SLOTS=page_slots, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if parts > 1:
        _latent_join[(count, heads, triton.cdiv(value, _JOINED))](
            batch.q_starts_B1, batch.context_B, partial_PBNV, stats_P2BN, out_TNV, count, HEADS=heads, VALUE=value,
            EACH=_JOINED, BLOCK=cut.block, PARTS=parts, LEAST=least, num_warps=4,
        )  # fmt: skip


_jit: Any = triton.jit


@_jit(do_not_specialize=["batch", "tiles"], do_not_specialize_on_alignment=["rows", "contexts"])
def _latent(
    q, rest, pool, table, columns, rows, starts, contexts, out, partial, stats, scale, slot_count, gap,
    q_token, q_head, rest_token, rest_head, batch, tiles,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, REST: tl.constexpr, REST_UP: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr,
    ALONE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    if ALONE:
        TILES: tl.constexpr = HEADS // PAIRS
        b, first = tile // TILES, tile % TILES * PAIRS
    else:  # the longest contexts start first
        tile = tiles - 1 - tile
        b = owner_of(starts, tile, 0, batch, HEADS, PAIRS, NUMBERED=True)
        first = (tile - tl.load(starts + b).to(tl.int32) * HEADS // PAIRS - b) * PAIRS
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(starts + b + 1).to(tl.int32) - start
    context = tl.load(contexts + b).to(tl.int32)
    begin, end, live = context * 0, context, context * 0 + 1
    if ALONE:
        length = _length(context, BLOCK, PARTS, LEAST)
        live = tl.cdiv(context, length)
        begin = part * length
        end = tl.minimum(begin + length, context)
    else:
        end = tl.minimum(context - count + (first + PAIRS - 1) // HEADS + 1, context)
    if (first < count * HEADS) & ((count == 1) == ALONE) & (begin < end):
        row = table + tl.load(rows + b) * columns
        r, v, o, j = tl.arange(0, ROWS), tl.arange(0, VALUE_UP), tl.arange(0, REST_UP), tl.arange(0, BLOCK)
        inside = (r < PAIRS) & (first + r < count * HEADS)
        own_M = context - count + (first + r) // HEADS
        pair_M = start.to(tl.int64) * HEADS + first + r
        token_M, head_M = start.to(tl.int64) + (first + r) // HEADS, (first + r) % HEADS
        q_M = q + (token_M * q_token + head_M * q_head)[:, None]
        q_MV = tl.load(q_M + v[None, :], mask=inside[:, None] & (v < VALUE)[None, :], other=0.0)
        if REST > 0:
            rest_M = rest + (token_M * rest_token + head_M * rest_head)[:, None]
            q_MO = tl.load(rest_M + o[None, :], mask=inside[:, None] & (o < REST)[None, :], other=0.0)
        best_M = tl.full((ROWS,), -1e30, tl.float32)
        total_M = tl.zeros((ROWS,), tl.float32)
        mixed_MV = tl.zeros((ROWS, VALUE_UP), tl.float32)
        for at in range(begin, end, BLOCK):
            t = at + j
            slot = load_slots(row, tl.minimum(t, end - 1), slot_count)
            at_T1 = row_starts(slot, gap, VALUE + REST, SLOTS)[:, None]
            row_TV = load_rows(pool + at_T1 + v[None, :], v, VALUE, VALUE_UP).to(q_MV.dtype)
            scores_MT = dot(q_MV, tl.trans(row_TV))
            if REST > 0:
                row_TO = load_rows(pool + at_T1 + VALUE + o[None, :], o, REST, REST_UP).to(q_MV.dtype)
                scores_MT = tl.dot(q_MO, tl.trans(row_TO), scores_MT, input_precision="ieee")
            seen_MT = (t[None, :] <= own_M[:, None]) & (t < end)[None, :]
            scores_MT = tl.where(seen_MT, scores_MT * scale, -1e30)
            better_M = tl.maximum(best_M, tl.max(scores_MT, 1))
            weights_MT = tl.exp2(scores_MT - better_M[:, None])
            fade_M = tl.exp2(best_M - better_M)
            total_M = total_M * fade_M + tl.sum(weights_MT, 1)
            mixed_MV = tl.dot(weights_MT.to(row_TV.dtype), row_TV, mixed_MV * fade_M[:, None], input_precision="ieee")
            best_M = better_M
        inside_MV = inside[:, None] & (v < VALUE)[None, :]
        if (PARTS == 1) | (live == 1):
            found_MV = mixed_MV / total_M[:, None]
            tl.store(out + pair_M[:, None] * VALUE + v[None, :], found_MV.to(out.dtype.element_ty), mask=inside_MV)
        else:
            every = batch * HEADS
            mine_M = b * HEADS + first + r
            spot_MV = (part * every + mine_M)[:, None].to(tl.int64) * VALUE + v[None, :]
            tl.store(partial + spot_MV, mixed_MV, mask=inside_MV)
            tl.store(stats + part * 2 * every + mine_M, best_M, mask=inside)
            tl.store(stats + (part * 2 + 1) * every + mine_M, total_M, mask=inside)


@_jit
def _length(context, BLOCK: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr):
    """Tokens of a part."""
    blocks = tl.cdiv(context, BLOCK)
    return tl.cdiv(blocks, tl.minimum(tl.cdiv(blocks, LEAST), PARTS)) * BLOCK


@_jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["contexts"])
def _latent_join(
    starts, contexts, partial, stats, out, batch,
    HEADS: tl.constexpr, VALUE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one sequence, in their order."""
    b, head, v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * EACH + tl.arange(0, EACH)
    start = tl.load(starts + b)
    context = tl.load(contexts + b).to(tl.int32)
    live = tl.cdiv(context, _length(context, BLOCK, PARTS, LEAST))
    if (tl.load(starts + b + 1) - start == 1) & (live > 1):
        p, every, mine = tl.arange(0, PARTS), batch * HEADS, b * HEADS + head
        best_P = tl.load(stats + p * 2 * every + mine, mask=p < live, other=-1e30)
        total_P = tl.load(stats + (p * 2 + 1) * every + mine, mask=p < live, other=0.0)
        weight_P = tl.exp2(best_P - tl.max(best_P, 0))
        spot_PV = (p * every + mine)[:, None].to(tl.int64) * VALUE + v[None, :]
        mixed_PV = tl.load(partial + spot_PV, mask=(p < live)[:, None] & (v < VALUE)[None, :], other=0.0)
        found_V = tl.sum(weight_P[:, None] * mixed_PV, 0) / tl.sum(weight_P * total_P, 0)
        spot_V = (start * HEADS + head) * VALUE + v
        tl.store(out + spot_V, found_V.to(out.dtype.element_ty), mask=v < VALUE)
