"""The routed experts of a mixture: two grouped products over tokens sorted by expert; see the reference.

The pairs of a token and one of its experts are sorted by expert, on the device, by a program for each expert: all of
them count all pairs, so that none waits for another. A program of a product takes a tile of rows of one expert and a
stretch of outputs. As many are started as any choice could need, and those without a tile end at once: shapes are those
of the batch alone, so that a step can be captured. A tile reads its expert's weights once; experts that no token chose
are not read. Of prompts the programs of a few neighbouring tiles follow each other, so that rows and weights come from
the second cache; quantized experts that meet many rows become floats once, in memory, some at a time (`quantized_moe`).

T = tokens, K = experts of a token, P = T K pairs, X = experts, E = width of the stream, F = width inside an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from serinus.kernels.checks import Expert, check_fused_moe
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.packed import PackedExperts
from serinus.kernels.triton.expert_rows import ExpertCut, put, rows_of
from serinus.kernels.triton.quantized import E2M1, E2M1_LARGE
from serinus.kernels.triton.quantized_moe import packed_experts, run_product, widened_stack

_SORTED = 4096
"""Pairs that are looked at together, at most."""
_WIDENED_MIN, _WIDENED_MIN_E2M1 = 256, 512
"""Pairs an expert above which quantized experts are written out as floats first. E2M1: where lines through the measured
times meet; others: where they should, by the time of as many experts in bf16 and of writing them."""
_WIDENED_BYTES = 1 << 29
"""Of experts that are written out as floats at once, unless one has more."""

Cuts = tuple[ExpertCut, ExpertCut]


def cuts_of(pairs: int, packed: PackedExperts, itemsize: int) -> Cuts:
    """For gate and up, and for down, of so many pairs, as measured best (benchmarks/gpu_models.py). `itemsize`: of the
    activations."""
    count, inner, width = packed.shape
    is_quantized, is_e2m1 = packed.rows is not None, _is_e2m1(packed)
    if is_quantized and (itemsize > 2 or pairs <= (_WIDENED_MIN_E2M1 if is_e2m1 else _WIDENED_MIN) * count):
        return (quantized_cut(pairs, count, is_e2m1=is_e2m1),) * 2
    if itemsize > 2:
        return (ExpertCut(rows=16, outputs=32, inner=32),) * 2
    if pairs <= 32:
        return ExpertCut(rows=16, outputs=32, inner=128, stages=4), ExpertCut(rows=16, outputs=64, inner=128)
    if pairs <= 32 * count:
        return (ExpertCut(rows=16 if pairs <= 8 * count else 32, outputs=64, inner=128),) * 2
    if pairs <= 128 * count:
        return (ExpertCut(rows=64, outputs=128, warps=8),) * 2
    bulk = width % 8 == inner % 8 == 0  # rows of whole 16 bytes
    many = ExpertCut(rows=128, outputs=128, warps=8, bulk=bulk, together=4, widened=is_quantized)
    return (replace(many, stages=4), replace(many, outputs=256)) if bulk else (many, many)


def _is_e2m1(packed: PackedExperts) -> bool:
    return packed.rows is not None and packed.rows.down.levels in (E2M1, E2M1_LARGE)


def quantized_cut(pairs: int, count: int, *, is_e2m1: bool) -> ExpertCut:
    """For both products of experts whose weights become floats in the kernel."""
    if pairs <= 32:
        return ExpertCut(rows=16, outputs=32, warps=2 if is_e2m1 else 4)
    if pairs <= 32 * count:
        return ExpertCut(rows=16 if pairs <= 8 * count else 32, outputs=64)
    return ExpertCut(rows=64, outputs=128, warps=8)


def pack_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """Quantized experts as their kernel reads them; see the reference. Raises ValueError: groups are too small."""
    return packed_experts(experts, gate_up_bias, down_bias)


def fused_moe(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate) -> Tensor:
    """The experts' sums. Cost: one read of the weights of the experts that are hit for each tile of their rows; P rows
    of the stream written and read once; where quantized experts become floats first, one write of all of them and
    _WIDENED_BYTES of memory; no host wait."""
    check_fused_moe(x_TE, weights_TK, ids_TK, packed)
    if not ids_TK.numel():
        return torch.zeros_like(x_TE)
    cuts = cuts_of(ids_TK.numel(), packed, x_TE.element_size())
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
    sorted_ = order_P, ends_X, tiles_2G
    inner_PF = x_TE.new_empty((pairs, inner))
    added_PE = (x_TE.new_zeros if packed.is_part else x_TE.new_empty)((pairs, width))
    shared: dict[str, Any] = {
        "weights_TK": weights_TK, "sorted_": sorted_, "tiles": tiles, "chosen": chosen, "is_oai": gate == "swiglu_oai"
    }  # fmt: skip
    hows = (None, None) if packed.rows is None else (packed.rows.gate_up, packed.rows.down)
    for is_down, left, stack, how, bias, out in (
        (False, x_TE, packed.gate_up, hows[0], packed.gate_up_bias, inner_PF),
        (True, inner_PF, packed.down, hows[1], packed.down_bias, added_PE),
    ):
        cut = cuts[is_down]
        shared |= {"bias": bias, "out": out, "cut": cut, "is_down": is_down}
        if how is None:
            _multiply(left, stack, range(count), **shared)
        elif cut.widened:
            outs, ins = out.shape[1] * (1 if is_down else 2), left.shape[1]
            each = max(1, _WIDENED_BYTES // (outs * ins * left.element_size()))
            for first in range(0, count, each):
                held = range(first, min(first + each, count))
                _multiply(left, widened_stack(stack, how, held, outs, left), held, **shared)
        else:
            run_product(left, stack, how, **shared)
    return added_PE.view(tokens, chosen, width).sum(1) if chosen > 1 else added_PE


def _multiply(
    left: Tensor, stack: Tensor, held: range, *, bias: Tensor | None, weights_TK: Tensor, sorted_: tuple[Tensor, ...],
    tiles: int, out: Tensor, cut: ExpertCut, chosen: int, is_down: bool, is_oai: bool,
) -> None:  # fmt: skip
    """One product of the experts `held`, by their weights `stack`."""
    (_, inner), outs = left.shape, out.shape[1]
    right: Any = stack
    if cut.bulk:
        flat = stack.flatten(0, 1)
        right = TensorDescriptor(flat, list(flat.shape), [inner, 1], [cut.outputs, cut.inner])
    blocks = triton.cdiv(outs, cut.outputs)
    _experts[(tiles * blocks,) if cut.together else (tiles, blocks)](
        left, right, stack if bias is None else bias, weights_TK, *sorted_, tiles, out, inner, outs, held.start,
        held.stop, CHOSEN=chosen, ROWS=cut.rows, OUTS=cut.outputs, BLOCK=cut.inner, DOWN=is_down, OAI=is_oai,
        HAS_BIAS=bias is not None, BULK=cut.bulk, TOGETHER=cut.together,
        EVEN=inner % cut.inner == 0 and (cut.bulk or outs % cut.outputs == 0), num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip


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


@_jit(do_not_specialize=["tiles", "begin", "end"])
def _experts(
    left, stack, bias, weights, order, ends, tiles_of, tiles, out, inner, outs, begin, end,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK: tl.constexpr, DOWN: tl.constexpr,
    OAI: tl.constexpr, HAS_BIAS: tl.constexpr, BULK: tl.constexpr, TOGETHER: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Gate, up and activation of rows of the stream; or with DOWN the down projection, times the expert's weight, to
    the place of its pair. Few rows are the narrow side of the product."""
    tile, block = tl.program_id(0), tl.program_id(1)
    if TOGETHER:
        each = TOGETHER * tl.cdiv(outs, OUTS)
        first_tile = tile // each * TOGETHER
        beside = tl.minimum(tiles - first_tile, TOGETHER)
        tile, block = first_tile + tile % each % beside, tile % each // beside
    expert = tl.load(tiles_of + tile)
    if (expert >= begin) & (expert < end):
        row, has_row, pair = rows_of(order, ends, tiles_of, tiles, tile, expert, ROWS)
        source = row if DOWN else pair // CHOSEN
        o, i = block * OUTS + tl.arange(0, OUTS), tl.arange(0, BLOCK)
        has_out = o < outs
        base = (expert - begin).to(tl.int64) * outs * (1 if DOWN else 2)
        SWAPPED: tl.constexpr = ROWS < 64
        if SWAPPED:
            total, upper = tl.zeros((OUTS, ROWS), tl.float32), tl.zeros((OUTS, ROWS), tl.float32)
        else:
            total, upper = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
        rows_at = left + source[:, None].to(tl.int64) * inner
        if BULK:
            one_at = (base + block * OUTS).to(tl.int32)
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
        base = expert.to(tl.int64) * outs * (1 if DOWN else 2)
        put(total, upper, bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN, OAI, HAS_BIAS)
