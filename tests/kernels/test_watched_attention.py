"""Attention that digests what it reads: the reference, the cpu column against it, and what columns refuse."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import AttentionBatch, Kernels, LayerDigest, packed_sums
from serinus.kernels.packed import PackedFactors

from .conftest import make_paged

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
    sums = torch.zeros(1, 2, 2, 12, dtype=torch.int32)
    return LayerDigest(factors=factors, due_7B=due, sums_P22E=sums, page_size=PAGE)


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
    assert torch.equal(packed_sums(digest.sums_P22E)[live], once)
    ref.watched_attention(*inputs, digest)
    low, high = ((once >> shift & 0xFFFFFFFF) * 2 & 0xFFFFFFFF for shift in (0, 32))
    assert torch.equal(packed_sums(digest.sums_P22E)[live], low | high << 32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"due_7B": torch.zeros(7, 3, dtype=torch.int64)}, r"due torch.int64 \(7, 3\), expected int64 \(7, 2\)"),
        ({"due_7B": torch.zeros(7, 2)}, "due torch.float32"),
        ({"sums_P22E": torch.zeros(4, dtype=torch.int32)}, r"sums torch.int32 \(4,\) over pages of 4"),
        ({"sums_P22E": torch.zeros(0, 2, 2, 4, dtype=torch.int32)}, r"sums torch.int32 \(0, 2, 2, 4\)"),
        ({"sums_P22E": torch.zeros(1, 2, 2, 4, dtype=torch.int64)}, "sums torch.int64"),
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


def watched_case(seed: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, LayerDigest]:
    """(arguments of the op, window and cap, coefficients, a digest without factors): a batch of some sequences with one
    query, of which any pages are due, and some with several, of which none are."""
    rng = random.Random(seed)
    (size, group), page = rng.choice(((64, 4), (128, 2))), rng.choice((1, 4, 16))
    heads, dtype = rng.choice((1, 2, 3)), rng.choice((torch.bfloat16,) * 4 + (torch.float32,))
    sequences = [(1, rng.randint(1, 150)) for _ in range(rng.randint(1, 4))]
    sequences += [(count, count + rng.randint(0, 60)) for count in rng.sample((2, 7, 12), rng.randint(0, 2))]
    rng.shuffle(sequences)
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads * group, kv_heads=heads, head_size=size, page_size=page, dtype=dtype
    )
    window = rng.choice((None, None, 20))
    due, entries, stride = torch.zeros(7, len(sequences), dtype=torch.int64), 0, rng.choice((1, 1, 2, 3))
    for b, (count, context) in enumerate(sequences):
        entries += rng.choice((0, page))  # a gap: entries of no sequence
        low = rng.randrange(context) if window is None else max(0, context - window)
        low, high = max(low, rng.choice((0, low))) if window is None else low, context - 1
        first, pages = low // page, -(-(-(-high // page) - low // page) // stride)
        if count == 1 and high > low:
            due[:, b] = torch.tensor([b, int(paged.batch.rows_B[b]), low, high, first, stride, entries])
            entries += pages * page
    lanes = size * dtype.itemsize // 2
    coefficients = torch.from_numpy(digest_coefficients([3], range(heads), lanes, 2, partial=False))[0]
    sums = torch.randint(-9, 9, (rng.randint(1, 3), 2, 2, entries), dtype=torch.int32)
    nothing = PackedFactors(factors=coefficients, bias=None, lane_count=0)
    inputs = paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, 0.1
    given = {"window": window, "softcap": 20.0 if size == 64 and rng.random() < 0.4 else None}
    return inputs, given, coefficients, LayerDigest(factors=nothing, due_7B=due, sums_P22E=sums, page_size=page)


def test_the_fast_column_digests_what_the_reference_does_to_the_byte(ref: Kernels, cpu: Kernels) -> None:
    threads = torch.get_num_threads()
    for seed in range(24):
        inputs, given, coefficients, blank = watched_case(seed)
        found = []
        torch.set_num_threads(1 + seed % 3)
        for ops in (ref, cpu):
            heads = inputs[1].shape[1]
            digest = replace(blank, factors=ops.pack_factors(coefficients, heads), sums_P22E=blank.sums_P22E.clone())
            attended = ops.watched_attention(*inputs, digest, None, **given)
            found.append(packed_sums(digest.sums_P22E))
            assert torch.equal(attended, ops.paged_attention(*inputs, **given)), f"seed {seed}"
        torch.set_num_threads(threads)
        assert torch.equal(*found), f"seed {seed}"


def test_factors_that_another_column_packed_are_refused(ref: Kernels, cpu: Kernels, coefficients: Tensor) -> None:
    inputs, given, coefficients, blank = watched_case(0)
    packed = cpu.pack_factors(coefficients, inputs[1].shape[1])
    foreign = replace(packed, factors=packed.factors.half(), bias=torch.zeros(1))
    with pytest.raises(ValueError, match="column cpu got factors packed by another column"):
        cpu.watched_attention(*inputs, replace(blank, factors=foreign), None, **given)


def test_coefficients_that_are_not_those_of_whole_heads_are_refused(ref: Kernels, coefficients: Tensor) -> None:
    for wrong in (coefficients, coefficients[0, :, :, :7], coefficients[0].long()):
        with pytest.raises(ValueError, match=r"digest coefficients .* expected int32"):
            ref.pack_factors(wrong, HEADS)
