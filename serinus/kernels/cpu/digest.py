"""The inner loops of the canary's digest as LLVM vectors: two 32-bit sums of (16-bit lane * factor), packed in 64 bits.

Addresses are int64. Sums wrap. Packed means low sum | high sum << 32.
"""

from __future__ import annotations

from typing import Any

from numba import types

from serinus.kernels.cpu.llvm import I32, I64, LANES, WORDS, call, fold, load, prefetch, shifted, splat, store
from serinus.kernels.cpu.scalar import cgutils, host_has, inlined, intrinsic, ir

ROWS = 4
"""Rows digested together: they share the loads of the factors."""
_WIDTH = LANES if host_has("avx512f") else LANES // 2
"""Lanes of each row at a time: the sums of ROWS rows stay in registers."""
BLOCK = 32
"""Lanes of one turn of the inner loop: 64 bytes of each row."""

_I16 = ir.IntType(16)
_SHORTS = ir.VectorType(_I16, 2 * LANES)


def _load(builder: Any, address: Any, byte_count: int, kind: Any, align: int) -> Any:
    return load(builder, shifted(builder, address, byte_count) if byte_count else address, kind, align)


def _folded(builder: Any, vector: Any) -> Any:
    return call(builder, f"llvm.vector.reduce.add.v{vector.type.count}i32", I32, [vector])


def _packed(builder: Any, low: Any, high: Any) -> Any:
    return builder.or_(builder.zext(low, I64), builder.shl(builder.zext(high, I64), I64(32)))


@intrinsic()
def digest_rows(builder: Any, rows: Any, factors: Any, others: Any, blocks: Any, out: Any, AHEAD: int) -> None:
    """out[r] = packed sums of the first `blocks` * BLOCK lanes of row r, for r < ROWS.

    rows: int64 addresses of ROWS rows; where AHEAD is 1, then of ROWS rows of which the same lanes are asked for ahead
    of their use. factors, others: int32 of the first and of the second sum. out: int64 [ROWS].
    """
    shorts, words = ir.VectorType(_I16, _WIDTH), ir.VectorType(I32, _WIDTH)
    spots = [_load(builder, rows, 8 * i, I64, 8) for i in range((1 + AHEAD) * ROWS)]
    sums = [[cgutils.alloca_once(builder, words) for _ in range(2)] for _ in range(ROWS)]
    for total in (total for pair in sums for total in pair):
        builder.store(ir.Constant(words, [0] * _WIDTH), total)
    with cgutils.for_range(builder, blocks, intp=I64) as loop:
        here, there = (builder.mul(loop.index, I64(BLOCK * size)) for size in (2, 4))
        for spot in spots[ROWS:]:
            prefetch(builder, builder.add(spot, here), 2)
        for first in range(0, BLOCK, _WIDTH):
            pair = [_load(builder, builder.add(at, there), first * 4, words, 4) for at in (factors, others)]
            for spot, totals in zip(spots[:ROWS], sums, strict=True):
                lanes = builder.zext(_load(builder, builder.add(spot, here), first * 2, shorts, 2), words)
                for factor, total in zip(pair, totals, strict=True):
                    builder.store(builder.add(builder.load(total), builder.mul(lanes, factor)), total)
    for r, (low, high) in enumerate(sums):
        both = _packed(builder, *(_folded(builder, builder.load(total)) for total in (low, high)))
        store(builder, both, shifted(builder, out, 8 * r), 8)


