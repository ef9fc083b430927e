"""The products of quantized experts: integers of 4 and 8 bits, E4M3 and E2M1 (MXFP4) become floats in the kernel; see
`quantized` and `fused_moe`.

Each projection lies output after output, filled up to whole spans. 4 bits: as in `quantized`, of a span the first half
in the lower halves of bytes. E2M1: of two neighbours the first in the lower half, and a scale's exponent (E8M0) for
each 32: what the compiler's own product of such numbers reads.

X = experts, O = output width of a projection, I = its input width, G = groups of an output, Y = bytes of an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import Expert, check_experts
from serinus.kernels.packed import PackedExperts, RowBlocks
from serinus.kernels.quantized import QuantizedWeight, e2m1_codes
from serinus.kernels.triton.expert_rows import put, rows_of
from serinus.kernels.triton.quantized import E2M1, E4M3, INTEGERS, SPAN_MIN, halves, span_of, widened

_BLOCK = 32
"""Values of E2M1 that share a scale."""
_HALF = _BLOCK // 2
_IN_ASSEMBLY = not triton.knobs.runtime.interpret


def packed_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """As the kernels read them; see the reference. Raises ValueError: groups are too small. Cost: two copies of them
    for a moment, and some of one expert."""
    gate_ups, downs = [], []
    inner = width = 0
    for gate_up, down in check_experts(experts):
        inner, width = down.in_size, down.out_size
        gate_ups.append(gate_up)
        downs.append(down)
    sizes = len(downs), inner, width
    return PackedExperts.of_integers(_stacked(gate_ups), _stacked(downs), gate_up_bias, down_bias, sizes)


def _stacked(weights: Sequence[QuantizedWeight]) -> tuple[Tensor, RowBlocks]:
    """One behind the other. Zero points are written out where some have them."""
    first = weights[0]
    group = 0 if first.scales_OG.shape[1] == 1 else first.group
    if group % SPAN_MIN or (first.e2m1 and first.group != _BLOCK):
        raise ValueError(
            f"kernels: experts in groups of {first.group}, expected a multiple of {SPAN_MIN}, of E2M1 {_BLOCK}"
        )
    span = span_of(0 if first.e2m1 else group)
    values = torch.stack([_bytes(each, span) for each in weights])
    if first.e2m1:
        scales, zeros = torch.stack([_exponents(each, values.shape[-1] // _HALF) for each in weights]), None
    else:
        scales, zeros = torch.stack([each.scales_OG.T for each in weights]).contiguous(), None
        if any(each.zeros_OG is not None for each in weights):
            tables = [torch.zeros_like(each.scales_OG, dtype=torch.int8) if each.zeros_OG is None else each.zeros_OG
                      for each in weights]  # fmt: skip
            zeros = torch.stack([each.T for each in tables]).contiguous()
    levels = E2M1 if first.e2m1 else E4M3 if first.e4m3 else INTEGERS
    rows = RowBlocks(
        address=values.data_ptr(), part=group, bits=4 if first.e2m1 else first.bits, levels=levels, scales=scales,
        zeros=zeros,
    )  # fmt: skip
    return values, rows


def _bytes(weight: QuantizedWeight, span: int) -> Tensor:
    """What its kernel reads of the values, [O, Y]."""
    values_OI = F.pad(weight.values_OI, (0, -weight.in_size % span))
    if weight.e2m1:
        digits = e2m1_codes(values_OI).to(torch.uint8)
        return digits[:, 0::2] | digits[:, 1::2] << 4
    if weight.bits == 8:
        return values_OI
    digits = (values_OI + 8).view(torch.uint8).view(len(values_OI), -1, 2, span // 2)
    return (digits[:, :, 0] | digits[:, :, 1] << 4).flatten(1)


def _exponents(weight: QuantizedWeight, groups: int) -> Tensor:
    """Of E2M1 the scales, E8M0, uint8 [O, G], filled up. Raises ValueError: one is no power of two."""
    words_OG = (weight.scales_OG * 2.0).view(torch.int32)
    exponents_OG = words_OG >> 23
    least = 1 << 22  # the bits of 2**-127
    if not torch.equal(words_OG, torch.where(exponents_OG == 0, least, exponents_OG << 23)):
        raise ValueError("kernels: experts in E2M1 with scales that are no powers of two from 2**-128 on")
    return F.pad(exponents_OG.to(torch.uint8), (0, groups - exponents_OG.shape[1]), value=127)


def run_product(
    left: Tensor, stack: Tensor, how: RowBlocks, bias: Tensor | None, weights_TK: Tensor, sorted_: Sequence[Tensor],
    tiles: int, out: Tensor, rows: int, outputs: int, *, chosen: int, is_down: bool, is_oai: bool,
) -> None:  # fmt: skip
    """One product of `fused_moe.run_experts`. `sorted_`: its order, ends and tiles."""
    assert how.scales is not None, "kernels: quantized experts without scales"
    span = span_of(0 if how.levels == E2M1 else how.part)
    is_paired = how.levels == E2M1 and left.dtype != torch.float32 and _IN_ASSEMBLY
    _quantized_experts[(tiles, triton.cdiv(out.shape[1], outputs))](
        left, stack, how.scales, how.scales if how.zeros is None else how.zeros, stack if bias is None else bias,
        weights_TK, *sorted_, tiles, out, left.shape[1], out.shape[1], max(how.part, 1), COUNT=len(stack),
        CHOSEN=chosen, ROWS=rows, OUTS=outputs, SPAN=span, BITS=how.bits, FLOATS=how.levels == E4M3,
        PAIRED=is_paired, E2M1=how.levels == E2M1, GROUPED=how.part > 0, HAS_ZEROS=how.zeros is not None,
        DOWN=is_down, OAI=is_oai, HAS_BIAS=bias is not None, EVEN=left.shape[1] % span == 0,
        IN_ASSEMBLY=_IN_ASSEMBLY, num_warps=8 if rows * outputs >= 8192 else 4, num_stages=3,
    )  # fmt: skip


_jit: Any = triton.jit


@_jit
def _e2m1(both, dtype: tl.constexpr):
    """The floats of bytes, of each its lower half first."""
    digits = tl.join(both & 15, both >> 4).to(tl.int32)
    size = digits & 7
    twice = tl.where(size < 4, size, tl.where(size < 6, 4 + 2 * (size & 1), 8 + 4 * (size & 1)))
    return (tl.where(digits > 7, -twice, twice).to(tl.float32) * 0.5).to(dtype)


@_jit
def _add(
    total, at, tables, less, one_RI, other_RI, has_out, scale_at, group_at, dtype: tl.constexpr, SPAN: tl.constexpr,
    OUTS: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, PAIRED: tl.constexpr, E2M1: tl.constexpr,
    GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The products of a span of inputs, [OUTS, ROWS]."""
    bytes_ = tl.load(at, mask=has_out[:, None], other=0)
    if E2M1:
        GROUPS: tl.constexpr = SPAN // 32
        scale_OG = tl.load(scale_at + tl.arange(0, GROUPS)[None, :], mask=has_out[:, None], other=127)
        if PAIRED:
            form: tl.constexpr = "bf16" if dtype == tl.bfloat16 else "fp16"
            total = tl.dot_scaled(bytes_, scale_OG, "e2m1", tl.trans(one_RI), None, form, total)
        else:
            wide = tl.where(scale_OG == 0, 1 << 22, scale_OG.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            values = tl.reshape(_e2m1(bytes_, tl.float32), (OUTS, GROUPS, 32)) * wide[:, :, None]
            total = tl.dot(tl.reshape(values, (OUTS, SPAN)).to(dtype), tl.trans(one_RI), total, input_precision="ieee")
    else:
        if HAS_ZEROS:
            zero_O = tl.load(less + group_at, mask=has_out, other=0).to(dtype)
        if BITS == 8:
            values = widened(bytes_, dtype, FLOATS, IN_ASSEMBLY)
            if HAS_ZEROS:
                values -= zero_O[:, None]
            sums = tl.dot(values, tl.trans(one_RI), input_precision="ieee")
        else:
            low, high = halves(bytes_, dtype, IN_ASSEMBLY)
            if HAS_ZEROS:
                low, high = low - zero_O[:, None], high - zero_O[:, None]
            sums = tl.dot(low, tl.trans(one_RI), input_precision="ieee")
            sums = tl.dot(high, tl.trans(other_RI), sums, input_precision="ieee")
        if GROUPED:
            sums *= tl.load(tables + group_at, mask=has_out, other=0.0)[:, None]
        total += sums
    return total


@_jit
def _rows(at, first, i, inner, has_row, EVEN: tl.constexpr):
    if EVEN:
        rows_RI = tl.load(at + first + i[None, :], mask=has_row[:, None], other=0.0)
    else:
        rows_RI = tl.load(at + first + i[None, :], mask=has_row[:, None] & (first + i < inner)[None, :], other=0.0)
    return rows_RI


@_jit(do_not_specialize=["tiles"])
def _quantized_experts(
    left, stack, scales, zeros, bias, weights, order, ends, tiles_of, tiles, out, inner, outs, group,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, SPAN: tl.constexpr,
    BITS: tl.constexpr, FLOATS: tl.constexpr, PAIRED: tl.constexpr, E2M1: tl.constexpr, GROUPED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, DOWN: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `_experts`; the weights are always the left factor."""
    expert = tl.load(tiles_of + tl.program_id(0))
    if expert < COUNT:
        row, has_row, pair = rows_of(order, ends, tiles_of, tiles, expert, ROWS)
        source = row if DOWN else pair // CHOSEN
        dtype: tl.constexpr = left.dtype.element_ty
        WIDTH: tl.constexpr = SPAN if BITS == 8 else SPAN // 2
        HALVES: tl.constexpr = 1 if DOWN else 2
        HALF: tl.constexpr = SPAN if (BITS == 8 or E2M1) else SPAN // 2
        o, i = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, HALF)
        has_out = o < outs
        steps = tl.cdiv(inner, SPAN)
        base = expert.to(tl.int64) * outs * HALVES
        groups = steps * (SPAN // 32) if E2M1 else tl.cdiv(inner, group) if GROUPED else 1
        total, upper = tl.zeros((OUTS, ROWS), tl.float32), tl.zeros((OUTS, ROWS), tl.float32)
        rows_at = left + source[:, None].to(tl.int64) * inner
        at = stack + (base + o)[:, None] * (steps * WIDTH) + tl.arange(0, WIDTH)[None, :]
        upper_at = at + outs.to(tl.int64) * (steps * WIDTH)
        table = expert.to(tl.int64) * groups * outs * HALVES + o
        scale_at = scales + (base + o)[:, None] * groups
        for step in range(steps):
            first = step * SPAN
            one_RI = _rows(rows_at, first, i, inner, has_row, EVEN)
            other_RI = one_RI
            if BITS == 4 and not E2M1:
                other_RI = _rows(rows_at, first + HALF, i, inner, has_row, EVEN)
            place = table + (first // group) * outs * HALVES if GROUPED else table
            total = _add(
                total, at + step * WIDTH, scales, zeros, one_RI, other_RI, has_out, scale_at + step * (SPAN // 32),
                place, dtype, SPAN, OUTS, BITS, FLOATS, PAIRED, E2M1, GROUPED, HAS_ZEROS, IN_ASSEMBLY,
            )  # fmt: skip
            if not DOWN:
                upper = _add(
                    upper, upper_at + step * WIDTH, scales, zeros, one_RI, other_RI, has_out,
                    scale_at + (outs * groups + step * (SPAN // 32)), place + outs, dtype, SPAN, OUTS, BITS, FLOATS,
                    PAIRED, E2M1, GROUPED, HAS_ZEROS, IN_ASSEMBLY,
                )  # fmt: skip
        if not GROUPED and not E2M1:
            total *= tl.load(scales + table, mask=has_out, other=0.0)[:, None]
            if not DOWN:
                upper *= tl.load(scales + table + outs, mask=has_out, other=0.0)[:, None]
        put(
            tl.trans(total), tl.trans(upper), bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN, OAI,
            HAS_BIAS,
        )  # fmt: skip
