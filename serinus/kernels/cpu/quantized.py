"""Quantized weights as `row_linear` reads them: how they lie in memory, and the loop that unpacks a chunk of them.

Blocks of 64 outputs, as those of oneDNN. 8 bits: [O/64][I][64] bytes. 4 bits: [O/64][I/8][64] words of 8 inputs of one
output, each plus 8 (of E2M1: the float as it is); from the lowest digit on inputs 0, 2, 4, 6, 1, 3, 5, 7, so that with
each shift by 4 the lower and the upper half of a word begin with the two inputs of a pair. O and I are filled up with
zeros.

They are unpacked into the words that the products are made with, pairs of bf16 or fp32: in registers for few rows, else
a chunk at a time in the first cache. Both hold these integers exactly; scales are applied to sums. Four bits become
bf16 by one look into a table of 32 (AVX512), which an index of 5 bits, digit less zero point, needs; those of E2M1 fp32
by one of 16 bytes (AVX2), or by shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.cpu.llvm import FLOATS, I32, I64, LANES, PAIRS, WORDS, call, load, prefetch, shifted, store
from serinus.kernels.cpu.products import BLOCK, LOCALITY, add_word
from serinus.kernels.cpu.scalar import cgutils, host_has, intrinsic, ir
from serinus.kernels.huge_pages import collapse_to_huge_pages
from serinus.kernels.packed import RowBlocks
from serinus.kernels.quantized import E2M1_TWICE, QuantizedWeight, e2m1_codes

IN_STEP = 8
"""What the input width is filled up to a multiple of."""
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Inputs of a word of 4-bit digits."""
_PLAIN, _SHIFTED, _E2M1, _E2M1_BY_SHIFTS = range(4)
"""What digits stand for (`RowBlocks.levels`): integers, those less a zero point, E2M1 by a table or by shifts."""


def packed_blocks(weight: QuantizedWeight) -> tuple[Tensor, RowBlocks]:
    """The bytes of the values, and how to read them. Raises ValueError: they are floats of 8 bits. Cost: some copies of
    the weight; it shares no memory with them."""
    if weight.e4m3:
        raise ValueError("kernels: quantized weight of E4M3, which no kernel of column cpu multiplies with")
    out_size, in_size = weight.values_OI.shape
    missing_out, missing_in = -out_size % BLOCK, -in_size % IN_STEP
    values_BOI = F.pad(weight.values_OI, (0, missing_in, 0, missing_out)).view(-1, BLOCK, in_size + missing_in)
    bits = 4 if weight.e2m1 else weight.bits
    if bits == 8:
        blocks = values_BOI.transpose(1, 2).contiguous()
    else:
        digits = e2m1_codes(values_BOI) if weight.e2m1 else values_BOI.int().add_(8)
        digits = digits.view(len(values_BOI), BLOCK, -1, IN_STEP)
        words = torch.zeros(digits.shape[:-1], dtype=torch.int32)
        for place, number in enumerate(_ORDER):
            words |= digits[..., number] << 4 * place
        blocks = words.transpose(1, 2).contiguous()
    collapse_to_huge_pages(blocks.data_ptr(), blocks.nbytes)
    zeros = None if weight.zeros_OG is None else _by_block(weight.zeros_OG, missing_out)
    levels = _PLAIN if zeros is None else _SHIFTED
    if weight.e2m1:
        levels = _E2M1 if host_has("avx2") else _E2M1_BY_SHIFTS
    rows = RowBlocks(
        address=blocks.data_ptr(),
        part=weight.group if weight.scales_OG.shape[1] > 1 else in_size + missing_in,
        bits=bits,
        levels=levels,
        scales=_by_block(weight.scales_OG, missing_out),
        zeros=zeros,
    )
    return blocks, rows


def _by_block(table_OG: Tensor, missing_out: int) -> Tensor:
    """[O/64, G, 64], a copy."""
    padded = F.pad(table_OG, (0, 0, 0, missing_out))
    return padded.view(-1, BLOCK, table_OG.shape[1]).transpose(1, 2).contiguous()


