"""What kernels do to one bf16 row between two products: RMS norm, gated activation. Addresses are int64.

Used by the ops of these names and by the linear that does them on its way, which is why both give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from serinus.kernels.cpu.scalar import FAST, LOG2_E, at, carray, exp2, inlined, narrow, widen
from serinus.kernels.ref.fused_moe import SWIGLU_ALPHA, SWIGLU_LIMIT

_SILU = np.float32(-LOG2_E)
_GELU = np.float32(-LOG2_E * 2.0 * math.sqrt(2.0 / math.pi))
_CUBIC = np.float32(0.044715)
_SLOPE = np.float32(-LOG2_E * SWIGLU_ALPHA)
_LIMIT = np.float32(SWIGLU_LIMIT)


@inlined(fastmath=FAST)
def norm_row(x_at: Any, residual_at: Any, weight_at: Any, wide: Any, out_at: Any, kept: Any, eps: Any) -> None:
    """The norm of a row as wide as `kept`, which is scratch; or, where residual_at is not 0, residual += x in place and
    then its norm. `wide`: the weight is fp32, and the product is rounded once."""
    width = len(kept)
    x, out = carray(at(x_at), width, np.uint16), carray(at(out_at), width, np.uint16)
    total = np.float32(0)
    if residual_at != 0:
        residual = carray(at(residual_at), width, np.uint16)
        for i in range(width):
            rounded = narrow(widen(x[i]) + widen(residual[i]))
            residual[i] = rounded
            value = widen(rounded)
            kept[i] = value
            total += value * value
    else:
        for i in range(width):
            value = widen(x[i])
            kept[i] = value
            total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    if wide:
        factors = carray(at(weight_at), width, np.float32)
        for i in range(width):
            out[i] = narrow(kept[i] * scale * factors[i])
    else:
        weight = carray(at(weight_at), width, np.uint16)
        for i in range(width):
            out[i] = narrow(widen(narrow(kept[i] * scale)) * widen(weight[i]))


@inlined(fastmath=FAST)
def gate_value(x: Any, up: Any, gelu: Any) -> Any:
    """silu(x) * up, or with `gelu` gelu(x) * up, of fp32. Both are x times a sigmoid: silu(x) = x s(x), and gelu(x) =
    x s(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    exponent = (x + _CUBIC * x * x * x) * _GELU if gelu else x * _SILU
    return x / (np.float32(1) + exp2(exponent)) * up


@inlined(fastmath=FAST)
def swiglu_value(gate: Any, up: Any) -> Any:
    """gpt-oss's activation, of fp32."""
    gate, up = min(gate, _LIMIT), max(-_LIMIT, min(up, _LIMIT))
    return (up + np.float32(1)) * gate / (np.float32(1) + exp2(gate * _SLOPE))


@inlined(fastmath=FAST)
def gate_row(gates: Any, ups: Any, out_at: Any, gelu: Any) -> None:
    """The gated activation of a row; gates and ups are arrays of bf16."""
    out = carray(at(out_at), len(gates), np.uint16)
    if gelu:
        for i in range(len(gates)):
            out[i] = narrow(gate_value(widen(gates[i]), widen(ups[i]), True))
    else:
        for i in range(len(gates)):
            out[i] = narrow(gate_value(widen(gates[i]), widen(ups[i]), False))
