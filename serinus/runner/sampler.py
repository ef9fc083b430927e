"""From logits to tokens: every field of SamplingParams, row by row the same whatever else is in the batch.

The order of a row: logit_bias; repetition, frequency and presence penalties; ids forbidden below min_new_tokens;
greedy rows end here (likeliest token, lowest id of equals). Others: divide by the temperature, keep top_k, of these
top_p (probabilities renormalised over what top_k kept), then min_p, and take the largest of logit + Gumbel noise.
The noise is a function of (seed, position, token id) alone, and what is kept is decided by a threshold on the row's own
logits (equals at the threshold stay together), so nothing depends on batch, chunking or sort order.

Knows no requests, only SampleSpec. Shapes: B = rows, N = those that draw, V = vocabulary, K = bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serinus.core.plan import SampleSpec
from serinus.core.request import TokenLogprobs
from serinus.kernels import Kernels

__all__ = ["Sampled", "Sampler", "token_logprobs"]

_BINS = 4096
_NATS = 64.0
_COLDEST = 1e-20
_FORBIDDEN = -1e30  # finite, so that a row with every id forbidden still has a largest
_SCORE_MAX = 1e30  # finite too: of two infinite scores neither is larger, and their difference is no number
_SIGN_BIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was chosen for one row."""

    token: int
    """Id of the chosen token."""
    logprobs: TokenLogprobs | None = None
    """Of the model's own distribution, where asked for."""


