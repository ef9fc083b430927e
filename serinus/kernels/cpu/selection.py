"""The inner loops of sampling as LLVM vectors: passes over one row of scores, and the search for what can still win.

A row is `count` fp32 in whole vectors of 16; what is behind its end is NaN, which no comparison takes. Addresses are
int64. `BF16`, `BELOW` and `MASS` are compile-time constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import types

from serinus.kernels.cpu.llvm import F32, FLOATS, I32, I64, LANES, WORDS, call, load, splat, store
from serinus.kernels.cpu.scalar import GAMMA, LOG2_E, MIX_1, MIX_2, cgutils, host_has, intrinsic, ir
from serinus.kernels.cpu.vector import vector_exp2

SCORE_MAX = 1e30
"""Scores are held to this: of two infinite scores neither is larger, and their difference is no number."""

NOISE_MAX = 33.0 * math.log(2.0)
"""The largest noise: that of the word 0."""

_RUN = 16
"""Vectors that are summed in fp32."""

_I1, _I16, _F64 = ir.IntType(1), ir.IntType(16), ir.DoubleType()
_FLAGS, _HALF, _WIDE = ir.VectorType(_I1, LANES), ir.VectorType(I32, LANES // 2), ir.VectorType(I64, LANES // 2)
_DOUBLES = ir.VectorType(_F64, LANES // 2)
_LOWER, _UPPER = list(range(8)), list(range(8, 16))


def _floats(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _part(builder: Any, vector: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(_HALF, lanes))


def _each(builder: Any, address: Any, vectors: Any, body: Callable[[Any, Any], None]) -> None:
    """body(address of a vector, its index) for each of a row."""
    with cgutils.for_range(builder, vectors, intp=I64) as loop:
        body(builder.add(address, builder.mul(loop.index, I64(LANES * 4))), loop.index)


def _held(builder: Any, vector: Any) -> Any:
    """Within +-SCORE_MAX; NaN as the lowest."""
    vector = builder.select(builder.fcmp_ordered(">", vector, _floats(-SCORE_MAX)), vector, _floats(-SCORE_MAX))
    return builder.select(builder.fcmp_ordered("<", vector, _floats(SCORE_MAX)), vector, _floats(SCORE_MAX))


def _bits(builder: Any, mask: Any) -> Any:
    return builder.bitcast(mask, _I16)


def _population(builder: Any, mask: Any) -> Any:
    return builder.zext(call(builder, "llvm.ctpop.i16", _I16, [_bits(builder, mask)]), I64)


@intrinsic(types.float32)
def lift(builder: Any, source: Any, target: Any, vectors: Any, mask: Any, BF16: int, MASKED: int) -> Any:
    """Logits to scores: fp32, within +-SCORE_MAX, and -SCORE_MAX where the bit of a `mask` is 0. Returns the largest,
    or -SCORE_MAX where there is no vector."""
    best = cgutils.alloca_once_value(builder, _floats(-SCORE_MAX))

    def body(spot: Any, index: Any) -> None:
        here = builder.add(source, builder.mul(index, I64(LANES * (2 if BF16 else 4))))
        if BF16:
            words = builder.zext(load(builder, here, ir.VectorType(_I16, LANES), 2), WORDS)
            vector = builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)
        else:
            vector = load(builder, here, FLOATS)
        vector = _held(builder, vector)
        if MASKED:
            word = load(builder, builder.add(mask, builder.mul(index, I64(2))), _I16, 2)
            vector = builder.select(builder.bitcast(word, _FLAGS), vector, _floats(-SCORE_MAX))
        store(builder, vector, spot)
        builder.store(call(builder, "llvm.maxnum.v16f32", FLOATS, [builder.load(best), vector]), best)

    _each(builder, target, vectors, body)
    return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [builder.load(best)])


@intrinsic(types.float32)
def highest(builder: Any, row: Any, vectors: Any) -> Any:
    """The largest score of a row."""
    best = cgutils.alloca_once_value(builder, _floats(-math.inf))

    def body(spot: Any, _: Any) -> None:
        vector, before = load(builder, spot, FLOATS), builder.load(best)
        builder.store(builder.select(builder.fcmp_ordered(">", vector, before), vector, before), best)

    _each(builder, row, vectors, body)
    return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [builder.load(best)])


@intrinsic()
def penalise(builder: Any, row: Any, seen: Any, vectors: Any, penalty: Any) -> None:
    """Scores of tokens whose bit is set: positive ones over the penalty, others times it; within +-SCORE_MAX."""
    factor = splat(builder, penalty)

    def body(spot: Any, index: Any) -> None:
        word = load(builder, builder.add(seen, builder.mul(index, I64(2))), _I16, 1)
        with builder.if_then(builder.icmp_unsigned("!=", word, _I16(0))):
            old = load(builder, spot, FLOATS)
            positive = builder.fcmp_ordered(">", old, _floats(0.0))
            new = builder.select(positive, builder.fdiv(old, factor), builder.fmul(old, factor))
            chosen = builder.select(builder.bitcast(word, _FLAGS), _held(builder, new), old)
            store(builder, chosen, spot)

    _each(builder, row, vectors, body)


@intrinsic()
def raise_all(builder: Any, row: Any, vectors: Any, top: Any, factor: Any) -> None:
    """row = (row - top) * factor."""
    top, factor = splat(builder, top), splat(builder, factor)

    def body(spot: Any, index: Any) -> None:
        store(builder, builder.fmul(builder.fsub(load(builder, spot, FLOATS), top), factor), spot)

    _each(builder, row, vectors, body)


class _Sum:
    """A sum of vectors: fp32 over a run of them, fp64 over the runs."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._run = cgutils.alloca_once_value(builder, _floats(0.0))
        self._halves = [cgutils.alloca_once_value(builder, ir.Constant(_DOUBLES, [0.0] * 8)) for _ in range(2)]

    def add(self, vector: Any) -> None:
        self._builder.store(self._builder.fadd(self._builder.load(self._run), vector), self._run)

    def end_run(self) -> None:
        builder, run = self._builder, self._builder.load(self._run)
        for half, lanes in zip(self._halves, (_LOWER, _UPPER), strict=True):
            builder.store(builder.fadd(builder.load(half), builder.fpext(_part(builder, run, lanes), _DOUBLES)), half)
        builder.store(_floats(0.0), self._run)

    def total(self) -> Any:
        builder = self._builder
        both = builder.fadd(*(builder.load(half) for half in self._halves))
        args = [ir.Constant(_F64, -0.0), both]
        return call(builder, "llvm.vector.reduce.fadd.v8f64", _F64, args, fastmath=("reassoc",))


