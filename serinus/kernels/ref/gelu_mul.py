"""The gated activation of Gemma's MLP: the specification. T = tokens, F = width of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import check_gate

__all__ = ["gelu_mul"]


def gelu_mul(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up with GELU's tanh form, in fp32, rounded once.

    Args:
        gate_up_T2F: fp32 or bf16 [T, 2F]; the first F columns are the gate, the others up.
    Returns: [T, F], dtype of the input.
    Raises:
        ValueError: the width is odd.
    """
    check_gate("gelu_mul", gate_up_T2F)
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    out: Tensor = (F.gelu(gate, approximate="tanh") * up).to(gate_up_T2F.dtype)
    return out
