"""MXFP4 weights: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling formats 1.0).

Twice a value is an integer of at most 12, so they are quantized weights, which kernels may keep in four bits; or they
are dequantized. Two values lie in a byte, the first in its lower half. Every value is exact in bfloat16 and float32.

N = any leading dimensions, G = blocks of a row.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels import E2M1_TWICE, QuantizedWeight

BLOCK = 32
"""Values that share a scale."""
BLOCK_BYTES = BLOCK // 2
_NAN = 255
"""The scale (E8M0) that is no number; others are the exponent of a float32, biased as there."""
_LEAST = 1 << 22
"""The bits of 2**-127, which has no exponent of its own."""


def dequantized(blocks_NGY: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, [N, 32 G].

    Args:
        blocks_NGY: uint8 [N, G, 16], two values in each byte.
        scales_NG: uint8, biased exponents of the blocks' scales.
        dtype: of the values; float16 rounds those it cannot hold, by way of float32.
    Raises:
        ConfigError: a scale is the format's NaN.
    Cost: 4 bytes of index for each byte of the blocks, and the values once more.
    """
    exact = torch.float32 if dtype == torch.float16 else dtype
    scales = _scales(scales_NG)
    values = _values(blocks_NGY, exact)
    return values.mul_(scales[..., None].to(exact)).flatten(-2).to(dtype)


def as_integers(blocks_OGY: Tensor, scales_OG: Tensor) -> QuantizedWeight:
    """The same of one matrix, as integers: twice the values, and half of the scales.

    Raises ConfigError: a scale is the format's NaN. Cost: as `dequantized`.
    """
    values_OI = _values(blocks_OGY, torch.float32).mul_(2.0).flatten(-2).to(torch.int8)
    return QuantizedWeight(bits=8, group=BLOCK, values_OI=values_OI, scales_OG=_scales(scales_OG) * 0.5, e2m1=True)


def _values(blocks_NGY: Tensor, dtype: torch.dtype) -> Tensor:
    """Without their scales, [N, G, 32]."""
    pairs = _pairs(dtype).to(blocks_NGY.device)
    return pairs.index_select(0, blocks_NGY.reshape(-1).int()).view(*blocks_NGY.shape[:-1], BLOCK)


def _scales(scales_NG: Tensor) -> Tensor:
    """The powers of two, fp32. Raises ConfigError: one is the format's NaN."""
    if bool((scales_NG == _NAN).any()):
        raise ConfigError("models: an MXFP4 scale is 255, which is no number, expected 0 .. 254")
    exponents = scales_NG.int()
    return torch.where(exponents == 0, _LEAST, exponents << 23).view(torch.float32)


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """The two values of each byte, [256, 2]."""
    magnitudes = torch.tensor(E2M1_TWICE, dtype=dtype) / 2
    values = torch.cat((magnitudes, -magnitudes))  # the fourth bit is the sign
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
