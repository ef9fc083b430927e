"""Some words within a device, and between it and pinned memory of its host, by a kernel where the device has one.

A copy engine would let them wait for pages on their way between the two: a decode step beside them took up to a third
longer, for its input of 10 KB and its tokens. Where pages go both ways a kernel is slow as well, so words travel on
streams of their own, one for each direction, and the model's goes on meanwhile.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["carry_words", "send_words", "travels"]

_WORDS_MAX = 1 << 17
"""What is more goes by the copy engine: there its rate counts."""


def carry_words(target_W: Tensor, source_W: Tensor) -> None:
    """Queue a copy of int64 words on the current stream of the device; a tensor of the host is pinned. No wait."""
    if target_W.numel() <= _WORDS_MAX and _has_triton():
        from serinus.kernels.triton.words import carry

        carry(target_W, source_W)
        return
    target_W.copy_(source_W, non_blocking=True)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def send_words(target_W: Tensor, source_W: Tensor) -> Any:
    """Queue a copy to pinned memory of the host, behind what is queued on the current stream, which does not wait for
    it; nothing that is queued later may write to the source. Returns the event behind the copy."""
    out = travels(source_W.device, out=True)
    out.wait_stream(torch.cuda.current_stream(source_W.device))
    with torch.cuda.stream(out):
        carry_words(target_W, source_W)
        source_W.record_stream(out)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
    return there


@cache
def travels(device: torch.device, *, out: bool) -> torch.cuda.Stream:
    """The stream on which words leave a device, or come to it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
