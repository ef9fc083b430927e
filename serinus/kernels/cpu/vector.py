"""The inner loops of attention as LLVM vectors: dots with keys, shares of a softmax, weighted sums, a bf16 matrix tile.

Written out here because the loop vectoriser, which cannot know that rows do not overlap, checks that at run time and
spends more on it than on 128 elements. Addresses are int64. `D`, `G` and `BF16` are compile-time constants: elements
of a head, query heads that share a KV head, and whether rows are bf16 (otherwise fp32). All sums are fp32.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types

from serinus.kernels.cpu.scalar import EXP2, cgutils, intrinsic, ir

__all__ = [
    "TILE",
    "add_rows",
    "add_weighted_4",
    "copy_bytes",
    "dots",
    "dots_16",
    "largest",
    "multiply_tile",
    "take_shares",
]

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_LANES = 16

TILE = 4
"""Rows, and vectors of 16 columns, of the tile that multiply_tile keeps in registers: 16 sums, 4 columns, 1 row."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not list."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)


def _lanes_of(size: int) -> int:
    """Elements of a vector: the most, up to 16, that divide a row."""
    return math.gcd(size, 16)


def _shifted(builder: Any, address: Any, byte_count: int) -> Any:
    return builder.add(address, _I64(byte_count))


def _load(builder: Any, address: Any, first: int, lanes: int, bf16: bool) -> Any:
    """`lanes` elements from element `first` of the row at `address`, as fp32."""
    spot = _shifted(builder, address, first * (2 if bf16 else 4))
    item = ir.IntType(16) if bf16 else _F32
    loaded = builder.load(builder.inttoptr(spot, ir.VectorType(item, lanes).as_pointer()))
    loaded.align = 2 if bf16 else 4
    if not bf16:
        return loaded
    words = builder.zext(loaded, ir.VectorType(ir.IntType(32), lanes))
    return builder.bitcast(builder.shl(words, ir.Constant(words.type, [16] * lanes)), ir.VectorType(_F32, lanes))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    fn = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(fn, [a, b, c])


def _sum(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(_F32, [_F32, vector.type])
    fn = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{vector.type.count}f32")
    return builder.call(fn, [ir.Constant(_F32, -0.0), vector], fastmath=("reassoc", "nsz"))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    blank = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(blank, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _dpbf16(builder: Any) -> Any:
    kind = ir.VectorType(_F32, _LANES)
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, _PAIRS, _PAIRS]), name)


