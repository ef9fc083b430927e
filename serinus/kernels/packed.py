"""What one column packed for its own kernels: weights of linears, factors of digests. Opaque outside of `kernels`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serinus.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """How to read a blocked weight without oneDNN: bf16 [O/64][I/2][64][2], or quantized (`cpu/quantized.py`)."""

    address: int
    """Of the first byte. It belongs to the PackedLinear's weight and lives as long."""
    part: int
    """Inputs of which the products are summed from zero, before that sum is added to those of the inputs before: as
    oneDNN does, or those that share a scale."""
    bits: int = 16
    """Of a weight: 16 (bf16), 8 or 4."""
    levels: int = 0
    """What the digits of a quantized weight stand for (`cpu/quantized.py`, `triton/quantized.py`)."""
    scales: Tensor | None = None
    """Of a quantized weight: fp32 [O/64, groups, 64] on a CPU; in the Triton column [groups, O], of E2M1 int32 with
    the exponents of four groups."""
    zeros: Tensor | None = None
    """Likewise its zero points, int8; None: it has none."""
    blocks: Tensor | None = None
    """The same scales, fp32 [O/128, I/128], where those of 128 outputs are equal and rows may be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A weight as `pack_linear` left it; only `linear` of the same column can read it. Holds no other copy."""

    weight: Tensor
    """The weight: plain [O, I], or an opaque blocked tensor where `blocked`; of a quantized one its integers."""
    bias_O: Tensor | None
    """The bias, dtype of the weight, if the layer has one."""
    in_size: int
    """I, the width of the input."""
    out_size: int
    """O, the width of the output."""
    blocked: bool
    """Whether the weight was reordered for a kernel of this column."""
    rows: RowBlocks | None = None
    """How a kernel for few rows reads the weight; None: only oneDNN can, or the weight is plain."""
    widened: bool = False
    """Whether `weight` and `bias_O` are fp32 of a layer in bf16, for a processor that multiplies no bf16."""
    quantized: QuantizedWeight | None = None
    """Of a quantized weight that is as it was: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """How a column reads the integers of a layer's experts, all of the same bits and groups."""

    gate_up: RowBlocks
    """Of gate and up projections."""
    down: RowBlocks
    """Of the down projections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The projections of a layer's experts, stacked; all columns read them as they are, but integers. X = experts, E =
    width of the stream, F = width inside an expert."""

    gate_up: Tensor
    """Gate and up projections as one, [X, 2F, E], contiguous; of quantized ones integers, as the column has them."""
    down: Tensor
    """Down projections, [X, E, F], contiguous; likewise."""
    gate_up_bias: Tensor | None = None
    """[X, 2F], if the experts have biases."""
    down_bias: Tensor | None = None
    """Of the down projections, [X, E], likewise."""
    is_part: bool = False
    """A token's experts may be none of these: then their number is X."""
    sizes: tuple[int, int, int] | None = None
    """X, F and E of quantized experts; None: they are not quantized."""
    rows: ExpertRows | None = None
    """How integers are read that lie in an order of the column's own."""
    quantized: tuple[tuple[QuantizedWeight, QuantizedWeight], ...] = ()
    """Of quantized experts that are as they were: gate and up as one, and down, of each."""

    @classmethod
    def of_integers(
        cls, gate_up: tuple[Tensor, RowBlocks], down: tuple[Tensor, RowBlocks], gate_up_bias: Tensor | None,
        down_bias: Tensor | None, sizes: tuple[int, int, int],
    ) -> PackedExperts:  # fmt: skip
        """Of quantized experts: the projections, stacked, as a column has put them in an order of its own."""
        return cls(
            gate_up=gate_up[0],
            down=down[0],
            gate_up_bias=None if gate_up_bias is None else gate_up_bias.float().contiguous(),
            down_bias=None if down_bias is None else down_bias.float().contiguous(),
            sizes=sizes,
            rows=ExpertRows(gate_up=gate_up[1], down=down[1]),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """X, F and E."""
        if self.sizes is not None:
            return self.sizes
        count, width, inner = self.down.shape
        return count, inner, width


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFactors:
    """Digest coefficients of one layer as `pack_factors` left them, for `watched_attention` of the same column."""

    factors: Tensor
    """Plain int32 [2, 2, W], or cut: in bytes, fp16 [half, head, D, column], on a GPU; in halves, int16, on a CPU."""
    bias: Tensor | None
    """int32 [half, head, sum]: what the sums lack where lanes less 2**15 are multiplied; None: nothing."""
    plain_22W: Tensor
    """The coefficients themselves: what digests by them serves for the factors of any column."""
