"""Attention of single query tokens over paged KV, bf16 or FP8, on the processor's bf16 dot products (AVX512-BF16).

Shapes: T = tokens of this step, N = query heads, H = KV heads, G = N / H, D = head size, U = work items.

A work item is one query token and a range of KV heads. It walks what it sees (its context, or its window's end of it)
in blocks of 64 positions: scores, running maximum and sum (online softmax, Milakov and Gimelshein, 2018), weighted
values. Within a block 16 positions go together: 16 scores share the shuffles of their horizontal sums, and the sums of
16 weighted rows stay in registers. Meanwhile the rows of heads that come next are prefetched: the hardware's
prefetchers stop at the end of a page, and one head's rows lie H * D elements apart. They go to the first-level cache, a
few heads ahead, so that a line waits once in the core's few slots for lines on their way: prefetched to the second
level, 16 rows of all heads ahead, it takes a slot twice.

Measured on 2 Zen 5 cores, 12 layers of 16 x 288 tokens, 16/8 heads of 128, 226 MB: 5.3 ms, prefetched to the second
level 6.0, without any prefetch 7.5; arithmetic alone (rows in the cache) 1.8 ms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from serinus.kernels.cpu.body import VERSION, Body, compile_body
from serinus.kernels.cpu.digest import BLOCK, ROWS, absorb_16_rows, fold_16_sums
from serinus.kernels.cpu.fp8 import BF16, bytes_of
from serinus.kernels.cpu.scalar import at, cap_score, carray, fetch_add, host_has, inlined, narrow
from serinus.kernels.cpu.vector import add_rows, begin_shares, dots_16, take_shares
from serinus.kernels.cpu.watching import (
    PACKED,
    PLAIN,
    WATCH_INTEGERS,
    add_sums,
    any_due,
    digest_due,
    find_entries,
    own_sums,
    weigh,
)

_BLOCK = 64
"""Positions of which the scores are kept at once."""
_GROUP = 16
"""Positions that are computed together."""
_AHEAD_BYTES = 8192
"""Of keys or values that are prefetched before they are used: of the first cache, which others use as well, a quarter
or less."""
UNIT_FIELDS = 9
"""Of a work item: row, context, token, first KV head, end of KV heads, first position that it sees, sequence in the
batch, which of that sequence's queries it is, how many there are."""
_FIELDS, _WATCHED_FIELDS = 16, 16 + len(WATCH_INTEGERS.split())


def serves(head_size: int, group: int, dtype: torch.dtype) -> bool:
    """Whether this kernel takes such heads on this processor."""
    return (
        dtype == torch.bfloat16 and head_size % 32 == 0 and head_size <= 256 and group <= 8 and host_has("avx512bf16")
    )


@inlined(fastmath=set())
def _ahead(head: Any, head_end: Any, held: Any, place: Any, pool: Any, next_place: Any, next_pool: Any) -> Any:
    """Which rows are prefetched, of which pool and head: behind the last head it is the first of what comes next."""
    if head < head_end:
        return place, pool, head
    return next_place, next_pool, head - held


