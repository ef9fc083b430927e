"""Random inputs for the kernels, and how far two columns may differ."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from serinus.kernels import AttentionBatch, Kernels, load

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="session")
def ref() -> Kernels:
    return load("cpu", "ref")


@pytest.fixture(scope="session")
def cpu() -> Kernels:
    return load("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own is the same in every run, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["ref", "cpu"])
def either(request: pytest.FixtureRequest) -> Kernels:
    """Each column in turn: what is said of an op holds for both."""
    return load("cpu", request.param)


def assert_close(got: Tensor, expected: Tensor, *, ulps: float = 1.0, bf16_atol: float = 1e-3) -> None:
    """Equal within `ulps` of the expected value's bf16 spacing (or `bf16_atol`), or in fp32 within 4e-6 of the largest
    value."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.dtype == torch.bfloat16:
        torch.testing.assert_close(got.float(), expected.float(), rtol=ulps * 2.0**-7, atol=bf16_atol)
    else:
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(got, expected, rtol=0, atol=4e-6 * scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Sequences with their KV in scattered pages of one pool."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    batch: AttentionBatch


def make_paged(
    *,
    seed: int,
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
    dtype: torch.dtype,
) -> Paged:
    """A batch of (query tokens, context) sequences; slots that no sequence owns hold NaN, to show if they are read."""
    rng = torch.Generator().manual_seed(seed)
    page_counts = [-(-context // page_size) for _, context in sequences]
    page_count = sum(page_counts) + 4
    pages = torch.randperm(page_count - 1, generator=rng) + 1
    width = max(context for _, context in sequences) + 3
    table = torch.zeros(len(sequences) + 2, width, dtype=torch.int32)
    rows = torch.randperm(len(sequences) + 1, generator=rng)[: len(sequences)] + 1
    pools = torch.full((2, page_count * page_size, kv_heads, head_size), float("nan"), dtype=dtype)
    taken = 0
    for (_, context), count, row in zip(sequences, page_counts, rows.tolist(), strict=True):
        owned = pages[taken : taken + count]
        taken += count
        slots = (owned[:, None] * page_size + torch.arange(page_size)).flatten()[:context]
        table[row, :context] = slots.int()
        pools[:, slots] = torch.randn(2, context, kv_heads, head_size, generator=rng).to(dtype)
    counts = torch.tensor([count for count, _ in sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    q = torch.randn(int(starts[-1]), heads, head_size, generator=rng).to(dtype)
    batch = AttentionBatch(rows_B=rows, q_starts_B1=starts, context_B=torch.tensor([c for _, c in sequences]))
    return Paged(q=q, k_pool=pools[0], v_pool=pools[1], table=table, batch=batch)
