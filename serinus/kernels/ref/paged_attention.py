"""Causal attention over paged KV, decode and prefill chunks in one batch: the specification.

Shapes: T = tokens of this step, N = query heads, H = KV heads, D = head size, S = slots, R = rows, C = context,
B = sequences, L = tokens that one sequence has so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch

__all__ = ["check_paged_attention", "paged_attention"]


def check_paged_attention(
    q_TND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Raise ValueError where shapes or dtypes disagree, a pool or the table is strided, or window or cap make no sense.

    Reads no values.
    """
    heads, size = q_TND.shape[1], q_TND.shape[2]
    kv_heads = k_pool_SHD.shape[1]
    if k_pool_SHD.shape != v_pool_SHD.shape or k_pool_SHD.shape[2] != size:
        raise ValueError(
            f"kernels: pools k {tuple(k_pool_SHD.shape)}, v {tuple(v_pool_SHD.shape)}; expected equal, heads of {size}"
        )
    if heads % kv_heads:
        raise ValueError(f"kernels: {heads} query heads over {kv_heads} KV heads; expected a multiple")
    if batch.q_starts_B1.shape[0] != batch.rows_B.shape[0] + 1 or batch.context_B.shape != batch.rows_B.shape:
        raise ValueError(
            f"kernels: batch of {batch.rows_B.shape[0]} rows, {batch.q_starts_B1.shape[0]} offsets, "
            f"{batch.context_B.shape[0]} contexts; expected B, B + 1, B"
        )
    if not (q_TND.dtype == k_pool_SHD.dtype == v_pool_SHD.dtype) or req_to_token_RC.dtype != torch.int32:
        raise ValueError(
            f"kernels: q {q_TND.dtype}, pools {k_pool_SHD.dtype} and {v_pool_SHD.dtype}, req_to_token "
            f"{req_to_token_RC.dtype}; expected one dtype, and torch.int32"
        )
    if not (k_pool_SHD.is_contiguous() and v_pool_SHD.is_contiguous() and req_to_token_RC.is_contiguous()):
        raise ValueError("kernels: a pool or req_to_token is strided, expected contiguous ones")
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"kernels: window {window}, softcap {softcap}; expected None, or at least 1 and above 0")


def paged_attention(
    q_TND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(scale * q k)) v for every token over the last `window` positions of its own sequence up to its own.

    Args:
        q_TND: fp32 or bf16.
        k_pool_SHD, v_pool_SHD: one layer's pools; dtype of q. The step's own k and v are already in them.
        req_to_token_RC: int32; [row, position] -> slot. Only the first context_B[b] entries of a row are read, and of
            these only such as lie in the window of one of the step's tokens: below it they may say anything, and
            their slots may hold anything.
        batch: which tokens belong to which row.
        scale: usually D ** -0.5.
        window: positions that a token sees, its own included; None = all up to its own.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
    Returns: [T, N, D], dtype of q; scores, softmax and sums in fp32.
    Raises:
        ValueError: shapes or dtypes disagree, a pool or the table is strided, or window or cap make no sense.
    """
    check_paged_attention(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap)
    kv_heads = k_pool_SHD.shape[1]
    group = q_TND.shape[1] // kv_heads
    starts, contexts, rows = batch.q_starts_B1.tolist(), batch.context_B.tolist(), batch.rows_B.tolist()
    out_TND = torch.empty_like(q_TND)
    for b, row in enumerate(rows):
        first = contexts[b] - (starts[b + 1] - starts[b])
        low = 0 if window is None else max(0, first - window + 1)
        slots_L = req_to_token_RC[row, low : contexts[b]].long()
        k_NLD = k_pool_SHD[slots_L].float().repeat_interleave(group, dim=1).transpose(0, 1)
        v_NLD = v_pool_SHD[slots_L].float().repeat_interleave(group, dim=1).transpose(0, 1)
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
        out_NTD = torch.matmul(torch.softmax(scores_NTL, dim=-1), v_NLD)
        out_TND[starts[b] : starts[b + 1]] = out_NTD.transpose(0, 1).to(q_TND.dtype)
    return out_TND
