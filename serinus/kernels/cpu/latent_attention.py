"""Causal attention of many query heads over latent rows; see the reference.

The rows of a sequence are gathered once, and all heads go over them by torch's flash attention: at the size of such
groups (16 to 128 heads) that is a product of matrices, no walk over memory.

Shapes: T = tokens of this step, N = query heads, W = elements of a row, V = value_size, S = slots, R, C = rows and
columns of req_to_token, L = tokens that one sequence has so far.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.batch import AttentionBatch, slots_in
from serinus.kernels.checks import check_latent_attention
from serinus.kernels.contracts import LayerDigest
from serinus.kernels.cpu.paged_attention import refuse_row
from serinus.kernels.pool_rows import rows_of
from serinus.kernels.ref.latent_attention import LatentRows

_SCORES = 1 << 22
"""Scores of one head that a mask holds at most: longer chunks go in pieces."""


def latent_attention(
    q_TNW: Tensor,
    pool_S1W: Tensor,
    value_size: int,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    scale: float,
    digest: LayerDigest | None = None,
) -> Tensor:
    """softmax(scale * q row) value; see the reference.

    Raises:
        ValueError: shapes disagree, or a row, a context or a slot lies outside of its table.
    """
    check_latent_attention(q_TNW, pool_S1W, value_size, req_to_token_RC, batch, digest)
    starts, contexts, rows = batch.q_starts_B1.tolist(), batch.context_B.tolist(), batch.rows_B.tolist()
    gathered = None if digest is None else LatentRows(digest, len(rows))
    out_TNV = q_TNW.new_empty((*q_TNW.shape[:2], value_size))
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
        _attend(q_TNW[own], rows_L1W[:, 0].to(q_TNW.dtype), scale, out_TNV[own])
    return out_TNV


def _attend(q_TNW: Tensor, rows_LW: Tensor, scale: float, out_TNV: Tensor) -> None:
    count, heads, _ = q_TNW.shape
    if count == 1:  # heads are queries of one key head, and all of them see every row
        found_11NW = F.scaled_dot_product_attention(q_TNW[None], rows_LW[None, None], rows_LW[None, None], scale=scale)
        out_TNV.copy_(found_11NW[0, :, :, : out_TNV.shape[2]])
        return
    past = len(rows_LW) - count
    step = max(1, _SCORES // len(rows_LW))
    for first in range(0, count, step):
        end = min(first + step, count)
        keys_1NLW = rows_LW[: past + end].expand(1, heads, -1, -1)
        hidden_TL = torch.arange(past + end)[None, :] > torch.arange(past + first, past + end)[:, None]
        mask_TL = torch.zeros(hidden_TL.shape, dtype=q_TNW.dtype).masked_fill_(hidden_TL, float("-inf"))
        found_1NTW = F.scaled_dot_product_attention(
            q_TNW[first:end].transpose(0, 1)[None], keys_1NLW, keys_1NLW, attn_mask=mask_TL, scale=scale
        )
        out_TNV[first:end].copy_(found_1NTW[0].transpose(0, 1)[:, :, : out_TNV.shape[2]])
