"""A block of 64 outputs for few rows, chunk after chunk of its weight: of bf16, or of integers that are unpacked.

A chunk serves all rows, four at a time, while the next one is fetched. Addresses are int64. Knows neither a linear nor
experts, which both are made of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from serinus.kernels.cpu.products import BLOCK, add_products
from serinus.kernels.cpu.quantized import add_unpacked, unpack
from serinus.kernels.cpu.scalar import FAST, at, carray, inlined, literally

CHUNK = 64
"""Input pairs that serve all rows before the next: 16 KiB of weight, half of the first cache."""
GROUP = 4
"""Rows in registers at a time: 16 sums, 4 vectors of weight, 1 of input."""
_UNPACKED_ROWS = 4
"""Up to so many rows quantized weights are unpacked in registers, for one group; else in the first cache, for all."""


@inlined(fastmath=FAST)
def _multiply_chunk(
    chunk_at: Any, x: Any, rows: Any, row_bytes: Any, count: Any, nothing_at: Any, sums_at: Any, fetch: Any,
    fetch_bytes: Any, PAIRED: Any,
) -> None:  # fmt: skip
    """sums += x weight for `count` words of all rows, or where `nothing_at` is not 0 sums = x weight: zeros of GROUP
    rows lie there. So many bytes a word are fetched meanwhile."""
    literally(PAIRED)
    groups = (rows + GROUP - 1) // GROUP
    fetch_step = fetch_bytes // max(1, groups)
    row = 0
    for group in range(groups):
        taken = (rows - row + groups - group - 1) // (groups - group)
        here, s = x + row * row_bytes, sums_at + row * BLOCK * 4
        before = nothing_at if nothing_at != 0 else s
        if taken == 4:
            add_products(here, row_bytes, chunk_at, before, s, count, fetch, fetch_step, 4, PAIRED)
        elif taken == 3:
            add_products(here, row_bytes, chunk_at, before, s, count, fetch, fetch_step, 3, PAIRED)
        elif taken == 2:
            add_products(here, row_bytes, chunk_at, before, s, count, fetch, fetch_step, 2, PAIRED)
        else:
            add_products(here, row_bytes, chunk_at, before, s, count, fetch, fetch_step, 1, PAIRED)
        row += taken
        fetch += count * fetch_step


@inlined(fastmath=FAST)
def _multiply_unpacked(
    chunk_at: Any, x: Any, rows: Any, row_bytes: Any, count: Any, sums_at: Any, zeros_at: Any, fetch: Any, BITS: Any,
    PAIRED: Any, LEVELS: Any,
) -> None:  # fmt: skip
    """The same of quantized weights, in registers."""
    literally(BITS)
    literally(PAIRED)
    literally(LEVELS)
    if rows == 4:
        add_unpacked(x, row_bytes, chunk_at, sums_at, count, zeros_at, fetch, 4, BITS, PAIRED, LEVELS)
    elif rows == 3:
        add_unpacked(x, row_bytes, chunk_at, sums_at, count, zeros_at, fetch, 3, BITS, PAIRED, LEVELS)
    elif rows == 2:
        add_unpacked(x, row_bytes, chunk_at, sums_at, count, zeros_at, fetch, 2, BITS, PAIRED, LEVELS)
    else:
        add_unpacked(x, row_bytes, chunk_at, sums_at, count, zeros_at, fetch, 1, BITS, PAIRED, LEVELS)


@inlined(fastmath=FAST)
def multiply_block(
    block_at: Any, next_at: Any, x: Any, rows: Any, words: Any, part: Any, total_at: Any, sums_at: Any,
    nothing_at: Any, kept_at: Any, scales_at: Any, zeros_at: Any, BITS: Any, PAIRED: Any, LEVELS: Any,
) -> None:  # fmt: skip
    """total = x weight, fp32 [rows, 64], for one block of outputs; the first chunk of the block at `next_at` is fetched
    meanwhile. sums_at: room for as much; nothing_at: zeros of GROUP rows; kept_at: room for a chunk of unpacked words.
    scales_at, zeros_at: those of the first part of this block, where it is quantized."""
    literally(BITS)
    literally(PAIRED)
    literally(LEVELS)
    each = word_bytes(BITS, PAIRED)
    for begin in range(0, words, part):
        end = min(begin + part, words)
        into = sums_at if begin else total_at
        sums = carray(at(into), rows * BLOCK, np.float32)
        if BITS < 16 and rows <= _UNPACKED_ROWS:
            for i in range(rows * BLOCK):
                sums[i] = np.float32(0)
        for chunk in range(begin, end, CHUNK):
            count = min(CHUNK, end - chunk)
            chunk_at = block_at + chunk * each
            fetch = chunk_at + CHUNK * each if chunk + CHUNK < words else next_at
            nothing = 0 if chunk > begin else nothing_at
            if BITS == 16:
                _multiply_chunk(chunk_at, x + chunk * 4, rows, words * 4, count, nothing, into, fetch, each, PAIRED)
            elif rows > _UNPACKED_ROWS:
                unpack(chunk_at, kept_at, count, zeros_at, fetch, BITS, PAIRED, LEVELS)
                _multiply_chunk(kept_at, x + chunk * 4, rows, words * 4, count, nothing, into, fetch, 0, PAIRED)
            else:
                _multiply_unpacked(
                    chunk_at, x + chunk * 4, rows, words * 4, count, into, zeros_at, fetch, BITS, PAIRED, LEVELS
                )
        if BITS < 16:
            scales = carray(at(scales_at), BLOCK, np.float32)
            for row in range(rows):
                for i in range(BLOCK):
                    sums[row * BLOCK + i] *= scales[i]
            scales_at += BLOCK * 4
            zeros_at += BLOCK
        if begin:
            total = carray(at(total_at), rows * BLOCK, np.float32)
            for i in range(rows * BLOCK):
                total[i] += sums[i]


@inlined(fastmath=set())
def word_bytes(bits: Any, paired: Any) -> Any:
    """Bytes of weight that 64 outputs have for a word of the rows."""
    return BLOCK * (2 if paired else 1) * bits // 8
