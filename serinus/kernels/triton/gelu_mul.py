"""The gated activation gelu; see the reference. T = tokens, F = width of the MLP."""

from __future__ import annotations

from torch import Tensor

from serinus.kernels.triton.gates import gate_mul


def gelu_mul(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up; see the reference."""
    return gate_mul("gelu", gate_up_T2F)