@intrinsic
def dots(typingctx: Any, q: Any, k: Any, out: Any, stride: Any, D: Any, G: Any, BF16: Any) -> Any:
    """out[g * stride] = q[g] . k for every g < G. q: fp32 [G, D]; k: [D]; out: fp32."""
    size, group, bf16 = D.literal_value, G.literal_value, bool(BF16.literal_value)
    lanes = _lanes_of(size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q_at, k_at, out_at, step = args[:4]
        firsts = range(0, size, lanes)
        keys = [_load(builder, k_at, first, lanes, bf16) for first in firsts]
        for g in range(group):
            sums: list[Any] = []
            for i, first in enumerate(firsts):
                row = _load(builder, q_at, g * size + first, lanes, False)
                if i < 2:  # two running sums hide the latency of the multiply-add
                    sums.append(builder.fmul(row, keys[i]))
                else:
                    sums[i % 2] = _fma(builder, row, keys[i], sums[i % 2])
            total = sums[0] if len(sums) == 1 else builder.fadd(*sums)
            spot = builder.add(out_at, builder.mul(step, _I64(4 * g)))
            builder.store(_sum(builder, total), builder.inttoptr(spot, _F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(q, k, out, stride, D, G, BF16), codegen


@intrinsic
def add_weighted_4(
    typingctx: Any, v0: Any, v1: Any, v2: Any, v3: Any, w: Any, stride: Any, acc: Any, D: Any, G: Any, BF16: Any
) -> Any:
    """acc[g] += w[g * stride + i] * v_i, summed over i < 4, for every g < G. acc: fp32 [G, D]; v_i: [D]; w: fp32."""
    size, group, bf16 = D.literal_value, G.literal_value, bool(BF16.literal_value)
    lanes = _lanes_of(size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, w_at, step, acc_at = args[:4], args[4], args[5], args[6]
        weights = []
        for g in range(group):
            base = builder.add(w_at, builder.mul(step, _I64(4 * g)))
            for i in range(4):
                spot = builder.inttoptr(_shifted(builder, base, 4 * i), _F32.as_pointer())
                weights.append(_splat(builder, builder.load(spot), lanes))
        for first in range(0, size, lanes):
            values = [_load(builder, row, first, lanes, bf16) for row in rows]
            for g in range(group):
                total = _load(builder, acc_at, g * size + first, lanes, False)
                for i in range(4):
                    total = _fma(builder, weights[g * 4 + i], values[i], total)
                spot = _shifted(builder, acc_at, (g * size + first) * 4)
                builder.store(total, builder.inttoptr(spot, total.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(v0, v1, v2, v3, w, stride, acc, D, G, BF16), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, byte_count: Any) -> Any:
    """memcpy between two addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i8_ptr = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(args[0], i8_ptr), builder.inttoptr(args[1], i8_ptr), args[2], 1, align=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def largest(typingctx: Any, address: Any, COUNT: Any) -> Any:
    """The largest of COUNT (a multiple of 16) fp32 at an address; NaN only if all are."""
    count = COUNT.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_F32, _LANES)
        pick = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), "llvm.maxnum.v16f32")
        best = _load(builder, args[0], 0, _LANES, False)
        for first in range(_LANES, count, _LANES):
            best = builder.call(pick, [best, _load(builder, args[0], first, _LANES, False)])
        fold = ir.FunctionType(_F32, [kind])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, fold, "llvm.vector.reduce.fmax.v16f32"), [best]
        )

    return types.float32(address, COUNT), codegen


@intrinsic
def multiply_tile(
    typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, pairs: Any, ADD: Any
) -> Any:
    """c = a b (or c += a b where ADD) for a tile of 4 x 64; bf16 times bf16 with sums in fp32 (needs AVX512-BF16).

    a: 4 rows of `pairs` bf16 pairs along the inner dimension. b: `pairs` rows of 64 bf16 pairs; the pair in column n
    of row p holds elements 2p and 2p + 1 of column n. c: 4 rows of 64 fp32. Strides are bytes between rows.
    """
    adds = bool(ADD.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a_at, a_step, b_at, b_step, c_at, c_step, count = args[:7]
        kind = ir.VectorType(_F32, _LANES)
        words = ir.VectorType(_I32, _LANES)
        fn = _dpbf16(builder)
        spots = [
            [_shifted(builder, builder.add(c_at, builder.mul(c_step, _I64(i))), j * 64) for j in range(TILE)]
            for i in range(TILE)
        ]
        zero = ir.Constant(kind, [0.0] * _LANES)
        sums = [[cgutils.alloca_once(builder, kind) for _ in range(TILE)] for _ in range(TILE)]
        for i in range(TILE):
            for j in range(TILE):
                builder.store(_load(builder, spots[i][j], 0, _LANES, False) if adds else zero, sums[i][j])
        rows = [builder.add(a_at, builder.mul(a_step, _I64(i))) for i in range(TILE)]
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            b_row = builder.add(b_at, builder.mul(b_step, loop.index))
            columns = []
            for j in range(TILE):
                loaded = builder.load(builder.inttoptr(_shifted(builder, b_row, j * 64), words.as_pointer()))
                loaded.align = 4
                columns.append(builder.bitcast(loaded, _PAIRS))
            for i in range(TILE):
                spot = builder.add(rows[i], builder.mul(loop.index, _I64(4)))
                pair = _splat(builder, builder.load(builder.inttoptr(spot, _I32.as_pointer())), _LANES)
                spread = builder.bitcast(pair, _PAIRS)
                for j in range(TILE):
                    builder.store(builder.call(fn, [builder.load(sums[i][j]), spread, columns[j]]), sums[i][j])
        for i in range(TILE):
            for j in range(TILE):
                builder.store(builder.load(sums[i][j]), builder.inttoptr(spots[i][j], kind.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(a, a_stride, b, b_stride, c, c_stride, pairs, ADD), codegen


def _prefetch(builder: Any, address: Any, byte_count: int) -> None:
    """Ask for the lines of a row that is needed soon. Any address will do: a wrong one is ignored.

    Into the second level: what 16 rows of all heads ask for is as large as the first, and would push out its users.
    """
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for first in range(0, byte_count, 64):
        spot = builder.inttoptr(_shifted(builder, address, first), pointer)
        builder.call(fn, [spot, _I32(0), _I32(1), _I32(1)])  # a read, into the second level, data


def _barrier(builder: Any) -> None:
    """No load crosses this: keeps LLVM from interleaving so much that sums leave the registers. No instruction."""
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", True), [])


def _load_words(builder: Any, address: Any, first: int) -> Any:
    """32 bf16 from element `first` of a row, as 16 words."""
    kind = ir.VectorType(_I32, _LANES)
    loaded = builder.load(builder.inttoptr(_shifted(builder, address, first * 2), kind.as_pointer()))
    loaded.align = 2
    return loaded


def _load_i64(builder: Any, address: Any, index: Any) -> Any:
    spot = builder.add(address, builder.mul(index, _I64(8)))
    return builder.load(builder.inttoptr(spot, _I64.as_pointer()))


def _mixed(builder: Any, a: Any, b: Any, picks: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(picks)), picks))


def _fold(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Halve the partial sums of two vectors into one: lanes with bit `width` clear hold a's, with it set b's."""
    low = [lane if not lane & width else lane - width + _LANES for lane in range(_LANES)]
    high = [lane + width if not lane & width else lane + _LANES for lane in range(_LANES)]
    return builder.fadd(_mixed(builder, a, b, low), _mixed(builder, a, b, high))


@intrinsic
def dots_16(
    typingctx: Any,
    q: Any,
    k: Any,
    rows: Any,
    scale: Any,
    out: Any,
    stride: Any,
    following: Any,
    next_rows: Any,
    D: Any,
    G: Any,
) -> Any:
    """out[g * stride + p] = scale * q[g] . k_p for p < 16 and g < G; all bf16, sums in fp32 (needs AVX512-BF16).

    q: [G, D]. rows: 16 int64 offsets, in bytes, of the keys from `k`. following, next_rows: the same of 16
    rows to prefetch. D is a multiple of 32.
    """
    size, group = D.literal_value, G.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q_at, k_at, rows_at, scaled, out_at, step, next_at, next_rows_at = args[:8]
        fn = _dpbf16(builder)
        zero = ir.Constant(ir.VectorType(_F32, _LANES), [0.0] * _LANES)
        firsts = range(0, size, 2 * _LANES)
        quarters: list[list[Any]] = [[] for _ in range(group)]
        for quarter in range(4):
            _barrier(builder)
            keys = []
            for p in range(quarter, _LANES, 4):  # the order in which _fold deals the lanes out
                _prefetch(builder, builder.add(next_at, _load_i64(builder, next_rows_at, _I64(p))), size * 2)
                key = builder.add(k_at, _load_i64(builder, rows_at, _I64(p)))
                keys.append([builder.bitcast(_load_words(builder, key, first), _PAIRS) for first in firsts])
            for g in range(group):
                query = [builder.bitcast(_load_words(builder, q_at, g * size + first), _PAIRS) for first in firsts]
                sums = []
                for key in keys:
                    total = zero
                    for a, b in zip(query, key, strict=True):
                        total = builder.call(fn, [total, a, b])
                    sums.append(total)
                pair = [_fold(builder, sums[0], sums[2], 8), _fold(builder, sums[1], sums[3], 8)]
                quarters[g].append(_fold(builder, pair[0], pair[1], 4))
        for g in range(group):
            q0, q1, q2, q3 = quarters[g]
            scores = _fold(builder, _fold(builder, q0, q2, 2), _fold(builder, q1, q3, 2), 1)
            spot = builder.inttoptr(builder.add(out_at, builder.mul(step, _I64(4 * g))), scores.type.as_pointer())
            builder.store(builder.fmul(scores, _splat(builder, scaled, _LANES)), spot).align = 4
        return context.get_dummy_value()

    return types.void(q, k, rows, scale, out, stride, following, next_rows, D, G), codegen


@intrinsic
def add_rows(
    typingctx: Any,
    v: Any,
    rows: Any,
    count: Any,
    w: Any,
    stride: Any,
    acc: Any,
    shrink: Any,
    following: Any,
    next_rows: Any,
    D: Any,
    G: Any,
) -> Any:
    """acc[g] = shrink[g] * acc[g] + w[g * stride + p] * v_p, summed over p < count, for every g < G. v_p: bf16 [D].

    rows: int64 offsets, in bytes, of the values from `v`. following, next_rows: the same of as many rows to prefetch.
    w, shrink: fp32.
    acc: fp32 [G, D / 32, 2, 16]: of each 32 elements, those with an even place and then the odd ones.
    """
    size, group = D.literal_value, G.literal_value
    pieces = max(1, min(size // 32, 8 // group))
    while size // 32 % pieces:
        pieces -= 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v_at, rows_at, count, w_at, step, acc_at, shrink_at, next_at, next_rows_at = args[:9]
        kind = ir.VectorType(_F32, _LANES)
        words = ir.VectorType(_I32, _LANES)
        sixteen, upper = ir.Constant(words, [16] * _LANES), ir.Constant(words, [-65536] * _LANES)
        weights = [builder.add(w_at, builder.mul(step, _I64(4 * g))) for g in range(group)]
        shrinks = [
            _splat(
                builder, builder.load(builder.inttoptr(_shifted(builder, shrink_at, 4 * g), _F32.as_pointer())), _LANES
            )
            for g in range(group)
        ]
        for start in range(0, size, 32 * pieces):
            spots = [
                builder.inttoptr(_shifted(builder, acc_at, (g * size + start + 16 * i) * 4), kind.as_pointer())
                for g in range(group)
                for i in range(2 * pieces)
            ]
            sums = [cgutils.alloca_once(builder, kind) for _ in spots]
            for i, (spot, total) in enumerate(zip(spots, sums, strict=True)):
                loaded = builder.load(spot)
                loaded.align = 4
                builder.store(builder.fmul(loaded, shrinks[i // (2 * pieces)]), total)
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                if start == 0:
                    _prefetch(builder, builder.add(next_at, _load_i64(builder, next_rows_at, loop.index)), size * 2)
                row = builder.add(v_at, _load_i64(builder, rows_at, loop.index))
                values = []
                for i in range(pieces):
                    pair = _load_words(builder, row, start + 32 * i)
                    values.append(builder.bitcast(builder.shl(pair, sixteen), kind))
                    values.append(builder.bitcast(builder.and_(pair, upper), kind))
                for g in range(group):
                    spot = builder.add(weights[g], builder.mul(loop.index, _I64(4)))
                    weight = _splat(builder, builder.load(builder.inttoptr(spot, _F32.as_pointer())), _LANES)
                    for i, value in enumerate(values):
                        total = sums[g * 2 * pieces + i]
                        builder.store(_fma(builder, weight, value, builder.load(total)), total)
            for spot, total in zip(spots, sums, strict=True):
                builder.store(builder.load(total), spot).align = 4
        return context.get_dummy_value()

    return types.void(v, rows, count, w, stride, acc, shrink, following, next_rows, D, G), codegen


def _exp2(builder: Any, x: Any) -> Any:
    """scalar.exp2 of a vector."""
    kind, words = x.type, ir.VectorType(_I32, x.type.count)

    def constant(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    for sign, bound in (("<", -126.0), (">", 127.0)):
        x = builder.select(builder.fcmp_ordered(sign, x, constant(bound)), constant(bound), x)
    nearest = ir.FunctionType(kind, [kind])
    steps = builder.call(cgutils.get_or_insert_function(builder.module, nearest, "llvm.rint.v16f32"), [x])
    r = builder.fsub(x, steps)
    total = constant(EXP2[0])
    for term in EXP2[1:]:
        total = _fma(builder, total, r, constant(term))
    shifted = builder.shl(builder.fptosi(steps, words), ir.Constant(words, [23] * kind.count))
    return builder.bitcast(builder.add(builder.bitcast(total, words), shifted), kind)


@intrinsic
def take_shares(typingctx: Any, score: Any, count: Any, top: Any, mass: Any, shrink: Any, COUNT: Any) -> Any:
    """Turn scores into shares of a running softmax, in powers of 2.

    score: COUNT (a multiple of 16) fp32, of which the first `count` mean something; in their places come the shares,
    and zeros. top, mass: fp32, the largest score so far and the sum of all shares. shrink: fp32, set to what earlier
    totals must shrink by.
    """
    size = COUNT.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        score_at, count, top_at, mass_at, shrink_at = args[:5]
        kind, words = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
        pick = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), "llvm.maxnum.v16f32")
        fold = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_F32, [kind]), "llvm.vector.reduce.fmax.v16f32"
        )
        top, mass, shrink = (builder.inttoptr(spot, _F32.as_pointer()) for spot in (top_at, mass_at, shrink_at))
        limit = _splat(builder, builder.trunc(count, _I32), _LANES)
        low, zero = ir.Constant(kind, [-math.inf] * _LANES), ir.Constant(kind, [0.0] * _LANES)
        before = _splat(builder, builder.load(top), _LANES)
        masks, scores, best = [], [], low
        for first in range(0, size, _LANES):
            places = ir.Constant(words, list(range(first, first + _LANES)))
            masks.append(builder.icmp_signed("<", places, limit))
            scores.append(builder.select(masks[-1], _load(builder, score_at, first, _LANES, False), low))
            best = builder.call(pick, [best, scores[-1]])
        best = builder.call(pick, [before, _splat(builder, builder.call(fold, [best]), _LANES)])
        added = zero
        for i, mask in enumerate(masks):
            share = builder.select(mask, _exp2(builder, builder.fsub(scores[i], best)), zero)
            added = builder.fadd(added, share)
            spot = builder.inttoptr(_shifted(builder, score_at, i * 64), kind.as_pointer())
            builder.store(share, spot).align = 4
        less = builder.extract_element(_exp2(builder, builder.fsub(before, best)), _I32(0))
        builder.store(less, shrink)
        builder.store(builder.extract_element(best, _I32(0)), top)
        builder.store(builder.fadd(builder.fmul(builder.load(mass), less), _sum(builder, added)), mass)
        return context.get_dummy_value()

    return types.void(score, count, top, mass, shrink, COUNT), codegen
