"""Causal attention of many query heads over latent rows (multi-head latent attention, absorbed): the specification.

A position has one row for all heads: key of every head, and in its first `value_size` elements their value too.

Shapes: T = tokens of this step, N = query heads, W = elements of a row, X = those of a query, V = value_size or what
heads make of it, S = slots, R, C = rows and columns of req_to_token, B = sequences, L = tokens that one sequence has so
far.
"""

from __future__ import annotations

from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_latent_attention
from serinus.kernels.contracts import LatentHeads, LayerDigest
from serinus.kernels.ref.paged_attention import attend
from serinus.kernels.ref.watched_attention import GatheredRows

__all__ = ["LatentRows", "latent_attention"]


def latent_attention(
    q_TNX: Tensor,
    pool_S1W: Tensor,
    value_size: int,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    digest: LayerDigest | None = None,
    heads: LatentHeads | None = None,
) -> Tensor:
    """softmax(scale * q row) value for every token over the positions of its own sequence up to its own.

    Args:
        q_TNX: queries in the space of the rows, X = W; with `heads` as these make them, the rotated elements last.
        pool_S1W: one layer's pool (pool_rows.py); dtype of q, or FP8 (fp8.py). The step's own rows are already
            in it.
        value_size: elements of a row that are the value, the first ones.
        req_to_token_RC, batch, scale: as `paged_attention` takes them.
        digest: as `watched_attention` takes it, of one half; None = attention alone.
        heads: what they make of latents: queries are brought into the space of rows, or keys and values are made of
            rows, which is less arithmetic for each score of a long chunk (a column may do either).
    Returns: [T, N, V], dtype of q; scores, softmax and sums in fp32. With `heads` the values that these make of it.
    Raises:
        ValueError: shapes or dtypes disagree, the pool or the table is strided, or the digest is of others.
    Cost: one read of each sequence's rows.
    """
    check_latent_attention(q_TNX, pool_S1W, value_size, req_to_token_RC, batch, digest, heads)
    q_TNW = q_TNX if heads is None else heads.in_rows(q_TNX)
    gathered = None if digest is None else LatentRows(digest, batch.sequence_count)
    values_S1V = pool_S1W[..., :value_size]
    mixed_TNV = attend(q_TNW, pool_S1W, values_S1V, req_to_token_RC, batch, scale, None, None, None, gathered)
    if heads is None:
        return mixed_TNV
    said_TNV = mixed_TNV.new_empty((*mixed_TNV.shape[:2], heads.value_NRV.shape[2]))
    heads.values(mixed_TNV, said_TNV)
    return said_TNV


class LatentRows(GatheredRows):
    """Adds the digests of gathered latent rows to the first of the sums."""

    def add(self, b: int, first: int, *halves_LHD: Tensor) -> None:
        """The value is part of the row, which is digested once."""
        super().add(b, first, halves_LHD[0])
