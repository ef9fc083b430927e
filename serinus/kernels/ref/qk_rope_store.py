"""From the qkv projection to attention: per-head norm, rotary embedding, and the write into the KV pool.

Shapes: T = tokens of this step, N = query heads, H = KV heads, D = head size, P = positions, S = slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.checks import check_qk_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.fp8 import stored_as
from serinus.kernels.pool_rows import put_rows
from serinus.kernels.ref.canary import digest_values
from serinus.kernels.ref.rms_norm import rms_norm

__all__ = ["qk_rope_store"]


def qk_rope_store(
    qkv_TX: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor, q_norm_D: Tensor | None,
    k_norm_D: Tensor | None, eps: float, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_T: Tensor, q_out_TND: Tensor,
    written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Split qkv; norm and rotate q and k; write q to `q_out`, and k and v to their slots.

    Rotation pairs element i with element i + D/2 (the "rotate half" form of Llama checkpoints as transformers
    stores them), in fp32, rounded once.

    Args:
        qkv_TX: [T, (N + 2H) * D], fp32 or bf16; rows of q heads, then k heads, then v heads.
        cos_PF, sin_PF: fp32 [P, D/2]; row p belongs to position p.
        positions_T: int64, each below P.
        q_norm_D, k_norm_D: weights of the per-head RMS norms, as rms_norm takes them, both of one dtype; or None for
            no norm.
        eps: of those norms.
        k_pool_SHD, v_pool_SHD: one layer's pools (pool_rows.py); changed in place; dtype of qkv, or FP8: keys and
            values of the dtype of qkv are rounded once more (fp8.py).
        slots_T: int64; token t goes to slot slots_T[t]. Distinct, except for padding tokens, which go to 0.
        q_out_TND: changed in place; dtype of qkv.
        written: where the digests of the stored rows are added, made of the values and not of the pool.
    Raises:
        ValueError: shapes or dtypes disagree, or a tensor is strided.
    """
    check_qk_rope_store(
        qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND,
        written,
    )  # fmt: skip
    tokens = qkv_TX.shape[0]
    heads, kv_heads, size = q_out_TND.shape[1], k_pool_SHD.shape[-2], q_out_TND.shape[2]
    rows_TXD = qkv_TX.view(tokens, -1, size)
    q, k, v = rows_TXD[:, :heads], rows_TXD[:, heads : heads + kv_heads], rows_TXD[:, heads + kv_heads :]
    if q_norm_D is not None:
        q = rms_norm(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm(k, k_norm_D, eps)
    cos = cos_PF[positions_T].unsqueeze(1)
    sin = sin_PF[positions_T].unsqueeze(1)
    q_out_TND.copy_(_rotate(q, cos, sin))
    k, v = (stored_as(x, k_pool_SHD.dtype) for x in (_rotate(k, cos, sin), v.contiguous()))
    if written is not None:
        digest_values(written, k, v)
    put_rows(k_pool_SHD, slots_T, k)
    put_rows(v_pool_SHD, slots_T, v)


def _rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    low, high = x_THD.float().chunk(2, dim=-1)
    turned = torch.cat([low * cos_T1F - high * sin_T1F, high * cos_T1F + low * sin_T1F], dim=-1)
    return turned.to(x_THD.dtype)
