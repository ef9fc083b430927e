"""A linear of the normed residual stream. T = tokens, I = width of the stream.

In a decode step the norm and the gated activation are short: each costs more to start, with its Python from a cold
cache, than to compute. So for few rows the kernel of the linear does them on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from serinus.kernels.checks import check_norm, check_residual
from serinus.kernels.contracts import Gate, NormLinear
from serinus.kernels.cpu.row_linear import GATED_BLOCK, ROWS_MAX, fused_rows, multiply_normed_rows
from serinus.kernels.packed import PackedLinear
from serinus.kernels.ref import norm_linear as plain


def make_norm_linear(ops: Mapping[str, Callable[..., Any]]) -> NormLinear:
    """The op; for many rows it is made of the others of its set."""
    one_by_one = plain.make_norm_linear(ops)

    def norm_linear(
        x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear,
        gate: Gate | None = None, /,
    ) -> Tensor:  # fmt: skip
        """The norm, the linear and the activation; see the reference."""
        blocks = fused_rows(packed)
        few = residual_TI.dtype == torch.bfloat16 and residual_TI.dim() == 2 and 0 < len(residual_TI) <= ROWS_MAX
        if blocks is None or not few or (gate is not None and packed.out_size % GATED_BLOCK):
            return one_by_one(x_TI, residual_TI, weight_I, eps, packed, gate)
        check_norm(residual_TI, weight_I)
        if x_TI is not None:
            check_residual(x_TI, residual_TI)
        return multiply_normed_rows(x_TI, residual_TI, weight_I, eps, packed, blocks, gate)

    return norm_linear
