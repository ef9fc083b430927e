"""A linear of the normed residual stream: the specification. T = tokens, I = width of the stream, O = output width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from serinus.kernels.contracts import Gate, NormLinear
from serinus.kernels.packed import PackedLinear

__all__ = ["make_norm_linear"]


def make_norm_linear(ops: Mapping[str, Callable[..., Any]]) -> NormLinear:
    """The op, made of the others of its set."""

    def norm_linear(
        x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear,
        gate: Gate | None = None, /,
    ) -> Tensor:  # fmt: skip
        """add_rms_norm(x, residual, weight, eps), or without x rms_norm(residual, weight, eps); then linear; then,
        where the weight is that of a gate and of what it lets through, silu_mul or gelu_mul.

        Args:
            x_TI: what the last block added to the stream, or None; left as it is.
            residual_TI: the stream; with x changed in place.
            weight_I: the norm's weight, as for rms_norm.
            packed: from pack_linear of the same set.
            gate: which activation follows; None = none does.
        Returns: [T, O], or with a gate [T, O / 2]; dtype of the residual.
        Raises:
            ValueError: as those ops do.
        """
        if x_TI is None:
            normed_TI = ops["rms_norm"](residual_TI, weight_I, eps)
        else:
            normed_TI = ops["add_rms_norm"](x_TI, residual_TI, weight_I, eps)
        out: Tensor = ops["linear"](normed_TI, packed)
        return out if gate is None else ops[f"{gate}_mul"](out)

    return norm_linear
