"""The gated activations of the MLP, one kernel for both; see their references. T = tokens, F = width of the MLP."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_gate
from serinus.kernels.contracts import Gate
from serinus.kernels.triton.dependent import dependent, wait_for_earlier

GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu": 2}
"""The activation, as kernels take it."""
_BLOCK = 1024


def gate_mul(gate: Gate, gate_up_T2F: Tensor) -> Tensor:
    """activation(gate) * up. Cost: one read of the input and one write of half as much."""
    check_gate(f"{gate}_mul", gate_up_T2F)
    gate_up_T2F = gate_up_T2F.contiguous()
    width = gate_up_T2F.shape[-1] // 2
    out_TF = gate_up_T2F.new_empty((*gate_up_T2F.shape[:-1], width))
    if out_TF.numel():
        _gate[(out_TF.numel() // width, triton.cdiv(width, _BLOCK))](
            gate_up_T2F, out_TF, width, GATE=GATES[gate], BLOCK=_BLOCK, **dependent(out_TF.device)
        )
    return out_TF


_jit: Any = triton.jit


@_jit
def gated(gate, up, GATE: tl.constexpr):
    """In fp32: silu, or gelu in its tanh form, of the gate, times up."""
    if GATE == 1:
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up


@_jit
def _gate(gate_up, out, width, GATE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * width + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + f, mask=f < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + f, gated(gate, up, GATE).to(out.dtype.element_ty), mask=f < width)
