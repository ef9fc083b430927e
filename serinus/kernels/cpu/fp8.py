"""Elements of pools as LLVM has them: fp32, bf16 and FP8, which is widened in registers and rounded one by one.

A number of FP8 has its bits moved to where a wider one has them, and the difference of the exponents added. Those below
the least normal one come from a table (bf16), or are a product (fp32). Every value is exact; NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from serinus.kernels.cpu.llvm import F32, I32, LANES, WORDS, call, load, shifted, store
from serinus.kernels.cpu.scalar import intrinsic, ir
from serinus.kernels.fp8 import FP8_FORMATS, Fp8Format

FP32, BF16, E4M3, E5M2 = range(4)
"""What the elements of a pool are."""
_FORMATS = dict(zip((E4M3, E5M2), FP8_FORMATS.values(), strict=True))
_KINDS = {torch.float32: FP32, torch.bfloat16: BF16, **dict(zip(FP8_FORMATS, _FORMATS, strict=True))}
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_SHORTS = ir.VectorType(_I16, 2 * LANES)


def kind_of(dtype: torch.dtype) -> int:
    """What elements of a pool of this type are."""
    return _KINDS[dtype]


def bytes_of(kind: int) -> int:
    """How many bytes an element takes."""
    return {FP32: 4, BF16: 2}.get(kind, 1)


def _beyond(form: Fp8Format) -> int:
    """The first magnitude, as bits, that is no number: e4m3 has NaN alone, e5m2 infinity and NaN."""
    return 0x7F if form.mantissa == 3 else 0x7C


def load_floats(builder: Any, address: Any, first: int, lanes: int, kind: int) -> Any:
    """`lanes` elements from element `first` of the row at `address`, as fp32."""
    spot, kind_of_lanes = shifted(builder, address, first * bytes_of(kind)), ir.VectorType(F32, lanes)
    if kind == FP32:
        return load(builder, spot, kind_of_lanes)
    wide = ir.VectorType(I32, lanes)

    def whole(word: int) -> Any:
        return ir.Constant(wide, [word] * lanes)

    stored = ir.VectorType(_I16 if kind == BF16 else _I8, lanes)
    words = builder.zext(load(builder, spot, stored, bytes_of(kind)), wide)
    if kind == BF16:
        return builder.bitcast(builder.shl(words, whole(16)), kind_of_lanes)
    form = _FORMATS[kind]
    size = builder.and_(words, whole(0x7F))
    bits = builder.add(builder.shl(size, whole(23 - form.mantissa)), whole((127 - form.bias) << 23))
    bits = builder.select(
        builder.icmp_unsigned(">=", size, whole(_beyond(form))), builder.or_(bits, whole(0x7F800000)), bits
    )
    least = ir.Constant(kind_of_lanes, [2.0 ** (1 - form.bias - form.mantissa)] * lanes)
    small = builder.bitcast(builder.fmul(builder.sitofp(size, kind_of_lanes), least), wide)
    bits = builder.select(builder.icmp_unsigned("<", size, whole(1 << form.mantissa)), small, bits)
    return builder.bitcast(builder.or_(bits, builder.shl(builder.and_(words, whole(0x80)), whole(24))), kind_of_lanes)


def load_pairs(builder: Any, address: Any, first: int, kind: int) -> Any:
    """32 bf16 or FP8 from element `first` of a row, as 16 words of two bf16 (FP8 needs AVX512-BW)."""
    if kind == BF16:
        return load(builder, shifted(builder, address, first * 2), WORDS, 2)
    form = _FORMATS[kind]

    def whole(word: int) -> Any:
        return ir.Constant(_SHORTS, [word] * 2 * LANES)

    stored = load(builder, shifted(builder, address, first), ir.VectorType(_I8, 2 * LANES), 1)
    words = builder.zext(stored, _SHORTS)
    size = builder.and_(words, whole(0x7F))
    bits = builder.add(builder.shl(size, whole(7 - form.mantissa)), whole((127 - form.bias) << 7))
    bits = builder.select(
        builder.icmp_unsigned(">=", size, whole(_beyond(form))), builder.or_(bits, whole(0x7F80)), bits
    )
    small = torch.arange(2 * LANES) * 2.0 ** (1 - form.bias - form.mantissa)
    table = ir.Constant(_SHORTS, small.bfloat16().view(torch.int16).tolist())
    found = call(builder, "llvm.x86.avx512.permvar.hi.512", _SHORTS, [table, size])
    bits = builder.select(builder.icmp_unsigned("<", size, whole(1 << form.mantissa)), found, bits)
    return builder.bitcast(builder.or_(bits, builder.shl(builder.and_(words, whole(0x80)), whole(8))), WORDS)


@intrinsic()
def widen_row(builder: Any, source: Any, target: Any, D: int, KIND: int) -> None:
    """D (a multiple of 32) elements of FP8 at an address become bf16 at another one."""
    for first in range(0, D, 2 * LANES):
        store(builder, load_pairs(builder, source, first, KIND), shifted(builder, target, first * 2), 2)


@intrinsic(types.uint8, types.float32)
def to_fp8(builder: Any, value: Any, KIND: int) -> Any:
    """fp32 -> the bits of FP8 (uint8): the nearest, half to even; beyond the largest the largest; NaN stays NaN."""
    form = _FORMATS[KIND]
    shift = 23 - form.mantissa
    largest, least = (_bits(number) for number in (form.largest, 2.0 ** (1 - form.bias)))
    magic = 2.0 ** (24 - form.bias - form.mantissa)  # its last bit is worth the least number
    word = builder.bitcast(value, I32)
    size = builder.and_(word, I32(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", size, I32(0x7F800000))
    size = builder.select(builder.icmp_unsigned(">", size, I32(largest)), I32(largest), size)
    odd = builder.and_(builder.lshr(size, I32(shift)), I32(1))
    near = builder.lshr(builder.add(builder.add(size, I32((1 << shift - 1) - 1)), odd), I32(shift))
    near = builder.sub(near, I32((127 - form.bias) << form.mantissa))
    moved = builder.fadd(builder.bitcast(size, F32), ir.Constant(F32, magic))
    small = builder.sub(builder.bitcast(moved, I32), I32(_bits(magic)))
    found = builder.select(builder.icmp_unsigned("<", size, I32(least)), small, near)
    found = builder.select(is_nan, I32(0x7F), found)
    sign = builder.and_(builder.lshr(word, I32(24)), I32(0x80))
    return builder.trunc(builder.or_(found, sign), _I8)


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))
