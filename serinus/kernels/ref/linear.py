"""The linear layer: the specification. T = tokens, I = input width, O = output width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import check_pack_linear
from serinus.kernels.packed import PackedLinear
from serinus.kernels.quantized import QuantizedWeight

__all__ = ["linear", "pack_linear"]


def pack_linear(weight_OI: Tensor | QuantizedWeight, bias_O: Tensor | None) -> PackedLinear:
    """Take a weight into the form that `linear` reads. Here: as it is.

    Args:
        weight_OI: fp32 or bf16, or integers with scales.
        bias_O: dtype of the weight, of a quantized one that of the rows; or None.
    Raises:
        ValueError: shapes disagree.
    """
    plain, quantized = check_pack_linear(weight_OI, bias_O)
    out_size, in_size = plain.shape
    return PackedLinear(
        weight=plain, bias_O=bias_O, in_size=in_size, out_size=out_size, blocked=False, quantized=quantized
    )


def linear(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias, [T, O] in the dtype of x (which is the weight's). A quantized weight is multiplied as it is,
    with sums in fp32: nothing is rounded but the result. (Another column may round rows too where it says so.)

    Raises:
        ValueError: the weight was packed by another column.
    """
    if packed.blocked:
        raise ValueError("kernels: linear of column ref got a blocked weight, expected one packed by column ref")
    if packed.quantized is not None:
        bias_O = None if packed.bias_O is None else packed.bias_O.float()
        return F.linear(x_TI.float(), packed.quantized.dequantized(), bias_O).to(x_TI.dtype)
    return F.linear(x_TI, packed.weight, packed.bias_O)
