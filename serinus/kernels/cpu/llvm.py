"""Words of LLVM that the inner loops share: types, loads and stores at addresses, intrinsics, the bf16 dot product.

Addresses are int64. Each function writes its instructions where the builder stands. Knows no op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.kernels.cpu.scalar import cgutils, ir


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not list."""

    def _to_string(self) -> str:
        return "bfloat"


LANES = 16
"""32-bit elements of a vector of 512 bits."""
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS, PAIRS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(_BFloat(), 2 * LANES)
"""A vector as fp32, as 32-bit integers, and as pairs of bf16."""


def shifted(builder: Any, address: Any, byte_count: int) -> Any:
    """The address so many bytes on."""
    return builder.add(address, I64(byte_count))


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """What lies at an address, which is a multiple of `align`."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def store(builder: Any, value: Any, address: Any, align: int = 4) -> Any:
    """Write a value to an address, which is a multiple of `align`; returns the instruction."""
    stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = align
    return stored


def call(builder: Any, name: str, kind: Any, args: Sequence[Any], **options: Any) -> Any:
    """Call an intrinsic of LLVM that returns `kind`."""
    declared = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, name), args, **options)


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector with a value in all of its lanes."""
    blank = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(blank, value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def dot_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a b of each pair, fp32 (needs AVX512-BF16)."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, a, b])


def fold(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Halve the partial sums of two vectors into one: lanes with bit `width` clear hold a's, with it set b's. fp32 or
    32-bit integers. Sixteen vectors r, folded by 8 (r with r + 8), 4, 2 and 1, are one of sixteen sums in order."""
    low = [lane if not lane & width else lane - width + LANES for lane in range(LANES)]
    high = [lane + width if not lane & width else lane + LANES for lane in range(LANES)]
    add = builder.fadd if a.type == FLOATS else builder.add
    return add(*(builder.shuffle_vector(a, b, ir.Constant(WORDS, picks)) for picks in (low, high)))


def prefetch(builder: Any, address: Any, locality: int) -> None:
    """Ask for a line of data that is read soon. Any address will do: a wrong one is ignored. `locality`: LLVM's word,
    from 3 (all caches) to 0."""
    spot = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [spot, I32(0), I32(locality), I32(1)])
