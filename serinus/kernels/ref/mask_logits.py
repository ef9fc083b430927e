"""Logits of tokens that a grammar does not allow: the specification. B = rows, R = those with a grammar, V =
vocabulary, W = words of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_mask

__all__ = ["mask_logits"]


def mask_logits(logits_BV: Tensor, rows: Sequence[int], words_RW: NDArray[np.int32]) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place.

    Args:
        logits_BV: fp32 or bf16.
        rows: R different rows, those that words are given for; others stay as they are.
        words_RW: on the host; bit t % 32 of word t // 32 says whether token t may be chosen.
    Raises:
        ValueError: the words are not (V + 31) // 32 for each row, or a row is outside.
    Cost: one copy of the words to the device, one pass over R * V; no host wait.
    """
    check_mask(logits_BV, rows, words_RW)
    if not rows:
        return
    words = torch.from_numpy(words_RW).to(logits_BV.device)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed_RV = ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits_BV.shape[1]]
    index = torch.tensor(list(rows), device=words.device)
    logits_BV[index] = logits_BV[index].masked_fill(~allowed_RV, -torch.inf)
