"""Logits of tokens that a grammar does not allow. B = rows, R = those with a grammar, V = vocabulary, W = words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_mask
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add
from serinus.kernels.ref.mask_logits import mask_logits as by_reference

_Arguments = fields("ticket logits stride rows count words vocab")
_MINUS_INF_BF16 = 0xFF80


def mask_logits(logits_BV: Tensor, rows: Sequence[int], words_RW: NDArray[np.int32]) -> None:
    """See the reference, which takes logits that are strided within a row or of another type. Cost: at 151,936 tokens
    about 40 us a row of fp32 and core."""
    if logits_BV.dtype not in (torch.float32, torch.bfloat16) or logits_BV.stride(1) != 1:
        by_reference(logits_BV, rows, words_RW)
        return
    check_mask(logits_BV, rows, words_RW)
    if not rows:
        return
    which = np.array(rows, np.int64)
    words_RW = np.ascontiguousarray(words_RW)
    arguments = _Arguments(
        0, logits_BV.data_ptr(), logits_BV.stride(0) * logits_BV.element_size(), which.ctypes.data, len(rows),
        words_RW.ctypes.data, logits_BV.shape[1],
    )  # fmt: skip
    _body(logits_BV.dtype == torch.bfloat16, VERSION)(arguments, min(len(rows), thread_count()))


def warm() -> None:
    """Compile, or load from the disk."""
    _body(False, VERSION)


@cache
def _body(bf16: bool, version: int) -> Body:
    none = np.uint16(_MINUS_INF_BF16) if bf16 else np.float32(-np.inf)

    def mask_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 7, np.int64)
        vocab = a[6]
        words = (vocab + 31) // 32
        item = np.uint16 if bf16 else np.float32
        chosen = carray(at(a[3]), a[4], np.int64)
        while True:
            i = fetch_add(a.ctypes.data, 1)
            if i >= a[4]:
                break
            logits = carray(at(a[1] + chosen[i] * a[2]), vocab, item)
            mask = carray(at(a[5] + i * words * 4), words, np.uint32)
            for w in range(words):
                word, first = mask[w], w * 32
                if word == np.uint32(0) and first + 32 <= vocab:
                    for t in range(first, first + 32):  # vectors: nearly all words of a mask are like this
                        logits[t] = none
                elif word != np.uint32(0xFFFFFFFF):
                    for t in range(first, min(first + 32, vocab)):
                        if not (word >> np.uint32(t - first)) & np.uint32(1):
                            logits[t] = none

    return compile_body(mask_rows)