@intrinsic()
def absorb_16_rows(
    builder: Any, base: Any, rows: Any, packed: Any, sums: Any, following: Any, next_rows: Any, BLOCKS: int, AHEAD: int
) -> None:  # fmt: skip
    """Add the products of BLOCKS * BLOCK lanes of 16 rows to the sums of `fold_16_sums`.

    rows: 16 int64 offsets, in bytes, of the rows from `base`. packed: int16 [BLOCKS, 4, BLOCK], the signed low and high
    halves of the first and of the second factor. sums: int32 [16 rows, 2, 16]. following, next_rows: where AHEAD is 1,
    the same of 16 rows of which as many lanes are prefetched, so that memory is never without a request meanwhile.

    A lane with its upper bit turned is a signed number, 2**15 less than the lane; its products with signed halves of a
    factor are those that a processor adds up in pairs, twice as many at a time as whole products.
    """
    turned = ir.Constant(_SHORTS, [-32768] * (2 * LANES))
    zero, sixteen = (ir.Constant(WORDS, [word] * LANES) for word in (0, 16))
    with cgutils.for_range(builder, I64(LANES // ROWS), intp=I64) as loop:
        first = builder.mul(loop.index, I64(ROWS * 8))
        spots = [builder.add(base, _load(builder, builder.add(rows, first), 8 * r, I64, 8)) for r in range(ROWS)]
        for r in range(ROWS * AHEAD):
            spot = builder.add(following, _load(builder, builder.add(next_rows, first), 8 * r, I64, 8))
            for line in range(BLOCKS):
                prefetch(builder, shifted(builder, spot, line * 2 * BLOCK), 0)
        begin = builder.add(sums, builder.mul(loop.index, I64(ROWS * 2 * 64)))
        lanes = [
            [builder.xor(_load(builder, spot, i * 2 * BLOCK, _SHORTS, 2), turned) for i in range(BLOCKS)]
            for spot in spots
        ]
        for which in range(2):
            totals = [zero] * ROWS
            for half in (1, 0):
                for i in range(BLOCKS):
                    factor = _load(builder, packed, (i * 4 + 2 * which + half) * 2 * BLOCK, _SHORTS, 2)
                    for r in range(ROWS):  # the sum is part of the instruction where there is VNNI
                        products = call(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, [lanes[r][i], factor])
                        totals[r] = builder.add(totals[r], products)
                if half:
                    for r in range(ROWS):
                        before = _load(builder, begin, (r * 2 + which) * 64, WORDS, 4)
                        totals[r] = builder.add(builder.shl(totals[r], sixteen), before)
            for r in range(ROWS):
                store(builder, totals[r], shifted(builder, begin, (r * 2 + which) * 64))


@intrinsic()
def fold_16_sums(builder: Any, sums: Any, bias: Any, out: Any) -> None:
    """out[s * 16 + r] = sum s of row r modulo 2**32, of what `absorb_16_rows` added up since this last took it: the
    sums are zeros again. bias: int32 [2], what the sums lack. out: int32 [2, 16]."""
    zero = ir.Constant(WORDS, [0] * LANES)
    for which in range(2):
        quarters = []
        for quarter in range(4):
            places = [(row * 2 + which) * 64 for row in range(quarter, LANES, 4)]  # the order that `fold` asks for
            found = [_load(builder, sums, place, WORDS, 4) for place in places]
            for place in places:
                store(builder, zero, shifted(builder, sums, place))
            pair = [fold(builder, found[0], found[2], 8), fold(builder, found[1], found[3], 8)]
            quarters.append(fold(builder, pair[0], pair[1], 4))
        q0, q1, q2, q3 = quarters
        whole = fold(builder, fold(builder, q0, q2, 2), fold(builder, q1, q3, 2), 1)
        lacking = splat(builder, _load(builder, bias, 4 * which, I32, 4))
        store(builder, builder.add(whole, lacking), shifted(builder, out, 4 * LANES * which))


@intrinsic(types.int64)
def digest_8(builder: Any, row: Any, factors: Any, others: Any) -> Any:
    """Packed sums of the 8 lanes at an address: 16 bytes."""
    words = ir.VectorType(I32, 8)
    lanes = builder.zext(_load(builder, row, 0, ir.VectorType(_I16, 8), 2), words)
    sums = [_folded(builder, builder.mul(lanes, _load(builder, at, 0, words, 4))) for at in (factors, others)]
    return _packed(builder, *sums)


@intrinsic()
def ask_for(builder: Any, address: Any) -> None:
    """The cache line at an address is needed soon. Any address will do: a wrong one is ignored."""
    prefetch(builder, address, 2)


@intrinsic(types.int64)
def digest_1(builder: Any, row: Any, factors: Any, others: Any) -> Any:
    """Packed sums of the one lane at an address."""
    lane = builder.zext(_load(builder, row, 0, _I16, 2), I32)
    return _packed(builder, *(builder.mul(lane, _load(builder, at, 0, I32, 4)) for at in (factors, others)))


@intrinsic(types.int64)
def add_packed(builder: Any, one: Any, other: Any) -> Any:
    """Each sum in its own 32 bits."""
    low = builder.add(*(builder.trunc(word, I32) for word in (one, other)))
    high = builder.add(*(builder.trunc(builder.lshr(word, I64(32)), I32) for word in (one, other)))
    return _packed(builder, low, high)


@intrinsic(types.int64)
def _digest_blocks(builder: Any, row: Any, factors: Any, others: Any, blocks: Any) -> Any:
    """Packed sums of the first `blocks` * BLOCK lanes at an address."""
    shorts = ir.VectorType(_I16, LANES)
    sums = [[cgutils.alloca_once(builder, WORDS) for _ in range(2)] for _ in range(BLOCK // LANES)]
    for total in (total for pair in sums for total in pair):
        builder.store(ir.Constant(WORDS, [0] * LANES), total)
    with cgutils.for_range(builder, blocks, intp=I64) as loop:
        here, there = (builder.mul(loop.index, I64(BLOCK * size)) for size in (2, 4))
        for i, pair in enumerate(sums):
            lanes = builder.zext(_load(builder, builder.add(row, here), i * 2 * LANES, shorts, 2), WORDS)
            for at, total in zip((factors, others), pair, strict=True):
                factor = _load(builder, builder.add(at, there), i * 4 * LANES, WORDS, 4)
                builder.store(builder.add(builder.load(total), builder.mul(lanes, factor)), total)
    totals = [builder.add(*(builder.load(pair[which]) for pair in sums)) for which in range(2)]
    return _packed(builder, *(_folded(builder, total) for total in totals))


@inlined(fastmath=set())
def digest_row(row: Any, factors: Any, others: Any, lanes: Any) -> Any:
    """Packed sums of all lanes of the row at an address; factors and others as `digest_rows` takes them."""
    blocks, whole = lanes // BLOCK, lanes // 8
    total = _digest_blocks(row, factors, others, blocks)
    for i in range(blocks * (BLOCK // 8), whole):
        total = add_packed(total, digest_8(row + i * 16, factors + i * 32, others + i * 32))
    for i in range(whole * 8, lanes):
        total = add_packed(total, digest_1(row + i * 2, factors + i * 4, others + i * 4))
    return total
