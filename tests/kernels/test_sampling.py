"""Sampling ops: both columns choose the same tokens, of the noise that the hash says, whatever the parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.core.history import TokenHistory
from serinus.core.rng import MASK64, splitmix64
from serinus.kernels import Kernels, RowSampling, load

DTYPES = (torch.float32, torch.bfloat16)


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise in plain Python."""
    key = splitmix64((splitmix64(seed & MASK64) + position) & MASK64)
    v = ((splitmix64((key + token) & MASK64) >> 32) + 0.5) * 2.0**-32
    return -math.log(-math.log1p(-min(v, 1 - 2.0**-24)))


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def history(rng: np.random.Generator, vocab: int) -> TokenHistory:
    made = TokenHistory(rng.integers(0, vocab, rng.integers(0, 60)).astype(np.int32))
    for token in rng.integers(0, vocab, rng.integers(0, 40)).tolist():
        made.add(token)
    return made


def test_the_token_is_the_largest_of_score_and_noise_of_the_hash(either: Kernels) -> None:
    logits = random_logits(40, 23)
    rows = [RowSampling(seed=97 * i - 1500, position=i, temperature=0.8) for i in range(40)]
    for i, token in enumerate(either.choose_tokens(logits, rows).tolist()):
        totals = [logits[i, t].item() / 0.8 + noise(97 * i - 1500, i, t) for t in range(23)]
        assert token == totals.index(max(totals))


@st.composite
def many_rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[RowSampling]]:
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 129, 300, 4099, 20011]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    count = draw(st.integers(1, 6))
    logits = torch.from_numpy(rng.normal(size=(count, vocab)) * scale).to(draw(st.sampled_from(DTYPES)))
    for value in draw(st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 3e38]), max_size=2)):
        logits[rng.integers(count), rng.integers(vocab)] = value

    def row() -> RowSampling:
        ids = np.sort(rng.choice(vocab + 9, min(vocab, 20), replace=False)).astype(np.int32)
        return RowSampling(
            seed=int(rng.integers(-(1 << 63), (1 << 63) - 1)),
            position=int(rng.integers(1 << 40)),
            temperature=float(rng.choice([0.0, 1e-20, 0.6, 1.0, 5.0])),
            top_k=int(rng.choice([-1, 1, 2, 40, 2000, vocab, 1 << 62])),
            top_p=float(rng.choice([1.0, 1.0, 0.99999, 0.95, 0.5, 1e-9])),
            min_p=float(rng.choice([0.0, 0.0, 0.01, 1.0])),
            bias=(ids, rng.normal(size=len(ids)).astype(np.float32)) if rng.random() < 0.3 else None,
            history=history(rng, vocab + 30) if rng.random() < 0.5 else None,
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.5, 1e-300])),
            frequency_penalty=float(rng.choice([0.0, 0.7])),
            presence_penalty=float(rng.choice([0.0, -0.4])),
            forbidden=tuple(rng.integers(0, vocab + 9, 3).tolist()) if rng.random() < 0.3 else (),
        )

    return logits, [row() for _ in range(count)]


@settings(max_examples=60)
@given(many_rows())
def test_both_columns_choose_the_same_tokens(case: tuple[torch.Tensor, list[RowSampling]]) -> None:
    logits, rows = case
    assert load("cpu").choose_tokens(logits, rows).equal(load("cpu", "ref").choose_tokens(logits, rows))


