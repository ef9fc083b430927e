"""Attention that digests what it reads: the reference, and what the check that columns share refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import AttentionBatch, Kernels, LayerDigest, packed_sums
from serinus.kernels.packed import PackedFactors

PAGE, HEADS, SIZE = 4, 2, 16


def batch_of(*contexts: int) -> AttentionBatch:
    count = len(contexts)
    return AttentionBatch(
        rows_B=torch.arange(count), q_starts_B1=torch.arange(count + 1), context_B=torch.tensor(contexts)
    )


@pytest.fixture
def inputs() -> tuple[Any, ...]:
    """Two sequences of 7 and 5 tokens: pages 1 and 2, and 3 and 4."""
    torch.manual_seed(1)
    kv = torch.randn(2, 20, HEADS, SIZE).bfloat16()
    table = torch.tensor([range(4, 12), range(12, 20)], dtype=torch.int32)
    return torch.randn(2, 2 * HEADS, SIZE).bfloat16(), kv[0], kv[1], table, batch_of(7, 5), 0.25


def digest_of(ref: Kernels, coefficients_22W: Tensor) -> LayerDigest:
    """Of all pages of the first sequence and the second page of the second one."""
    due = torch.tensor([[0, 1], [0, 1], [0, 0], [7, 5], [0, 1], [1, 1], [0, 8]])
    factors = ref.pack_factors(coefficients_22W, HEADS)
    return LayerDigest(factors=factors, due_7B=due, sums_22E=torch.zeros(2, 2, 12, dtype=torch.int32), page_size=PAGE)


@pytest.fixture
def coefficients() -> Tensor:
    return torch.from_numpy(digest_coefficients([0], [0, 1], SIZE, 2, partial=False))


def test_the_digest_of_what_is_due_is_added_and_attention_is_the_same(
    ref: Kernels, inputs: tuple[Any, ...], coefficients: Tensor
) -> None:
    digest = digest_of(ref, coefficients[0])
    attended = ref.watched_attention(*inputs, digest)
    assert torch.equal(attended, ref.paged_attention(*inputs))
    assert torch.equal(ref.watched_attention(*inputs), attended)
    once = ref.canary_digest([(inputs[1], inputs[2])], torch.tensor([*range(4, 11), 16]), coefficients)
    live = [*range(7), 8]
    assert torch.equal(packed_sums(digest.sums_22E)[live], once)
    ref.watched_attention(*inputs, digest)
    low, high = ((once >> shift & 0xFFFFFFFF) * 2 & 0xFFFFFFFF for shift in (0, 32))
    assert torch.equal(packed_sums(digest.sums_22E)[live], low | high << 32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"due_7B": torch.zeros(7, 3, dtype=torch.int64)}, r"due torch.int64 \(7, 3\), expected int64 \(7, 2\)"),
        ({"due_7B": torch.zeros(7, 2)}, "due torch.float32"),
        ({"sums_22E": torch.zeros(4, dtype=torch.int32)}, r"sums torch.int32 \(4,\) over pages of 4"),
        ({"sums_22E": torch.zeros(2, 2, 4, dtype=torch.int64)}, "sums torch.int64"),
        ({"page_size": 0}, "over pages of 0, expected"),
        ({"factors": PackedFactors(factors=torch.zeros(2, 2, 8), bias=None, lane_count=8)}, "of 8 lanes, expected 32"),
        (
            {"factors": PackedFactors(factors=torch.zeros(1), bias=torch.zeros(1), lane_count=32)},
            "column ref got factors packed by another column",
        ),
    ],
)
def test_a_digest_that_is_not_of_this_batch_is_refused(
    ref: Kernels, inputs: tuple[Any, ...], coefficients: Tensor, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ref.watched_attention(*inputs, replace(digest_of(ref, coefficients[0]), **wrong))


def test_several_queries_of_a_sequence_are_refused(ref: Kernels, inputs: tuple[Any, ...]) -> None:
    chunk = AttentionBatch(
        rows_B=torch.zeros(1, dtype=torch.int64), q_starts_B1=torch.tensor([0, 2]), context_B=torch.tensor([7])
    )
    with pytest.raises(ValueError, match="2 queries of 1 sequences, expected one of each"):
        ref.watched_attention(*inputs[:4], chunk, 0.25)


def test_coefficients_that_are_not_those_of_whole_heads_are_refused(ref: Kernels, coefficients: Tensor) -> None:
    for wrong in (coefficients, coefficients[0, :, :, :7], coefficients[0].long()):
        with pytest.raises(ValueError, match=r"digest coefficients .* expected int32"):
            ref.pack_factors(wrong, HEADS)
