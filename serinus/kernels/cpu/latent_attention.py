"""Causal attention of many query heads over latent rows; see the reference.

The rows of a sequence are gathered once, and all heads go over them by torch's flash attention: at the size of such
groups (16 to 128 heads) that is a product of matrices, no walk over memory. For a long chunk the keys and values of all
heads are made of the rows first: once for each row, and each score is then of fewer elements. A head of DeepSeek-V2 has
keys of 192 elements for rows of 576: a chunk of 2,048 tokens takes 0.43 of the time, one of 256 tokens 0.9 (fp32, one
Zen 3 core).

Shapes: T = tokens of this step, N = query heads, W = elements of a row, Q = those of a query, V = value_size or what
heads make of it, S = slots, R, C = rows and columns of req_to_token, L = tokens that one sequence has so far, X =
elements of a head's key, and of its value where that is larger.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.batch import AttentionBatch, slots_in
from serinus.kernels.checks import check_latent_attention
from serinus.kernels.contracts import LatentHeads, LayerDigest
from serinus.kernels.cpu.paged_attention import refuse_row
from serinus.kernels.pool_rows import rows_of
from serinus.kernels.ref.latent_attention import LatentRows

_SCORES = 1 << 22
"""Scores of one head that a mask holds at most: longer chunks go in pieces."""
_KEYS = 1 << 24
"""Elements of keys that are made of rows at a time: more heads than have so many go one group after the other."""


def latent_attention(
    q_TNQ: Tensor,
    pool_S1W: Tensor,
    value_size: int,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    digest: LayerDigest | None = None,
    heads: LatentHeads | None = None,
) -> Tensor:
    """softmax(scale * q row) value; see the reference.

    Raises:
        ValueError: shapes disagree, or a row, a context or a slot lies outside of its table.
    """
    check_latent_attention(q_TNQ, pool_S1W, value_size, req_to_token_RC, batch, digest, heads)
    starts, contexts, rows = batch.q_starts_B1.tolist(), batch.context_B.tolist(), batch.rows_B.tolist()
    gathered = None if digest is None else LatentRows(digest, len(rows))
    width, absorbed_TNW = pool_S1W.shape[-1], q_TNQ
    expands = [heads is not None and heads.pays(end - start, width) for start, end in pairwise(starts)]
    if heads is not None and not any(expands):
        absorbed_TNW = heads.in_rows(q_TNQ)
    out_TNV = q_TNQ.new_empty((*q_TNQ.shape[:2], value_size if heads is None else heads.value_NRV.shape[2]))
    for b, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        if not (0 <= row < len(req_to_token_RC) and context <= req_to_token_RC.shape[1]):
            raise ValueError(
                f"kernels: row {row} of {context} tokens, expected one of a table {tuple(req_to_token_RC.shape)}"
            )
        slots_L = req_to_token_RC[row, :context]
        if batch.is_watched:
            slots_L = slots_in(slots_L, len(pool_S1W))
        elif int(slots_L.min()) < 0 or int(slots_L.max()) >= len(pool_S1W):
            refuse_row(row + 1, len(pool_S1W))
        rows_L1W = rows_of(pool_S1W, slots_L)
        if gathered is not None:
            gathered.add(b, 0, rows_L1W)
        own = slice(starts[b], starts[b + 1])
        rows_LW = rows_L1W[:, 0].to(q_TNQ.dtype)
        if heads is not None and expands[b]:
            _attend_expanded(q_TNQ[own], rows_LW, heads, scale, out_TNV[own])
            continue
        q_TNW = heads.in_rows(q_TNQ[own]) if heads is not None and any(expands) else absorbed_TNW[own]
        keys_NLW = rows_LW.expand(q_TNW.shape[1], -1, -1)
        mixed_TNR = _attend(q_TNW, keys_NLW, keys_NLW, scale)[:, :, :value_size]
        if heads is None:
            out_TNV[own] = mixed_TNR
        else:
            heads.values(mixed_TNR, out_TNV[own])
    return out_TNV


def _attend_expanded(q_TNQ: Tensor, rows_LW: Tensor, heads: LatentHeads, scale: float, out_TNV: Tensor) -> None:
    """Some heads after the other: keys and values of `rows_LW`, and attention over these."""
    (count, plain, rank), value = heads.key_NPR.shape, heads.value_NRV.shape[2]
    latents_LR, rotated_LO = rows_LW[:, :rank], rows_LW[:, rank:]
    own = plain + rotated_LO.shape[1]
    size = max(own, value)
    step = max(1, _KEYS // (len(rows_LW) * size))
    for first in range(0, count, step):
        some = slice(first, min(first + step, count))
        q_TNX = F.pad(q_TNQ[:, some], (0, size - own))
        keys_NLX, values_NLX = rows_LW.new_zeros((2, some.stop - first, len(rows_LW), size))
        keys_NLX[:, :, :plain] = latents_LR @ heads.key_NPR[some].transpose(1, 2)
        keys_NLX[:, :, plain:own] = rotated_LO
        values_NLX[:, :, :value] = latents_LR @ heads.value_NRV[some]
        out_TNV[:, some] = _attend(q_TNX, keys_NLX, values_NLX, scale)[:, :, :value]


def _attend(q_TNX: Tensor, keys_NLX: Tensor, values_NLX: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T of L positions, [T, N, X]."""
    count, total = len(q_TNX), keys_NLX.shape[1]
    if count == 1 and not keys_NLX.stride(0):  # heads are queries of one key head, and all of them see every row
        return F.scaled_dot_product_attention(q_TNX[None], keys_NLX[None, :1], values_NLX[None, :1], scale=scale)[0]
    past, out_TNX = total - count, torch.empty_like(q_TNX)
    step = max(1, _SCORES // total)
    for first in range(0, count, step):
        end = min(first + step, count)
        hidden_TL = torch.arange(past + end)[None, :] > torch.arange(past + first, past + end)[:, None]
        mask_TL = torch.zeros(hidden_TL.shape, dtype=q_TNX.dtype).masked_fill_(hidden_TL, float("-inf"))
        found_1NTX = F.scaled_dot_product_attention(
            q_TNX[first:end].transpose(0, 1)[None], keys_NLX[None, :, : past + end], values_NLX[None, :, : past + end],
            attn_mask=mask_TL, scale=scale,
        )  # fmt: skip
        out_TNX[first:end] = found_1NTX[0].transpose(0, 1)
    return out_TNX
