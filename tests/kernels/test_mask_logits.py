"""mask_logits: tokens whose bit is 0 can be chosen no more, in every column, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serinus.kernels import load


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_a_bit_of_a_row_is_a_token_of_it(column: str, dtype: torch.dtype, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    words = (vocab + 31) // 32
    masks = rng.integers(-(1 << 31), 1 << 31, (4, words)).astype(np.int32)
    masks[1], masks[2] = 0, -1
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = logits.clone()
    for row, mask in zip((5, 0, 3, 2), masks, strict=True):
        for token in range(vocab):
            if not (int(mask[token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    load("cpu", column).mask_logits(logits, [5, 0, 3, 2], masks)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_a_strided_row_and_no_row_at_all(column: str) -> None:
    op = load("cpu", column).mask_logits
    logits = torch.zeros(40, 3).T
    op(logits, [1], np.zeros((1, 2), np.int32))
    assert torch.equal(logits.isinf().sum(1), torch.tensor([0, 40, 0]))
    op(logits, [], np.zeros((0, 2), np.int32))
    assert logits.isinf().sum() == 40


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [([0], np.zeros((1, 1), np.int32)), ([0], np.zeros((2, 2), np.int32)), ([3], np.zeros((1, 2), np.int32)),
     ([-1], np.zeros((1, 2), np.int32)), ([0], np.zeros((1, 2), np.int64))],
)  # fmt: skip
def test_words_that_do_not_fit_are_refused(column: str, rows: list[int], words: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=r"expected int32 \[\d, 2\] for rows from 0 to 2"):
        load("cpu", column).mask_logits(torch.zeros(3, 40), rows, words)
