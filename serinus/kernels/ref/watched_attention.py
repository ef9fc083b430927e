"""Attention that digests the KV it reads: the bytes that the canary vouches for are the bytes that were used. The
specification: it gathers the rows of a sequence, digests what it gathered and attends over that very tensor.

B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of
req_to_token, E = slots digested, W = 16-bit lanes of a row of one half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_pack_factors, check_watched_attention
from serinus.kernels.contracts import LayerDigest, Tiling
from serinus.kernels.due import entries_of
from serinus.kernels.packed import PackedFactors
from serinus.kernels.ref.canary import canary_digest
from serinus.kernels.ref.paged_attention import attend

__all__ = ["GatheredRows", "pack_factors", "watched_attention"]


def pack_factors(coefficients_22W: Tensor, kv_heads: int) -> PackedFactors:
    """Take coefficients of one layer into the form that `watched_attention` reads; once, at start. Here: as they are.

    Args:
        coefficients_22W: int32, of `digest_coefficients` with all lanes, on the pools' device.
        kv_heads: H.
    Raises:
        ValueError: they are not those of so many heads.
    """
    check_pack_factors(coefficients_22W, kv_heads)
    return PackedFactors(factors=coefficients_22W, bias=None, plain_22W=coefficients_22W)


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
    sinks_N: Tensor | None = None,
) -> Tensor:
    """`paged_attention`; with a digest, `canary_digest` of what is due is added to its sums.

    Args:
        q_BND ... scale, window, softcap, sinks_N: of `paged_attention`.
        digest: what is due, factors of any column; what is due below the window of the first query, and so not
            used, is digested beside. None = attention alone, the same to the bit.
        tiling: how a GPU cuts the work; None = as measured best. Only columns of a GPU read it.
    Returns: as `paged_attention`.
    Raises:
        ValueError: shapes or dtypes disagree, or the factors are not those of such rows.
    """
    check_watched_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, digest, window, softcap, sinks_N)
    gathered = None if digest is None else GatheredRows(digest, batch.sequence_count)
    return attend(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap, sinks_N, gathered)


class GatheredRows:
    """Adds the digests of gathered rows to the first of the sums."""

    def __init__(self, digest: LayerDigest, sequences: int) -> None:
        self._digest, self._sequences = digest, sequences
        self._columns: list[list[int]] = digest.due_7B.T.tolist()
        self._canary_digest = digest.canary_digest or canary_digest

    def low(self, b: int) -> int:
        """The first position of sequence b that is due; where none is, a position far away."""
        return min(column[2] if column[3] > column[2] else 1 << 62 for column in self._columns[b :: self._sequences])

    def add(self, b: int, first: int, *halves_LHD: Tensor) -> None:
        """Digest what is due of these rows of sequence b, K and V or latent rows, contiguous, from position `first`
        on."""
        count, device = len(halves_LHD[0]), halves_LHD[0].device
        digest = self._digest
        for column in self._columns[b :: self._sequences]:
            positions, entries = entries_of(column, first, first + count, digest.page_size)
            if not len(entries):
                continue
            index_E, entries_E = (torch.from_numpy(each).to(device) for each in (positions - first, entries))
            found_E2 = self._canary_digest([halves_LHD], index_E, digest.factors.plain_22W[None])
            words_22E = found_E2.view(torch.int32).view(len(entries), 2, 2).permute(1, 2, 0)
            digest.sums_P22E[0].index_add_(2, entries_E, words_22E.contiguous())
