"""The products of quantized experts: integers of 4 and 8 bits, E4M3 and E2M1 (MXFP4) become floats in the kernel; see
`quantized` and `fused_moe`.

Each projection lies output after output, filled up to whole spans. 4 bits: as in `quantized`, of a span the first half
in the lower halves of bytes. E2M1: span after span, of a span [O, 32] words of 16 bits, and [O] words with the
exponents of its four scales. Word c has of inputs c, 32 + c, 64 + c and 96 + c sign and size where `_PLACES` says, so
that few instructions bring them to the sign and behind the exponent's upper bits in bf16: 2**126 too small, which the
scale makes up for.

Of prompts each expert meets many rows: there `widened_stack` writes some experts at once as floats of the activations,
for the products of `fused_moe`. E2M1 times its scale is exact, as it is in the kernel here; (integer - zero) * scale
and E4M3 * scale are rounded once to the activations' dtype, where the kernel here scales sums in fp32.

X = experts, O = output width of a projection, I = its input width, G = groups of an output, S = spans of an output.
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
from serinus.kernels.triton.expert_rows import ExpertCut, put, rows_of
from serinus.kernels.triton.quantized import E2M1, E2M1_LARGE, E4M3, INTEGERS, SPAN_MIN, halves, span_of, widened

_BLOCK = 32
"""Values of E2M1 that share a scale."""
_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))
"""In a word the sign and the lowest bit of the size, of each of four values of E2M1."""
_EXPONENT_MAX = 128
"""Of a scale, biased: 2**126 times a larger one is no bf16."""
_WIDENED = 32
"""Outputs that a program widens."""
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
    if first.e2m1:
        return _stacked_e2m1(weights)
    span = span_of(group)
    values = torch.stack([_bytes(each, span) for each in weights])
    scales, zeros = torch.stack([each.scales_OG.T for each in weights]).contiguous(), None
    if any(each.zeros_OG is not None for each in weights):
        tables = [torch.zeros_like(each.scales_OG, dtype=torch.int8) if each.zeros_OG is None else each.zeros_OG
                  for each in weights]  # fmt: skip
        zeros = torch.stack([each.T for each in tables]).contiguous()
    rows = RowBlocks(
        address=values.data_ptr(), part=group, bits=first.bits, levels=E4M3 if first.e4m3 else INTEGERS, scales=scales,
        zeros=zeros,
    )  # fmt: skip
    return values, rows


def _bytes(weight: QuantizedWeight, span: int) -> Tensor:
    """What its kernel reads of the values, [O, bytes]."""
    values_OI = F.pad(weight.values_OI, (0, -weight.in_size % span))
    if weight.bits == 8:
        return values_OI
    digits = (values_OI + 8).view(torch.uint8).view(len(values_OI), -1, 2, span // 2)
    return (digits[:, :, 0] | digits[:, :, 1] << 4).flatten(1)


def _stacked_e2m1(weights: Sequence[QuantizedWeight]) -> tuple[Tensor, RowBlocks]:
    values = torch.stack([_words(each) for each in weights])
    exponents = torch.stack([_exponents(each) for each in weights])
    levels = E2M1 if int(exponents.view(torch.uint8).max()) <= _EXPONENT_MAX else E2M1_LARGE
    return values, RowBlocks(address=values.data_ptr(), part=_BLOCK, bits=4, levels=levels, scales=exponents)


def _words(weight: QuantizedWeight) -> Tensor:
    """Of E2M1 the values, int16 [S, O, 32]."""
    span = span_of(0)
    digits_SOKC = (
        e2m1_codes(F.pad(weight.values_OI, (0, -weight.in_size % span)))
        .view(weight.out_size, -1, span // _BLOCK, _BLOCK)
        .transpose(0, 1)
    )
    words_SOC = torch.zeros_like(digits_SOKC[:, :, 0])
    for number, (sign, size) in enumerate(_PLACES):
        digits_SOC = digits_SOKC[:, :, number]
        words_SOC |= digits_SOC >> 3 << sign | (digits_SOC & 7) << size
    return words_SOC.to(torch.int16)


def _exponents(weight: QuantizedWeight) -> Tensor:
    """Of E2M1 the scales, E8M0, of each span four in an int32 [S, O]. Raises ValueError: one is no power of two."""
    words_OG = (weight.scales_OG * 2.0).view(torch.int32)
    exponents_OG = words_OG >> 23
    least = 1 << 22  # the bits of 2**-127
    if not torch.equal(words_OG, torch.where(exponents_OG == 0, least, exponents_OG << 23)):
        raise ValueError("kernels: experts in E2M1 with scales that are no powers of two from 2**-128 on")
    each = span_of(0) // _BLOCK
    whole_OG = F.pad(exponents_OG.to(torch.uint8), (0, -exponents_OG.shape[1] % each))
    return whole_OG.view(torch.int32).t().contiguous()


def run_product(
    left: Tensor, stack: Tensor, how: RowBlocks, *, bias: Tensor | None, weights_TK: Tensor, sorted_: Sequence[Tensor],
    tiles: int, out: Tensor, cut: ExpertCut, chosen: int, is_down: bool, is_oai: bool,
) -> None:  # fmt: skip
    """One product of `fused_moe.run_experts`. `sorted_`: its order, ends and tiles."""
    assert how.scales is not None, "kernels: quantized experts without scales"
    (inner, outs), span, is_e2m1 = (left.shape[1], out.shape[1]), _span(how), how.levels in (E2M1, E2M1_LARGE)
    blocks, added = triton.cdiv(outs, cut.outputs), stack if bias is None else bias
    shared: dict[str, Any] = {
        "COUNT": len(stack), "CHOSEN": chosen, "ROWS": cut.rows, "OUTS": cut.outputs, "DOWN": is_down, "OAI": is_oai,
        "HAS_BIAS": bias is not None, "EVEN": inner % span == 0, "IN_ASSEMBLY": _IN_ASSEMBLY, "num_warps": cut.warps,
        "num_stages": cut.stages,
    }  # fmt: skip
    if is_e2m1:
        _e2m1_experts[(tiles, blocks)](
            left, stack, how.scales, added, weights_TK, *sorted_, tiles, out, inner, outs,
            LARGE=how.levels == E2M1_LARGE, **shared,
        )  # fmt: skip
    else:
        _quantized_experts[(tiles, blocks)](
            left, stack, how.scales, how.scales if how.zeros is None else how.zeros, added, weights_TK, *sorted_, tiles,
            out, inner, outs, max(how.part, 1), SPAN=span, BITS=how.bits, FLOATS=how.levels == E4M3,
            GROUPED=how.part > 0, HAS_ZEROS=how.zeros is not None, **shared,
        )  # fmt: skip


def widened_stack(stack: Tensor, how: RowBlocks, held: range, outs: int, left: Tensor) -> Tensor:
    """The projections of some experts, [experts, outs, inputs], as floats of what they are multiplied with. Cost: one
    read of what is packed and one write of them."""
    assert how.scales is not None, "kernels: quantized experts without scales"
    inner = left.shape[1]
    some, span = slice(held.start, held.stop), _span(how)
    wide, scales = left.new_empty((len(held), outs, inner)), how.scales[some]
    _widen[(triton.cdiv(outs, _WIDENED), triton.cdiv(inner, span), len(held))](
        stack[some], scales, scales if how.zeros is None else how.zeros[some], wide, inner, outs, max(how.part, 1),
        OUTS=_WIDENED, SPAN=span, BITS=how.bits, FLOATS=how.levels == E4M3, E2M1=how.levels in (E2M1, E2M1_LARGE),
        LARGE=how.levels == E2M1_LARGE, GROUPED=how.part > 0, HAS_ZEROS=how.zeros is not None, IN_ASSEMBLY=_IN_ASSEMBLY,
    )  # fmt: skip
    return wide


def _span(how: RowBlocks) -> int:
    return span_of(0 if how.levels in (E2M1, E2M1_LARGE) else how.part)


_jit: Any = triton.jit
_FLOATS: Any = tl.constexpr(
    "{ .reg .b32 a, z; mov.b32 z, 0x80008000; and.b32 $0, $4, 0x81C081C0;"
    " shl.b32 $1, $4, 3; and.b32 $1, $1, 0x81C081C0;"
    " shr.b32 $2, $4, 3; and.b32 $2, $2, 0x01C001C0; shl.b32 a, $4, 1; lop3.b32 $2, a, 0x80008000, $2, 0xEA;"
    " shl.b32 $3, $4, 6; and.b32 $3, $3, 0x01C001C0; shl.b32 a, $4, 2; lop3.b32 $3, a, 0x80008000, $3, 0xEA;"
    " fma.rn.bf16x2 $0, $0, $5, z; fma.rn.bf16x2 $1, $1, $6, z;"
    " fma.rn.bf16x2 $2, $2, $7, z; fma.rn.bf16x2 $3, $3, $8, z; }"
)
"""Of two words: sign and size of each value to their places, times 2**126 and its scale. See `_PLACES`."""


@_jit
def _factor(exponents, NUMBER: tl.constexpr):
    """2**126 times the scale, in bf16."""
    bits = (exponents >> (8 * NUMBER) & 255) + 126 << 7
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@_jit
def _value(words, exponents, NUMBER: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr):
    """The same in fp32, by arithmetic."""
    size, exponent = words.to(tl.int32) >> SIZE & 7, exponents >> (8 * NUMBER) & 255
    twice = tl.where(size < 4, size, tl.where(size < 6, 4 + 2 * (size & 1), 8 + 4 * (size & 1)))
    half = tl.where((words.to(tl.int32) >> SIGN & 1) == 1, -twice, twice).to(tl.float32) * 0.5
    return half * tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@_jit
def _floats(words, exponents, dtype: tl.constexpr, LARGE: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """Of words of E2M1 the four values, times their scales."""
    if IN_ASSEMBLY and not LARGE:
        zero, one, two, three = tl.inline_asm_elementwise(
            _FLOATS, "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, _factor(exponents, 0), _factor(exponents, 1), _factor(exponents, 2), _factor(exponents, 3)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        zero, one = _value(words, exponents, 0, 15, 6), _value(words, exponents, 1, 12, 3)
        two, three = _value(words, exponents, 2, 14, 9), _value(words, exponents, 3, 13, 0)
    return zero.to(dtype), one.to(dtype), two.to(dtype), three.to(dtype)


@_jit
def _put_wide(to, values, i, inner, has_out):
    tl.store(to + i[None, :], values.to(to.dtype.element_ty), mask=has_out[:, None] & (i < inner)[None, :])


@_jit
def _widen(
    stack, scales, zeros, out, inner, outs, group,
    OUTS: tl.constexpr, SPAN: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, E2M1: tl.constexpr,
    LARGE: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """A span of some outputs of one expert."""
    o, step, expert = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    has_out, steps, first = o < outs, tl.cdiv(inner, SPAN), step * SPAN
    row_O = expert * outs + o
    to = out + row_O[:, None] * inner
    if E2M1:
        place_O, c = (expert * steps + step) * outs + o, tl.arange(0, 32)
        words = tl.load(stack + place_O[:, None] * 32 + c[None, :], mask=has_out[:, None], other=0)
        exponents = tl.load(scales + place_O, mask=has_out, other=0)
        zero, one, two, three = _floats(words, exponents[:, None], dtype, LARGE, IN_ASSEMBLY)
        _put_wide(to, zero, first + c, inner, has_out)
        _put_wide(to, one, first + 32 + c, inner, has_out)
        _put_wide(to, two, first + 64 + c, inner, has_out)
        _put_wide(to, three, first + 96 + c, inner, has_out)
    else:
        WIDTH: tl.constexpr = SPAN if BITS == 8 else SPAN // 2
        i = tl.arange(0, WIDTH)
        table_O = expert * outs + o
        if GROUPED:
            table_O = (expert * tl.cdiv(inner, group) + first // group) * outs + o
        scale_O = tl.load(scales + table_O, mask=has_out, other=0.0)
        zero_O = tl.load(zeros + table_O, mask=has_out, other=0).to(tl.float32) if HAS_ZEROS else 0.0 * scale_O
        bytes_ = tl.load(stack + row_O[:, None] * (steps * WIDTH) + step * WIDTH + i[None, :], mask=has_out[:, None])
        if BITS == 8:
            values = widened(bytes_, dtype, FLOATS, IN_ASSEMBLY).to(tl.float32)
            _put_wide(to, (values - zero_O[:, None]) * scale_O[:, None], first + i, inner, has_out)
        else:
            low, high = halves(bytes_, dtype, IN_ASSEMBLY)
            low, high = low.to(tl.float32) - zero_O[:, None], high.to(tl.float32) - zero_O[:, None]
            _put_wide(to, low * scale_O[:, None], first + i, inner, has_out)
            _put_wide(to, high * scale_O[:, None], first + WIDTH + i, inner, has_out)


@_jit
def _add(
    total, at, tables, less, one_RI, other_RI, has_out, group_at, dtype: tl.constexpr, BITS: tl.constexpr,
    FLOATS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The products of a span of inputs, [OUTS, ROWS]."""
    bytes_ = tl.load(at, mask=has_out[:, None], other=0)
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
    return total + sums


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
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, DOWN: tl.constexpr,
    OAI: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `_experts`; the weights are always the left factor."""
    expert = tl.load(tiles_of + tl.program_id(0))
    if expert < COUNT:
        row, has_row, pair = rows_of(order, ends, tiles_of, tiles, tl.program_id(0), expert, ROWS)
        source = row if DOWN else pair // CHOSEN
        dtype: tl.constexpr = left.dtype.element_ty
        WIDTH: tl.constexpr = SPAN if BITS == 8 else SPAN // 2
        HALVES: tl.constexpr = 1 if DOWN else 2
        o, i = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, WIDTH)
        has_out = o < outs
        steps = tl.cdiv(inner, SPAN)
        base = expert.to(tl.int64) * outs * HALVES
        groups = tl.cdiv(inner, group) if GROUPED else 1
        total, upper = tl.zeros((OUTS, ROWS), tl.float32), tl.zeros((OUTS, ROWS), tl.float32)
        rows_at = left + source[:, None].to(tl.int64) * inner
        at = stack + (base + o)[:, None] * (steps * WIDTH) + i[None, :]
        upper_at = at + outs.to(tl.int64) * (steps * WIDTH)
        table = expert.to(tl.int64) * groups * outs * HALVES + o
        for step in range(steps):
            first = step * SPAN
            one_RI = _rows(rows_at, first, i, inner, has_row, EVEN)
            other_RI = one_RI
            if BITS == 4:
                other_RI = _rows(rows_at, first + WIDTH, i, inner, has_row, EVEN)
            place = table + (first // group) * outs * HALVES if GROUPED else table
            total = _add(
                total, at + step * WIDTH, scales, zeros, one_RI, other_RI, has_out, place, dtype, BITS, FLOATS, GROUPED,
                HAS_ZEROS, IN_ASSEMBLY,
            )  # fmt: skip
            if not DOWN:
                upper = _add(
                    upper, upper_at + step * WIDTH, scales, zeros, one_RI, other_RI, has_out, place + outs, dtype, BITS,
                    FLOATS, GROUPED, HAS_ZEROS, IN_ASSEMBLY,
                )  # fmt: skip
        if not GROUPED:
            total *= tl.load(scales + table, mask=has_out, other=0.0)[:, None]
            if not DOWN:
                upper *= tl.load(scales + table + outs, mask=has_out, other=0.0)[:, None]
        put(
            tl.trans(total), tl.trans(upper), bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN, OAI,
            HAS_BIAS,
        )  # fmt: skip


@_jit
def _add_e2m1(
    total, at, exponents_at, zero_RI, one_RI, two_RI, three_RI, has_out, LARGE: tl.constexpr, IN_ASSEMBLY: tl.constexpr
):  # fmt: skip
    """The products of a span of inputs, [OUTS, ROWS], by four groups of 32."""
    words = tl.load(at, mask=has_out[:, None], other=0)
    exponents = tl.load(exponents_at, mask=has_out, other=0)
    zero, one, two, three = _floats(words, exponents[:, None], zero_RI.dtype, LARGE, IN_ASSEMBLY)
    total = tl.dot(zero, tl.trans(zero_RI), total, input_precision="ieee")
    total = tl.dot(one, tl.trans(one_RI), total, input_precision="ieee")
    total = tl.dot(two, tl.trans(two_RI), total, input_precision="ieee")
    return tl.dot(three, tl.trans(three_RI), total, input_precision="ieee")


@_jit(do_not_specialize=["tiles"])
def _e2m1_experts(
    left, stack, exponents, bias, weights, order, ends, tiles_of, tiles, out, inner, outs,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DOWN: tl.constexpr,
    OAI: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """As `_quantized_experts`, by spans of 128 inputs."""
    expert = tl.load(tiles_of + tl.program_id(0))
    if expert < COUNT:
        row, has_row, pair = rows_of(order, ends, tiles_of, tiles, tl.program_id(0), expert, ROWS)
        source = row if DOWN else pair // CHOSEN
        o, c = tl.program_id(1) * OUTS + tl.arange(0, OUTS), tl.arange(0, 32)
        has_out, steps = o < outs, tl.cdiv(inner, 128)
        base = expert.to(tl.int64) * outs * (1 if DOWN else 2)
        total, upper = tl.zeros((OUTS, ROWS), tl.float32), tl.zeros((OUTS, ROWS), tl.float32)
        rows_at = left + source[:, None].to(tl.int64) * inner
        exponents_at = exponents + base * steps + o
        at = stack + (base * steps + o)[:, None] * 32 + c[None, :]
        for step in range(steps):
            first, beyond = step * 128, step * outs * (1 if DOWN else 2)
            zero_RI = _rows(rows_at, first, c, inner, has_row, EVEN)
            one_RI = _rows(rows_at, first + 32, c, inner, has_row, EVEN)
            two_RI = _rows(rows_at, first + 64, c, inner, has_row, EVEN)
            three_RI = _rows(rows_at, first + 96, c, inner, has_row, EVEN)
            total = _add_e2m1(
                total, at + beyond * 32, exponents_at + beyond, zero_RI, one_RI, two_RI, three_RI, has_out, LARGE,
                IN_ASSEMBLY,
            )  # fmt: skip
            if not DOWN:
                beyond += outs
                upper = _add_e2m1(
                    upper, at + beyond * 32, exponents_at + beyond, zero_RI, one_RI, two_RI, three_RI, has_out, LARGE,
                    IN_ASSEMBLY,
                )  # fmt: skip
        put(
            tl.trans(total), tl.trans(upper), bias, weights, out, base, o, outs, row, pair, has_row, has_out, DOWN, OAI,
            HAS_BIAS,
        )  # fmt: skip
