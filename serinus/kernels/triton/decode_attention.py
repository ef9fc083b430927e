"""Paged attention of sequences with one query: split KV, and the digest of what is read; see the references.

A program has one sequence, one KV head and one part of its tokens. How many parts there are is decided by the batch
alone, how long they are by each context: parts of a long sequence are shared by several programs, a short one has a
single part, and the others of its programs end at once. The last program puts the parts together, in their order:
no sum depends on which came first. Sequences with more queries are left to `chunk_attention`.

Sums of the digest are integers, added atomically. They are made by the matrix unit, exactly: a byte of a lane as the
bits of a number in fp16 is 2**-24 as much, and times a balanced byte of a coefficient less than 2**15 units of that,
of which fp32 adds up D without rounding. Byte planes are then put together modulo 2**32. (Products of int8 were slower:
403 us a layer where bytes in fp16 took 291, and attention alone 258.)

A position that is masked is read as one that is not, so that no value of a foreign slot (which may be NaN) is touched.

B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of req_to_token,
E = slots digested, P = parts of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.contracts import LayerDigest, Tiling
from serinus.kernels.packed import PackedFactors
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.dependent import EARLY, dependent, wait_for_earlier
from serinus.kernels.triton.pool_rows import row_starts
from serinus.kernels.triton.tickets import TICKETS

ROWS_LEAST = 16
"""Query heads of one KV head are padded to what a matrix unit takes."""
PLANE_COLUMNS = 8
"""Byte planes of a coefficient of both sums: sum 0 in columns 0-3, sum 1 in 4-7."""
_IN_ASSEMBLY = not triton.knobs.runtime.interpret
"""Triton's interpreter knows none."""
_LOG2_E = 1.4426950408889634
_PROGRAMS = 512
"""With fewer, sequences are cut into parts: an H100 has 132 multiprocessors."""
_NARROW, _NARROW_PROGRAMS, _NARROW_ALONE = 128, 768, 1024
"""From so many on a program is one warp, of which a multiprocessor holds more. Sequences are then cut into as many
parts as make the second number of them, and with fewer than the third into two at least (measured: docs/GPU.md)."""
_PARTS_MAX = 32
_TOKENS_ALONE, _TOKENS_SHARED = 2048, 1280
"""Tokens of a part at least where sequences alone fill the GPU; where they need parts, so many over their number."""
_JOINED = 2048
"""Values of all parts that a warp puts together at a time; twice as many of more than 8 parts by one warp."""


