"""Work items of a batch of one query token a sequence, laid out by one compiled call: what `paged_attention` does for
batches of every kind, for those that come in every decode step.

B = sequences, U = work items.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields
from serinus.kernels.cpu.decode_attention import UNIT_FIELDS
from serinus.kernels.cpu.scalar import at, carray

Lay = fields("ticket rows contexts units count row_count width sees threads kv_heads unit_count work bad", "uneven")
"""`units`: room for [B * kv_heads, UNIT_FIELDS]. `sees`: positions that a query sees. `uneven`: of how many times its
even part a thread has at most before sequences are cut. `unit_count`, `work`, `bad` are answers: items, positions that
they see, whether a row or a context is none of the table's."""
_FIELDS = len(Lay._fields_)


def warm() -> None:
    """Compile, or load from the disk."""
    _lay_body(VERSION)


def run_lay(arguments: Any) -> None:
    """Lay out a batch (Lay): the longest sequence first, each cut where that keeps the threads busy."""
    _lay_body(VERSION)(arguments, 1)


@cache
def _lay_body(version: int) -> Body:
    unit_fields = UNIT_FIELDS

    def lay(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        uneven = carray(args, _FIELDS, np.float64)[_FIELDS - 1]
        count, threads, kv_heads = a[4], a[8], a[9]
        rows = carray(at(a[1]), count, np.int64)
        contexts = carray(at(a[2]), count, np.int64)
        order = np.empty(count, np.int64)
        loads = np.zeros(threads, np.int64)
        a[10], a[11], a[12] = 0, 0, 0
        for b in range(count):
            if rows[b] < 0 or rows[b] >= a[5] or contexts[b] < 1 or contexts[b] > a[6]:
                a[12] = 1
                return
            place = b
            while place > 0 and min(contexts[order[place - 1]], a[7]) < min(contexts[b], a[7]):
                order[place] = order[place - 1]
                place -= 1
            order[place] = b
        for b in order:
            least = 0
            for t in range(1, threads):
                if loads[t] < loads[least]:
                    least = t
            loads[least] += min(contexts[b], a[7])
            a[11] += min(contexts[b], a[7])
        parts = min(kv_heads, threads if loads.max() * threads > uneven * a[11] else 1)
        a[10] = count * parts
        units = carray(at(a[3]), (a[10], unit_fields), np.int64)
        u = 0
        for b in order:
            for i in range(parts):
                units[u, 0], units[u, 1], units[u, 2] = rows[b], contexts[b], b
                units[u, 3], units[u, 4] = kv_heads * i // parts, kv_heads * (i + 1) // parts
                units[u, 5], units[u, 6] = max(0, contexts[b] - a[7]), b
                units[u, 7], units[u, 8] = 0, 1
                u += 1

    return compile_body(lay)