@intrinsic()
def unpack(
    builder: Any, source: Any, target: Any, count: Any, zeros: Any, fetch: Any, BITS: int, PAIRED: int, LEVELS: int
) -> None:
    """Integers of one block become words: `count` words (of one input, or where PAIRED of two) for each of 64 outputs.

    source: where their bytes begin. target: [count, 64] fp32, or pairs of bf16. zeros: int8 [64], subtracted where
    LEVELS says so. As many bytes as are read are called for from `fetch` on. 4 bits: count is a multiple of 8 inputs'
    words.
    """
    form = _Form(BITS, PAIRED, LEVELS)
    with _steps(builder, form, source, count, zeros, fetch) as (index, columns):
        there = builder.add(target, builder.mul(I64(form.words * BLOCK * 4), index))
        for j, word in enumerate(columns):
            for number in range(form.words):
                spot = shifted(builder, there, number * BLOCK * 4 + j * 64)
                store(builder, builder.bitcast(word(number), WORDS), spot)


@intrinsic()
def add_unpacked(
    builder: Any, x: Any, x_stride: Any, source: Any, sums: Any, count: Any, zeros: Any, fetch: Any, ROWS: int,
    BITS: int, PAIRED: int, LEVELS: int,
) -> None:  # fmt: skip
    """`unpack` and `add_products` in registers, for ROWS rows; the bits of one after the other."""
    form, size = _Form(BITS, PAIRED, LEVELS), BLOCK // LANES
    cells = {(i, j): shifted(builder, sums, (i * size + j) * 64) for i in range(ROWS) for j in range(size)}
    held = {cell: cgutils.alloca_once(builder, FLOATS) for cell in cells}
    for cell, spot in cells.items():
        builder.store(load(builder, spot, FLOATS), held[cell])
    rows = [builder.add(x, builder.mul(x_stride, I64(i))) for i in range(ROWS)]
    with _steps(builder, form, source, count, zeros, fetch) as (index, columns):
        first = builder.mul(I64(form.words * 4), index)
        for number in range(form.words):
            weights = [builder.bitcast(word(number), PAIRS if form.paired else FLOATS) for word in columns]
            for i in range(ROWS):
                spot = shifted(builder, builder.add(rows[i], first), number * 4)
                add_word(builder, load(builder, spot, I32), weights, [held[i, j] for j in range(size)])
    for cell, spot in cells.items():
        store(builder, builder.load(held[cell]), spot)


class _Form:
    """What is known of the integers at compile time."""

    def __init__(self, bits: int, paired: int, levels: int) -> None:
        self.bits, self.paired, self.levels = bits, bool(paired), levels
        self.words = 1 if self.bits == 8 else IN_STEP // 2 if self.paired else IN_STEP
        """That are made of what is read at once."""
        inputs = self.words * 2 if self.paired else self.words
        self.bytes = BLOCK * inputs * self.bits // 8
        """That are read at once, of all outputs."""


_Word = Callable[[int], Any]
"""From the number of a word to 16 outputs of it."""


