"""Pools of one byte an element: FP8, and how values become such elements.

A value goes to the nearest one, half to even; what is larger than the largest becomes the largest, so that nothing
becomes infinite; NaN stays NaN. Keys and values are those of the model's type, rounded once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """What the bits of a byte are: the sign, then the exponent, then the mantissa."""

    mantissa: int
    """Bits of the mantissa."""
    bias: int
    """What the exponent is less by than it says."""
    largest: float
    """The largest number that it holds."""


FP8_FORMATS: Final[Mapping[torch.dtype, Fp8Format]] = MappingProxyType(
    {
        torch.float8_e4m3fn: Fp8Format(mantissa=3, bias=7, largest=448.0),
        torch.float8_e5m2: Fp8Format(mantissa=2, bias=15, largest=57344.0),
    }
)
"""By the type of the pool."""


def stored_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows as a pool of this type holds them; of another type than FP8 they are what they were."""
    form = FP8_FORMATS.get(dtype)
    return rows if form is None else rows.clamp(-form.largest, form.largest).to(dtype)
