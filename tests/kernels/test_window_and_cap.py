"""Attention under a window and with capped scores: by hand, both columns, and that nothing below a window is read."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.kernels import AttentionBatch, Kernels, load
from tests.cells import some
from tests.kernels.conftest import DTYPES, Paged, assert_close, make_paged

SHARES_ROUNDED = 2.0**-7
"""Chunks round the shares of the softmax to bf16 before they weigh values of about 1."""
OUT_OF_EVERY_POOL = 1 << 30
MIXED = [(1, 1), (1, 40), (17, 17), (5, 77), (64, 200), (1, 300), (2, 2), (9, 130), (200, 330)]
GEMMA = [(8, 4, 256), (4, 1, 256), (16, 8, 128)]
ODD = [(7, 1, 64), (3, 3, 10), (9, 3, 96), (5, 1, 64)]
FEW = ((16, 8, 128), (7, 1, 64), (3, 3, 10))
"""One shape for each kernel that serves a shape; each other one costs seconds of a compiler."""
SHAPES = some((*GEMMA, *ODD), *FEW)


def run(
    kernels: Kernels, paged: Paged, window: int | None, cap: float | None = None, scale: float = 0.0
) -> torch.Tensor:
    scale = scale or paged.q.shape[2] ** -0.5
    return kernels.paged_attention(paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, scale, window, cap)


def let_go(paged: Paged, window: int, entry: int) -> Paged:
    """Below the windows of all queries, rows say `entry` and the KV is NaN."""
    table, pools = paged.table.clone(), [paged.k_pool.clone(), paged.v_pool.clone()]
    counts = paged.batch.q_starts_B1.diff().tolist()
    for row, context, count in zip(paged.batch.rows_B.tolist(), paged.batch.context_B.tolist(), counts, strict=True):
        low = max(0, context - count - window + 1)
        for pool in pools:
            pool[table[row, :low].long()] = float("nan")
        table[row, :low] = entry
    return dataclasses.replace(paged, table=table, k_pool=pools[0], v_pool=pools[1])


def some(sequences: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> Paged:
    heads, kv_heads, size = shape
    return make_paged(
        seed=seed, sequences=sequences, heads=heads, kv_heads=kv_heads, head_size=size, page_size=8, dtype=dtype
    )


def evenly(queries: int, values: list[float]) -> Paged:
    """One sequence of equal keys: every token takes the mean of the values it sees."""
    paged = some([(queries, len(values))], (1, 1, 2), torch.float32)
    slots = paged.table[paged.batch.rows_B[0], : len(values)].long()
    paged.k_pool[slots] = 0.0
    paged.v_pool[slots, 0] = torch.tensor(values)[:, None]
    return paged


def test_a_window_holds_the_token_itself_and_those_just_before_it(either: Kernels) -> None:
    paged = evenly(12, [float(i) for i in range(12)])
    out = run(either, paged, 3)[:, 0, 0]
    torch.testing.assert_close(out, torch.tensor([0.0, 0.5, *range(1, 11)]))
    assert run(either, paged, 1)[:, 0, 0].tolist() == [float(i) for i in range(12)]


def test_a_single_token_sees_the_end_of_its_sequence(either: Kernels) -> None:
    paged = evenly(1, [float(i) for i in range(100)])
    torch.testing.assert_close(run(either, paged, 11)[0, 0, 0], torch.tensor(94.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [300, 330, 1000])
def test_a_window_as_long_as_everything_changes_no_byte(cpu: Kernels, window: int, dtype: torch.dtype) -> None:
    paged = some([(1, 300), (2, 300), (1, 7)], (4, 2, 64), dtype)
    assert torch.equal(run(cpu, paged, window), run(cpu, paged, None))


def test_a_cap_by_hand(either: Kernels) -> None:
    paged = some([(1, 2)], (1, 1, 2), torch.float32)
    slots = paged.table[paged.batch.rows_B[0], :2].long()
    paged.q[:] = torch.tensor([1.0, 0.0])
    paged.k_pool[slots, 0] = torch.tensor([[8.0, 0.0], [-3.0, 0.0]])
    paged.v_pool[slots, 0] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    scores = [5 * math.tanh(0.5 * 8 / 5), 5 * math.tanh(0.5 * -3 / 5)]
    share = 1 / (1 + math.exp(scores[1] - scores[0]))
    expected = torch.tensor([[[share, 1 - share]]])
    torch.testing.assert_close(run(either, paged, None, 5.0, 0.5), expected, rtol=0, atol=2e-6)


def test_a_high_cap_leaves_scores_as_they_are(either: Kernels) -> None:
    paged = some(MIXED, (4, 2, 16), torch.float32)
    torch.testing.assert_close(run(either, paged, 20, 1e3), run(either, paged, 20), rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "cap"), [(None, 30.0), (1, None), (17, 5.0), (100, None)])
def test_both_columns_agree_and_read_nothing_below_a_window(
    ref: Kernels,
    cpu: Kernels,
    shape: tuple[int, int, int],
    window: int | None,
    cap: float | None,
    dtype: torch.dtype,
) -> None:
    paged = some(MIXED, shape, dtype, seed=shape[0])
    expected = run(ref, paged, window, cap)
    assert not expected.isnan().any()
    found = run(cpu, paged, window, cap)
    if dtype == torch.float32 and cap is not None:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    else:
        assert_close(found, expected, ulps=2, bf16_atol=SHARES_ROUNDED)
    if window is not None:
        for entry in (0, OUT_OF_EVERY_POOL):
            assert torch.equal(run(cpu, let_go(paged, window, entry), window, cap), found)
            assert torch.equal(run(ref, let_go(paged, window, entry), window, cap), expected)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 150)), min_size=1, max_size=4),
    window=st.integers(1, 200),
    shape=st.sampled_from([(2, 1, 64), (4, 2, 64), (3, 1, 64), (2, 2, 16)]),
    dtype=st.sampled_from(DTYPES),
)
def test_both_columns_agree_under_any_window(
    seed: int, lengths: list[tuple[int, int]], window: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    paged = some([(count, count + before) for count, before in lengths], shape, dtype, seed)
    let_go_of = let_go(paged, window, OUT_OF_EVERY_POOL)
    expected = run(load("cpu", "ref"), paged, window)
    assert_close(run(load("cpu"), let_go_of, window), expected, ulps=2, bf16_atol=SHARES_ROUNDED)


def test_layers_with_and_without_a_window_share_a_batch(ref: Kernels, cpu: Kernels) -> None:
    paged = some([(1, 90), (30, 70)], (4, 2, 64), torch.bfloat16)
    for window in (None, 16, None, 40, 16):
        assert_close(run(cpu, paged, window), run(ref, paged, window), ulps=2, bf16_atol=SHARES_ROUNDED)


def test_a_prompt_in_chunks_gives_the_rows_of_a_prompt_in_one_piece(cpu: Kernels) -> None:
    whole = some([(300, 300)], (4, 2, 16), torch.float32)
    rows = []
    for first, end in ((0, 13), (13, 14), (14, 140), (140, 144), (144, 300)):
        batch = AttentionBatch(
            rows_B=whole.batch.rows_B, q_starts_B1=torch.tensor([0, end - first]), context_B=torch.tensor([end])
        )
        part = let_go(dataclasses.replace(whole, q=whole.q[first:end], batch=batch), 19, 0)
        rows.append(run(cpu, part, 19))
    torch.testing.assert_close(torch.cat(rows), run(cpu, whole, 19), rtol=0, atol=2e-6)


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, -1])
def test_nan_within_a_window_is_not_hidden(either: Kernels, count: int, dtype: torch.dtype, place: int) -> None:
    paged = some([(count, 80)], (2, 1, 64), dtype)
    low = 80 - count - 10 + 1
    slot = paged.table[paged.batch.rows_B[0], low if place == 0 else 79].long()
    paged.k_pool[slot] = float("nan")
    out = run(either, paged, 10, 20.0)
    assert out[0 if place == 0 else -1].isnan().all()
    if count > 20:
        assert not out[11:-11].isnan().any()


@pytest.mark.parametrize(("window", "cap"), [(0, None), (-1, None), (None, 0.0), (None, -1.0)])
def test_windows_and_caps_that_make_no_sense_are_refused(
    either: Kernels, window: int | None, cap: float | None
) -> None:
    with pytest.raises(ValueError, match=f"window {window}, softcap {cap}"):
        run(either, some([(1, 6)], (2, 1, 16), torch.float32), window, cap)