@intrinsic(types.float64)
def weigh(builder: Any, row: Any, vectors: Any, top: Any, pivot: Any, total: Any) -> Any:
    """The sum of exp(score - top), fp64, over scores of at least the pivot; none is above `top`.

    total: fp64, set to the sum over all.
    """
    upper, whole = _Sum(builder), _Sum(builder)
    top, pivot = splat(builder, top), splat(builder, pivot)

    def body(spot: Any, _: Any) -> None:
        vector = load(builder, spot, FLOATS)
        share = vector_exp2(builder, builder.fmul(builder.fsub(vector, top), _floats(LOG2_E)))
        share = builder.select(builder.fcmp_ordered("ord", vector, vector), share, _floats(0.0))
        whole.add(share)
        upper.add(builder.select(builder.fcmp_ordered(">=", vector, pivot), share, _floats(0.0)))

    runs = builder.lshr(builder.add(vectors, I64(_RUN - 1)), I64(_RUN.bit_length() - 1))
    with cgutils.for_range(builder, runs, intp=I64) as loop:
        first = builder.mul(loop.index, I64(_RUN))
        left = builder.sub(vectors, first)
        count = builder.select(builder.icmp_signed("<", left, I64(_RUN)), left, I64(_RUN))
        _each(builder, builder.add(row, builder.mul(first, I64(LANES * 4))), count, body)
        whole.end_run()
        upper.end_run()
    store(builder, whole.total(), total, 8)
    return upper.total()


@intrinsic(types.int64)
def count_from(builder: Any, row: Any, vectors: Any, pivot: Any) -> Any:
    """How many scores are at least the pivot."""
    count, pivot = cgutils.alloca_once_value(builder, I64(0)), splat(builder, pivot)

    def body(spot: Any, index: Any) -> None:
        mask = builder.fcmp_ordered(">=", load(builder, spot, FLOATS), pivot)
        builder.store(builder.add(builder.load(count), _population(builder, mask)), count)

    _each(builder, row, vectors, body)
    return builder.load(count)


