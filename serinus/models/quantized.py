"""Sources of quantized weights: those of a checkpoint that is not quantized, made as it is loaded.

int8: the largest weight of an output becomes 127 or -127. int4: of each group the weight of largest magnitude becomes
-8, with a scale of either sign: its error is 12 % below that of a scale of largest / 7, and 2.5 % above that of zero
points (normal weights, groups of 128), which would cost a byte a group and two instructions in every product.
fp8: the largest weight of an output becomes 448 or -448, others the nearest of FP8 (e4m3); they are kept, or what they
stand for.
Shapes: O = output width, I = input width, G = groups of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from serinus.kernels import QuantizedWeight
from serinus.models.quantization import QuantSpec
from serinus.models.weights import WeightSource

_ROWS = 8192
"""Outputs that are quantized at once: in fp32 they take a few hundred MB at most."""


class QuantizingSource:
    """A source whose linears are quantized as they are taken; all else comes as it is."""

    def __init__(self, source: WeightSource, spec: QuantSpec) -> None:
        self.device, self.dtype = source.device, source.dtype
        self._source, self._spec = source, spec

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As the source has it."""
        return self._source.take(name, shape, span, dim, dtype)

    def linear(
        self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0
    ) -> torch.Tensor | QuantizedWeight:
        """Quantized as a whole where a span of the inputs is asked for: all ranks have parts of the same weights."""
        if span is None or dim == 0:
            return self.quantized(name, self._source.take(f"{name}.weight", shape, span, dim))
        whole = self.quantized(name, self._source.take(f"{name}.weight", shape))
        return whole.columns(span) if isinstance(whole, QuantizedWeight) else whole[:, span.start : span.stop]

    def quantized(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """A weight that was taken already."""
        if name == "lm_head" and self._spec.head_bits == 16:
            return weight_OI
        if self._spec.method == "fp8":
            return rounded_to_fp8(weight_OI) if self._spec.bits == 16 else to_fp8(weight_OI, self._spec.group)
        bits, group = (self._spec.head_bits, 0) if name == "lm_head" else (self._spec.bits, self._spec.group)
        return quantize(weight_OI, bits, group or weight_OI.shape[1])

    def names_of(self, name: str) -> Sequence[str]:
        """The weight, which is one tensor."""
        return self._source.names_of(name)

    def has(self, name: str) -> bool:
        """Whether the source has it."""
        return self._source.has(name)

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """As the source does."""
        self._source.finish(ignore)


def joined(weights: Sequence[torch.Tensor | QuantizedWeight], dtype: torch.dtype) -> torch.Tensor | QuantizedWeight:
    """One below the other. Where not all are quantized alike they are multiplied as what they stand for, in `dtype`."""
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    if len(quantized) == len(weights) and len({(each.bits, each.group, each.e4m3) for each in quantized}) == 1:
        return QuantizedWeight.joined(quantized)
    return torch.cat([each.dequantized().to(dtype) if isinstance(each, QuantizedWeight) else each for each in weights])


def quantize(weight_OI: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """The nearest integers, with one scale for each output and group (see above). Deterministic, on any device."""
    pieces = [_quantize_rows(rows.float(), bits, group) for rows in torch.split(weight_OI, _ROWS)]
    return QuantizedWeight.joined(pieces)


def to_fp8(weight_OI: torch.Tensor, block: int = 0) -> QuantizedWeight:
    """The nearest numbers of FP8, with one scale for each output, or of blocks of so many outputs and inputs (a part of
    _ROWS). Deterministic, on any device."""
    return QuantizedWeight.joined([_fp8_rows(rows, block) for rows in torch.split(weight_OI, _ROWS)])


def rounded_to_fp8(weight_OI: torch.Tensor) -> torch.Tensor:
    """What those stand for, in the dtype of the weight."""
    return torch.cat([_fp8_rows(rows).dequantized().to(weight_OI.dtype) for rows in torch.split(weight_OI, _ROWS)])


def _fp8_rows(weight_OI: torch.Tensor, block: int = 0) -> QuantizedWeight:
    (outs, ins), (high, wide) = weight_OI.shape, (block or 1, block or weight_OI.shape[1])
    padded_OI = F.pad(weight_OI.float(), (0, -ins % wide, 0, -outs % high))
    largest_OG = padded_OI.abs().view(len(padded_OI) // high, high, -1, wide).amax((1, 3))
    scales_OG = (largest_OG / torch.finfo(torch.float8_e4m3fn).max).repeat_interleave(high, 0)[:outs].contiguous()
    scales_OG = torch.where(scales_OG == 0, 1.0, scales_OG)
    each_OI = scales_OG if not block else scales_OG.repeat_interleave(wide, 1)[:, :ins]
    values_OI = (weight_OI.float() / each_OI).to(torch.float8_e4m3fn).view(torch.int8)
    return QuantizedWeight(bits=8, group=wide, values_OI=values_OI, scales_OG=scales_OG, e4m3=True, rounds_rows=True)


def _quantize_rows(weight_OI: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    out_size, in_size = weight_OI.shape
    grouped = F.pad(weight_OI, (0, -in_size % group)).view(out_size, -1, group)
    magnitude = grouped.abs()
    if bits == 8:
        scales_OG = magnitude.amax(-1) / 127
    else:
        scales_OG = grouped.gather(-1, magnitude.argmax(-1, keepdim=True))[..., 0] / -8
    scales_OG = torch.where(scales_OG == 0, 1.0, scales_OG)
    low = -(1 << bits - 1)
    values = (grouped / scales_OG[..., None]).round_().clamp_(low, -low - 1)
    values_OI = values.view(out_size, -1)[:, :in_size].to(torch.int8)
    return QuantizedWeight(bits=bits, group=group, values_OI=values_OI, scales_OG=scales_OG)
