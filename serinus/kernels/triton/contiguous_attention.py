"""Causal attention of chunks over keys and values that lie side by side, not in pages, and the copy that lays rows so.

Contexts of a group of neighbouring sequences lie one behind the other, each from a multiple of CHUNK_ROWS rows on, with
zeros up to the next one; those of a head behind those of the head before. So blocks of keys and values are read by the
bulk copy engine (TMA): no table, no addresses in registers, no masks but that of the future. A program has a tile of
queries of one head. Tiles are numbered as in `chunk_attention`, and the longest contexts of a sequence start first.

T = tokens, N = query heads, H = heads of keys, D = elements of a head, L = rows of the group, P, O, V = elements of a
key that are a head's own, that all heads share, and of a value, B = sequences, M = queries of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from serinus.kernels.batch import CHUNK_ROWS, AttentionBatch, HostChunk
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.decode_attention import dot, head_block, load_slots
from serinus.kernels.triton.pool_rows import owner_of, row_starts

__all__ = ["ChunkCut", "ChunkGroup", "aligned", "attend_contiguous", "chunk_groups", "gather_rows", "head_parts"]

_LOG2_E = 1.4426950408889634
_GATHERED = 1 << 14
"""Elements that a program copies, of some rows."""
_KEYS = 1 << 27
"""Elements of keys and values that lie side by side at a time: more heads than have so many go one group after the
other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCut:
    """How attention is cut."""

    rows: int
    """Queries of a tile."""
    block: int
    """Positions at a time; CHUNK_ROWS is a multiple."""
    warps: int
    """Warps of one program."""
    stages: int
    """Blocks that are loaded ahead."""


