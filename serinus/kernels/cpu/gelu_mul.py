"""The gated activation of Gemma's MLP: `silu_mul` with another slope. T = tokens, F = width of the MLP."""

from __future__ import annotations

from torch import Tensor

from serinus.kernels.cpu import silu_mul


def gelu_mul(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up; see the reference."""
    return silu_mul.gate(gate_up_T2F, "gelu_mul", gelu=True)
