"""RMS norm, alone and after a residual addition, one program a row; see the reference. T = tokens, E = width."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_norm, check_residual
from serinus.kernels.triton.dependent import dependent, wait_for_earlier


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """The norm of rows; see the reference. Cost: one read and one write of x."""
    check_norm(x_TE, weight_E)
    x_TE = x_TE.contiguous()
    return _normed(x_TE, x_TE, weight_E, eps, adds=False)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, then its norm; see the reference. Cost: two reads and two writes of as much as x."""
    check_residual(x_TE, residual_TE)
    check_norm(residual_TE, weight_E)
    return _normed(x_TE.contiguous(), residual_TE, weight_E, eps, adds=True)


def _normed(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, *, adds: bool) -> Tensor:
    width = x_TE.shape[-1]
    out_TE = torch.empty_like(residual_TE)
    block = int(triton.next_power_of_2(width))
    if out_TE.numel():
        _norm[(out_TE.numel() // width,)](
            x_TE, residual_TE, weight_E.contiguous(), out_TE, eps, WIDTH=width, BLOCK=block, ADDS=adds,
            IN_FP32=weight_E.dtype != x_TE.dtype, num_warps=min(16, max(1, block // 512)), **dependent(x_TE.device),
        )  # fmt: skip
    return out_TE


_jit: Any = triton.jit


@_jit
def normed(x, weight, total, eps, SIZE: tl.constexpr, IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """A row (or rows) of fp32 values by its sum of squares and the weight: as that of Llama, or as Gemma's."""
    scaled = x * tl.rsqrt(total / SIZE + eps)
    if IN_FP32:
        return (scaled * weight.to(tl.float32)).to(dtype)
    return (scaled.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@_jit
def _norm(
    x, residual, weight, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, IN_FP32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * WIDTH + e, e < WIDTH
    weight_E = tl.load(weight + e, mask=inside, other=0.0)
    wait_for_earlier(DEPENDENT)
    value_E = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        total_E = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + value_E.to(tl.float32)
        value_E = total_E.to(value_E.dtype)
        tl.store(residual + at, value_E, mask=inside)
    wide_E = value_E.to(tl.float32)
    total = tl.sum(wide_E * wide_E, 0)
    tl.store(out + at, normed(wide_E, weight_E, total, eps, WIDTH, IN_FP32, out.dtype.element_ty), mask=inside)
