"""Some words between a device and pinned memory of its host, by a kernel where the device has one.

A copy engine would let them wait for pages on their way between the two: a decode step beside them took up to a third
longer, for its input of 10 KB and its tokens.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

__all__ = ["carry_words"]

_WORDS_MAX = 1 << 17
"""What is more goes by the copy engine: there its rate counts."""


def carry_words(target_W: Tensor, source_W: Tensor) -> None:
    """Queue a copy of int64 words on the current stream of the device; the tensor of the host is pinned. No wait."""
    if target_W.numel() <= _WORDS_MAX and _has_triton():
        from serinus.kernels.triton.words import carry

        carry(target_W, source_W)
        return
    target_W.copy_(source_W, non_blocking=True)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
