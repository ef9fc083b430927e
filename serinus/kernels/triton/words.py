"""Words between a device and pinned memory of its host, which kernels reach as they reach their own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@torch.inference_mode()
def carry(target_W: Tensor, source_W: Tensor) -> None:
    """Queue a copy of int64 words, both contiguous."""
    count = target_W.numel()
    if count:
        _carry[(triton.cdiv(count, _BLOCK),)](target_W, source_W, count, BLOCK=_BLOCK)


_jit: Any = triton.jit


@_jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["target", "source"])
def _carry(target, source, count, BLOCK: tl.constexpr):
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + w, tl.load(source + w, mask=w < count), mask=w < count)