class Sampler:
    """Chooses tokens. Stateless: everything comes with the call."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Choose one token per row.

        Args:
            logits_BV: raw logits, fp32 or bf16; not changed.
            specs: one per row.
        Cost: plain greedy rows one argmax; others some passes over their row. One host wait.
        """
        tokens = _likeliest(logits_BV) if all(map(_is_plain, specs)) else self._choose(logits_BV, specs)
        logprobs = _sampled_logprobs(logits_BV, specs, tokens)
        return [Sampled(token=t, logprobs=lp) for t, lp in zip(tokens, logprobs, strict=True)]

    def _choose(self, logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        """Rows that need their own treatment: on an fp32 copy, noise only where the temperature is not 0."""
        scores_BV = logits_BV.to(torch.float32, copy=True)
        for row_V, spec in zip(scores_BV, specs, strict=True):
            _adjust(row_V, spec)
        noisy = [i for i, spec in enumerate(specs) if not spec.params.greedy]
        if noisy:
            index_N = torch.tensor(noisy, device=scores_BV.device)
            scores_BV[index_N] = self._perturb(scores_BV[index_N], [specs[i] for i in noisy])
        return _likeliest(scores_BV)

    def _perturb(self, scores_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """Scale, cut and add noise: the largest of each row is then its sample."""
        device = scores_NV.device
        temperature_N1 = torch.tensor([[s.params.temperature] for s in specs], device=device).clamp_min(_COLDEST)
        scores_NV = (scores_NV - scores_NV.amax(-1, keepdim=True)) / temperature_N1
        floor_N1 = _floors(scores_NV, specs)
        seeds_N = torch.tensor([_signed(s.seed) for s in specs], device=device)
        positions_N = torch.tensor([s.position for s in specs], device=device)
        noise_NV = self._kernels.counter_gumbel(seeds_N, positions_N, scores_NV.shape[1])
        return torch.where(scores_NV >= floor_N1, scores_NV + noise_NV, -torch.inf)


def token_logprobs(logits_BV: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the model's own distribution: of chosen[i], and of the counts[i] likeliest of row i.

    Cost: one log-softmax of the rows in fp32 and a partial sort where a count is above 0.
    """
    norm_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    own = norm_BV.gather(1, torch.tensor(chosen, device=norm_BV.device)[:, None])[:, 0].tolist()
    most = min(max(counts), norm_BV.shape[1])
    top_values, top_ids = norm_BV.topk(most, dim=-1) if most else (norm_BV[:, :0], norm_BV[:, :0])
    values, ids = top_values.tolist(), top_ids.tolist()
    return [
        TokenLogprobs(
            logprob=own[i],
            top_ids=tuple(int(t) for t in ids[i][:count]),
            top_logprobs=tuple(values[i][:count]),
        )
        for i, count in enumerate(counts)
    ]


def _likeliest(scores_BV: torch.Tensor) -> list[int]:
    """Of each row, the id of its largest, the lowest of equals. `max` is four times as fast as `argmax` in bf16."""
    tokens: list[int] = scores_BV.max(-1).indices.tolist()
    return tokens


def _is_plain(spec: SampleSpec) -> bool:
    """Greedy over the raw logits."""
    params = spec.params
    return params.greedy and not params.penalised and not params.logit_bias and not _forbidden(spec)


def _forbidden(spec: SampleSpec) -> bool:
    return bool(spec.stop_ids) and spec.generated < spec.params.min_new_tokens


def _adjust(row_V: torch.Tensor, spec: SampleSpec) -> None:
    """Bias, penalties and forbidden ids, in place. Ids the model does not have cannot be chosen and change nothing."""
    params, vocab = spec.params, len(row_V)
    if params.logit_bias:
        pairs = [(i, b) for i, b in params.logit_bias.items() if i < vocab]
        ids = torch.tensor([i for i, _ in pairs], dtype=torch.int64, device=row_V.device)
        row_V[ids] += torch.tensor([b for _, b in pairs], dtype=torch.float32, device=row_V.device)
    if params.penalised:
        _penalise(row_V, spec)
    if _forbidden(spec):
        row_V[torch.tensor([i for i in spec.stop_ids if i < vocab], dtype=torch.int64)] = _FORBIDDEN


def _penalise(row_V: torch.Tensor, spec: SampleSpec) -> None:
    params = spec.params
    output = spec.output_ids if spec.output_ids is not None else np.zeros(0, dtype=np.int32)
    if params.repetition_penalty != 1.0:
        prompt = spec.prompt_ids if spec.prompt_ids is not None else np.zeros(0, dtype=np.int32)
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, output])).astype(np.int64)).to(row_V.device)
        old = row_V[seen]
        new = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        row_V[seen] = new.clamp_(-_SCORE_MAX, _SCORE_MAX)
    if (params.frequency_penalty or params.presence_penalty) and len(output):
        found, times = np.unique(output, return_counts=True)
        ids = torch.from_numpy(found.astype(np.int64)).to(row_V.device)
        count = torch.from_numpy(times.astype(np.float32)).to(row_V.device)
        row_V[ids] -= params.frequency_penalty * count + params.presence_penalty


def _floors(scores_NV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """[N, 1]: the lowest score each row keeps. Scores are scaled and their largest is 0."""
    floors = [_floor(row_V, spec) for row_V, spec in zip(scores_NV, specs, strict=True)]
    return torch.tensor(floors, dtype=torch.float32, device=scores_NV.device)[:, None]


def _floor(row_V: torch.Tensor, spec: SampleSpec) -> float:
    params = spec.params
    floor = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    if 0 < params.top_k < len(row_V):
        least = row_V.topk(params.top_k).values[-1]
        floor, row_V = max(floor, float(least)), row_V[row_V >= least]
    return max(floor, _nucleus_floor(row_V, params.top_p)) if params.top_p < 1.0 else floor


def _nucleus_floor(row_V: torch.Tensor, top_p: float) -> float:
    """The lowest score among the fewest likeliest that together reach top_p of the row's probability. Sorts no whole
    row: sums the probabilities in bins of equal width first, then sorts the one bin in which top_p is reached."""
    mass_V = row_V.exp().double()
    wanted = top_p * float(mass_V.sum())
    lowest = max(float(row_V.min()), -_NATS)
    bins_V = (row_V * ((_BINS - 1) / min(lowest, -1e-30))).clamp_max(_BINS - 1).long()
    reached_K = torch.bincount(bins_V, weights=mass_V, minlength=_BINS).cumsum(0)
    at = int(torch.searchsorted(reached_K, wanted))
    if at == _BINS:  # top_p so near to 1 that rounding decides: everything stays
        return -math.inf
    inside_K = row_V[bins_V == at].sort(descending=True).values
    sums_K = inside_K.exp().double().cumsum(0) + (reached_K[at - 1] if at else 0.0)
    last = min(int(torch.searchsorted(sums_K, wanted)), len(inside_K) - 1)
    return float(inside_K[last])


def _sampled_logprobs(
    logits_BV: torch.Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    asked = [i for i, s in enumerate(specs) if s.params.logprobs is not None]
    found: list[TokenLogprobs | None] = [None] * len(specs)
    if asked:
        rows = logits_BV if len(asked) == len(specs) else logits_BV[asked]
        counts = [specs[i].params.logprobs or 0 for i in asked]
        for i, value in zip(asked, token_logprobs(rows, [tokens[i] for i in asked], counts), strict=True):
            found[i] = value
    return found


def _signed(seed: int) -> int:
    """A 64-bit word as torch takes it."""
    word = seed & (2 * _SIGN_BIT - 1)
    return word - 2 * _SIGN_BIT if word >= _SIGN_BIT else word
