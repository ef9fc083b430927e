"""The inner loops of attention as LLVM vectors: dots with keys, shares of a softmax, weighted sums, a bf16 matrix tile.

Written out here because the loop vectoriser, which cannot know that rows do not overlap, checks that at run time and
spends more on it than on 128 elements. Addresses are int64. `D`, `G` and `KIND` are compile-time constants: elements
of a head, query heads that share a KV head, and what the elements of keys and values are (fp8.py). All sums are fp32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from serinus.kernels.cpu.fp8 import BF16, FP32, bytes_of, load_floats, load_pairs
from serinus.kernels.cpu.llvm import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    PAIRS,
    WORDS,
    call,
    dot_pairs,
    fold,
    load,
    prefetch,
    shifted,
    splat,
    store,
)
from serinus.kernels.cpu.scalar import EXP2, LOG2_E, at, carray, cgutils, inlined, intrinsic, ir

TILE = 4
"""Rows, and vectors of 16 columns, of the tile that multiply_tile keeps in registers: 16 sums, 4 columns, 1 row."""


def _lanes_of(size: int) -> int:
    """Elements of a vector: the most, up to 16, that divide a row."""
    return math.gcd(size, 16)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def _sum(builder: Any, vector: Any) -> Any:
    name, zero = f"llvm.vector.reduce.fadd.v{vector.type.count}f32", ir.Constant(F32, -0.0)
    return call(builder, name, F32, [zero, vector], fastmath=("reassoc", "nsz"))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return call(builder, "llvm.maxnum.v16f32", FLOATS, [a, b])


def _largest(builder: Any, vector: Any) -> Any:
    return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [vector])


@intrinsic()
def dots(builder: Any, q: Any, k: Any, out: Any, stride: Any, D: int, G: int, KIND: int) -> None:
    """out[g * stride] = q[g] . k for every g < G. q: fp32 [G, D]; k: [D]; out: fp32."""
    lanes = _lanes_of(D)
    firsts = range(0, D, lanes)
    keys = [load_floats(builder, k, first, lanes, KIND) for first in firsts]
    for g in range(G):
        sums: list[Any] = []
        for i, first in enumerate(firsts):
            row = load_floats(builder, q, g * D + first, lanes, FP32)
            if i < 2:  # two running sums hide the latency of the multiply-add
                sums.append(builder.fmul(row, keys[i]))
            else:
                sums[i % 2] = _fma(builder, row, keys[i], sums[i % 2])
        total = sums[0] if len(sums) == 1 else builder.fadd(*sums)
        store(builder, _sum(builder, total), builder.add(out, builder.mul(stride, I64(4 * g))))


@intrinsic()
def add_weighted_4(
    builder: Any, v0: Any, v1: Any, v2: Any, v3: Any, w: Any, stride: Any, acc: Any, D: int, G: int, KIND: int
) -> None:
    """acc[g] += w[g * stride + i] * v_i, summed over i < 4, for every g < G. acc: fp32 [G, D]; v_i: [D]; w: fp32."""
    lanes = _lanes_of(D)
    weights = []
    for g in range(G):
        base = builder.add(w, builder.mul(stride, I64(4 * g)))
        weights += [splat(builder, load(builder, shifted(builder, base, 4 * i), F32), lanes) for i in range(4)]
    for first in range(0, D, lanes):
        values = [load_floats(builder, row, first, lanes, KIND) for row in (v0, v1, v2, v3)]
        for g in range(G):
            total = load_floats(builder, acc, g * D + first, lanes, FP32)
            for i in range(4):
                total = _fma(builder, weights[g * 4 + i], values[i], total)
            store(builder, total, shifted(builder, acc, (g * D + first) * 4))


@intrinsic(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, byte_count: Any) -> None:
    """memcpy between two addresses."""
    i8_ptr = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(
        builder, builder.inttoptr(target, i8_ptr), builder.inttoptr(source, i8_ptr), byte_count, 1, align=1
    )


@intrinsic(types.float32)
def largest(builder: Any, address: Any, COUNT: int) -> Any:
    """The largest of COUNT (a multiple of 16) fp32 at an address; NaN only if all are."""
    best = load(builder, address, FLOATS)
    for first in range(LANES, COUNT, LANES):
        best = _larger(builder, best, load(builder, shifted(builder, address, first * 4), FLOATS))
    return _largest(builder, best)


@intrinsic()
def multiply_tile(
    builder: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, pairs: Any, ADD: int
) -> None:
    """c = a b (or c += a b where ADD) for a tile of 4 x 64; bf16 times bf16 with sums in fp32 (needs AVX512-BF16).

    a: 4 rows of `pairs` bf16 pairs along the inner dimension. b: `pairs` rows of 64 bf16 pairs; the pair in column n
    of row p holds elements 2p and 2p + 1 of column n. c: 4 rows of 64 fp32. Strides are bytes between rows.
    """
    cells = [(i, j) for i in range(TILE) for j in range(TILE)]
    spots = {(i, j): shifted(builder, builder.add(c, builder.mul(c_stride, I64(i))), j * 64) for i, j in cells}
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    sums = {cell: cgutils.alloca_once(builder, FLOATS) for cell in cells}
    for cell in cells:
        builder.store(load(builder, spots[cell], FLOATS) if ADD else zero, sums[cell])
    rows = [builder.add(a, builder.mul(a_stride, I64(i))) for i in range(TILE)]
    with cgutils.for_range(builder, pairs, intp=I64) as loop:
        b_row = builder.add(b, builder.mul(b_stride, loop.index))
        columns = [builder.bitcast(load(builder, shifted(builder, b_row, j * 64), WORDS), PAIRS) for j in range(TILE)]
        for i in range(TILE):
            spot = builder.add(rows[i], builder.mul(loop.index, I64(4)))
            spread = builder.bitcast(splat(builder, load(builder, spot, I32)), PAIRS)
            for j in range(TILE):
                total = dot_pairs(builder, builder.load(sums[i, j]), spread, columns[j])
                builder.store(total, sums[i, j])
    for cell in cells:
        store(builder, builder.load(sums[cell]), spots[cell])


def _prefetch(builder: Any, address: Any, byte_count: int) -> None:
    """Ask for the lines of a row that is needed soon and once, into the first cache: no other need make room."""
    for first in range(0, byte_count, 64):
        prefetch(builder, shifted(builder, address, first), 0)


def _barrier(builder: Any) -> None:
    """No load crosses this: keeps LLVM from interleaving so much that sums leave the registers. No instruction."""
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", True), [])


def _load_i64(builder: Any, address: Any, index: Any) -> Any:
    return load(builder, builder.add(address, builder.mul(index, I64(8))), I64, 8)


@intrinsic()
def dots_16(
    builder: Any, q: Any, k: Any, rows: Any, scale: Any, out: Any, stride: Any, following: Any, next_rows: Any, D: int,
    G: int, KIND: int,
) -> None:  # fmt: skip
    """out[g * stride + p] = scale * q[g] . k_p for p < 16 and g < G; sums in fp32 (needs AVX512-BF16).

    q: bf16 [G, D]; keys: bf16 or FP8. rows: 16 int64 offsets, in bytes, of the keys from `k`. following, next_rows:
    the same of 16 rows to prefetch. D is a multiple of 32.
    """
    row_bytes = D * bytes_of(KIND)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    firsts = range(0, D, 2 * LANES)
    quarters: list[list[Any]] = [[] for _ in range(G)]
    for quarter in range(4):
        _barrier(builder)
        keys = []
        for p in range(quarter, LANES, 4):  # the order in which `fold` deals the lanes out
            _prefetch(builder, builder.add(following, _load_i64(builder, next_rows, I64(p))), row_bytes)
            key = builder.add(k, _load_i64(builder, rows, I64(p)))
            keys.append([builder.bitcast(load_pairs(builder, key, first, KIND), PAIRS) for first in firsts])
        for g in range(G):
            query = [builder.bitcast(load_pairs(builder, q, g * D + first, BF16), PAIRS) for first in firsts]
            sums = []
            for key in keys:
                total = zero
                for a, b in zip(query, key, strict=True):
                    total = dot_pairs(builder, total, a, b)
                sums.append(total)
            pair = [fold(builder, sums[0], sums[2], 8), fold(builder, sums[1], sums[3], 8)]
            quarters[g].append(fold(builder, pair[0], pair[1], 4))
    for g in range(G):
        q0, q1, q2, q3 = quarters[g]
        scores = fold(builder, fold(builder, q0, q2, 2), fold(builder, q1, q3, 2), 1)
        spot = builder.add(out, builder.mul(stride, I64(4 * g)))
        store(builder, builder.fmul(scores, splat(builder, scale)), spot)


@intrinsic()
def add_rows(
    builder: Any, v: Any, rows: Any, count: Any, w: Any, stride: Any, acc: Any, shrink: Any, following: Any,
    next_rows: Any, D: int, G: int, KIND: int,
) -> None:  # fmt: skip
    """acc[g] = shrink[g] * acc[g] + w[g * stride + p] * v_p, summed over p < count, for every g < G.

    v_p: bf16 or FP8 [D]. rows: int64 offsets, in bytes, of the values from `v`. following, next_rows: the same of as
    many rows to prefetch. w, shrink: fp32.
    acc: fp32 [G, D / 32, 2, 16]: of each 32 elements, those with an even place and then the odd ones.
    """
    row_bytes = D * bytes_of(KIND)
    pieces = max(1, min(D // 32, 8 // G))
    while D // 32 % pieces:
        pieces -= 1
    sixteen, upper = ir.Constant(WORDS, [16] * LANES), ir.Constant(WORDS, [-65536] * LANES)
    weights = [builder.add(w, builder.mul(stride, I64(4 * g))) for g in range(G)]
    shrinks = [splat(builder, load(builder, shifted(builder, shrink, 4 * g), F32)) for g in range(G)]
    for start in range(0, D, 32 * pieces):
        spots = [shifted(builder, acc, (g * D + start + 16 * i) * 4) for g in range(G) for i in range(2 * pieces)]
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in spots]
        for i, (spot, total) in enumerate(zip(spots, sums, strict=True)):
            builder.store(builder.fmul(load(builder, spot, FLOATS), shrinks[i // (2 * pieces)]), total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            if start == 0:
                _prefetch(builder, builder.add(following, _load_i64(builder, next_rows, loop.index)), row_bytes)
            row = builder.add(v, _load_i64(builder, rows, loop.index))
            values = []
            for i in range(pieces):
                pair = load_pairs(builder, row, start + 32 * i, KIND)
                values.append(builder.bitcast(builder.shl(pair, sixteen), FLOATS))
                values.append(builder.bitcast(builder.and_(pair, upper), FLOATS))
            for g in range(G):
                spot = builder.add(weights[g], builder.mul(loop.index, I64(4)))
                weight = splat(builder, load(builder, spot, F32))
                for i, value in enumerate(values):
                    total = sums[g * 2 * pieces + i]
                    builder.store(_fma(builder, weight, value, builder.load(total)), total)
        for spot, total in zip(spots, sums, strict=True):
            store(builder, builder.load(total), spot)


def vector_exp2(builder: Any, x: Any) -> Any:
    """scalar.exp2 of a vector."""
    kind, words = x.type, ir.VectorType(I32, x.type.count)

    def constant(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    for sign, bound in (("<", -126.0), (">", 127.0)):
        x = builder.select(builder.fcmp_ordered(sign, x, constant(bound)), constant(bound), x)
    steps = call(builder, "llvm.rint.v16f32", kind, [x])
    r = builder.fsub(x, steps)
    total = constant(EXP2[0])
    for term in EXP2[1:]:
        total = _fma(builder, total, r, constant(term))
    shifted = builder.shl(builder.fptosi(steps, words), ir.Constant(words, [23] * kind.count))
    return builder.bitcast(builder.add(builder.bitcast(total, words), shifted), kind)


@intrinsic()
def take_shares(builder: Any, score: Any, count: Any, top: Any, mass: Any, shrink: Any, COUNT: int) -> None:
    """Turn scores into shares of a running softmax, in powers of 2.

    score: COUNT (a multiple of 16) fp32, of which the first `count` mean something; in their places come the shares,
    and zeros. top, mass: fp32, the largest score so far and the sum of all shares. shrink: fp32, set to what earlier
    totals must shrink by.
    """
    limit = splat(builder, builder.trunc(count, I32))
    low, zero = ir.Constant(FLOATS, [-math.inf] * LANES), ir.Constant(FLOATS, [0.0] * LANES)
    before = splat(builder, load(builder, top, F32))
    masks, scores, best = [], [], low
    for first in range(0, COUNT, LANES):
        places = ir.Constant(WORDS, list(range(first, first + LANES)))
        masks.append(builder.icmp_signed("<", places, limit))
        scores.append(builder.select(masks[-1], load(builder, shifted(builder, score, first * 4), FLOATS), low))
        best = _larger(builder, best, scores[-1])
    best = _larger(builder, before, splat(builder, _largest(builder, best)))
    added = zero
    for i, mask in enumerate(masks):
        share = builder.select(mask, vector_exp2(builder, builder.fsub(scores[i], best)), zero)
        added = builder.fadd(added, share)
        store(builder, share, shifted(builder, score, i * 64))
    less = builder.extract_element(vector_exp2(builder, builder.fsub(before, best)), I32(0))
    store(builder, less, shrink)
    store(builder, builder.extract_element(best, I32(0)), top)
    whole = builder.fadd(builder.fmul(load(builder, mass, F32), less), _sum(builder, added))
    store(builder, whole, mass)


@inlined(fastmath=set())
def begin_shares(top: Any, mass: Any, first: Any, end: Any, sinks: Any) -> None:
    """The running softmax of heads first .. end - 1 before any position: nothing, or where there are sinks (an address
    other than 0, of fp32 of all heads) those alone."""
    for n in range(first, end):
        top[n], mass[n] = np.float32(-np.inf), np.float32(0)
    if sinks != 0:
        of_heads = carray(at(sinks), end, np.float32)
        for n in range(first, end):
            top[n], mass[n] = of_heads[n] * np.float32(LOG2_E), np.float32(1)
