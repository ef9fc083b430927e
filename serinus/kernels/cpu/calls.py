"""Calls: bodies with their arguments, made once and run again and again, one after the other, by one compiled call.

In a decode step each kernel computes for some 100 us, and the Python that checks its tensors, allocates its output and
fills its arguments takes 30 us before it, as the weights have emptied the caches meanwhile. What does not differ from
step to step (addresses of weights, pools and buffers that stay) is therefore written down once.

Arguments are copied before each run: a body counts in them, and finds them as they were made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from serinus.kernels.cpu.body import PARALLEL_AT, VERSION, Body, compile_body, fields
from serinus.kernels.cpu.scalar import at, carray, intrinsic, ir

_WORDS_MAX = 64
"""Of the arguments of one call."""
_COLUMNS = 5
_Run = fields("ticket table begin end parallel failed said")
"""`table`: of each call the address of its body, its threads, where its arguments lie, how many words they are, and
which of them says that something was wrong (-1: none). `failed`, `said`: 1 + the call that said so, and the word."""


@dataclass(slots=True, kw_only=True)
class KernelCall:
    """A kernel that is ready to be started."""

    body: Body
    arguments: ctypes.Structure
    threads: int
    refusal: str = ""
    """The argument that is not 0 after a run that met something wrong; empty = there is none."""
    keeps: tuple[object, ...] = ()
    """What its addresses point to."""

    def run(self) -> int:
        """Run it once, to the end; its `refusal`."""
        self.body(self.arguments, self.threads)
        return int(getattr(self.arguments, self.refusal)) if self.refusal else 0


class Calls:
    """So many of them, in their order. `put` them all before a run."""

    def __init__(self, count: int) -> None:
        self._calls: list[KernelCall | None] = [None] * count
        self._table = np.zeros((count, _COLUMNS), np.int64)
        self._run = _Run(0, self._table.ctypes.data, 0, 0, PARALLEL_AT, 0, 0)
        self._start = _calls_body(VERSION).alone(self._run)

    def put(self, first: int, calls: Sequence[KernelCall]) -> None:
        """These are the calls from `first` on; what their structures hold may change, as long as they are there."""
        for place, call in enumerate(calls, first):
            self._calls[place], self._table[place] = call, _line(call)

    def set_threads(self, index: int, threads: int) -> None:
        """So many for one of them, from now on."""
        self._table[index, 1] = threads

    def run(self, begin: int, end: int) -> tuple[int, int] | None:
        """Run those from `begin` to `end` - 1. Ends with the first that refuses: which one, and what it says."""
        arguments = self._run
        arguments.begin, arguments.end = begin, end
        self._start()
        return (arguments.failed - 1, arguments.said) if arguments.failed else None


def warm() -> None:
    """Compile, or load from the disk."""
    _calls_body(VERSION)


def _line(call: KernelCall) -> tuple[int, ...]:
    words = ctypes.sizeof(call.arguments) // 8
    assert words <= _WORDS_MAX, f"kernels: a call of {words} words, expected at most {_WORDS_MAX}"
    refusal = getattr(type(call.arguments), call.refusal).offset // 8 if call.refusal else -1
    return call.body.address, call.threads, ctypes.addressof(call.arguments), words, refusal


@intrinsic(types.void, types.int64, types.int64, types.int64, types.int64)
def _start(builder: Any, parallel: Any, body: Any, arguments: Any, threads: Any) -> None:
    """Run a body: on this thread, or where `parallel` is an address by GOMP_parallel, which lies there."""
    byte_at, void, i32 = ir.IntType(8).as_pointer(), ir.VoidType(), ir.IntType(32)
    alone, team = ir.FunctionType(void, [byte_at]), ir.FunctionType(void, [byte_at, byte_at, i32, i32])
    given = builder.inttoptr(arguments, byte_at)
    with builder.if_else(builder.icmp_signed("==", parallel, ir.IntType(64)(0))) as (here, several):
        with here:
            builder.call(builder.inttoptr(body, alone.as_pointer()), [given])
        with several:
            count = builder.trunc(threads, i32)
            start = builder.inttoptr(parallel, team.as_pointer())
            builder.call(start, [builder.inttoptr(body, byte_at), given, count, i32(0)])


@cache
def _calls_body(version: int) -> Body:
    def run_calls(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 7, np.int64)
        table = carray(at(a[1]), (a[3], _COLUMNS), np.int64)
        live = np.empty(_WORDS_MAX, np.int64)
        a[5] = 0
        for i in range(a[2], a[3]):
            given = carray(at(table[i, 2]), table[i, 3], np.int64)
            for word in range(table[i, 3]):
                live[word] = given[word]
            _start(a[4] if table[i, 1] > 1 else 0, table[i, 0], live.ctypes.data, table[i, 1])
            if table[i, 4] >= 0 and live[table[i, 4]] != 0:
                a[5], a[6] = i + 1, live[table[i, 4]]
                break

    return compile_body(run_calls)
