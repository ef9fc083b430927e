"""What the attention kernels of this column share to digest the rows that they read: which positions are due, with what
weight, and how sums are added. Inlined into their bodies.

Several readers. Where the queries of a sequence are computed by several work items, each of them reads the rows for
itself, and a byte may be right for one and wrong for another. So each digests what it read. Their digests are weighted
such that the weights add up to 1: the first of n readers has 3 - 2n, every other one 2. Where all read the same, the
sum is that of one; a difference d within one lane that some of them met adds d times an odd number, or 2d times their
number, which is not 0 modulo 2**32 for any number of readers below 2**15.

Threads. Items of one sequence add to the same sums, so each thread has a slice of its own of sums_P22E.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from serinus.kernels.contracts import LayerDigest
from serinus.kernels.cpu.digest import BLOCK, ROWS, digest_row, digest_rows
from serinus.kernels.cpu.scalar import at, carray, fetch_add, inlined

PACKED, PLAIN = 1, 2
"""How a body digests what it reads: by packed factors, 16 rows at a time, or by plain ones, row by row; 0: not."""
GROUP = 16
"""Positions that are digested together."""
MISSING = -1
"""In place of an entry: the position is not due."""
WATCH_INTEGERS = " factors bias due sums entry_count page_size sequence_count sets lanes sees slices thread"
"""Arguments that follow those of a body that digests nothing; `lanes`: W of plain factors, `sees`: positions that a
query sees, `slices`: P of sums_P22E, `thread`: 0, counted up by the threads."""


def is_packed(digest: LayerDigest) -> bool:
    """Whether its factors were packed by this column."""
    return digest.factors.bias is not None and digest.factors.factors.dtype == torch.int16


def watch_integers(digest: LayerDigest, how: int, sees: int, sequences: int) -> tuple[int, ...]:
    """What WATCH_INTEGERS are for a digest."""
    packed, sums = digest.factors, digest.sums_P22E
    factors = packed.plain_22W if how == PLAIN else packed.factors
    return (
        factors.data_ptr(), 0 if packed.bias is None else packed.bias.data_ptr(), digest.due_7B.data_ptr(),
        sums.data_ptr(), sums.shape[-1], digest.page_size, sequences, digest.due_7B.shape[1] // sequences,
        packed.plain_22W.shape[-1], sees, len(sums), 0,
    )  # fmt: skip


@inlined(fastmath=set())
def own_sums(sums: Any, entry_count: Any, slices: Any, thread_at: Any) -> Any:
    """The address of the slice of this thread."""
    if slices == 1:
        return sums
    return sums + min(fetch_add(thread_at, 1), slices - 1) * entry_count * 16


@inlined(fastmath=set())
def find_entries(entries: Any, due: Any, batch: Any, sets: Any, b: Any, start: Any, count: Any, page_size: Any) -> Any:
    """entries[p] = where the sums of position start + p of sequence b go, for p < `count`; behind, and where nothing
    is due, MISSING. Returns whether any is due; where none is, nothing is written. From one page that is due to the
    next: mostly there is none, and two divisions say so."""
    width, found = sets * batch, False
    for column in range(b, width, batch):
        low, high, first = due[2 * width + column], due[3 * width + column], due[4 * width + column]
        stride, begin = due[5 * width + column], due[6 * width + column]
        low, high = max(low, start), min(high, start + count)
        if low >= high:
            continue
        turn = max(0, (low // page_size - first + stride - 1) // stride)
        page_start, entry = (first + turn * stride) * page_size, begin + turn * page_size
        while page_start < high:
            if not found:
                entries[:], found = MISSING, True
            for position in range(max(low, page_start), min(high, page_start + page_size)):
                entries[position - start] = entry + position - page_start
            page_start, entry = page_start + stride * page_size, entry + page_size
    return found


@inlined(fastmath=set())
def any_due(entries: Any, first: Any) -> Any:
    """Whether any of 16 positions is."""
    largest = entries[first]
    for p in range(first, first + GROUP):
        largest = max(largest, entries[p])
    return largest >= 0


@inlined(fastmath=set())
def add_sums(sums: Any, entry_count: Any, entries: Any, weights: Any, first: Any, found: Any) -> None:
    """Add both sums of 16 rows, weighted, to those of their entries. sums: int32 [2, E] at an address."""
    strays = 0
    for p in range(GROUP):
        strays += entries[first + p] != entries[first] + p
    if entries[first] >= 0 and strays == 0:
        low = carray(at(sums + entries[first] * 4), GROUP, np.int32)
        high = carray(at(sums + (entry_count + entries[first]) * 4), GROUP, np.int32)
        for p in range(GROUP):
            low[p] += found[p] * weights[first + p]
        for p in range(GROUP):
            high[p] += found[GROUP + p] * weights[first + p]
        return
    both = carray(at(sums), 2 * entry_count, np.int32)
    for p in range(GROUP):
        entry = entries[first + p]
        if entry >= 0:
            both[entry] += found[p] * weights[first + p]
            both[entry_count + entry] += found[GROUP + p] * weights[first + p]


@inlined(fastmath=set())
def digest_due(
    sums: Any, entry_count: Any, entries: Any, weights: Any, rows: Any, base: Any, begin: Any, behind: Any,
    factors: Any, lanes: Any, first: Any, end: Any, words: Any,
) -> None:  # fmt: skip
    """Digest lanes first .. end - 1 of the rows of those positions begin .. behind - 1 that are due by plain factors,
    int32 [2, lanes] at an address, and add both sums, weighted. Lanes that have no factors are not digested.

    rows: offsets, in bytes, from `base`. words: int64 [2 * ROWS], for the time of the call.
    """
    end = min(end, lanes)
    if first >= end:
        return
    ones, others = factors + first * 4, factors + (lanes + first) * 4
    both = carray(at(sums), 2 * entry_count, np.int32)
    for p in range(begin, behind, ROWS):
        count, due = min(ROWS, behind - p), 0
        for r in range(count):
            due += entries[p + r] >= 0
        if not due:
            continue
        for r in range(count):
            words[r] = base + rows[p + r] + first * 2
        if due == ROWS and (end - first) % BLOCK == 0:
            digest_rows(words.ctypes.data, ones, others, (end - first) // BLOCK, words.ctypes.data + 8 * ROWS, 0)
        else:
            for r in range(count):
                if entries[p + r] >= 0:
                    words[ROWS + r] = digest_row(words[r], ones, others, end - first)
        for r in range(count):
            entry, found, weight = entries[p + r], words[ROWS + r], weights[p + r]
            if entry >= 0:
                both[entry] += np.int32(found & 0xFFFFFFFF) * weight
                both[entry_count + entry] += np.int32((found >> 32) & 0xFFFFFFFF) * weight


@inlined(fastmath=set())
def weigh(weights: Any, query: Any, queries: Any, context: Any, sees: Any, start: Any) -> None:
    """weights[p] of the digest that this query makes of position start + p: see above. `context`: its own."""
    for p in range(len(weights)):
        weight = 1
        if queries > 1:
            readers = min(queries, start + p + sees - context + 1)
            weight = 2 if query > 0 else 3 - 2 * readers
        weights[p] = weight
