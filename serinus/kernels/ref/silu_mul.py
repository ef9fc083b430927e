"""The gated activation of the MLP: the specification. T = tokens, F = width of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import check_gate

__all__ = ["silu_mul"]


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, in fp32, rounded once.

    Args:
        gate_up_T2F: fp32 or bf16 [T, 2F]; the first F columns are the gate, the others up.
    Returns: [T, F], dtype of the input.
    Raises:
        ValueError: the width is odd.
    """
    check_gate("silu_mul", gate_up_T2F)
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    out: Tensor = (F.silu(gate) * up).to(gate_up_T2F.dtype)
    return out
