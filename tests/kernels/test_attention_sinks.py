"""Attention with sinks: by hand, both columns, and what a sink must not do."""

from __future__ import annotations

import math

import pytest
import torch

from serinus.kernels import Kernels
from tests.kernels.conftest import DTYPES, Paged, assert_close
from tests.kernels.test_window_and_cap import MIXED, SHARES_ROUNDED, evenly, some

SHAPES = ((16, 2, 64), (7, 1, 64), (3, 3, 10))
"""One for each kernel that serves a shape."""


def run(kernels: Kernels, paged: Paged, sinks: torch.Tensor | None, window: int | None = None) -> torch.Tensor:
    inputs = paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, paged.q.shape[2] ** -0.5
    return kernels.paged_attention(*inputs, window, None, sinks)


@pytest.mark.parametrize("queries", [1, 12])
def test_a_sink_takes_its_share_and_weighs_no_value(either: Kernels, queries: int) -> None:
    paged = evenly(queries, [2.0] * 12)
    found = run(either, paged, torch.tensor([math.log(3.0)]))[:, 0, 0]
    seen = torch.arange(12 - queries + 1, 13)
    torch.testing.assert_close(found, 2.0 * seen / (seen + 3.0))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_columns_agree(
    ref: Kernels, cpu: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    paged, sinks = some(MIXED, shape, dtype), torch.linspace(-3.0, 6.0, shape[0])
    expected = run(ref, paged, sinks, window)
    assert (expected - run(ref, paged, None, window)).abs().max() > 0.05
    assert_close(run(cpu, paged, sinks, window), expected, ulps=2, bf16_atol=SHARES_ROUNDED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_far_below_all_scores_changes_nothing(either: Kernels, dtype: torch.dtype) -> None:
    paged = some(MIXED, (4, 2, 64), dtype)
    found = run(either, paged, torch.full((4,), -1e4), 20)
    assert_close(found, run(either, paged, None, 20), ulps=2, bf16_atol=SHARES_ROUNDED)


def test_sinks_of_another_model_are_refused(either: Kernels) -> None:
    paged = some([(1, 6)], (2, 1, 16), torch.float32)
    for odd in (torch.zeros(1), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="sinks"):
            run(either, paged, odd)
