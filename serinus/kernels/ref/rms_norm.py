"""RMS norm, alone and after a residual addition: the specification.

Shapes: T = tokens, E = width of the hidden state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.checks import check_norm, check_residual

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), row by row.

    With a weight of the dtype of x: normalised in fp32, rounded to that dtype, and only then multiplied by the weight
    (rounded again): the order in which the Llama and Qwen families were trained, and in which transformers computes
    it. With an fp32 weight: everything in fp32, rounded once, which is Gemma's order.

    Args:
        x_TE: fp32 or bf16; any number of leading dimensions.
        weight_E: dtype of x, or fp32.
    Returns: shape and dtype of x.
    Raises:
        ValueError: the weight has another width, or neither the dtype of x nor fp32.
    """
    check_norm(x_TE, weight_E)
    x32 = x_TE.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight_E.dtype != x_TE.dtype:
        return (x32 * scale * weight_E).to(x_TE.dtype)
    return (x32 * scale).to(x_TE.dtype) * weight_E


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place (rounded to its dtype), then the RMS norm of the new residual.

    Args:
        x_TE: what the last block added; left as it is.
        residual_TE: the stream of hidden states; changed in place.
        weight_E: the norm's weight, as for rms_norm.
    Returns: the norm, shape and dtype of x.
    Raises:
        ValueError: as rms_norm; or the residual is strided, or has another shape or dtype than x.
    """
    check_residual(x_TE, residual_TE)
    residual_TE.add_(x_TE)
    return rms_norm(residual_TE, weight_E, eps)
