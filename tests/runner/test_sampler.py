"""What the sampler chooses: edges of every parameter, distributions, and independence from the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.history import TokenHistory
from serinus.core.plan import SampleSpec
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.runner import Sampler

VOCAB = 50
SAMPLER = Sampler(load("cpu"))


def spec(*, seed: int = 0, position: int = 1, generated: int = 0, **given: Any) -> SampleSpec:
    """A SampleSpec; history and stop ids by name, everything else goes to SamplingParams."""
    history = TokenHistory(np.array(given.pop("prompt_ids", ()), np.int32))
    for token in given.pop("output_ids", ()):
        history.add(token)
    stop_ids = tuple(given.pop("stop_ids", ()))
    return SampleSpec(
        params=SamplingParams(**given), seed=seed, position=position, generated=generated, stop_ids=stop_ids,
        history=history,
    )  # fmt: skip


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draws(row: torch.Tensor, count: int = 4000, **given: Any) -> np.ndarray:
    """Frequencies of the tokens drawn with `count` different seeds, in one batch."""
    specs = [spec(seed=i, **given) for i in range(count)]
    tokens = [s.token for s in SAMPLER.sample(row.expand(count, -1), specs).read()]
    return np.bincount(tokens, minlength=len(row)) / count


def close(found: np.ndarray, expected: list[float], count: int = 4000) -> None:
    """Each frequency within five standard deviations."""
    for f, p in zip(found, expected, strict=True):
        assert abs(f - p) <= 5 * math.sqrt(max(p * (1 - p), 1e-9) / count), (found, expected)


def random_row(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


# ---- greedy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.3}])
def test_greedy_takes_the_likeliest(dtype: torch.dtype, given: dict[str, Any]) -> None:
    rows = torch.stack([random_row(i) for i in range(8)]).to(dtype)
    found = [s.token for s in SAMPLER.sample(rows, [spec(seed=i, **given) for i in range(8)]).read()]
    assert found == [row.tolist().index(max(row.tolist())) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beside", [[], [{"temperature": 1.0}], [{"temperature": 0.0, "logit_bias": {1: 1.0}}]])
def test_of_equally_likely_tokens_greedy_takes_the_lowest_id(dtype: torch.dtype, beside: list[dict[str, Any]]) -> None:
    row = torch.zeros(32000, dtype=dtype)
    row[[31990, 777, 20000, 778]] = 3.0
    specs = [spec(temperature=0.0), *(spec(**b) for b in beside)]
    assert SAMPLER.sample(row.expand(len(specs), -1), specs).read()[0].token == 777


def test_logits_are_not_changed() -> None:
    rows = torch.stack([random_row(0), random_row(1)])
    before = rows.clone()
    SAMPLER.sample(rows, [spec(logit_bias={3: 9.0}, temperature=0.5), spec(temperature=0.0, stop_ids=[1])]).read()
    assert torch.equal(rows, before)


# ---- distributions ------------------------------------------------------------------------------------------------


def test_temperature_one_draws_from_the_models_distribution() -> None:
    close(draws(logits_of(0.5, 0.3, 0.15, 0.05)), [0.5, 0.3, 0.15, 0.05])


def test_temperature_sharpens_and_flattens() -> None:
    row = logits_of(0.8, 0.2)
    close(draws(row, temperature=0.5), [0.64 / 0.68, 0.04 / 0.68])
    close(draws(row, temperature=2.0), [2 / 3, 1 / 3])


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    row = random_row(5)
    assert draws(row, 50, temperature=temperature)[int(row.argmax())] == 1.0


def test_a_huge_temperature_is_nearly_uniform() -> None:
    close(draws(logits_of(0.97, 0.01, 0.01, 0.01), temperature=1e4), [0.25] * 4)


def test_positions_of_one_seed_are_independent_draws() -> None:
    row = logits_of(0.6, 0.4)
    specs = [spec(seed=11, position=p) for p in range(1, 4001)]
    tokens = np.array([s.token for s in SAMPLER.sample(row.expand(4000, -1), specs).read()])
    close(np.bincount(tokens) / 4000, [0.6, 0.4])
    pairs = np.bincount(tokens[:-1] * 2 + tokens[1:]) / 3999
    close(pairs, [0.36, 0.24, 0.24, 0.16], 3999)


# ---- top_k, top_p, min_p ------------------------------------------------------------------------------------------


def test_top_k_keeps_k_and_renormalises() -> None:
    close(draws(logits_of(0.1, 0.4, 0.2, 0.3), top_k=2), [0.0, 4 / 7, 0.0, 3 / 7])


def test_top_k_as_large_as_the_vocabulary_keeps_all() -> None:
    close(draws(logits_of(0.1, 0.4, 0.2, 0.3), top_k=4), [0.1, 0.4, 0.2, 0.3])
    close(draws(logits_of(0.1, 0.4, 0.2, 0.3), top_k=10**9), [0.1, 0.4, 0.2, 0.3])


def test_tokens_as_likely_as_the_last_of_top_k_stay_too() -> None:
    close(draws(logits_of(0.4, 0.2, 0.2, 0.2), top_k=2), [0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.999, [0.4, 0.3, 0.2, 0.1]), (0.9001, [0.4, 0.3, 0.2, 0.1]), (0.85, [4 / 9, 3 / 9, 2 / 9, 0.0])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[float]) -> None:
    close(draws(logits_of(0.4, 0.3, 0.2, 0.1), top_p=top_p), kept)


def test_a_tiny_top_p_keeps_the_likeliest_only() -> None:
    assert draws(logits_of(0.3, 0.4, 0.3), 200, top_p=1e-9).tolist() == [0.0, 1.0, 0.0]


def test_top_p_counts_within_what_top_k_kept() -> None:
    # top_k leaves 0.4 and 0.3, that is 4/7 and 3/7: 0.5 is reached by the first alone
    assert draws(logits_of(0.4, 0.3, 0.2, 0.1), 200, top_k=2, top_p=0.5).tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_top_p_beyond_the_sorted_candidates_is_still_exact() -> None:
    row = torch.zeros(5000)
    row[:2000] = 2.0  # 2000 likely tokens share e^2 * 2000 / (e^2 * 2000 + 3000) = 0.83 of the probability
    found = draws(row, 2000, top_p=0.8)
    assert found[2000:].sum() == 0.0
    assert (found[:2000] > 0).sum() > 1000
    row[0] = 2.5
    assert draws(row, 2000, top_p=0.9)[2000:].sum() > 0.0


def test_min_p_drops_what_is_less_likely_than_a_part_of_the_likeliest() -> None:
    close(draws(logits_of(0.5, 0.3, 0.15, 0.05), min_p=0.35), [0.625, 0.375, 0.0, 0.0])
    assert draws(logits_of(0.5, 0.3, 0.2), 100, min_p=1.0).tolist() == [1.0, 0.0, 0.0]


def test_min_p_looks_at_probabilities_after_the_temperature() -> None:
    # at temperature 0.5 the second token is 0.36 as likely as the first, not 0.6
    assert draws(logits_of(0.5, 0.3, 0.2), 100, min_p=0.5, temperature=0.5).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_stricter_of_top_p_and_min_p_decides() -> None:
    row = logits_of(0.4, 0.3, 0.2, 0.1)
    close(draws(row, top_p=0.65, min_p=0.01), [4 / 7, 3 / 7, 0.0, 0.0])
    close(draws(row, top_p=0.99, min_p=0.6), [4 / 7, 3 / 7, 0.0, 0.0])


# ---- bias, penalties, forbidden ids -------------------------------------------------------------------------------


def chosen(row: torch.Tensor, **given: Any) -> int:
    return SAMPLER.sample(row[None], [spec(temperature=0.0, **given)]).read()[0].token


def test_logit_bias_adds_to_logits() -> None:
    row = torch.tensor([1.0, 2.0, 3.0])
    assert chosen(row, logit_bias={0: 2.01}) == 0
    assert chosen(row, logit_bias={0: 1.99}) == 2
    assert chosen(row, logit_bias={2: -100.0, 1: -100.0}) == 0
    close(draws(logits_of(0.5, 0.5), logit_bias={0: math.log(3)}), [0.75, 0.25])


def test_a_bias_on_an_id_the_model_does_not_have_changes_nothing() -> None:
    assert chosen(torch.tensor([1.0, 2.0]), logit_bias={2: 100.0, 99: 100.0}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"frequency_penalty": 0.5}, [3.0, 2.5 - 0.5 * 3, 2.0 - 0.5, -1.0]),
        ({"presence_penalty": 0.5}, [3.0, 2.5 - 0.5, 2.0 - 0.5, -1.0]),
        ({"repetition_penalty": 2.0}, [3.0 / 2, 2.5 / 2, 2.0 / 2, -1.0 * 2]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 1.0},
            [1.5, 1.25 - 0.75 - 1.0, 1.0 - 0.25 - 1.0, -2.0],
        ),
        ({"frequency_penalty": -1.0}, [3.0, 2.5 + 3.0, 2.0 + 1.0, -1.0]),
    ],
)
def test_penalties_are_those_computed_by_hand(given: dict[str, Any], expected: list[float]) -> None:
    """Prompt [0, 3, 0], output [1, 2, 1, 1]; read off through the frequencies at temperature 1."""
    row = torch.tensor([3.0, 2.5, 2.0, -1.0])
    found = draws(row, 8000, prompt_ids=[0, 3, 0], output_ids=[1, 2, 1, 1], **given)
    close(found, torch.softmax(torch.tensor(expected), 0).tolist(), 8000)


def test_penalties_without_history_change_nothing() -> None:
    row = random_row(2)
    given = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 5.0}
    assert chosen(row, prompt_ids=[], output_ids=[], **given) == int(row.argmax())


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-30])
@pytest.mark.parametrize("given", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}, {"temperature": 0.0}])
def test_a_penalty_that_leaves_no_finite_score_still_yields_a_token(penalty: float, given: dict[str, Any]) -> None:
    row = torch.tensor([[2.0, 3.0, 1.0, 0.5]])
    found = SAMPLER.sample(row, [spec(repetition_penalty=penalty, prompt_ids=[0, 2], **given)]).read()
    assert found[0].token in (0, 2)


def test_stop_ids_are_forbidden_until_min_new_tokens() -> None:
    row = torch.tensor([5.0, 4.0, 3.0])
    given: dict[str, Any] = {"min_new_tokens": 3, "stop_ids": [0, 1, 70]}
    assert [chosen(row, generated=g, **given) for g in range(5)] == [2, 2, 2, 0, 0]
    assert draws(row, 300, temperature=5.0, generated=2, **given)[:2].sum() == 0.0


@pytest.mark.parametrize("given", [{}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_with_every_id_forbidden_still_yields_a_token(given: dict[str, Any]) -> None:
    found = SAMPLER.sample(random_row(3)[None], [spec(min_new_tokens=9, stop_ids=range(VOCAB), **given)]).read()
    assert 0 <= found[0].token < VOCAB


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.99999])
def test_the_nucleus_is_that_of_a_plain_sort(temperature: float, top_p: float) -> None:
    row = (torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 3).bfloat16().float()
    row[7] = -torch.inf
    found = draws(row, 300, temperature=temperature, top_p=top_p)
    scaled = (row.double() - row.max()) / max(temperature, 1e-20)
    order = scaled.sort(descending=True).values
    share = order.exp().cumsum(0) / order.exp().sum()
    least = order[min(int((share < top_p - 1e-6).sum()), 2999)]  # a hair below top_p: sums are rounded
    kept = scaled >= least - 1e-6 * abs(least)
    assert found[~kept.numpy()].sum() == 0.0
    assert (found > 0).sum() >= min(int(kept.sum()), 2)


# ---- seeds --------------------------------------------------------------------------------------------------------


def random_spec(rng: Rng, seed: int, position: int) -> SampleSpec:
    return spec(
        seed=seed,
        position=position,
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        top_k=rng.choice([-1, 1, 5, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logit_bias=rng.choice([{}, {3: 2.0}]),
        prompt_ids=[rng.randrange(VOCAB) for _ in range(5)],
        output_ids=[rng.randrange(VOCAB) for _ in range(4)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_sampled_the_same_whatever_else_is_in_the_batch(dtype: torch.dtype) -> None:
    rng = Rng(4)
    rows = torch.stack([random_row(i) for i in range(64)]).to(dtype)
    specs = [random_spec(rng, rng.getrandbits(63), rng.randrange(1, 9999)) for _ in range(64)]
    alone = [SAMPLER.sample(rows[i : i + 1], specs[i : i + 1]).read()[0].token for i in range(64)]
    for _ in range(10):
        order = rng.sample(range(64), rng.randrange(1, 65))
        found = SAMPLER.sample(rows[order], [specs[i] for i in order]).read()
        assert [s.token for s in found] == [alone[i] for i in order]


def test_another_seed_or_position_draws_other_tokens() -> None:
    rows = torch.zeros(1, 32000)
    tokens = {SAMPLER.sample(rows, [spec(seed=s, position=p)]).read()[0].token for s in range(5) for p in range(1, 6)}
    assert len(tokens) > 20


@pytest.mark.parametrize("seed", [-(1 << 63), -1, 0, (1 << 63) - 1])
def test_every_64_bit_seed_is_taken(seed: int) -> None:
    assert 0 <= SAMPLER.sample(random_row(1)[None], [spec(seed=seed)]).read()[0].token < VOCAB


# ---- log-probabilities --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_before_temperature_and_penalties() -> None:
    row = logits_of(0.5, 0.3, 0.15, 0.05)
    given: dict[str, Any] = {"temperature": 0.0, "logit_bias": {2: 50.0}, "logprobs": 2}
    found = SAMPLER.sample(row[None], [spec(**given)]).read()[0]
    assert found.token == 2
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(math.log(0.15), abs=1e-6)
    assert found.logprobs.top_ids == (0, 1)
    assert found.logprobs.top_logprobs == pytest.approx((math.log(0.5), math.log(0.3)), abs=1e-6)


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    rows = torch.stack([random_row(i) for i in range(4)])
    specs = [spec(logprobs=k) for k in (None, 0, 3, 64)]
    found = [s.logprobs for s in SAMPLER.sample(rows, specs).read()]
    assert found[0] is None
    assert [len(lp.top_ids) for lp in found[1:] if lp is not None] == [0, 3, VOCAB]
    assert all(lp.logprob is not None and lp.logprob < 0 for lp in found[1:] if lp is not None)
