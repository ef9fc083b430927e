"""Scalars that numba has no words for: bf16 in and out, raw addresses, exp2 and log that LLVM can vectorise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import llvmlite.ir  # type: ignore[import-untyped]
import numba
import numba.core.cgutils
import numba.extending
import numpy as np
from numba import types

from serinus.kernels.canary import SEQUENCES

# What numba and llvmlite declare is what these are in Python; inside a kernel they mean something else.
ir: Any = llvmlite.ir
cgutils: Any = numba.core.cgutils
carray: Any = numba.carray  # type: ignore[attr-defined]
literally: Any = numba.literally  # type: ignore[attr-defined]


@cache
def host_has(feature: str) -> bool:
    """Whether the processor has an instruction set, by LLVM's name for it."""
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


def intrinsic(returns: Any = types.void, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function that writes LLVM IR where it is called.

    It takes the builder and then what a kernel calls it with: an argument in capitals is a compile-time constant and
    comes as a number of Python's, any other as a value of LLVM's. It returns the value of the call, if it has one.

    Args:
        returns: numba's type of the value.
        takes: numba's types of the first arguments, which are converted; what follows is taken as it is given.
    """

    def declare(function: Callable[..., Any]) -> Any:
        constants = [name.isupper() for name in inspect.signature(function).parameters][1:]

        @wraps(function)  # numba reads the names of the arguments from it, less the first one
        def typed(_typing: Any, *given: Any) -> Any:
            def write(context: Any, builder: Any, _signature: Any, values: Sequence[Any]) -> Any:
                each = zip(given, values, constants, strict=True)
                args = [kind.literal_value if constant else value for kind, value, constant in each]
                result = function(builder, *args)
                return context.get_dummy_value() if returns is types.void else result

            return returns(*takes, *given[len(takes) :]), write

        return numba.extending.intrinsic(prefer_literal=True)(typed)

    return declare


def inlined(*, fastmath: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a part of kernels, in each of them at every call. Divisions do not look for zero, which would keep
    LLVM from making vectors.

    What is called instead is a weak symbol of each body: the process that compiles a body runs the part's own machine
    code, one that loads the body runs what was optimised with it, and their sums differ in the last bit.
    """
    return lambda function: numba.njit(fastmath=fastmath, error_model="numpy", forceinline=True)(function)


FAST = {"contract", "reassoc", "nsz", "arcp"}
"""Liberties LLVM may take in the kernels: order of sums and fused multiply-add. NaN and infinity keep their meaning."""

EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
"""Taylor polynomial of 2 ** r on [-1/2, 1/2], the highest power first."""

LOG2_E = 1.4426950408889634

_F32 = ir.FloatType()
_I32 = ir.IntType(32)


@intrinsic(types.voidptr, types.int64)
def at(builder: Any, address: Any) -> Any:
    """The int64 address as a pointer, for numba.carray."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@intrinsic(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, step: Any) -> Any:
    """Add to the int64 at an address, atomically; returns what was there."""
    pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", pointer, step, "monotonic")


@intrinsic(types.void, types.int64, types.int64)
def publish(builder: Any, address: Any, step: Any) -> None:
    """Add to the int64 at an address; a thread that has seen the sum (`await_count`) sees all that
    this one wrote before."""
    pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
    builder.atomic_rmw("add", pointer, step, "release")


@intrinsic(types.void, types.int64, types.int64)
def await_count(builder: Any, address: Any, count: Any) -> None:
    """Spin until the int64 at an address has reached a number. What is waited for must be under way on some thread: no
    thread may be asked to begin it."""
    pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
    waiting, done = builder.append_basic_block("waiting"), builder.append_basic_block("done")
    builder.branch(waiting)
    builder.position_at_end(waiting)
    pause = ir.FunctionType(ir.VoidType(), [])
    if host_has("sse2"):
        builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
    seen = builder.load_atomic(pointer, "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", seen, count), waiting, done)
    builder.position_at_end(done)


@intrinsic(types.float32, types.uint16)
def widen(builder: Any, word: Any) -> Any:
    """bf16 bits (uint16) -> fp32, exactly."""
    return builder.bitcast(builder.shl(builder.zext(word, _I32), _I32(16)), _F32)


@intrinsic(types.uint16, types.float32)
def narrow(builder: Any, value: Any) -> Any:
    """fp32 -> bf16 bits (uint16), to the nearest even; every NaN becomes the quiet one."""
    word = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(word, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(builder.add(word, _I32(0x7FFF)), odd), _I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), ir.IntType(16))


@intrinsic(types.int32, types.float32)
def exponent(builder: Any, value: Any) -> Any:
    """The int32 e with value * 2 ** -e in [sqrt(1/2), sqrt(2)), for a positive, normal fp32."""
    return builder.ashr(builder.sub(builder.bitcast(value, _I32), _I32(0x3F3504F3)), _I32(23))


@intrinsic(types.int32, types.float32)
def whole(builder: Any, value: Any) -> Any:
    """A whole fp32 as int32; numba's own conversion goes through 64 bits, which halves the vectors."""
    return builder.fptosi(value, _I32)


@intrinsic(types.float32, types.float32, types.int32)
def scaled(builder: Any, value: Any, exponent: Any) -> Any:
    """value * 2 ** exponent, by adding to the exponent's bits; the result must be a normal number."""
    word = builder.add(builder.bitcast(value, _I32), builder.shl(exponent, _I32(23)))
    return builder.bitcast(word, _F32)


@intrinsic(types.float32, types.float32)
def nearest(builder: Any, value: Any) -> Any:
    """The nearest whole number, as fp32."""
    kind = ir.FunctionType(_F32, [_F32])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), [value])


GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants that splitmix64 adds and multiplies by."""
_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)


@inlined(fastmath=set())
def splitmix(x: Any) -> Any:
    """splitmix64 of a uint64."""
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@inlined(fastmath={"contract", "nsz"})
def exp2(x: Any) -> Any:
    """2 ** x in fp32, within 2 units in the last place; x is held to [-126, 127], NaN stays NaN.

    A Taylor polynomial of degree 6 on [-1/2, 1/2] and the exponent added into the bits: no branch, no table, so LLVM
    makes vectors of it (math.exp would be a call per element).
    """
    x = np.float32(-126.0) if x < np.float32(-126.0) else x
    x = np.float32(127.0) if x > np.float32(127.0) else x
    steps = nearest(x)
    r = x - steps
    p = np.float32(EXP2[0])
    p = p * r + np.float32(EXP2[1])
    p = p * r + np.float32(EXP2[2])
    p = p * r + np.float32(EXP2[3])
    p = p * r + np.float32(EXP2[4])
    p = p * r + np.float32(EXP2[5])
    p = p * r + np.float32(EXP2[6])
    return scaled(p, whole(steps))


@inlined(fastmath={"contract", "nsz"})
def log(x: Any) -> Any:
    """Natural logarithm of a positive, normal fp32, within 4e-7 (absolute near 1, relative elsewhere).

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)); then log m = 2 artanh((m - 1) / (m + 1)), by its series.
    """
    e = exponent(x)
    m = scaled(x, np.int32(-e))
    t = (m - np.float32(1.0)) / (m + np.float32(1.0))
    s = t * t
    p = np.float32(2.0 / 9.0)
    p = p * s + np.float32(2.0 / 7.0)
    p = p * s + np.float32(2.0 / 5.0)
    p = p * s + np.float32(2.0 / 3.0)
    return np.float32(e) * np.float32(0.6931471805599453) + (t * s * p + np.float32(2.0) * t)


@inlined(fastmath={"contract", "nsz"})
def cap_score(x: Any, cap: Any) -> Any:
    """cap * tanh(x), within 2e-7 of the cap; NaN stays NaN."""
    return cap - (cap + cap) / (np.float32(1.0) + exp2(x * np.float32(2.0 * LOG2_E)))


@inlined(fastmath=set())
def mix(previous_hash: Any, token: Any, position: Any) -> Any:
    """The next hash of the canary's chain, of uint64 words."""
    return splitmix(previous_hash ^ splitmix(token ^ (position << np.uint64(32))))


@inlined(fastmath=set())
def count_sequence(by_sequence: Any, numbers: Any, name: Any, lane: Any, checked: Any) -> None:
    """So many more entries of a sequence were looked at in a lane."""
    number = name & (SEQUENCES - 1)
    if number < numbers and checked > 0:
        fetch_add(by_sequence + (number * 4 + lane) * 8, checked)
