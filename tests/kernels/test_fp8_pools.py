"""Pools in FP8: what is stored, to the bit, and attention over it, in every column; refused types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serinus.kernels import FP8_FORMATS, Kernels
from serinus.kernels.fp8 import stored_as
from tests.kernels.conftest import DTYPES, Paged, assert_close
from tests.kernels.test_qk_rope_store import inputs, run
from tests.kernels.test_window_and_cap import MIXED, SHARES_ROUNDED, some

KINDS = tuple(FP8_FORMATS)
SHAPES = ((16, 2, 64), (4, 2, 128), (6, 3, 96), (7, 1, 32), (3, 3, 10))
"""One for each kernel that serves a shape, with digests of whole blocks and of others."""


def codes(kind: torch.dtype) -> Tensor:
    """All numbers of the type, as it has them, the NaNs too."""
    return torch.arange(256).to(torch.uint8).view(kind)


def awkward(kind: torch.dtype) -> Tensor:
    """All finite numbers, what lies half way between neighbours and a little beside, what is too large, NaN."""
    finite = torch.unique(codes(kind).float()[codes(kind).float().isfinite()])
    halves = (finite[1:] + finite[:-1]) / 2
    beside = torch.cat([halves * (1 + sign * 2.0**-7) for sign in (-1, 1)])
    largest = float(finite.max())
    odd = torch.tensor([largest * 1.03, largest * 1.5, 3e38, float("inf"), float("nan"), 1e-30, 0.0])
    return torch.cat([finite, halves, beside, odd, -odd])


def in_fp8(paged: Paged, kind: torch.dtype) -> Paged:
    return replace(paged, k_pool=stored_as(paged.k_pool, kind), v_pool=stored_as(paged.v_pool, kind))


def attend(kernels: Kernels, paged: Paged, **given: Any) -> Tensor:
    return kernels.paged_attention(
        paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, paged.q.shape[2] ** -0.5, **given
    )


def test_numbers_that_are_too_large_become_the_largest_and_none_becomes_infinite() -> None:
    wild = torch.tensor([500.0, -1e9, float("inf"), 6e4, 2.0**-10, 17.0])
    assert stored_as(wild, KINDS[0]).tolist() == [448.0, -448.0, 448.0, 448.0, 0.0, 16.0]
    assert stored_as(wild, KINDS[1]).tolist() == [512.0, -57344.0, 57344.0, 57344.0, 2.0**-10, 16.0]
    assert stored_as(torch.tensor([float("nan")]), KINDS[0]).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_stored_as_the_nearest_number(
    either: Kernels, kind: torch.dtype, dtype: torch.dtype
) -> None:
    values = awkward(kind)
    tokens, size = -(-len(values) // 32), 32
    given = inputs(tokens=tokens, heads=2, kv_heads=1, size=size, dtype=dtype, norms=False)
    flat = torch.zeros(tokens * size)
    flat[: len(values)] = values
    finite = torch.where(flat.isfinite(), flat, 1.0)  # a rotated infinity would be NaN
    halves = [each.view(tokens, size) for each in (finite, flat)]
    given["qkv_TX"] = torch.cat([torch.zeros(tokens, 2 * size), *halves], 1).to(dtype)
    given["cos_PF"], given["sin_PF"] = torch.ones(50, size // 2), torch.zeros(50, size // 2)
    pool = torch.zeros(given["k_pool_SHD"].shape, dtype=kind)
    given["k_pool_SHD"], given["v_pool_SHD"] = pool, pool.clone()
    largest = FP8_FORMATS[kind].largest
    for found, source in zip(run(either, given)[1:], (finite, flat), strict=True):
        rows = found.view(torch.uint8)[given["slots_T"]].view(kind).flatten().float()
        expected = source.to(dtype).float().clamp(-largest, largest).to(kind).float()
        torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize("shape", [(2, 1, 256), (2, 1, 250)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_read_as_what_it_is(
    either: Kernels, kind: torch.dtype, dtype: torch.dtype, shape: tuple[int, int, int], queries: int
) -> None:
    """Equal keys share evenly between equal values: what comes out is the value."""
    paged = in_fp8(some([(queries, queries)], shape, dtype), kind)
    row = codes(kind)[-shape[2] :].clone()
    row.view(torch.uint8)[row.float().isinf()] = 0  # none is ever stored, and a share of 0 of it is NaN
    paged.k_pool.view(torch.uint8).zero_()
    paged.v_pool.view(torch.uint8).copy_(row.view(torch.uint8).expand(paged.v_pool.shape))
    out = attend(either, paged)
    expected = row.float().expand(out.shape)
    torch.testing.assert_close(out.float(), expected, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_columns_attend_alike(
    ref: Kernels, cpu: Kernels, kind: torch.dtype, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    sinks = torch.linspace(-3.0, 6.0, shape[0])
    for given in ({}, {"window": 20, "sinks_N": sinks}, {"softcap": 5.0}):
        plain = some(MIXED, shape, dtype)
        paged = in_fp8(plain, kind)
        found, expected = attend(cpu, paged, **given), attend(ref, paged, **given)
        assert_close(found, expected, ulps=2, bf16_atol=SHARES_ROUNDED)
        assert (expected - attend(ref, plain, **given)).abs().max() > 0.01


def test_pools_of_two_types_are_refused(either: Kernels) -> None:
    paged = in_fp8(some([(1, 6)], (2, 1, 16), torch.float32), KINDS[0])
    odd = replace(paged, v_pool=paged.v_pool.float().to(KINDS[1]))
    with pytest.raises(ValueError, match=r"pools torch.float8_e4m3fn and torch.float8_e5m2, .* expected one dtype"):
        attend(either, odd)
