"""From logits to tokens, and to log-probabilities: the specification.

The order of a row: bias; repetition, frequency and presence penalties; forbidden ids; a greedy row then takes its
likeliest token, the lowest id of equals. Others: less the largest, over the temperature; keep top_k, of these top_p
(probabilities renormalised over what top_k kept), of these what min_p leaves, and take the largest of score + noise.

argmax(logits / temperature + Gumbel noise) is a sample from softmax(logits / temperature) (Gumbel, 1954). The noise of
a token is a function of (seed, position, token id) alone, and what is kept is decided by a threshold on the row's own
scores (equals at the threshold stay together), so a request draws the same tokens whatever else is in the batch,
however it was chunked, and after a retraction.

Shapes: B = rows, N = those that draw, C = those that cut, V = vocabulary, K = tokens listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_logits
from serinus.kernels.contracts import RowMasks, RowSampling, TopTokens
from serinus.kernels.ref.mask_logits import mask_logits
from serinus.kernels.splitmix import splitmix

__all__ = ["choose_tokens", "top_tokens"]

_MASK32 = (1 << 32) - 1
_SIGN_BIT = 1 << 63
_SCORE_MAX = 1e30
"""Scores are held to this: of two infinite scores neither is larger, and their difference is no number."""


def choose_tokens(logits_BV: Tensor, rows: Sequence[RowSampling], masks: RowMasks | None = None) -> Tensor:
    """One token for each row.

    Args:
        logits_BV: fp32 or bf16; not changed but for `masks`. Held to +-1e30, and NaN counts as -1e30.
        rows: how each is chosen.
        masks: logits of tokens that they forbid count as -inf, and may become it.
    Returns: B ids in [0, V), int64, on the device of the logits.
    Raises:
        ValueError: there are not as many rows as logits, V is 0, or masks do not fit.
    Cost: some passes over B * V, and a sort of the rows that cut. No kernel of it need wait for the device.
    """
    check_logits(logits_BV, len(rows))
    if masks is not None:
        mask_logits(logits_BV, *masks)
    scores_BV = _scores(logits_BV)
    for row_V, row in zip(scores_BV, rows, strict=True):
        _adjust(row_V, row)
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0.0]
    if drawn:
        index_N = torch.tensor(drawn, device=scores_BV.device)
        scores_BV[index_N] = _perturbed(scores_BV[index_N], [rows[i] for i in drawn])
    tokens_B: Tensor = scores_BV.max(-1).indices
    return tokens_B


def top_tokens(logits_BV: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TopTokens]:
    """Log-probabilities of the model's own distribution: of chosen[i], and of the counts[i] likeliest of row i, of
    equals the lowest ids first.

    Args:
        logits_BV: fp32 or bf16, as `choose_tokens` takes them.
        chosen: B ids in [0, V).
        counts: B numbers from 0; where one is above V, V are listed.
    Raises:
        ValueError: there are not as many of each as rows, or an id is outside.
    Cost: some passes over B * V. One host wait or three.
    """
    check_logits(logits_BV, len(chosen), len(counts), chosen=chosen)
    norm_BV = torch.log_softmax(_scores(logits_BV), dim=-1)
    own = norm_BV.gather(1, torch.tensor(chosen, device=norm_BV.device)[:, None])[:, 0].tolist()
    most, vocab = min(max(counts, default=0), norm_BV.shape[1]), norm_BV.shape[1]
    bits_BV = norm_BV.view(torch.int32).long()
    rising_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)  # integers in the order of the floats
    keys_BV = (rising_BV << 32) - torch.arange(vocab, device=norm_BV.device)
    ids_BK = keys_BV.topk(most, dim=-1).values.neg() & _MASK32
    values, ids = norm_BV.gather(1, ids_BK).tolist(), ids_BK.tolist()
    return [
        TopTokens(logprob=own[i], ids=tuple(ids[i][:count]), logprobs=tuple(values[i][:count]))
        for i, count in enumerate(counts)
    ]


def _scores(logits_BV: Tensor) -> Tensor:
    """A copy in fp32, finite."""
    lifted_BV = logits_BV.float().nan_to_num(nan=-_SCORE_MAX, posinf=_SCORE_MAX, neginf=-_SCORE_MAX)
    return lifted_BV.clamp_(-_SCORE_MAX, _SCORE_MAX)


def _adjust(row_V: Tensor, row: RowSampling) -> None:
    """Bias, penalties and forbidden ids, in place. Ids the model does not have change nothing."""

    def put(array: NDArray[Any], ids: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array[ids < len(row_V)]).to(row_V.device)

    if row.bias is not None:
        ids, values = row.bias
        row_V[put(ids.astype(np.int64), ids)] += put(values, ids)
    if row.history is not None and row.repetition_penalty != 1.0:
        flags = np.unpackbits(row.history.seen, bitorder="little")
        seen = put(np.flatnonzero(flags), np.flatnonzero(flags))
        penalty = torch.tensor(row.repetition_penalty, dtype=torch.float32, device=row_V.device)
        old = row_V[seen]
        row_V[seen] = torch.where(old > 0, old / penalty, old * penalty).clamp_(-_SCORE_MAX, _SCORE_MAX)
    if row.history is not None and (row.frequency_penalty or row.presence_penalty):
        ids, times = row.history.output_ids, row.history.output_times
        penalties = times * np.float32(row.frequency_penalty) + np.float32(row.presence_penalty)
        row_V[put(ids.astype(np.int64), ids)] -= put(penalties, ids)
    if row.forbidden:
        row_V[torch.tensor([i for i in row.forbidden if i < len(row_V)], dtype=torch.int64)] = -_SCORE_MAX


def _perturbed(scores_NV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Scaled, cut and with noise: the largest of each row is then its sample."""
    device, vocab = scores_NV.device, scores_NV.shape[1]
    inverse_N1 = torch.tensor([[1.0 / row.temperature] for row in rows], dtype=torch.float32, device=device)
    scores_NV = (scores_NV - scores_NV.amax(-1, keepdim=True)) * inverse_N1
    floors = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in rows]
    floor_N1 = torch.tensor(floors, dtype=torch.float32, device=device)[:, None]
    cut = [i for i, row in enumerate(rows) if 0 < row.top_k < vocab or row.top_p < 1.0]
    if cut:
        index_C = torch.tensor(cut, device=device)
        least_C1 = _least_kept(scores_NV[index_C], [rows[i] for i in cut])
        floor_N1[index_C] = torch.maximum(floor_N1[index_C], least_C1)
    seeds_N = torch.tensor([_signed(row.seed) for row in rows], device=device)
    positions_N = torch.tensor([row.position for row in rows], device=device)
    noise_NV = _noise(seeds_N, positions_N, vocab)
    return torch.where(scores_NV >= floor_N1, scores_NV + noise_NV, -torch.inf)