@intrinsic(types.int64)
def gather(builder: Any, row: Any, vectors: Any, pivot: Any, target: Any, ABOVE: int) -> Any:
    """The scores above the pivot (ABOVE = 1) or below it, one after the other from `target`, and a vector of NaN behind
    them. Returns how many. The target has room for 16 more."""
    sign = ">" if ABOVE else "<"
    found, pivot = cgutils.alloca_once_value(builder, target), splat(builder, pivot)

    def body(spot: Any, index: Any) -> None:
        vector, end = load(builder, spot, FLOATS), builder.load(found)
        mask = builder.fcmp_ordered(sign, vector, pivot)
        # No branch around an empty mask: it would be guessed wrong too often to pay.
        if host_has("avx512f"):  # in a register: into memory it is microcode on Zen 4
            packing = [vector, _floats(math.nan), mask]
            store(builder, call(builder, "llvm.x86.avx512.mask.compress.v16f32", FLOATS, packing), end)
        else:
            pointer = builder.inttoptr(end, F32.as_pointer())
            call(builder, "llvm.masked.compressstore.v16f32", ir.VoidType(), [vector, pointer, mask])
        builder.store(builder.add(end, builder.shl(_population(builder, mask), I64(2))), found)

    _each(builder, row, vectors, body)
    end = builder.load(found)
    store(builder, _floats(math.nan), end)
    return builder.lshr(builder.sub(end, target), I64(2))


def _first(
    builder: Any, first: Any, vectors: Any, row: Any, visit: Callable[[Any, Any, Callable[[Any], None]], None]
) -> Any:
    """The index of the first vector from `first` at which `visit(index, vector, stop)` calls stop on a mask with a lane
    set; `vectors` where none has."""
    found = cgutils.alloca_once_value(builder, vectors)
    with cgutils.for_range(builder, vectors, start=first, intp=I64) as loop:

        def stop(mask: Any) -> None:
            with builder.if_then(builder.icmp_unsigned("!=", _bits(builder, mask), _I16(0))):
                builder.store(loop.index, found)
                loop.do_break()

        visit(loop.index, load(builder, builder.add(row, builder.mul(loop.index, I64(LANES * 4))), FLOATS), stop)
    return builder.load(found)


@intrinsic(types.int64)
def next_at_least(builder: Any, row: Any, first: Any, vectors: Any, least: Any) -> Any:
    """The first vector from `first` on that has a score of at least `least`; `vectors` where none has."""
    least = splat(builder, least)

    def visit(index: Any, vector: Any, stop: Callable[[Any], None]) -> None:
        stop(builder.fcmp_ordered(">=", vector, least))

    return _first(builder, first, vectors, row, visit)


@intrinsic(types.int64)
def next_to_win(builder: Any, row: Any, first: Any, vectors: Any, key: Any, least: Any, needed: Any) -> Any:
    """The first vector from `first` on in which a score of at least `least` and its noise might reach `needed`.

    The noise of token t is at most ln 2 times one more than the leading zeros of the word that it is made of, the upper
    half of splitmix(key + t): so no logarithm is taken, and nothing that reaches `needed` is missed.
    """
    least, needed = splat(builder, least), splat(builder, needed)
    keys = [builder.add(splat(builder, key, 8), ir.Constant(_WIDE, lanes)) for lanes in (_LOWER, _UPPER)]

    def visit(index: Any, vector: Any, stop: Callable[[Any], None]) -> None:
        within_reach = builder.fcmp_ordered(">=", builder.fadd(vector, _floats(NOISE_MAX)), needed)
        alive = builder.and_(builder.fcmp_ordered(">=", vector, least), within_reach)
        with builder.if_then(builder.icmp_unsigned("!=", _bits(builder, alive), _I16(0))):
            tokens = splat(builder, builder.mul(index, I64(LANES)), 8)
            words = [_splitmix_upper(builder, builder.add(lanes, tokens)) for lanes in keys]
            word = builder.shuffle_vector(*words, ir.Constant(WORDS, list(range(LANES))))
            zeros = call(builder, "llvm.ctlz.v16i32", WORDS, [word, _I1(0)])
            digits = builder.sitofp(builder.add(zeros, ir.Constant(WORDS, [1] * LANES)), FLOATS)
            bound = builder.fadd(vector, builder.fmul(digits, _floats(math.log(2.0))))
            stop(builder.and_(alive, builder.fcmp_ordered(">=", bound, needed)))

    return _first(builder, first, vectors, row, visit)


def _splitmix_upper(builder: Any, x: Any) -> Any:
    """The upper half of splitmix64 of each of 8 words."""

    def word(value: int) -> Any:
        return ir.Constant(_WIDE, [value] * (LANES // 2))

    x = builder.add(x, word(GAMMA))
    x = builder.mul(builder.xor(x, builder.lshr(x, word(30))), word(MIX_1))
    x = builder.mul(builder.xor(x, builder.lshr(x, word(27))), word(MIX_2))
    return builder.trunc(builder.lshr(builder.xor(x, builder.lshr(x, word(31))), word(32)), _HALF)
