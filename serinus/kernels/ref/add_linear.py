"""A linear that joins the residual stream: the specification. T = tokens, I = input width, O = width of the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from serinus.kernels.contracts import AddLinear
from serinus.kernels.packed import PackedLinear

__all__ = ["make_add_linear"]


def make_add_linear(ops: Mapping[str, Callable[..., Any]]) -> AddLinear:
    """The op, made of the others of its set."""
    joined: Callable[[Tensor, PackedLinear, Tensor], bool] | None = getattr(ops["linear"], "joined", None)

    def add_linear(x_TI: Tensor, packed: PackedLinear, residual_TO: Tensor, /) -> Tensor | None:
        """linear(x), which the caller adds to the stream; or None: it has joined the stream already, where one product
        does both. That rounds the sum once, where a linear and an addition round twice.

        Args:
            x_TI: rows.
            packed: from pack_linear of the same set.
            residual_TO: the stream, as many rows; changed in place where None is returned.
        Raises:
            ValueError: as linear does.
        """
        if joined is not None and joined(x_TI, packed, residual_TO):
            return None
        out_TO: Tensor = ops["linear"](x_TI, packed)
        return out_TO

    return add_linear
