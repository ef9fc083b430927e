"""The routed experts of a mixture: two grouped products over tokens sorted by expert; see the reference.

The pairs of a token and one of its experts are sorted by expert, on the device, by a program for each expert: all of
them count all pairs, so that none waits for another. A program of a product takes a tile of rows of one expert and a
stretch of outputs. As many are started as any choice could need, and those without a tile end at once: shapes are those
of the batch alone, so that a step can be captured. A tile reads its expert's weights once; experts that no token chose
are not read.

T = tokens, K = experts of a token, P = T K pairs, X = experts, E = width of the stream, F = width inside an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from serinus.kernels.checks import Expert, check_fused_moe
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.packed import PackedExperts
from serinus.kernels.triton.expert_rows import put, rows_of
from serinus.kernels.triton.quantized_moe import packed_experts, run_product

_SORTED = 4096
"""Pairs that are looked at together, at most."""


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


Cuts = tuple[ExpertCut, ExpertCut]


def cuts_of(pairs: int, packed: PackedExperts) -> Cuts:
    """For gate and up, and for down, of so many pairs, as measured best (benchmarks/gpu_models.py)."""
    count, inner, width = packed.shape
    if packed.rows is not None:
        return (quantized_cut(pairs, count),) * 2
    if packed.down.element_size() > 2:
        return (ExpertCut(rows=16, outputs=32, inner=32),) * 2
    if pairs <= 32:
        return ExpertCut(rows=16, outputs=32, inner=128, stages=4), ExpertCut(rows=16, outputs=64, inner=128)
    if pairs <= 32 * count:
        return (ExpertCut(rows=16 if pairs <= 8 * count else 32, outputs=64, inner=128),) * 2
    if pairs <= 128 * count:
        return (ExpertCut(rows=64, outputs=128, warps=8),) * 2
    bulk = width % 8 == inner % 8 == 0  # rows of whole 16 bytes
    wide = 256 if bulk else 128
    return (
        ExpertCut(rows=128, outputs=128, warps=8, stages=4 if bulk else 3, bulk=bulk),
        ExpertCut(rows=128, outputs=wide, warps=8, bulk=bulk),
    )


def quantized_cut(pairs: int, count: int) -> ExpertCut:
    """For both products of experts whose weights are unpacked, of which none comes through the bulk copy engine."""
    if pairs <= 32 * count:
        return ExpertCut(rows=16 if pairs <= 8 * count else 32, outputs=32 if pairs <= 32 else 64)
    return ExpertCut(rows=64, outputs=128, warps=8)


def pack_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """Quantized experts as their kernel reads them; see the reference. Raises ValueError: groups are too small."""
    return packed_experts(experts, gate_up_bias, down_bias)


def fused_moe(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate) -> Tensor:
    """The experts' sums. Cost: one read of the weights of the experts that are hit for each tile of their rows; P rows
    of the stream written and read once; no host wait."""
    check_fused_moe(x_TE, weights_TK, ids_TK, packed)
    if not ids_TK.numel():
        return torch.zeros_like(x_TE)
    cuts = cuts_of(ids_TK.numel(), packed)
    return run_experts(x_TE.contiguous(), weights_TK.contiguous(), ids_TK.contiguous(), packed, gate, cuts)


def run_experts(
    x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate, cuts: Cuts
) -> Tensor:
    """The same of what was checked and is contiguous, of at least one pair, cut so."""
    (tokens, width), chosen, device = x_TE.shape, ids_TK.shape[1], x_TE.device
    (count, inner, _), pairs, rows = packed.shape, ids_TK.numel(), cuts[0].rows
    tiles = min(pairs, count) + pairs // rows
    order_P, ends_X, tiles_2G = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in (pairs, count, (2, tiles))
    )
    block = min(_SORTED, max(128, int(triton.next_power_of_2(pairs))))
    _sort[(count,)](
        ids_TK, order_P, ends_X, tiles_2G, pairs, tiles, COUNT=count, COUNT_UP=int(triton.next_power_of_2(count + 1)),
        ROWS=rows, BLOCK=block, num_warps=max(4, min(16, block // 256)),
    )  # fmt: skip
    inner_PF = x_TE.new_empty((pairs, inner))
    added_PE = (x_TE.new_zeros if packed.is_part else x_TE.new_empty)((pairs, width))
    for cut, down, left, stack, bias, out in (
        (cuts[0], False, x_TE, packed.gate_up, packed.gate_up_bias, inner_PF),
        (cuts[1], True, inner_PF, packed.down, packed.down_bias, added_PE),
    ):
        if packed.rows is not None:
            run_product(
                left, stack, packed.rows.down if down else packed.rows.gate_up, bias, weights_TK,
                (order_P, ends_X, tiles_2G), tiles, out, rows, cut.outputs, chosen=chosen, is_down=down,
                is_oai=gate == "swiglu_oai",
            )  # fmt: skip
            continue
        right: Any = stack
        if cut.bulk:
            flat = stack.flatten(0, 1)
            right = TensorDescriptor(flat, list(flat.shape), [flat.shape[1], 1], [cut.outputs, cut.inner])
        _experts[(tiles, triton.cdiv(out.shape[1], cut.outputs))](
            left, right, stack if bias is None else bias, weights_TK, order_P, ends_X, tiles_2G, tiles, out,
            left.shape[1], out.shape[1], COUNT=count, CHOSEN=chosen, ROWS=rows, OUTS=cut.outputs, BLOCK=cut.inner,
            DOWN=down, OAI=gate == "swiglu_oai", HAS_BIAS=bias is not None, BULK=cut.bulk,
            EVEN=left.shape[1] % cut.inner == 0 and out.shape[1] % cut.outputs == 0, num_warps=cut.warps,
            num_stages=cut.stages,
        )  # fmt: skip
    return added_PE.view(tokens, chosen, width).sum(1) if chosen > 1 else added_PE


_jit: Any = triton.jit


@_jit(do_not_specialize=["pairs", "tiles"])
def _sort(
    ids, order, ends, tiles_of, pairs, tiles,
    COUNT: tl.constexpr, COUNT_UP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one expert: the places of its pairs in their order, where they end, and of its tiles the expert and the first
    row. Expert 0 marks what is no tile."""
    expert = tl.program_id(0)
    x, p = tl.arange(0, COUNT_UP), tl.arange(0, BLOCK)
    counts_X = tl.zeros((COUNT_UP,), tl.int32)
    for at in range(0, pairs, BLOCK):
        counts_X += tl.histogram(tl.load(ids + at + p, mask=at + p < pairs, other=COUNT).to(tl.int32), COUNT_UP)
    counts_X = tl.where(x < COUNT, counts_X, 0)
    tiles_X = (counts_X + ROWS - 1) // ROWS
    place = tl.sum(tl.where(x < expert, counts_X, 0), 0)
    count = tl.sum(tl.where(x == expert, counts_X, 0), 0)
    tile = tl.sum(tl.where(x < expert, tiles_X, 0), 0)
    tl.store(ends + expert, place + count)
    for at in range(0, count, ROWS):
        tl.store(tiles_of + tile + at // ROWS, expert)
        tl.store(tiles_of + tiles + tile + at // ROWS, place + at)
    if expert == 0:
        for at in range(tl.sum(tiles_X, 0), tiles, BLOCK):
            tl.store(tiles_of + at + p, COUNT, mask=at + p < tiles)
    for at in range(0, pairs, BLOCK):
        is_mine = (tl.load(ids + at + p, mask=at + p < pairs, other=COUNT).to(tl.int32) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, at + p, mask=is_mine != 0)
        place += tl.sum(is_mine, 0)


@_jit
def _weights(stack, at, first, i, inner, has_out, BULK: tl.constexpr, EVEN: tl.constexpr):
    """A block of weights: `at` names the first output, or points to those of all outputs."""
    if BULK:
        block_OI = stack.load([at, first])
    elif EVEN:
        block_OI = tl.load(at + first + i[None, :])
    else:
        block_OI = tl.load(at + first + i[None, :], mask=has_out[:, None] & (first + i < inner)[None, :], other=0.0)
    return block_OI


@_jit(do_not_specialize=["tiles"])
def _experts(
    left, stack, bias, weights, order, ends, tiles_of, tiles, out, inner, outs,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr,
    DOWN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gate, up and activation of rows of the stream; or with DOWN the down projection, times the expert's weight, to
    the place of its pair. Few rows are the narrow side of the product."""
    expert = tl.load(tiles_of + tl.program_id(0))
    if expert < COUNT:
        row, has_row, pair = rows_of(order, ends, tiles_of, tiles, expert, ROWS)
        source = row if DOWN else pair // CHOSEN
        o, i = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, BLOCK)
        has_out = o < outs
        base = expert.to(tl.int64) * outs * (1 if DOWN else 2)
        SWAPPED: tl.constexpr = ROWS < 64
        if SWAPPED:
            total, upper = tl.zeros((OUTS, ROWS), tl.float32), tl.zeros((OUTS, ROWS), tl.float32)
        else:
            total, upper = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
        rows_at = left + source[:, None].to(tl.int64) * inner
        if BULK:
            one_at = (base + tl.program_id(1) * OUTS).to(tl.int32)
            other_at = one_at + outs
        else:
            one_at = stack + (base + o)[:, None] * inner
            other_at = one_at + outs.to(tl.int64) * inner
        for first in range(0, inner, BLOCK):
            if EVEN:
                rows_RI = tl.load(rows_at + first + i[None, :], mask=has_row[:, None], other=0.0)
            else:
                inside = has_row[:, None] & (first + i < inner)[None, :]
                rows_RI = tl.load(rows_at + first + i[None, :], mask=inside, other=0.0)
            one_OI = _weights(stack, one_at, first, i, inner, has_out, BULK, EVEN)
            if SWAPPED:
                total = tl.dot(one_OI, tl.trans(rows_RI), total, input_precision="ieee")
            else:
                total = tl.dot(rows_RI, tl.trans(one_OI), total, input_precision="ieee")
            if not DOWN:
                other_OI = _weights(stack, other_at, first, i, inner, has_out, BULK, EVEN)
                if SWAPPED:
                    upper = tl.dot(other_OI, tl.trans(rows_RI), upper, input_precision="ieee")
                else:
                    upper = tl.dot(rows_RI, tl.trans(other_OI), upper, input_precision="ieee")
        if SWAPPED:
            total, upper = tl.trans(total), tl.trans(upper)
        put(total, upper, bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN, OAI, HAS_BIAS)
