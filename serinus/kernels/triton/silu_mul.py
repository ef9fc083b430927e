"""The gated activation silu; see the reference. T = tokens, F = width of the MLP."""

from __future__ import annotations

from torch import Tensor

from serinus.kernels.triton.gates import gate_mul


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up; see the reference."""
    return gate_mul("silu", gate_up_T2F)
