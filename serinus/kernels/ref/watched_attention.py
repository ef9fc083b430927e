"""Decode attention that digests the KV it reads, so that the canary need not read it again: the specification.

A device that has no kernel for it loses nothing by `paged_attention` and `canary_digest` one after the other, which is
what this is. B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of
req_to_token, E = slots digested, W = 16-bit lanes of a row of one half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_pack_factors, check_watched_attention
from serinus.kernels.contracts import LayerDigest, Tiling
from serinus.kernels.packed import PackedFactors
from serinus.kernels.ref.canary import canary_digest, canary_plan
from serinus.kernels.ref.paged_attention import paged_attention

__all__ = ["digest_due", "pack_factors", "watched_attention"]


def pack_factors(coefficients_22W: Tensor, kv_heads: int) -> PackedFactors:
    """Take coefficients of one layer into the form that `watched_attention` reads; once, at start. Here: as they are.

    Args:
        coefficients_22W: int32, of `digest_coefficients` with all lanes, on the pools' device.
        kv_heads: H.
    Raises:
        ValueError: they are not those of so many heads.
    """
    check_pack_factors(coefficients_22W, kv_heads)
    return PackedFactors(factors=coefficients_22W, bias=None, lane_count=coefficients_22W.shape[-1])


def watched_attention(
    q_BND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    digest: LayerDigest | None = None,
    tiling: Tiling | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`paged_attention`; with a digest, `canary_digest` of what is due is added to its sums.

    Args:
        q_BND ... scale, window, softcap: of `paged_attention`. A GPU takes one query a sequence, no window and no cap.
        digest: what is due; None = attention alone, the same to the bit.
        tiling: how a GPU cuts the work; None = as measured best. Only columns of a GPU read it.
    Returns: as `paged_attention`.
    Raises:
        ValueError: shapes or dtypes disagree, or the factors were packed by another column or are not those of whole
            rows.
    """
    check_watched_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, digest)
    if digest is not None:
        if digest.factors.bias is not None:
            raise ValueError("kernels: watched_attention of column ref got factors packed by another column")
        digest_due(k_pool_SHD, v_pool_SHD, req_to_token_RC, digest, digest.factors.factors)
    return paged_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap)


def digest_due(
    k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, digest: LayerDigest, coefficients_22W: Tensor
) -> None:
    """Add the digests of one layer's rows that are due to the first of the sums."""
    entries = digest.sums_P22E.shape[-1]
    due_7B = digest.due_7B[:, digest.due_7B[3] > digest.due_7B[2]].contiguous()
    if not entries or not due_7B.shape[1]:
        return
    slots_E = canary_plan(req_to_token_RC, due_7B, entries, page_size=digest.page_size)[0]
    found_E2 = canary_digest([(k_pool_SHD, v_pool_SHD)], slots_E, coefficients_22W[None])
    found_E2 = torch.where(slots_E[:, None] == 0, 0, found_E2)
    digest.sums_P22E[0].add_(found_E2.view(torch.int32).view(entries, 2, 2).permute(1, 2, 0))
