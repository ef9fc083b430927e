"""PackedLinear: the weight of one linear layer in the order its kernel reads it. Opaque outside of `kernels`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PackedLinear", "RowBlocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """How to read a blocked weight without oneDNN: bf16 [O/64][I/2][64][2]."""

    address: int
    """Of the first byte. It belongs to the PackedLinear's weight and lives as long."""
    part: int
    """Input pairs of which oneDNN sums the products from zero, before it adds that sum to those of the pairs before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A weight as `pack_linear` left it; only `linear` of the same column can read it. Holds no other copy."""

    weight: Tensor
    """The weight: plain [O, I], or an opaque blocked tensor where `blocked`."""
    bias_O: Tensor | None
    """The bias, dtype of the weight, if the layer has one."""
    in_size: int
    """I, the width of the input."""
    out_size: int
    """O, the width of the output."""
    blocked: bool
    """Whether the weight was reordered for oneDNN."""
    rows: RowBlocks | None = None
    """How a kernel for few rows reads the weight; None: only oneDNN can, or the weight is plain."""
