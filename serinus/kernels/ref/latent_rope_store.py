"""From the projections of latent attention to attention: norm, rotary embedding, and the write of a row into the pool.

Shapes: T = tokens of this step, N = query heads, W = elements of a row, R = those of its latent, O = W - R, those that
rotate, Q = elements of a query head, P = positions, S = slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.checks import check_latent_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.fp8 import stored_as
from serinus.kernels.pool_rows import put_rows
from serinus.kernels.ref.canary import digest_values
from serinus.kernels.ref.rms_norm import rms_norm

__all__ = ["latent_rope_store", "rotated"]


def latent_rope_store(
    rows_TW: Tensor, norm_R: Tensor, eps: float, queries_TNQ: Tensor, cos_PF: Tensor, sin_PF: Tensor,
    positions_T: Tensor, pool_S1W: Tensor, slots_T: Tensor, written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Norm the latents of rows and rotate the rest, and write them to their slots; rotate the last O elements of
    queries.

    Rotation pairs element i with element i + O/2, in fp32, rounded once.

    Args:
        rows_TW, queries_TNQ: of one dtype; elements of a row, or of a head, one behind the other, else of any strides.
            Queries are changed in place.
        norm_R, eps: of the norm of latents, as rms_norm takes them.
        cos_PF, sin_PF: fp32 [P, O/2]; row p belongs to position p.
        positions_T, slots_T, written: as `qk_rope_store` takes them.
        pool_S1W: one layer's pool (pool_rows.py); changed in place; dtype of rows, or FP8: rows are
            rounded once more (fp8.py).
    Raises:
        ValueError: shapes or dtypes disagree, or the pool or a table is strided.
    """
    check_latent_rope_store(rows_TW, norm_R, queries_TNQ, cos_PF, sin_PF, positions_T, pool_S1W, slots_T, written)
    rank = len(norm_R)
    cos_TF, sin_TF = cos_PF[positions_T], sin_PF[positions_T]
    stored_TW = torch.cat(
        [rms_norm(rows_TW[:, :rank].contiguous(), norm_R, eps), rotated(rows_TW[:, rank:], cos_TF, sin_TF)], dim=1
    )
    stored_TW = stored_as(stored_TW, pool_S1W.dtype)
    if written is not None:
        digest_values(written, stored_TW)
    put_rows(pool_S1W, slots_T, stored_TW[:, None])
    turned_TNO = queries_TNQ[:, :, rank - rows_TW.shape[1] :]
    turned_TNO.copy_(rotated(turned_TNO, cos_TF[:, None], sin_TF[:, None]))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Element i turns with element i + O/2, in fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