def head_block(size: int) -> int:
    """Elements of a head, padded to a power of 2 that a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(size)))


def tiling_of(programs: int, size: int, itemsize: int, queries: int, *, watched: bool) -> tuple[Tiling, int]:
    """How the work is cut, for so many pairs of a sequence and a KV head, and tokens of a part at least. `queries`: of
    one KV head."""
    is_narrow = programs >= _NARROW and size <= 128 and itemsize <= 2 and queries <= ROWS_LEAST
    parts = _parts_of(programs, is_narrow=is_narrow)
    least, long = (_TOKENS_ALONE, 8) if parts == 1 else (_TOKENS_SHARED // parts, 16 if is_narrow else 8)
    if is_narrow:
        block, warps, stages = 32, 1, 4
    elif itemsize > 2:
        block, warps, stages = 32 if size <= 128 else 16, 4, 1
    elif size > 128:
        block, warps, stages = (32, 4, 3) if watched else (64, 4, 2)  # with 2 warps ptxas may spill nearly all
    else:
        block, warps, stages = 64, 2, 2 if watched else 3
    return Tiling(block=block, warps=warps, stages=stages, stretches=min(_PARTS_MAX, max(long, parts))), max(1, least)


def _parts_of(programs: int, *, is_narrow: bool) -> int:
    """Parts of each sequence that fill the GPU; long ones are cut further."""
    if is_narrow and programs >= _NARROW_ALONE:
        return 1
    parts = int(triton.next_power_of_2(triton.cdiv(_NARROW_PROGRAMS if is_narrow else _PROGRAMS, programs)))
    return max(2, parts) if is_narrow else parts


def attend_one(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
    scale: float, window: int | None, softcap: float | None, sinks_N: Tensor | None, out_TND: Tensor, tickets: Tensor,
    tiling: Tiling | None, packed: PackedFactors | None = None, digest: LayerDigest | None = None,
) -> None:  # fmt: skip
    """Attention of the sequences with one query, into `out_TND`; those with more are left alone.

    Args:
        tickets: of `Tickets`.
        tiling: None = by the table.
        packed: the digest's factors as planes; digest: of its first set what lies in the window is digested. None of
            both = attention alone.
    """
    count, kv_heads, size = batch.sequence_count, k_pool_SHD.shape[-2], q_TND.shape[2]
    heads = q_TND.shape[1]
    each, watching = heads // kv_heads, digest is not None
    by_table = tiling_of(count * kv_heads, size, q_TND.element_size(), each, watched=watching)
    cut, tokens = by_table if tiling is None else (tiling, 1)
    parts = cut.stretches if count * kv_heads <= TICKETS else 1
    least = triton.cdiv(tokens, cut.block)
    partial_PBND = torch.empty((parts, count, heads, size), dtype=torch.float32, device=q_TND.device)
    stats_P2BN = torch.empty((parts, 2, count, heads), dtype=torch.float32, device=q_TND.device)
    watched: tuple[Any, ...] = (*(batch.rows_B,) * 3, 0)  # not read where nothing is watched
    if digest is not None and packed is not None:
        sums_P22E, sets = digest.sums_P22E, digest.due_7B.shape[1]
        watched = (packed.factors, digest.due_7B, sums_P22E, sums_P22E.shape[-1])
    else:
        sets = count
    page_slots, gap = page_gap(k_pool_SHD)
    joined = int(triton.next_power_of_2(each))
    values = _JOINED * (cut.warps if parts <= 8 else max(2, cut.warps))
    depth = max(1, min(size & -size, values // (parts * joined)))
    _decode[(count, kv_heads, parts)](
        q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, req_to_token_RC.stride(0), batch.rows_B, batch.q_starts_B1,
        batch.context_B, sinks_N, out_TND, partial_PBND, stats_P2BN, tickets, *watched,
        scale * (1.0 if softcap else _LOG2_E), softcap or 0.0, window or 0, slot_count(k_pool_SHD), gap, count,
        sets, least, HEADS=kv_heads, QUERIES=each, GROUP=max(ROWS_LEAST, joined),
        SIZE=size, WIDE=head_block(size), PAGE=1 if digest is None else digest.page_size, BLOCK=cut.block, PARTS=parts,
        CAPPED=softcap is not None, WINDOWED=window is not None, WATCHED=watching,
        COLUMNS=PLANE_COLUMNS, IN_ASSEMBLY=_IN_ASSEMBLY, HEADS_JOINED=joined, DEPTH=depth, SLOTS=page_slots,
        WORDS=k_pool_SHD.element_size() > 1, LANES=size if k_pool_SHD.element_size() > 1 else size // 2,
        num_warps=cut.warps, num_stages=cut.stages, **dependent(q_TND.device),
    )  # fmt: skip


_jit: Any = triton.jit
_LOG2_E_C = tl.constexpr(_LOG2_E)


@_jit
def capped(scores, cap):
    """cap * tanh(score / cap), times log2(e); without infinities."""
    return (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E_C) / cap) + 1.0)) * (cap * _LOG2_E_C)


@_jit
def load_rows(at, d, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows of heads, padded with zeros."""
    if SIZE == WIDE:
        return tl.load(at)
    return tl.load(at, mask=(d < SIZE)[None, :], other=0.0)


@_jit
def load_slots(row, t, slot_count):
    """Slots of these positions; 0 for each that is none of the pool's."""
    slot = tl.load(row + t)
    return tl.where((slot < 0) | (slot >= slot_count), 0, slot)


@_jit
def dot(one, other):
    """A product with fp32 sums; of fp32 without any rounding to less."""
    return tl.dot(one, other, input_precision="ieee")


