"""Causal attention over paged KV, decode and prefill chunks in one batch: the specification.

Shapes: T = tokens of this step, N = query heads, H = KV heads, D = head size, S = slots, R = rows, C = context,
B = sequences, L = tokens that one sequence has so far.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch, slots_in
from serinus.kernels.checks import check_paged_attention
from serinus.kernels.pool_rows import rows_of, slot_count

__all__ = ["attend", "paged_attention"]


class Gathered(Protocol):
    """What digests the rows that are attended."""

    def low(self, b: int) -> int:
        """The first position of sequence b that it wants to see."""

    def add(self, b: int, first: int, k_LHD: Tensor, v_LHD: Tensor) -> None:
        """These are the rows of sequence b from position `first` on."""


def paged_attention(
    q_TND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k)) v for every token over the last `window` positions of its own sequence up to its own.

    Args:
        q_TND: fp32 or bf16.
        k_pool_SHD, v_pool_SHD: one layer's pools (pool_rows.py); dtype of q, or FP8 (fp8.py). The step's own rows are
            in them already.
        req_to_token_RC: int32; [row, position] -> slot. Only the first context_B[b] entries of a row are read, and of
            these only such as lie in the window of one of the step's tokens: below it they may say anything, and
            their slots may hold anything.
        batch: which tokens belong to which row.
        scale: usually D ** -0.5.
        window: positions that a token sees, its own included; None = all up to its own.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
        sinks_N: fp32, a score of each head that joins the softmax and weighs no value: exp(sink) is added to its
            denominator. Neither scaled nor capped. None = there is none.
    Returns: [T, N, D], dtype of q; scores, softmax and sums in fp32.
    Raises:
        ValueError: shapes or dtypes disagree, a pool or the table is strided, or window, cap or sinks make no sense.
    """
    check_paged_attention(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap, sinks_N)
    return attend(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap, sinks_N, None)


def attend(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
    scale: float, window: int | None, softcap: float | None, sinks_N: Tensor | None, gathered: Gathered | None,
) -> Tensor:  # fmt: skip
    """The same, of checked arguments. `gathered` is shown the rows that were gathered, which are then attended."""
    kv_heads = k_pool_SHD.shape[-2]
    group = q_TND.shape[1] // kv_heads
    starts, contexts, rows = batch.q_starts_B1.tolist(), batch.context_B.tolist(), batch.rows_B.tolist()
    out_TND = q_TND.new_empty((*q_TND.shape[:2], v_pool_SHD.shape[-1]))
    for b, row in enumerate(rows):
        first = contexts[b] - (starts[b + 1] - starts[b])
        low = 0 if window is None else max(0, first - window + 1)
        from_low = low if gathered is None else min(low, gathered.low(b))
        slots_L = req_to_token_RC[row, from_low : contexts[b]].long()
        if batch.is_watched:
            slots_L = slots_in(slots_L, slot_count(k_pool_SHD))
        k_LHD, v_LHD = rows_of(k_pool_SHD, slots_L), rows_of(v_pool_SHD, slots_L)
        if gathered is not None:
            gathered.add(b, from_low, k_LHD, v_LHD)
        k_NLD = k_LHD[low - from_low :].float().repeat_interleave(group, dim=1).transpose(0, 1)
        v_NLD = v_LHD[low - from_low :].float().repeat_interleave(group, dim=1).transpose(0, 1)
        q_NTD = q_TND[starts[b] : starts[b + 1]].float().transpose(0, 1)
        scores_NTL = torch.matmul(q_NTD, k_NLD.transpose(1, 2)) * scale
        if softcap is not None:
            scores_NTL = torch.tanh(scores_NTL / softcap) * softcap
        seen_1L = torch.arange(low, contexts[b], device=q_TND.device)[None, :]
        own_T1 = torch.arange(first, contexts[b], device=q_TND.device)[:, None]
        hidden_TL = seen_1L > own_T1
        if window is not None:
            hidden_TL |= seen_1L <= own_T1 - window
        scores_NTL.masked_fill_(hidden_TL, float("-inf"))
        if sinks_N is not None:
            sinks_NT1 = sinks_N[:, None, None].expand(-1, scores_NTL.shape[1], 1)
            scores_NTL = torch.cat([scores_NTL, sinks_NT1], dim=-1)
        shares_NTL = torch.softmax(scores_NTL, dim=-1)[..., : v_NLD.shape[1]]
        out_NTD = torch.matmul(shares_NTL, v_NLD)
        out_TND[starts[b] : starts[b + 1]] = out_NTD.transpose(0, 1).to(q_TND.dtype)
    return out_TND
