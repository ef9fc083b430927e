"""Gumbel noise as a pure function of (seed, position, token id): the specification.

argmax(logits / temperature + noise) is a sample from softmax(logits / temperature) (Gumbel, 1954). Because the noise
of a token depends on nothing else, a request draws the same tokens whatever else is in the batch, however it was
chunked, and after a retraction. Shapes: B = sequences, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["counter_gumbel"]

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_MASK32 = (1 << 32) - 1


def counter_gumbel(seeds_B: Tensor, positions_B: Tensor, vocab: int) -> Tensor:
    """Noise [B, V] fp32 for each sequence's next token.

    The hash is splitmix64, three times over: mix(mix(mix(seed) + position) + token). Its upper 32 bits give a
    uniform number v in (0, 1), exact in fp32 near 0, and the noise is -log(-log1p(-v)): fine where it is large,
    which is where samples are decided; at most about 22, at least about -2.9.

    Args:
        seeds_B, positions_B: int64.
        vocab: V.
    """
    key_B1 = _mix(_mix(seeds_B) + positions_B).unsqueeze(1)
    tokens_V = torch.arange(vocab, dtype=torch.int64, device=seeds_B.device)
    word_BV = (_mix(key_B1 + tokens_V) >> 32) & _MASK32
    v_BV = ((word_BV.double() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v_BV)).float()


def _mix(x: Tensor) -> Tensor:
    """splitmix64 on int64 words, which wrap."""
    x = x + _GAMMA
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
