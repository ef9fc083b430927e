"""Attention that digests what it reads: the reference, the cpu column against it, and what columns refuse."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import FP8_FORMATS, AttentionBatch, Kernels, LayerDigest, packed_sums
from serinus.kernels.fp8 import stored_as
from serinus.kernels.packed import PackedFactors

from .conftest import make_paged

PAGE, HEADS, SIZE = 4, 2, 16


def plain(factors_22W: Tensor) -> PackedFactors:
    return PackedFactors(factors=factors_22W, bias=None, plain_22W=factors_22W)


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
        ({"factors": plain(torch.zeros(2, 2, 9, dtype=torch.int32))}, r"torch.int32 \(2, 2, 9\), expected int32"),
    ],
)
def test_a_digest_that_is_not_of_this_batch_is_refused(
    ref: Kernels, inputs: tuple[Any, ...], coefficients: Tensor, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ref.watched_attention(*inputs, replace(digest_of(ref, coefficients[0]), **wrong))


def test_a_digest_with_other_sums_writes_to_these(cpu: Kernels, inputs: tuple[Any, ...], coefficients: Tensor) -> None:
    """What a kernel keeps of a digest are addresses of its tensors."""
    before = digest_of(cpu, coefficients[0])
    cpu.watched_attention(*inputs, before)
    once = before.sums_P22E.clone()
    after = replace(before, sums_P22E=torch.zeros_like(once))
    cpu.watched_attention(*inputs, after)
    assert torch.equal(before.sums_P22E, once)
    assert torch.equal(after.sums_P22E, once)
    assert once.any()


def due_of(rng: random.Random, b: int, row: int, low: int, high: int, page: int, begin: int) -> tuple[list[int], int]:
    """A column of a plan whose entries begin there, and where they end."""
    stride = rng.choice((1, 1, 2, 3))
    first = low // page
    pages = max(0, -(-(-(-high // page) - first) // stride)) if high > low else 0
    return [b, row, low, high if pages else low, first, stride, begin], begin + pages * page


def watched_case(seed: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, LayerDigest]:
    """(arguments of the op, window and cap, coefficients, a digest with plain factors): a batch of sequences with one
    query, few and many, of which any pages before their first query are due, in one or two columns."""
    rng = random.Random(seed)
    (size, group), page = rng.choice(((64, 4), (128, 2), (48, 2))), rng.choice((1, 4, 16))
    heads, dtype = rng.choice((1, 2, 3)), rng.choice((torch.bfloat16,) * 3 + (torch.float32,))
    kind = rng.choice((dtype, dtype, *FP8_FORMATS))
    sequences = [(1, rng.randint(1, 150)) for _ in range(rng.randint(1, 3))]
    counts = rng.sample((2, 7, 12, 70, 300), rng.randint(0, 2))
    sequences += [(count, count + rng.randint(0, 150)) for count in counts]
    rng.shuffle(sequences)
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads * group, kv_heads=heads, head_size=size, page_size=page, dtype=dtype
    )
    pools = stored_as(paged.k_pool, kind), stored_as(paged.v_pool, kind)
    window, partial = rng.choice((None, None, 20, 130)), rng.random() < 0.2
    sets: list[list[list[int]]] = [[], []]
    entries = 0
    for b, (count, context) in enumerate(sequences):
        entries += rng.choice((0, page))  # a gap: entries of no sequence
        start, row = context - count, int(paged.batch.rows_B[b])
        low = rng.randrange(start + 1) if window is None else max(0, start - window + 1 - rng.choice((0, 0, 9)))
        middle = rng.randrange(low // page, start // page + 1) * page if rng.random() < 0.5 else 0
        for columns, (begin, end) in zip(sets, ((max(low, middle), start), (low, middle)), strict=True):
            column, entries = due_of(rng, b, row, begin, end, page, entries)
            columns.append(column)
    due = torch.tensor(sets[0] if rng.random() < 0.3 else sets[0] + sets[1]).T.contiguous()
    lanes = size * kind.itemsize // 2
    coefficients = torch.from_numpy(digest_coefficients([3], range(heads), lanes, 2, partial=partial))[0]
    sums = torch.randint(-9, 9, (rng.randint(1, 3), 2, 2, entries), dtype=torch.int32)
    inputs = paged.q, *pools, paged.table, paged.batch, 0.1
    given: dict[str, Any] = {"window": window, "softcap": 20.0 if size == 64 and rng.random() < 0.4 else None}
    given["sinks_N"] = torch.randn(heads * group) if rng.random() < 0.5 else None
    return inputs, given, coefficients, LayerDigest(
        factors=plain(coefficients), due_7B=due, sums_P22E=sums, page_size=page
    )  # fmt: skip


def expected_sums(ref: Kernels, inputs: tuple[Any, ...], digest: LayerDigest) -> Tensor:
    """What the sums of a digest are to be: canary_plan and canary_digest, column by column."""
    sums = digest.sums_P22E.clone()
    for column in digest.due_7B.T:
        count = int((column[3] - column[2] // digest.page_size * digest.page_size).clamp_min(0)) + digest.page_size
        alone = column.clone()
        alone[6] = 0
        sizes = {"page_size": digest.page_size, "slot_count": len(inputs[1])}
        slots = ref.canary_plan(inputs[3], alone[:, None].contiguous(), count, **sizes)[0]
        live = slots.nonzero().flatten()
        if int(column[3]) > int(column[2]) and len(live):
            found = ref.canary_digest([inputs[1:3]], slots[live], digest.factors.plain_22W[None])
            words = found.view(torch.int32).view(len(live), 2, 2).permute(1, 2, 0)
            sums[0].index_add_(2, live + int(column[6]), words.contiguous())
    return packed_sums(sums)


@pytest.mark.parametrize(
    ("packs", "seeds"),
    [
        ("cpu", range(8)),
        ("ref", range(8, 12)),
        pytest.param("cpu", range(12, 90), marks=pytest.mark.proof),
        pytest.param("ref", range(90, 120), marks=pytest.mark.proof),
    ],
)
def test_every_column_digests_what_is_due_to_the_byte_and_attends_as_ever(
    ref: Kernels, cpu: Kernels, packs: str, seeds: range
) -> None:
    """Any mix of sequences with one, few and many queries, dtypes, windows, whole rows and first bytes."""
    threads = torch.get_num_threads()
    for seed in seeds:
        inputs, given, coefficients, blank = watched_case(seed)
        whole = coefficients.shape[-1] == inputs[1][0].numel() * inputs[1].itemsize // 2
        packed = cpu.pack_factors(coefficients, inputs[1].shape[1]) if whole and packs == "cpu" else blank.factors
        expected = expected_sums(ref, inputs, blank)
        torch.set_num_threads(1 + seed % 3)
        for ops in (ref, cpu):
            digest = replace(blank, factors=packed, sums_P22E=blank.sums_P22E.clone())
            attended = ops.watched_attention(*inputs, digest, None, **given)
            assert torch.equal(packed_sums(digest.sums_P22E), expected), f"seed {seed}, {ops.columns['linear']}"
            assert torch.equal(attended, ops.paged_attention(*inputs, **given)), f"seed {seed}"
        torch.set_num_threads(threads)


def test_coefficients_that_are_not_those_of_whole_heads_are_refused(ref: Kernels, coefficients: Tensor) -> None:
    for wrong in (coefficients, coefficients[0, :, :, :7], coefficients[0].long()):
        with pytest.raises(ValueError, match=r"digest coefficients .* expected int32"):
            ref.pack_factors(wrong, HEADS)