@cache
def decode_body(
    size: int, group: int, capped: bool, watched: int = 0, kind: int = BF16, version: int = VERSION
) -> Body:
    """The kernel for one shape of heads: compiled, or loaded from the disk. `capped`: scores go through tanh;
    `kind`: of the pools, bf16 or FP8.

    `watched`: PACKED or PLAIN; the rows that are due are digested too, 16 positions right after attention read them,
    from the cache. The arguments of WATCH_INTEGERS follow then. The last integer is the address of sinks, or 0.
    """
    head_bytes = size * bytes_of(kind)
    half, lanes = size // 2, head_bytes // 2
    blocks = lanes // BLOCK
    ahead_max = max(1, _AHEAD_BYTES // (_GROUP * head_bytes))
    field_count = _WATCHED_FIELDS if watched else _FIELDS

    def attend(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, field_count, np.int64)
        scale = np.float32(carray(args, field_count, np.float64)[field_count - 2])
        cap = np.float32(carray(args, field_count, np.float64)[field_count - 1])
        sinks = a[field_count - 3]
        unit_count, heads, kv_heads, context_max = a[6], a[8], a[9], a[10]
        units = carray(at(a[7]), (unit_count, UNIT_FIELDS), np.int64)
        row_bytes = kv_heads * head_bytes
        total = np.empty(heads * size, np.float32)
        score = np.empty(heads * _BLOCK, np.float32)
        top = np.empty(heads, np.float32)
        mass = np.empty(heads, np.float32)
        shrink = np.empty(heads, np.float32)
        rows = np.empty(_BLOCK + _GROUP, np.int64)
        entries = np.empty(_BLOCK, np.int64)
        weights = np.empty(_BLOCK, np.int32)
        parts = np.zeros(_GROUP * 32, np.int32)
        found = np.empty(2 * _GROUP, np.int32)
        bias = np.zeros(4, np.int32)
        words = np.empty(2 * ROWS, np.int64)
        if watched:
            sums = own_sums(a[16], a[17], a[23], a.ctypes.data + 24 * 8)
            due = carray(at(a[15]), 7 * a[19] * a[20], np.int64)
        while True:
            u = fetch_add(a.ctypes.data, 1)
            if u >= unit_count:
                break
            row, context, token, head, head_end = units[u, 0], units[u, 1], units[u, 2], units[u, 3], units[u, 4]
            held = head_end - head
            ahead, further = min(held, ahead_max), min(held, ahead_max + 1)
            table = carray(at(a[4] + row * context_max * 4), context, np.int32)
            query = a[1] + token * heads * size * 2
            total[head * group * size : head_end * group * size] = np.float32(0)
            begin_shares(top, mass, head * group, head_end * group, sinks)
            if watched == PACKED:
                # Of the heads of this item; factors of head h and half i lie at (i * kv_heads + h) * lanes * 8 bytes.
                lacking = carray(at(a[14]), 4 * kv_heads, np.int32)
                bias[:] = 0
                for i in range(2):
                    for h in range(head, head_end):
                        bias[2 * i] += lacking[(i * kv_heads + h) * 2]
                        bias[2 * i + 1] += lacking[(i * kv_heads + h) * 2 + 1]
            for start in range(units[u, 5], context, _BLOCK):
                count = min(_BLOCK, context - start)
                for p in range(_BLOCK + _GROUP):  # those past the block are prefetched: its successor starts there
                    slot = np.int64(table[min(start + p, context - 1)])
                    if slot < 0 or slot >= a[11]:
                        a[12], slot = row + 1, np.int64(0)
                    rows[p] = slot * row_bytes
                some_due = watched and find_entries(entries, due, a[19], a[20], units[u, 6], start, count, a[18])
                if some_due:
                    weigh(weights, units[u, 7], units[u, 8], context, a[22], start)
                for p in range(0, count, _GROUP):
                    is_due = some_due and any_due(entries, p)
                    pool, first = (a[2], p + _GROUP) if p + _GROUP < count else (a[3], 0)
                    for h in range(head, head_end):
                        place, then_at, then = _ahead(h + ahead, head_end, held, p, a[2], first, pool)
                        dots_16(
                            query + h * (group * size * 2), a[2] + h * head_bytes, rows.ctypes.data + p * 8, scale,
                            score.ctypes.data + (h * (group * _BLOCK) + p) * 4, _BLOCK,
                            then_at + then * head_bytes, rows.ctypes.data + place * 8, size, group, kind,
                        )  # fmt: skip
                        if watched == PACKED and is_due:
                            place, then_at, then = _ahead(h + further, head_end, held, p, a[2], first, pool)
                            absorb_16_rows(
                                a[2] + h * head_bytes, rows.ctypes.data + p * 8, a[13] + h * (lanes * 8),
                                parts.ctypes.data, then_at + then * head_bytes, rows.ctypes.data + place * 8, blocks, 1,
                            )  # fmt: skip
                    if watched == PACKED and is_due:
                        fold_16_sums(parts.ctypes.data, bias.ctypes.data, found.ctypes.data)
                        add_sums(sums, a[17], entries, weights, p, found)
                    if watched == PLAIN and is_due:
                        digest_due(
                            sums, a[17], entries, weights, rows, a[2], p, min(p + _GROUP, count), a[13], a[21],
                            head * lanes, head_end * lanes, words,
                        )  # fmt: skip
                if capped:
                    for i in range(head * group * _BLOCK, head_end * group * _BLOCK):
                        score[i] = cap_score(score[i], cap)
                for n in range(head * group, head_end * group):
                    take_shares(
                        score.ctypes.data + n * (_BLOCK * 4),
                        count,
                        top.ctypes.data + n * 4,
                        mass.ctypes.data + n * 4,
                        shrink.ctypes.data + n * 4,
                        _BLOCK,
                    )
                for p in range(0, count, _GROUP):
                    is_due = some_due and any_due(entries, p)
                    pool, first = (a[3], p + _GROUP) if p + _GROUP < count else (a[2], _BLOCK)
                    for h in range(head, head_end):
                        place, then_at, then = _ahead(h + ahead, head_end, held, p, a[3], first, pool)
                        add_rows(
                            a[3] + h * head_bytes, rows.ctypes.data + p * 8, min(_GROUP, count - p),
                            score.ctypes.data + (h * (group * _BLOCK) + p) * 4, _BLOCK,
                            total.ctypes.data + h * (group * size * 4), shrink.ctypes.data + h * (group * 4),
                            then_at + then * head_bytes, rows.ctypes.data + place * 8, size, group, kind,
                        )  # fmt: skip
                        if watched == PACKED and is_due:
                            place, then_at, then = _ahead(h + further, head_end, held, p, a[3], first, pool)
                            absorb_16_rows(
                                a[3] + h * head_bytes, rows.ctypes.data + p * 8, a[13] + (kv_heads + h) * (lanes * 8),
                                parts.ctypes.data, then_at + then * head_bytes, rows.ctypes.data + place * 8, blocks, 1,
                            )  # fmt: skip
                    if watched == PACKED and is_due:
                        fold_16_sums(parts.ctypes.data, bias.ctypes.data + 8, found.ctypes.data)
                        add_sums(sums + a[17] * 8, a[17], entries, weights, p, found)
                    if watched == PLAIN and is_due:
                        digest_due(
                            sums + a[17] * 8, a[17], entries, weights, rows, a[3], p, min(p + _GROUP, count),
                            a[13] + a[21] * 8, a[21], head * lanes, head_end * lanes, words,
                        )  # fmt: skip
                    shrink[:] = np.float32(1)
            for n in range(head * group, head_end * group):
                inverse = np.float32(1) / mass[n]
                out = carray(at(a[5] + (token * heads + n) * size * 2), half, np.uint32)
                for c in range(0, half, 16):
                    for i in range(16):
                        even = np.uint32(narrow(total[n * size + c * 2 + i] * inverse))
                        odd = np.uint32(narrow(total[n * size + c * 2 + 16 + i] * inverse))
                        out[c + i] = even | (odd << np.uint32(16))

    return compile_body(attend)
