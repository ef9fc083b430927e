"""From the projections of latent attention to attention, by norm and digest of this column; see the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.checks import check_latent_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.cpu.canary import canary_digest
from serinus.kernels.cpu.rms_norm import rms_norm
from serinus.kernels.fp8 import stored_as
from serinus.kernels.pool_rows import put_rows
from serinus.kernels.ref.canary import add_digests
from serinus.kernels.ref.latent_rope_store import rotated


def latent_rope_store(
    rows_TW: Tensor, norm_R: Tensor, eps: float, queries_TNQ: Tensor, cos_PF: Tensor, sin_PF: Tensor,
    positions_T: Tensor, pool_S1W: Tensor, slots_T: Tensor, written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Store rows, rotate queries; digests are made of the values."""
    check_latent_rope_store(rows_TW, norm_R, queries_TNQ, cos_PF, sin_PF, positions_T, pool_S1W, slots_T, written)
    rank = len(norm_R)
    cos_TF, sin_TF = cos_PF[positions_T], sin_PF[positions_T]
    latent_TR = rms_norm(rows_TW[:, :rank].contiguous(), norm_R, eps)
    stored_TW = torch.cat([latent_TR, rotated(rows_TW[:, rank:], cos_TF, sin_TF)], dim=1)
    stored_TW = stored_as(stored_TW, pool_S1W.dtype)
    if written is not None:
        every_T = torch.arange(len(stored_TW))
        found_T2 = canary_digest([(stored_TW[:, None],)], every_T, written.coefficients_22W[None])
        written.sums_T2.copy_(add_digests(written.sums_T2, found_T2))
    put_rows(pool_S1W, slots_T, stored_TW[:, None])
    turned_TNO = queries_TNQ[:, :, rank - rows_TW.shape[1] :]
    turned_TNO.copy_(rotated(turned_TNO, cos_TF[:, None], sin_TF[:, None]))
