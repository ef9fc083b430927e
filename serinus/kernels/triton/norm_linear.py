"""A linear of the normed residual stream, and a gate behind it; see the reference. The norm is a kernel of its own, the
gate is part of that of the linear, where there is one. T = tokens, I = width of the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from serinus.kernels.contracts import Gate, NormLinear
from serinus.kernels.packed import PackedLinear


def make_norm_linear(ops: Mapping[str, Callable[..., Any]]) -> NormLinear:
    """The op, made of the others of its set."""
    fused = getattr(ops["linear"], "gated", None)

    def norm_linear(
        x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear,
        gate: Gate | None = None, /,
    ) -> Tensor:  # fmt: skip
        """The norm, the linear and the activation; see the reference."""
        if x_TI is None:
            normed_TI = ops["rms_norm"](residual_TI, weight_I, eps)
        else:
            normed_TI = ops["add_rms_norm"](x_TI, residual_TI, weight_I, eps)
        if gate is not None and fused is not None and normed_TI.dim() == 2:
            found: Tensor | None = fused(normed_TI, packed, gate)
            if found is not None:
                return found
        out: Tensor = ops["linear"](normed_TI, packed)
        return out if gate is None else ops[f"{gate}_mul"](out)

    return norm_linear