@contextmanager
def _steps(
    builder: Any, form: _Form, source: Any, count: Any, zeros: Any, fetch: Any
) -> Generator[tuple[Any, list[_Word]]]:
    """The loop over what is read at once: its number, and of each 16 outputs what makes their words."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    zero = [
        builder.sext(load(builder, shifted(builder, zeros, j * LANES), kind, 1), WORDS)
        if form.levels == _SHIFTED
        else None
        for j in range(BLOCK // LANES)
    ]
    floats = _floats if form.levels == _E2M1 else _floats_by_shifts if form.levels == _E2M1_BY_SHIFTS else _digits
    make = _bytes if form.bits == 8 else _pairs if form.paired else floats
    with cgutils.for_range(builder, builder.udiv(count, I64(form.words)), intp=I64) as loop:
        done = builder.mul(I64(form.bytes), loop.index)
        for line in range(0, form.bytes, 64):
            prefetch(builder, shifted(builder, builder.add(fetch, done), line), LOCALITY)
        here = builder.add(source, done)
        yield loop.index, [make(builder, form, here, j, each) for j, each in enumerate(zero)]


def _all(value: int, kind: Any = WORDS) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _bytes(builder: Any, form: _Form, source: Any, j: int, zero: Any) -> _Word:
    """One input as fp32; or two as a pair: the bf16 of a small integer is the upper half of its fp32."""

    def value(number: int) -> Any:
        spot = shifted(builder, source, number * BLOCK + j * LANES)
        loaded = builder.sext(load(builder, spot, ir.VectorType(ir.IntType(8), LANES), 1), WORDS)
        return builder.bitcast(builder.sitofp(builder.sub(loaded, zero) if zero else loaded, FLOATS), WORDS)

    def word(number: int) -> Any:
        return builder.or_(builder.lshr(value(0), _all(16)), value(1)) if form.paired else value(0)

    return word


def _pairs(builder: Any, form: _Form, source: Any, j: int, zero: Any) -> _Word:
    """Four pairs: a table of bf16 is looked up by digit plus garbage * 16, or by digit less zero."""
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    packed = builder.bitcast(load(builder, shifted(builder, source, j * 64), WORDS), halves)
    numbers = [float(place if place < 16 else place - 32) for place in range(2 * LANES)]
    less = None
    if form.levels in (_E2M1, _E2M1_BY_SHIFTS):
        numbers = [float(E2M1_TWICE[place & 7] * (-1 if place & 8 else 1)) for place in range(2 * LANES)]
    elif zero is None:
        numbers = [float((place & 15) - 8) for place in range(2 * LANES)]
    else:
        above = builder.add(zero, _all(8))
        less = builder.bitcast(builder.or_(above, builder.shl(above, _all(16))), halves)
    table = ir.Constant(halves, torch.tensor(numbers).bfloat16().view(torch.int16).tolist())

    def word(number: int) -> Any:
        index = builder.lshr(packed, _all(4 * number, halves)) if number else packed
        if less is not None:
            index = builder.sub(builder.and_(index, _all(15, halves)), less)
        return call(builder, "llvm.x86.avx512.permvar.hi.512", halves, [table, index])

    return word


def _digits(builder: Any, form: _Form, source: Any, j: int, zero: Any) -> _Word:
    """Eight inputs as fp32."""
    packed = load(builder, shifted(builder, source, j * 64), WORDS)
    above = _all(8) if zero is None else builder.add(zero, _all(8))

    def word(number: int) -> Any:
        digit = builder.and_(builder.lshr(packed, _all(4 * _ORDER.index(number))), _all(15))
        return builder.sitofp(builder.sub(digit, above), FLOATS)

    return word


def _floats(builder: Any, form: _Form, source: Any, j: int, zero: Any) -> _Word:
    """Eight inputs of E2M1 as fp32: 32 digits at a time become bytes, by one look into a table of 16."""
    packed = load(builder, shifted(builder, source, j * 64), WORDS)
    half, bytes_ = LANES // 2, ir.VectorType(ir.IntType(8), 2 * LANES)
    signed = [each * sign for sign in (1, -1) for each in E2M1_TWICE]
    table = ir.Constant(bytes_, 2 * signed)

    def looked_up(digits: Any) -> Any:
        """Of the lower digit of each byte."""
        digits = builder.and_(digits, _all(0x0F0F0F0F))
        halves = []
        for at in (0, half):
            lanes = ir.Constant(ir.VectorType(I32, half), [*range(at, at + half)])
            index = builder.bitcast(builder.shuffle_vector(digits, digits, lanes), bytes_)
            found = call(builder, "llvm.x86.avx2.pshuf.b", bytes_, [table, index])
            halves.append(builder.bitcast(found, ir.VectorType(I32, half)))
        return builder.shuffle_vector(*halves, ir.Constant(WORDS, [*range(LANES)]))

    values = looked_up(packed), looked_up(builder.lshr(packed, _all(4)))

    def word(number: int) -> Any:
        byte, is_upper = divmod(_ORDER.index(number), 2)
        above = builder.shl(values[is_upper], _all(24 - 8 * byte))
        return builder.sitofp(builder.ashr(above, _all(24)), FLOATS)

    return word


def _floats_by_shifts(builder: Any, form: _Form, source: Any, j: int, zero: Any) -> _Word:
    """The same for any processor: below 4 a magnitude is its own number, from there on 4 or 6, doubled."""
    packed = load(builder, shifted(builder, source, j * 64), WORDS)

    def word(number: int) -> Any:
        place = 4 * _ORDER.index(number)
        low = builder.and_(builder.lshr(packed, _all(place)), _all(7))
        above = builder.or_(_all(4), builder.shl(builder.and_(low, _all(1)), _all(1)))
        doubled = builder.shl(above, builder.and_(builder.lshr(low, _all(1)), _all(1)))
        small = builder.icmp_unsigned("<", low, _all(4))
        magnitude = builder.bitcast(builder.sitofp(builder.select(small, low, doubled), FLOATS), WORDS)
        sign = builder.and_(builder.shl(packed, _all(28 - place)), _all(-(1 << 31)))
        return builder.bitcast(builder.xor(magnitude, sign), FLOATS)

    return word
