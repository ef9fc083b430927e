"""From logits to tokens, and to log-probabilities, on the device; see the reference for what each parameter means.

Nothing is sorted: thresholds of top_k and top_p are found by bisection over the bits of the scores (`selection`). What
adjusts few tokens of a row is sent as a list and applied to them alone. The host sends all parameters in pinned memory
and waits for nothing. B = rows, V = vocabulary, E = adjusted tokens, K = tokens listed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_logits
from serinus.kernels.contracts import RowMasks, RowSampling, TopTokens
from serinus.kernels.triton.mask_logits import mask_logits
from serinus.kernels.triton.pinned import sent
from serinus.kernels.triton.selection import SCORE_MAX, adjust, choose, lift

_ROW = struct.Struct("<3q3d")
"""Seed, position, top_k; the inverse of the temperature (0 = greedy), top_p, and the least score by min_p."""
_SIGN, _WORD = 1 << 63, 1 << 64


def choose_tokens(logits_BV: Tensor, rows: Sequence[RowSampling], masks: RowMasks | None = None) -> Tensor:
    """One token for each row; see the reference. Cost: one read of the logits where all rows are greedy, some more
    where they draw, about thirty where they cut. No host wait."""
    check_logits(logits_BV, len(rows))
    vocab, device = logits_BV.shape[1], logits_BV.device
    if not len(rows):
        return torch.empty(0, dtype=torch.int64, device=device)
    if masks is not None:
        mask_logits(logits_BV, *masks)
    scores_BV = _adjusted(logits_BV, rows)
    if all(row.temperature <= 0.0 for row in rows):
        return choose(scores_BV, None, cuts=False)
    words = bytearray(b"".join([_packed(row, vocab) for row in rows]))
    rows_B6 = sent(torch.frombuffer(words, dtype=torch.int64).view(len(rows), 6), device)
    cuts = any(row.temperature > 0.0 and (0 < row.top_k < vocab or row.top_p < 1.0) for row in rows)
    return choose(scores_BV, rows_B6, cuts=cuts)


def top_tokens(logits_BV: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TopTokens]:
    """Log-probabilities of the model's own distribution; see the reference. One host wait."""
    check_logits(logits_BV, len(chosen), len(counts), chosen=chosen)
    if not len(chosen):
        return []
    vocab, device = logits_BV.shape[1], logits_BV.device
    most = min(max(counts, default=0), vocab)
    norm_BV = torch.log_softmax(lift(logits_BV), dim=-1)
    ids_BK = sent(torch.tensor(chosen)[:, None], device)
    if most:
        bits_BV = norm_BV.view(torch.int32)
        rising_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV).long()  # in the order of the floats
        keys_BV = (rising_BV << 32) - torch.arange(vocab, device=device)
        ids_BK = torch.cat([ids_BK, keys_BV.topk(most, dim=-1).values.neg() & 0xFFFFFFFF], dim=1)
    values_BK = norm_BV.gather(1, ids_BK).double().view(torch.int64)
    ids, words = torch.stack([ids_BK, values_BK]).cpu().numpy()
    values: list[list[float]] = words.view(np.float64).tolist()
    return [
        TopTokens(logprob=row[0], ids=tuple(some[1 : count + 1]), logprobs=tuple(row[1 : count + 1]))
        for some, row, count in zip(ids.tolist(), values, counts, strict=True)
    ]


def _packed(row: RowSampling, vocab: int) -> bytes:
    cold = row.temperature <= 0.0
    return _ROW.pack(
        (row.seed + _SIGN) % _WORD - _SIGN, row.position, row.top_k if 0 < row.top_k < vocab else vocab,
        0.0 if cold else 1.0 / row.temperature, row.top_p, math.log(row.min_p) if row.min_p > 0.0 else -math.inf,
    )  # fmt: skip


def _adjusted(logits_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """The logits; or scores in fp32 with bias, penalties and forbidden ids, where a row has any."""
    added, taken, forbidden = [], [], []
    repeated: list[tuple[int, NDArray[np.uint8], float]] = []
    for i, row in enumerate(rows):
        if row.bias is not None:
            added.append((i, *row.bias))
        history = row.history
        if history is not None and row.repetition_penalty != 1.0:
            repeated.append((i, history.seen, row.repetition_penalty))
        if history is not None and (row.frequency_penalty or row.presence_penalty):
            penalties = history.output_times * np.float32(row.frequency_penalty) + np.float32(row.presence_penalty)
            taken.append((i, history.output_ids, -penalties))
        if row.forbidden:
            forbidden.append((i, np.array(row.forbidden), np.full(len(row.forbidden), -SCORE_MAX, np.float32)))
    if not (added or taken or forbidden or repeated):
        return logits_BV
    scores_BV, vocab = lift(logits_BV), logits_BV.shape[1]
    lists = [_entries(each, vocab) for each in (added, taken, forbidden)]
    adjust(scores_BV, lists, repeated)
    return scores_BV


def _entries(lists: Iterable[tuple[int, NDArray[np.integer], NDArray[np.float32]]], vocab: int) -> NDArray[np.int32]:
    """int32 [3, E]: row, id and the bits of a value; ids that the model does not have are left out."""
    found = [np.empty((3, 0), np.int32)]
    for row, ids, values in lists:
        known = ids < vocab
        mine = ids[known].astype(np.int32)
        found.append(
            np.stack((np.full(len(mine), row, np.int32), mine, values[known].astype(np.float32).view(np.int32)))
        )
    return np.concatenate(found, axis=1)
