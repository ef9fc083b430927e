"""QuantizedWeight: the weight of a linear as integers of 4 or 8 bits, or floats of 8, with scales, before it is packed.

weight = (values - zeros) * scales, exactly; a scale serves a group of neighbouring inputs of one output. Shapes: O =
output width, I = input width, G = groups of an output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice what the lower three bits of the 4-bit float E2M1 stand for; the fourth is the sign."""
_STEP = 8
"""Inputs of which kernels read whole multiples from where a group begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """Checked when it is made: raises ValueError where shapes or sizes disagree."""

    bits: int
    """Of a value: 4 or 8."""
    group: int
    """Inputs that share a scale; the last group of an output may have fewer."""
    values_OI: Tensor
    """int8, each in [-2**(bits - 1), 2**(bits - 1)); of `e4m3` the bytes of its floats."""
    scales_OG: Tensor
    """In fp32, of either sign."""
    zeros_OG: Tensor | None = None
    """int8, in [-8, 8] of 4 bits, any of 8; None = all are 0."""
    e2m1: bool = False
    """Values are twice those of the 4-bit float E2M1, of 8 bits and without zeros: a column may keep them in four."""
    e4m3: bool = False
    """Values are floats of 8 bits (E4M3) without zeros, none of them NaN."""
    rounds_rows: bool = False
    """Of `e4m3`: a column may round rows to E4M3 as well, with a scale for each, where that is faster."""

    def __post_init__(self) -> None:
        groups = -(-self.values_OI.shape[1] // self.group) if self.group > 0 else 0
        tables = [self.scales_OG, *([] if self.zeros_OG is None else [self.zeros_OG])]
        wanted = (len(self.values_OI), groups)
        if self.e2m1 and (self.bits != 8 or self.zeros_OG is not None):
            zeros = "none" if self.zeros_OG is None else "some"
            raise ValueError(f"kernels: weight of E2M1 with {self.bits} bits, zeros: {zeros}, expected 8 and none")
        if self.e4m3 and (self.bits != 8 or self.zeros_OG is not None or self.e2m1):
            raise ValueError(f"kernels: weight of E4M3 with {self.bits} bits, zeros or E2M1, expected 8 bits alone")
        if self.bits not in (4, 8) or any(tuple(table.shape) != wanted for table in tables):
            raise ValueError(
                f"kernels: quantized weight {list(self.values_OI.shape)} of {self.bits} bits in groups of {self.group}"
                f" with tables {[list(table.shape) for table in tables]}, expected 4 or 8 bits and {list(wanted)}"
            )

    @property
    def in_size(self) -> int:
        """I, the width of the input."""
        return self.values_OI.shape[1]

    @property
    def out_size(self) -> int:
        """O, the width of the output."""
        return len(self.values_OI)

    def dequantized(self) -> Tensor:
        """The weight, fp32 [O, I]. Cost: 5 bytes of memory for each byte of it, for a moment."""
        values_OI = self.values_OI.view(torch.float8_e4m3fn) if self.e4m3 else self.values_OI
        shifted = values_OI.float()
        scales_OI = self._over_inputs(self.scales_OG)
        if self.zeros_OG is not None:
            shifted -= self._over_inputs(self.zeros_OG.float())
        return shifted * scales_OI

    def rows(self, chosen: Tensor | range) -> QuantizedWeight:
        """These outputs, in their order."""
        index = torch.tensor(chosen) if isinstance(chosen, range) else chosen
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG[index]
        return replace(self, values_OI=self.values_OI[index], scales_OG=self.scales_OG[index], zeros_OG=zeros_OG)

    def columns(self, span: range) -> QuantizedWeight:
        """These inputs. Groups get smaller where the span does not begin with one.

        Raises ValueError: they would have to be of fewer than 8 inputs.
        """
        values_OI = self.values_OI[:, span.start : span.stop].contiguous()
        group = len(span) if self.scales_OG.shape[1] == 1 else math.gcd(self.group, span.start)
        if self.scales_OG.shape[1] > 1 and group % _STEP:
            raise ValueError(
                f"kernels: inputs from {span.start} on of a weight in groups of {self.group}, expected a multiple of"
                f" {_STEP}"
            )
        tables = []
        for table in (self.scales_OG, self.zeros_OG):
            if table is not None and table.shape[1] > 1:
                repeated = table.repeat_interleave(self.group // group, 1)
                table = repeated[:, span.start // group : -(-span.stop // group)].contiguous()
            tables.append(table)
        assert tables[0] is not None, "kernels: a quantized weight without scales"
        return replace(self, group=group, values_OI=values_OI, scales_OG=tables[0], zeros_OG=tables[1])

    def scaled(self, factor: float) -> QuantizedWeight:
        """The weight times a factor."""
        return replace(self, scales_OG=self.scales_OG * factor)

    def padded(self, count: int) -> QuantizedWeight:
        """With so many outputs more, of weights 0."""

        def more(table: Tensor) -> Tensor:
            return torch.cat([table, table.new_zeros((count, table.shape[1]))])

        zeros_OG = None if self.zeros_OG is None else more(self.zeros_OG)
        return replace(self, values_OI=more(self.values_OI), scales_OG=more(self.scales_OG), zeros_OG=zeros_OG)

    @staticmethod
    def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Several, one below the other; of the same bits and group, all of `e4m3` or none. Zeros are written out where
        some have them."""
        has_zeros = any(part.zeros_OG is not None for part in parts)
        zeros = [
            torch.zeros_like(part.scales_OG, dtype=torch.int8) if part.zeros_OG is None else part.zeros_OG
            for part in parts
        ]
        return replace(
            parts[0],
            values_OI=torch.cat([part.values_OI for part in parts]),
            scales_OG=torch.cat([part.scales_OG for part in parts]),
            zeros_OG=torch.cat(zeros) if has_zeros else None,
            e2m1=all(part.e2m1 for part in parts),
            rounds_rows=all(part.rounds_rows for part in parts),
        )

    def _over_inputs(self, table_OG: Tensor) -> Tensor:
        return table_OG.repeat_interleave(self.group, 1)[:, : self.in_size]


def e2m1_codes(values: Tensor) -> Tensor:
    """Digits of E2M1 of twice its values, int32. Raises ValueError: a value is none of them."""
    magnitudes = torch.tensor(E2M1_TWICE, dtype=torch.int8, device=values.device)
    found = torch.bucketize(values.abs(), magnitudes, out_int32=True).clamp_(max=len(E2M1_TWICE) - 1)
    if not torch.equal(magnitudes[found], values.abs()):
        raise ValueError(f"kernels: quantized weight of E2M1, expected values of {E2M1_TWICE} and less than 0")
    return found.add_(8 * (values < 0).int())
