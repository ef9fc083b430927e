"""splitmix64 in torch, of int64 words, which wrap: what chains of hashes, noise and the toy model are made of."""

from __future__ import annotations

from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def splitmix(x: Tensor) -> Tensor:
    """The words, each mixed by one step of it."""
    x = x + _GAMMA
    x = (x ^ shift_right(x, 30)) * _MIX_1
    x = (x ^ shift_right(x, 27)) * _MIX_2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