@settings(max_examples=60)
@given(many_rows(), st.integers(0, 1 << 30))
def test_masked_rows_are_chosen_as_if_what_is_forbidden_were_minus_infinity(
    case: tuple[torch.Tensor, list[RowSampling]], seed: int
) -> None:
    logits, rows = case
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(rows))[: rng.integers(len(rows) + 1)].tolist()
    share = rng.choice([0.001, 0.5, 0.999], (len(some), 1))
    allowed = rng.random((len(some), (logits.shape[1] + 31) // 32 * 32)) < share
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    masked = logits.clone()
    load("cpu", "ref").mask_logits(masked, some, words)
    expected = load("cpu", "ref").choose_tokens(masked, rows)
    for column in ("cpu", "ref"):
        assert load("cpu", column).choose_tokens(logits.clone(), rows, (some, words)).equal(expected), column


def test_masks_that_do_not_fit_the_logits_are_refused(either: Kernels) -> None:
    with pytest.raises(ValueError, match=r"expected int32 \[1, 2\]"):
        either.choose_tokens(torch.zeros(1, 40), [RowSampling(seed=0, position=0)], ([0], np.zeros((1, 1), np.int32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_columns_choose_the_same_of_a_large_vocabulary(ref: Kernels, cpu: Kernels, dtype: torch.dtype) -> None:
    logits = random_logits(12, 151_936, dtype)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 700}, {"top_k": 90_000, "top_p": 0.99}]
    rows = [RowSampling(seed=i, position=i, **kinds[i % 4]) for i in range(12)]
    assert cpu.choose_tokens(logits, rows).equal(ref.choose_tokens(logits, rows))


@pytest.mark.parametrize("vocab", [17, 5000])
def test_thresholds_cut_where_a_plain_sort_does(cpu: Kernels, vocab: int) -> None:
    """Drawn at a temperature so high that each kept token is as likely: seen is what was kept, almost surely."""
    logits = random_logits(1, vocab) / 1e4
    order = logits[0].argsort(descending=True).tolist()
    for k in (1, 5, 16):
        rows = [RowSampling(seed=seed, position=1, temperature=1e4, top_k=k) for seed in range(30 * k)]
        found = set(cpu.choose_tokens(logits.expand(len(rows), -1), rows).tolist())
        assert found == set(order[:k])


def test_strided_logits_and_half_precision_are_read_as_they_are(cpu: Kernels) -> None:
    wide = random_logits(6, 80)
    rows = [RowSampling(seed=i, position=2) for i in range(6)]
    plain = cpu.choose_tokens(wide[:, :40].contiguous(), rows)
    assert cpu.choose_tokens(wide[:, :40], rows).equal(plain)
    assert cpu.choose_tokens(wide[:, :40].t().contiguous().t(), rows).equal(plain)
    assert cpu.choose_tokens(wide.half(), rows).equal(cpu.choose_tokens(wide.half().float(), rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 50, 6000])
def test_log_probabilities_are_those_of_a_log_softmax(either: Kernels, vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(4, vocab, dtype)
    norm = torch.log_softmax(logits.double(), -1)
    chosen, counts = [0, vocab - 1, vocab // 2, 0], [0, 1, 64, vocab]
    for i, top in enumerate(either.top_tokens(logits, chosen, counts)):
        likeliest = norm[i].sort(descending=True, stable=True)  # of equals the lowest id first
        count = min(counts[i], vocab)
        assert top.logprob == pytest.approx(norm[i, chosen[i]].item(), abs=1e-5)
        assert list(top.ids) == likeliest.indices[:count].tolist()
        assert list(top.logprobs) == pytest.approx(likeliest.values[:count].tolist(), abs=1e-5)


def test_log_probabilities_of_large_scores_are_as_good_as_those_of_small_ones(either: Kernels) -> None:
    logits = 1e6 + torch.tensor([[0.0, -1.0, -2.0]])
    norm = torch.log_softmax(logits.double(), -1)[0].tolist()
    (top,) = either.top_tokens(logits, [2], [3])
    assert top.logprob == pytest.approx(norm[2], abs=1e-5)
    assert list(top.logprobs) == pytest.approx(norm, abs=1e-5)


def test_what_does_not_fit_is_refused(either: Kernels) -> None:
    row = RowSampling(seed=1, position=1)
    for logits in (torch.zeros(3), torch.zeros(2, 0), torch.zeros(1, 9), torch.zeros(2, 9, dtype=torch.int64)):
        with pytest.raises(ValueError, match="logits"):
            either.choose_tokens(logits, [row, row])
        with pytest.raises(ValueError, match="logits"):
            either.top_tokens(logits, [0, 0], [1, 1])
    with pytest.raises(ValueError, match=r"ids 0 \.\. 9 are chosen, expected 0 \.\. 8"):
        either.top_tokens(torch.zeros(2, 9), [0, 9], [1, 1])
    assert either.choose_tokens(torch.zeros(0, 9), []).tolist() == []
    assert either.top_tokens(torch.zeros(0, 9), [], []) == []