def cut_of(size: int, itemsize: int) -> ChunkCut:
    """By the elements of a key: two programs share a multiprocessor. One of 128 queries and 8 warps takes 7 % more for
    eight prompts of 1,024 tokens over keys of 192 elements, for one of 8,192 1 % less; over keys of 128 27 and 14 %
    more."""
    if itemsize > 2:
        return ChunkCut(rows=16, block=32 if size <= 128 else 16, warps=4, stages=1)
    return ChunkCut(rows=64, block=64, warps=4, stages=3 if size <= 128 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Neighbouring sequences, all with several tokens; their contexts lie side by side."""

    chunks: tuple[HostChunk, ...]

    @property
    def sequences(self) -> slice:
        """Their numbers in the batch."""
        return slice(self.chunks[0].sequence, self.chunks[-1].sequence + 1)

    @property
    def tokens(self) -> slice:
        """Their tokens in the step."""
        return slice(self.chunks[0].first, self.chunks[-1].first + self.chunks[-1].count)

    @property
    def rows(self) -> int:
        """L, rows of their contexts: a multiple of CHUNK_ROWS."""
        last = self.chunks[-1]
        return whole_rows(last.place + last.context - self.chunks[0].place)


def whole_rows(count: int) -> int:
    """So many rows and those up to the next multiple of CHUNK_ROWS."""
    return -(-count // CHUNK_ROWS) * CHUNK_ROWS


def chunk_groups(chunks: Sequence[HostChunk], rows: int) -> list[ChunkGroup]:
    """These chunks, in their order, in groups of at most so many rows, or of one chunk."""
    groups: list[list[HostChunk]] = []
    for chunk in chunks:
        group = groups[-1] if groups else []
        if group and group[-1].sequence + 1 == chunk.sequence and chunk.place + chunk.context - group[0].place <= rows:
            group.append(chunk)
        else:
            groups.append([chunk])
    return [ChunkGroup(chunks=tuple(group)) for group in groups]


def aligned(size: int) -> int:
    """Elements of a row that has so many, with padding: the bulk copy engine reads rows from multiples of 16 bytes."""
    return (size + 7) // 8 * 8


def head_parts(like: Tensor, heads: int, rows: int, longest: int, each: int) -> Iterator[tuple[slice, Tensor]]:
    """Heads that go together, and room for so many rows of them, [H, L, each], all in the same memory: as much of it as
    a group of the longest context takes, so that the largest step of all is one of those."""
    most = each * max(rows, whole_rows(longest))
    room = like.new_empty(max(most, min(_KEYS, heads * most)))
    parts = -(-heads // (len(room) // (rows * each)))
    for i in range(parts):
        some = slice(heads * i // parts, heads * (i + 1) // parts)
        count = some.stop - some.start
        yield some, room[: count * rows * each].view(count, rows, each)


def gather_rows(
    pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch, group: ChunkGroup, out_HLD: Tensor, *,
    head: int = 0, split: int = 0,
) -> None:  # fmt: skip
    """Copy the rows of the contexts of a group out of their pages, those of `head` and the next ones, and widen them;
    elements from `split` on go to column aligned(split) and behind. Slots that are none of the pool's are read as
    slot 0."""
    assert batch.chunks is not None, "kernels: a group of a batch whose chunks nobody knows"
    page_slots, gap = page_gap(pool_SHD)
    heads, width = pool_SHD.shape[-2:]
    first, wide = group.chunks[0], triton.next_power_of_2(width)
    rows = max(16, min(CHUNK_ROWS, _GATHERED // wide))
    _gather[(group.rows // rows, len(out_HLD))](
        pool_SHD, req_to_token_RC, req_to_token_RC.stride(0), batch.rows_B, batch.context_B, batch.chunks.places_B,
        out_HLD, slot_count(pool_SHD), gap, first.sequence, len(group.chunks), first.place, group.rows, head,
        HEADS=heads, WIDTH=width, WIDE=wide, SPLIT=split, SHIFT=aligned(split) - split,
        STRIDE=out_HLD.stride(1), ROWS=rows, SLOTS=page_slots, num_warps=8,
    )  # fmt: skip


def attend_contiguous(
    q_TNX: Tensor, k_HLP: Tensor, v_HLV: Tensor, batch: AttentionBatch, group: ChunkGroup, scale: float,
    out_TNV: Tensor, *, queries: int = 1, head: int = 0, shared_LO: Tensor | None = None, cut: ChunkCut | None = None,
) -> None:  # fmt: skip
    """Attention of the sequences of a group into `out_TNV`; other tokens are left alone.

    Args:
        q_TNX: of all tokens of the step, X = P + O: a head's elements one behind the other.
        k_HLP, v_HLV: of some heads; rows begin at multiples of 16 bytes.
        queries: heads of queries for each head of keys; head: the first of them.
        shared_LO: elements of keys that are the same for all heads; rows as those of k.
        cut: None = by the table.
    """
    assert batch.chunks is not None, "kernels: a group of a batch whose chunks nobody knows"
    (heads, rows, plain), value, chunks = k_HLP.shape, v_HLV.shape[2], group.chunks
    rest = q_TNX.shape[2] - plain
    cut = cut or cut_of(q_TNX.shape[2], q_TNX.element_size())
    before = chunks[0].first // cut.rows + chunks[0].sequence
    tiles = group.tokens.stop // cut.rows + group.sequences.stop - before
    key, other = _bulk(k_HLP.flatten(0, 1), cut.block), _bulk(v_HLV.flatten(0, 1), cut.block)
    _contiguous[(tiles, heads * queries)](
        q_TNX, key, other, key if shared_LO is None else _bulk(shared_LO, cut.block), batch.q_starts_B1,
        batch.context_B, batch.chunks.places_B, out_TNV, scale * _LOG2_E, q_TNX.stride(0), q_TNX.stride(1),
        out_TNV.stride(0), out_TNV.stride(1), rows, chunks[0].sequence, len(chunks), chunks[0].place, before, tiles,
        head, QUERIES=queries, PLAIN=plain, PLAIN_UP=head_block(plain), REST=rest, REST_UP=head_block(rest),
        VALUE=value, VALUE_UP=head_block(value), TILE=cut.rows, BLOCK=cut.block, num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip


def _bulk(rows_LX: Tensor, block: int) -> TensorDescriptor:
    """What the bulk copy engine reads blocks of rows by, padded with zeros to a size that a matrix unit takes."""
    return TensorDescriptor(rows_LX, list(rows_LX.shape), list(rows_LX.stride()), [block, head_block(rows_LX.shape[1])])


_jit: Any = triton.jit


@_jit(do_not_specialize=["sequence", "count", "base", "length", "head"])
def _gather(
    pool, table, columns, rows, contexts, places, out, slot_count, gap, sequence, count, base, length, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, SHIFT: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    at, h = tl.program_id(0) * ROWS, tl.program_id(1)
    b = owner_of(places, base + at, sequence, count, 1, 1, NUMBERED=False)
    r, w = tl.arange(0, ROWS), tl.arange(0, WIDE)
    t = at - (tl.load(places + b).to(tl.int32) - base) + r
    context = tl.load(contexts + b).to(tl.int32)
    slot = load_slots(table + tl.load(rows + b) * columns, tl.minimum(t, context - 1), slot_count)
    inside = (w < WIDTH)[None, :]
    at_R1 = row_starts(slot, gap, HEADS * WIDTH, SLOTS)[:, None] + (head + h) * WIDTH
    row_RW = tl.load(pool + at_R1 + w[None, :], mask=(t < context)[:, None] & inside, other=0.0)
    spot_W = w + tl.where(w < SPLIT, 0, SHIFT)
    spot_RW = (h * length + at + r)[:, None].to(tl.int64) * STRIDE + spot_W[None, :]
    tl.store(out + spot_RW, row_RW.to(out.dtype.element_ty), mask=inside)


@_jit
def _scores(q_MP, q_MO, k, shared, key_at, row_at, REST: tl.constexpr):
    """Of a block of keys, without the scale."""
    scores_MT = dot(q_MP, tl.trans(k.load([key_at, 0])))
    if REST > 0:
        scores_MT = tl.dot(q_MO, tl.trans(shared.load([row_at, 0])), scores_MT, input_precision="ieee")
    return scores_MT


@_jit
def _mix(scores_MT, value_TV, scale, best_M, total_M, mixed_MV):
    """The softmax so far, and one block more."""
    better_M = tl.maximum(best_M, tl.max(scores_MT, 1) * scale)
    weights_MT = tl.exp2(scores_MT * scale - better_M[:, None])
    fade_M = tl.exp2(best_M - better_M)
    total_M = total_M * fade_M + tl.sum(weights_MT, 1)
    mixed_MV = tl.dot(weights_MT.to(value_TV.dtype), value_TV, mixed_MV * fade_M[:, None], input_precision="ieee")
    return better_M, total_M, mixed_MV


@_jit(do_not_specialize=["length", "sequence", "count", "base", "before", "tiles", "head"])
def _contiguous(
    q, k, v, shared, starts, contexts, places, out, scale, q_token, q_head, out_token, out_head, length, sequence,
    count, base, before, tiles, head,
    QUERIES: tl.constexpr, PLAIN: tl.constexpr, PLAIN_UP: tl.constexpr, REST: tl.constexpr, REST_UP: tl.constexpr,
    VALUE: tl.constexpr, VALUE_UP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, h = before + tiles - 1 - tl.program_id(0), tl.program_id(1)
    b = owner_of(starts, tile, sequence, count, 1, TILE, NUMBERED=True)
    start = tl.load(starts + b).to(tl.int32)
    tokens = tl.load(starts + b + 1).to(tl.int32) - start
    first = (tile - start // TILE - b) * TILE
    if first < tokens:
        context = tl.load(contexts + b).to(tl.int32)
        row_at = tl.load(places + b).to(tl.int32) - base
        key_at = h // QUERIES * length + row_at
        i, j = first + tl.arange(0, TILE), tl.arange(0, BLOCK)
        p, o, e = tl.arange(0, PLAIN_UP), tl.arange(0, REST_UP), tl.arange(0, VALUE_UP)
        own_M = context - tokens + i
        token_M = (start + i).to(tl.int64)
        q_M = q + token_M[:, None] * q_token + (head + h) * q_head
        q_MP = tl.load(q_M + p[None, :], mask=(i < tokens)[:, None] & (p < PLAIN)[None, :], other=0.0)
        q_MO = q_MP
        if REST > 0:
            q_MO = tl.load(q_M + PLAIN + o[None, :], mask=(i < tokens)[:, None] & (o < REST)[None, :], other=0.0)
        best_M = tl.full((TILE,), -1e30, tl.float32)
        total_M = tl.zeros((TILE,), tl.float32)
        mixed_MV = tl.zeros((TILE, VALUE_UP), tl.float32)
        own = context - tokens + first  # position of the first query
        whole = (own + 1) // BLOCK * BLOCK  # blocks that all queries see whole need no mask
        for at in range(0, whole, BLOCK):
            scores_MT = _scores(q_MP, q_MO, k, shared, key_at + at, row_at + at, REST)
            best_M, total_M, mixed_MV = _mix(scores_MT, v.load([key_at + at, 0]), scale, best_M, total_M, mixed_MV)
        for at in range(whole, tl.minimum(own + TILE, context), BLOCK):
            scores_MT = _scores(q_MP, q_MO, k, shared, key_at + at, row_at + at, REST)
            scores_MT = tl.where((at + j)[None, :] <= own_M[:, None], scores_MT, -1e30)
            best_M, total_M, mixed_MV = _mix(scores_MT, v.load([key_at + at, 0]), scale, best_M, total_M, mixed_MV)
        spot_MV = out + token_M[:, None] * out_token + (head + h) * out_head + e[None, :]
        found_MV = (mixed_MV / total_M[:, None]).to(out.dtype.element_ty)
        tl.store(spot_MV, found_MV, mask=(i < tokens)[:, None] & (e < VALUE)[None, :])