def _least_kept(scores_CV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """[C, 1]: the lowest score that top_k and then top_p keep."""
    device, vocab = scores_CV.device, scores_CV.shape[1]
    sorted_CV = scores_CV.sort(dim=-1, descending=True).values
    counts = [row.top_k if 0 < row.top_k < vocab else vocab for row in rows]
    least_C1 = sorted_CV.gather(1, torch.tensor(counts, device=device)[:, None] - 1)
    mass_CV = torch.where(sorted_CV >= least_C1, sorted_CV.exp(), 0.0).double().cumsum(-1)
    shares_C1 = torch.tensor([[row.top_p] for row in rows], dtype=torch.float64, device=device)
    enough_C1 = (mass_CV < shares_C1 * mass_CV[:, -1:]).sum(-1, keepdim=True).clamp_max_(vocab - 1)
    return torch.where(shares_C1 < 1.0, torch.maximum(sorted_CV.gather(1, enough_C1), least_C1), least_C1)


def _noise(seeds_N: Tensor, positions_N: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [N, V] fp32 for each sequence's next token.

    The hash is splitmix64, three times over: mix(mix(mix(seed) + position) + token). Its upper 32 bits give a
    uniform number v in (0, 1), exact in fp32 near 0, and the noise is -log(-log1p(-v)): fine where it is large,
    which is where samples are decided; at most about 22.9, at least about -2.9.
    """
    key_N1 = splitmix(splitmix(seeds_N) + positions_N).unsqueeze(1)
    tokens_V = torch.arange(vocab, dtype=torch.int64, device=seeds_N.device)
    word_NV = (splitmix(key_N1 + tokens_V) >> 32) & _MASK32
    v_NV = ((word_NV.double() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v_NV)).float()


def _signed(seed: int) -> int:
    """A 64-bit word as torch takes it."""
    word = seed & (2 * _SIGN_BIT - 1)
    return word - 2 * _SIGN_BIT if word >= _SIGN_BIT else word
