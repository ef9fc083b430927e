"""Logits of tokens that a grammar does not allow; see the reference. B = rows, R = those with a grammar, V =
vocabulary, W = words of 32 bits.

Rows and words cross to the device as one pinned copy behind the kernels of the forward pass: no call waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_mask

_BLOCK = 4096


def mask_logits(logits_BV: Tensor, rows: Sequence[int], words_RW: NDArray[np.int32]) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place. Cost: one copy, one pass over R * V bits."""
    check_mask(logits_BV, rows, words_RW)
    if not rows:
        return
    count, words = words_RW.shape
    packed = torch.empty(count * (words + 1), dtype=torch.int32, pin_memory=logits_BV.is_cuda)
    packed[:count] = torch.from_numpy(np.array(rows, np.int32))
    packed[count:] = torch.from_numpy(np.ascontiguousarray(words_RW)).flatten()
    there = packed.to(logits_BV.device, non_blocking=True)
    vocab = logits_BV.shape[1]
    _mask[(count, triton.cdiv(vocab, _BLOCK))](
        logits_BV, logits_BV.stride(0), logits_BV.stride(1), there, there[count:], words, vocab, BLOCK=_BLOCK
    )


_jit: Any = triton.jit


@_jit(do_not_specialize_on_alignment=["words"])
def _mask(logits, row_stride, token_stride, rows, words, word_count, vocab, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = t < vocab
    word = tl.load(words + r * word_count + t // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (t % 32).to(tl.int32)) & 1) == 0)
    row = tl.load(rows + r).to(tl.int64)
    none = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * row_stride + t * token_stride, none, mask=forbidden)
