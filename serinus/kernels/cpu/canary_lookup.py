"""What the canary's watch asks of row tables, each in one compiled call: what sequences read, what they have stored,
and which columns of a plan are those of a batch.

R, C = rows and columns of req_to_token, B = sequences, T = tokens stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.digest import ask_for
from serinus.kernels.cpu.scalar import at, carray

Look = fields("ticket table written columns bound count out")
"""`written`: the rows as the leader wrote them, like `table`. `bound`: as `Watch.expand` takes it. `out`: [4, B],
slots, positions, hashes and names as `canary_bind` takes them."""
Find = fields("ticket table columns slot_count rows starts positions slots count first_name names found placed")
"""`names`, `found`, `placed`: [T] each, the sequence of each token that is stored, the slot that its row names, and its
position; -1 for padding, which has no slot to be stored in."""
Match = fields(
    "ticket due count rows starts contexts sequences row_count places out left sets queries longest sum left_count"
)
"""`due`: [7, count], the columns of a plan. `places`: [2, row_count], -1 everywhere, and so again afterwards. `out`:
room for [7, 2 * sequences], the columns in the order of the batch, in `sets` sets. `left`: [count], 1 where a column
is of none of its sequences. The last four are answers, too: tokens of the batch, its longest context, their sum, and
how many columns are of none of its sequences."""

_LINE = 16
"""Entries of a line of the caches..."""
_ASKED = 1024
"""...and of a row that are asked for before they are read; what follows comes by itself."""


def warm() -> None:
    """Compile, or load from the disk."""
    for body in (_look_body, _find_body, _match_body):
        body(VERSION)


def look_call(arguments: ctypes.Structure) -> KernelCall:
    """Look up the last slots that sequences read, and hold all that they read against what the leader wrote: where an
    entry differs, that is what is looked up, with a hash that no slot has."""
    return KernelCall(body=_look_body(VERSION), arguments=arguments, threads=1)


def find_call(arguments: ctypes.Structure) -> KernelCall:
    """Where rows say that tokens are that were stored: attention has read them there. 0 where that is no slot."""
    return KernelCall(body=_find_body(VERSION), arguments=arguments, threads=1)


def match_run(arguments: ctypes.Structure) -> Callable[[], object]:
    """`match_columns` of kernels.due, for rows that have two columns at most, of arguments that stay."""
    return _match_body(VERSION).alone(arguments)


@cache
def _look_body(version: int) -> Body:
    def look(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 7, np.int64)
        columns, count = a[3], a[5]
        bound = carray(at(a[4]), 5 * count, np.int64)
        out = carray(at(a[6]), 4 * count, np.int64)
        for b in range(count):  # rows lie far apart: their lines are asked for before any of them is needed
            row, low, position = bound[count + b], bound[2 * count + b], bound[3 * count + b]
            end = min(position, low + _ASKED) + 1
            for p in range(low, end + _LINE, _LINE):
                ask_for(a[1] + (row * columns + min(p, position)) * 4)
                ask_for(a[2] + (row * columns + min(p, position)) * 4)
        for b in range(count):
            row, low, position = bound[count + b], bound[2 * count + b], bound[3 * count + b]
            chain, reads, strays = bound[4 * count + b], position - low + 1, np.int32(0)
            named = carray(at(a[1] + (row * columns + low) * 4), reads, np.int32)
            written = carray(at(a[2] + (row * columns + low) * 4), reads, np.int32)
            for i in range(reads):
                strays |= named[i] ^ written[i]
            if strays != 0:
                position, chain = low, ~chain
                while position - low < reads - 1 and named[position - low] == written[position - low]:
                    position += 1
            out[b], out[count + b] = np.int64(named[position - low]), position
            out[2 * count + b], out[3 * count + b] = chain, bound[b]

    return compile_body(look)


@cache
def _find_body(version: int) -> Body:
    def find(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 13, np.int64)
        columns, slot_count, count = a[2], a[3], a[8]
        rows = carray(at(a[4]), count, np.int64)
        starts = carray(at(a[5]), count + 1, np.int64)
        total = starts[count]
        positions = carray(at(a[6]), total, np.int64)
        slots = carray(at(a[7]), total, np.int64)
        names = carray(at(a[10]), total, np.int64)
        found = carray(at(a[11]), total, np.int64)
        placed = carray(at(a[12]), total, np.int64)
        for b in range(count):
            row = carray(at(a[1] + rows[b] * columns * 4), columns, np.int32)
            for t in range(starts[b], starts[b + 1]):
                slot = np.int64(row[positions[t]])
                names[t] = a[9] + b
                found[t] = slot if 0 <= slot < slot_count else 0
                placed[t] = positions[t] if slots[t] != 0 else -1

    return compile_body(find)


@cache
def _match_body(version: int) -> Body:
    def match(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 16, np.int64)
        count, sequences, row_count = a[2], a[6], a[7]
        due = carray(at(a[1]), 7 * count, np.int64)
        rows = carray(at(a[3]), sequences, np.int64)
        contexts = carray(at(a[5]), sequences, np.int64)
        places = carray(at(a[8]), 2 * row_count, np.int64)
        left = carray(at(a[10]), count, np.int64)
        for c in range(count):
            row = due[count + c]
            places[row_count + row] = places[row]
            places[row] = c
            left[c] = 1
        sets, a[13], a[14] = 1, 0, 0
        for b in range(sequences):
            if places[row_count + rows[b]] >= 0:
                sets = 2
            a[13] = max(a[13], contexts[b])
            a[14] += contexts[b]
        width = sets * sequences
        out = carray(at(a[9]), 7 * width, np.int64)
        for turn in range(sets):
            for b in range(sequences):
                c = places[turn * row_count + rows[b]]
                for i in range(7):
                    out[i * width + turn * sequences + b] = due[i * count + c] if c >= 0 else 0
                if c >= 0:
                    left[c] = 0
        a[15] = 0
        for c in range(count):
            row = due[count + c]
            places[row], places[row_count + row] = -1, -1
            a[15] += left[c]
        a[11], a[12] = sets, carray(at(a[4]), sequences + 1, np.int64)[sequences]

    return compile_body(match)
