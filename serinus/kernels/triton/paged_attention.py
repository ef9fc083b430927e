"""Causal attention over paged KV; see the reference for what it means. Sequences with one query go to
`decode_attention`, those with more to `chunk_attention`; which are there is known from the sizes alone, so a captured
step serves any contexts. T = tokens, N = query heads, H = KV heads, D = head size, S = slots."""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_paged_attention
from serinus.kernels.contracts import PagedAttention
from serinus.kernels.triton.chunk_attention import attend_many
from serinus.kernels.triton.decode_attention import attend_one
from serinus.kernels.triton.tickets import Tickets


def new_paged_attention() -> PagedAttention:
    """The op, with tickets of its own."""
    tickets = Tickets()

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
        """Attention of every token over its own sequence; entries of the table that name no slot of the pool are read
        as slot 0. Cost: one read of the KV; no host wait; equal inputs give equal bits."""
        check_paged_attention(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap, sinks_N)
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        inputs = q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap, sinks_N, out_TND
        if len(q_TND) != batch.sequence_count:
            attend_many(*inputs)
        if batch.sequence_count > 1 or len(q_TND) == 1:
            attend_one(*inputs, tickets.on(q_TND.device), None)
        return out_TND

    return paged_attention
