"""The linear layer: the specification. T = tokens, I = input width, O = output width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import check_pack_linear
from serinus.kernels.packed import PackedLinear

__all__ = ["linear", "pack_linear"]


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
    """Take a weight into the form that `linear` reads. Here: as it is.

    Args:
        weight_OI: fp32 or bf16.
        bias_O: dtype of the weight, or None.
    Raises:
        ValueError: shapes disagree.
    """
    check_pack_linear(weight_OI, bias_O)
    out_size, in_size = weight_OI.shape
    return PackedLinear(weight=weight_OI, bias_O=bias_O, in_size=in_size, out_size=out_size, blocked=False)


def linear(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias, [T, O] in the dtype of x (which is the weight's).

    Raises:
        ValueError: the weight was packed by another column.
    """
    if packed.blocked:
        raise ValueError("kernels: linear of column ref got a blocked weight, expected one packed by column ref")
    return F.linear(x_TI, packed.weight, packed.bias_O)
