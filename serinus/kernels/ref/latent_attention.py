"""Causal attention of many query heads over latent rows (multi-head latent attention, absorbed): the specification.

A position has one row for all heads: key of every head, and in its first `value_size` elements their value too.

Shapes: T = tokens of this step, N = query heads, W = elements of a row, V = value_size, S = slots, R, C = rows and
columns of req_to_token, B = sequences, L = tokens that one sequence has so far.
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
    q_TNW: Tensor,
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
        q_TNW: queries, in the space of the rows.
        pool_S1W: one layer's pool (pool_rows.py); dtype of q, or FP8 (fp8.py). The step's own rows are already
            in it.
        value_size: elements of a row that are the value, the first ones.
        req_to_token_RC, batch, scale: as `paged_attention` takes them.
        digest: as `watched_attention` takes it, of one half; None = attention alone.
        heads: what they make of latents; a column may then make keys and values of rows for prompts, which is less
            arithmetic for each score.
    Returns: [T, N, V], dtype of q; scores, softmax and sums in fp32. With `heads` the values that these make of it.
    Raises:
        ValueError: shapes or dtypes disagree, the pool or the table is strided, or the digest is of others.
    Cost: one read of each sequence's rows.
    """
    check_latent_attention(q_TNW, pool_S1W, value_size, req_to_token_RC, batch, digest)
    gathered = None if digest is None else LatentRows(digest, batch.sequence_count)
    values_S1V = pool_S1W[..., :value_size]
    mixed_TNV = attend(q_TNW, pool_S1W, values_S1V, req_to_token_RC, batch, scale, None, None, None, gathered)
    return mixed_TNV if heads is None else heads.values(mixed_TNV)


class LatentRows(GatheredRows):
    """Adds the digests of gathered latent rows to the first of the sums."""

    def add(self, b: int, first: int, *halves_LHD: Tensor) -> None:
        """The value is part of the row, which is digested once."""
        super().add(b, first, halves_LHD[0])