@_jit(do_not_specialize=["entries", "batch", "due_columns", "least"])
def _decode(
    q, k, v, table, columns, rows, starts, contexts, sinks, out, partial, stats, tickets, planes, due, sums,
    entries, scale, cap, window, slot_count, gap, batch, due_columns, least,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, WATCHED: tl.constexpr, COLUMNS: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
    HEADS_JOINED: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    b, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(starts + b, cache_modifier=EARLY)
    is_one = tl.load(starts + b + 1, cache_modifier=EARLY) - token == 1
    context = tl.load(contexts + b, cache_modifier=EARLY).to(tl.int32)
    lowest = context * 0
    if WINDOWED:
        lowest = tl.maximum(context - window, 0)
    base = lowest // BLOCK * BLOCK
    blocks = tl.cdiv(context - base, BLOCK)
    length = tl.cdiv(blocks, tl.minimum(tl.cdiv(blocks, least), PARTS)) * BLOCK
    live = tl.cdiv(context - base, length)
    begin = base + part * length
    if is_one & (begin < context):
        end = tl.minimum(begin + length, context)
        row = table + tl.load(rows + b, cache_modifier=EARLY) * columns
        g, d = tl.arange(0, GROUP), tl.arange(0, WIDE)
        if WATCHED:
            c, half = tl.arange(0, COLUMNS), HEADS * LANES * COLUMNS
            at_DC = planes + (h * LANES + (d if WORDS else d // 2))[:, None] * COLUMNS + c[None, :]
            held = c[None, :] >= 0
            if not WORDS:  # elements of one byte are the low and the high half of a lane, in turn
                at_DC, held = at_DC - d[:, None] % 2, c[None, :] % 4 >= d[:, None] % 2
            k_planes, v_planes = tl.load(at_DC, mask=held, other=0.0), tl.load(at_DC + half, mask=held, other=0.0)
            shift_C, two, asked = (c % 4 * 8).to(tl.uint32), tl.arange(0, 2), due + b
            low = tl.load(asked + 2 * due_columns, cache_modifier=EARLY).to(tl.int32)
            high = tl.load(asked + 3 * due_columns, cache_modifier=EARLY).to(tl.int32)
            low, high = tl.maximum(low, lowest), tl.minimum(high, end)
            first = tl.load(asked + 4 * due_columns, cache_modifier=EARLY).to(tl.int32)
            stride = tl.maximum(tl.load(asked + 5 * due_columns, cache_modifier=EARLY).to(tl.int32), 1)
            entry = tl.load(asked + 6 * due_columns, cache_modifier=EARLY).to(tl.int32)
        wait_for_earlier(DEPENDENT)
        query = token * (HEADS * QUERIES) + h * QUERIES + g
        inside = (g < QUERIES)[:, None] & (d < SIZE)[None, :]
        q_GD = tl.load(q + query[:, None] * SIZE + d[None, :], mask=inside, other=0.0)
        best_G = tl.full((GROUP,), -1e30, tl.float32)
        total_G = tl.zeros((GROUP,), tl.float32)
        if sinks is not None:  # the first part counts them
            sink_G = tl.load(sinks + h * QUERIES + g, mask=g < QUERIES, other=0.0) * _LOG2_E_C
            best_G, total_G = tl.where(part == 0, sink_G, best_G), tl.where(part == 0, 1.0, total_G)
        mixed_GD = tl.zeros((GROUP, WIDE), tl.float32)
        k_head, v_head = k + h * SIZE + d[None, :], v + h * SIZE + d[None, :]
        for at in range(begin, end, BLOCK):
            t = at + tl.arange(0, BLOCK)
            read = tl.minimum(t, end - 1)
            if WINDOWED:
                read = tl.maximum(read, lowest)
            at_T1 = row_starts(load_slots(row, read, slot_count), gap, HEADS * SIZE, SLOTS)[:, None]
            k_TD = load_rows(k_head + at_T1, d, SIZE, WIDE)
            scores_GT = dot(q_GD, tl.trans(k_TD.to(q_GD.dtype))) * scale
            if CAPPED:
                scores_GT = capped(scores_GT, cap)
            seen = t < end
            if WINDOWED:
                seen = seen & (t >= lowest)
            scores_GT = tl.where(seen[None, :], scores_GT, -1e30)
            v_TD = load_rows(v_head + at_T1, d, SIZE, WIDE)
            better_G = tl.maximum(best_G, tl.max(scores_GT, 1))
            weights_GT = tl.exp2(scores_GT - better_G[:, None])
            fade_G = tl.exp2(best_G - better_G)
            total_G = total_G * fade_G + tl.sum(weights_GT, 1)
            mixed_GD = tl.dot(
                weights_GT.to(q_GD.dtype), v_TD.to(q_GD.dtype), mixed_GD * fade_G[:, None], input_precision="ieee"
            )
            best_G = better_G
            if WATCHED:
                # The first due page not before this block's first; a block without a due page is left alone.
                page = at // PAGE
                turns = tl.maximum(page - first + stride - 1, 0) // stride
                if (low < high) & (first + turns * stride < page + (BLOCK + PAGE - 1) // PAGE):
                    turn = t // PAGE - first
                    is_due = (t >= low) & (t < high) & (turn >= 0) & (turn % stride == 0)
                    spot_T2 = (sums + entry + turn // stride * PAGE + t % PAGE)[:, None] + (two * entries)[None, :]
                    _add(spot_T2, _sums(k_TD, k_planes, WORDS, IN_ASSEMBLY), shift_C, is_due)
                    _add(spot_T2 + 2 * entries, _sums(v_TD, v_planes, WORDS, IN_ASSEMBLY), shift_C, is_due)
        if (PARTS == 1) | (live == 1):
            found_GD = mixed_GD / total_G[:, None]
            tl.store(out + query[:, None] * SIZE + d[None, :], found_GD.to(out.dtype.element_ty), mask=inside)
        else:
            every = batch * HEADS * QUERIES
            mine_G = b * HEADS * QUERIES + h * QUERIES + g
            spot_GD = (part * every + mine_G)[:, None].to(tl.int64) * SIZE + d[None, :]
            tl.store(partial + spot_GD, mixed_GD, mask=inside)
            tl.store(stats + part * 2 * every + mine_G, best_G, mask=g < QUERIES)
            tl.store(stats + (part * 2 + 1) * every + mine_G, total_G, mask=g < QUERIES)
            tl.debug_barrier()
            ticket = tickets + b * HEADS + h
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == live - 1:
                tl.store(ticket, 0)
                _join(partial, stats, out, token, b, h, every, live, HEADS, QUERIES, HEADS_JOINED, SIZE, PARTS, DEPTH)
    else:
        wait_for_earlier(DEPENDENT)


@_jit
def _join(
    partial, stats, out, token, b, h, every, live,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, HEADS_JOINED: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and KV head, in their order. All are loaded at once: one after another they cost 6 us
    at 16 parts."""
    p, n = tl.arange(0, PARTS), tl.arange(0, HEADS_JOINED)
    mine_PN = (p * 2 * every)[:, None] + (b * HEADS * QUERIES + h * QUERIES + n)[None, :]
    there_PN = (p < live)[:, None] & (n < QUERIES)[None, :]
    best_PN = tl.load(stats + mine_PN, mask=there_PN, other=-1e30, cache_modifier=".cg")
    total_PN = tl.load(stats + mine_PN + every, mask=there_PN, other=0.0, cache_modifier=".cg")
    weight_PN = tl.exp2(best_PN - tl.max(best_PN, 0)[None, :])
    total_N = tl.sum(weight_PN * total_PN, 0)
    rows_PN = (p * every)[:, None] + (b * HEADS * QUERIES + h * QUERIES + n)[None, :]
    for first in tl.static_range(0, SIZE, DEPTH):
        d = first + tl.arange(0, DEPTH)
        spot_PND = rows_PN[:, :, None].to(tl.int64) * SIZE + d[None, None, :]
        mixed_PND = tl.load(partial + spot_PND, mask=there_PN[:, :, None], other=0.0, cache_modifier=".cg")
        found_ND = tl.sum(weight_PN[:, :, None] * mixed_PND, 0) / total_N[:, None]
        spot_ND = (token * HEADS * QUERIES + h * QUERIES + n)[:, None] * SIZE + d[None, :]
        tl.store(out + spot_ND, found_ND.to(out.dtype.element_ty), mask=(n < QUERIES)[:, None])


@_jit
def _sums(rows_TD, planes_DC, WORDS: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """Sums by byte plane, [T, C] modulo 2**32. In assembly two or four elements are taken apart at a time."""
    if WORDS:
        words = rows_TD.to(tl.uint16, bitcast=True)
        if IN_ASSEMBLY:
            low, high = tl.inline_asm_elementwise(
                "and.b32 $0, $2, 0x00FF00FF; prmt.b32 $1, $2, 0, 0x4341;", "=&r,=r,r", [words],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            low, high = (words & 0xFF).to(tl.float16, bitcast=True), (words >> 8).to(tl.float16, bitcast=True)
        found = _whole(tl.dot(low, planes_DC)) + (_whole(tl.dot(high, planes_DC)) << 8)
    else:
        words = rows_TD.to(tl.uint8, bitcast=True)
        if IN_ASSEMBLY:
            low = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;", "=&r,=r,r", [words],
                dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low = words.to(tl.uint16).to(tl.float16, bitcast=True)
        found = _whole(tl.dot(low, planes_DC))
    return found


@_jit
def _whole(sums_TC):
    """Units of 2**-24, modulo 2**32."""
    return (sums_TC * 16777216.0).to(tl.int32).to(tl.uint32, bitcast=True)


@_jit
def _add(spot_T2, planes_TC, shift_C, is_due_T):
    """Put byte planes together and add both sums."""
    whole_T24 = tl.reshape(planes_TC << shift_C[None, :], (planes_TC.shape[0], 2, 4))
    total_T2 = tl.sum(whole_T24, 2).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_add(spot_T2, total_T2, mask=is_due_T[:, None], sem="relaxed")
