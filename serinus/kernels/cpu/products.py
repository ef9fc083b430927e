"""The inner loop of `row_linear`: products of a few rows with one block of outputs, in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.kernels.cpu.llvm import (
    FLOATS,
    I32,
    I64,
    LANES,
    PAIRS,
    WORDS,
    call,
    dot_pairs,
    load,
    prefetch,
    shifted,
    splat,
    store,
)
from serinus.kernels.cpu.scalar import cgutils, intrinsic

BLOCK = 64
"""Outputs of a block; also what oneDNN pads I to."""
LOCALITY = 2
"""LLVM's word for the second cache, where the next chunk goes: the first one is full of this chunk and the rows."""


@intrinsic()
def add_products(
    builder: Any, x: Any, x_stride: Any, weight: Any, before: Any, sums: Any, words: Any, fetch: Any, fetch_step: Any,
    ROWS: int, PAIRED: int,
) -> None:  # fmt: skip
    """sums = before + x weight for ROWS rows and one block of outputs, word after word: pairs of bf16, or fp32.

    x: rows of `words` words, `x_stride` bytes apart. weight: [words, 64] likewise. before, sums: fp32 [ROWS, 64].
    With word w the cache lines from `fetch` + w * `fetch_step` are called for, up to those of the next, at most 4.
    """
    columns = range(BLOCK // LANES)
    cells = [(i, j, i * BLOCK * 4 + j * 64) for i in range(ROWS) for j in columns]
    held = {(i, j): cgutils.alloca_once(builder, FLOATS) for i, j, _ in cells}
    for i, j, place in cells:
        builder.store(load(builder, shifted(builder, before, place), FLOATS), held[i, j])
    rows = [builder.add(x, builder.mul(x_stride, I64(i))) for i in range(ROWS)]
    with cgutils.for_range(builder, words, intp=I64) as loop:
        ahead = builder.add(fetch, builder.mul(fetch_step, loop.index))
        for j in columns:
            if not j:
                prefetch(builder, ahead, LOCALITY)
                continue
            with builder.if_then(builder.icmp_signed(">", fetch_step, I64(j * 64))):
                prefetch(builder, shifted(builder, ahead, j * 64), LOCALITY)
        here = builder.add(weight, builder.mul(loop.index, I64(BLOCK * 4)))
        kind = PAIRS if PAIRED else FLOATS
        weights = [builder.bitcast(load(builder, shifted(builder, here, j * 64), WORDS), kind) for j in columns]
        for i in range(ROWS):
            word = load(builder, builder.add(rows[i], builder.mul(loop.index, I64(4))), I32)
            add_word(builder, word, weights, [held[i, j] for j in columns])
    for i, j, place in cells:
        store(builder, builder.load(held[i, j]), shifted(builder, sums, place))


def add_word(builder: Any, word: Any, weights: Sequence[Any], held: Sequence[Any]) -> None:
    """held[j] += word weights[j]: an fp32, or a pair of bf16 where the weights are such."""
    x = builder.bitcast(splat(builder, word), weights[0].type)
    for total, weight in zip(held, weights, strict=True):
        before = builder.load(total)
        if weight.type == PAIRS:
            after = dot_pairs(builder, before, x, weight)
        else:
            after = call(builder, "llvm.fma.v16f32", FLOATS, [x, weight, before])
        builder.store(after, total)
