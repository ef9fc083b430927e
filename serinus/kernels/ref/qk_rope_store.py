"""From the qkv projection to attention: per-head norm, rotary embedding, and the write into the KV pool.

Shapes: T = tokens of this step, N = query heads, H = KV heads, D = head size, P = positions, S = slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serinus.kernels.ref.rms_norm import rms_norm

__all__ = ["check_qk_rope_store", "qk_rope_store"]


def check_qk_rope_store(
    qkv_TX: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    positions_T: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    slots_T: Tensor,
    q_out_TND: Tensor,
) -> None:
    """Raise ValueError where shapes or dtypes disagree, or a tensor is strided. Reads no values."""
    tokens, width = qkv_TX.shape
    _, heads, size = q_out_TND.shape
    kv_heads = k_pool_SHD.shape[1]
    if width != (heads + 2 * kv_heads) * size or k_pool_SHD.shape[2] != size:
        raise ValueError(
            f"kernels: qkv of width {width} does not hold {heads} query and 2 x {kv_heads} KV heads of {size}"
        )
    if k_pool_SHD.shape != v_pool_SHD.shape:
        raise ValueError(f"kernels: pools differ: k {tuple(k_pool_SHD.shape)}, v {tuple(v_pool_SHD.shape)}")
    if not (tokens == q_out_TND.shape[0] == positions_T.shape[0] == slots_T.shape[0]):
        raise ValueError(
            f"kernels: {tokens} rows of qkv, {q_out_TND.shape[0]} of q_out, {positions_T.shape[0]} positions, "
            f"{slots_T.shape[0]} slots; expected as many of each"
        )
    if cos_PF.shape != sin_PF.shape or cos_PF.shape[1] * 2 != size:
        raise ValueError(
            f"kernels: rope tables {tuple(cos_PF.shape)} and {tuple(sin_PF.shape)}, expected [positions, {size // 2}]"
        )
    dtypes = {qkv_TX.dtype, k_pool_SHD.dtype, v_pool_SHD.dtype, q_out_TND.dtype}
    if len(dtypes) > 1 or cos_PF.dtype != torch.float32 or sin_PF.dtype != torch.float32:
        raise ValueError(
            f"kernels: qkv, pools and q_out of {sorted(map(str, dtypes))}, rope tables of {cos_PF.dtype}; "
            "expected one dtype, and torch.float32"
        )
    if positions_T.dtype != torch.int64 or slots_T.dtype != torch.int64:
        raise ValueError(f"kernels: positions {positions_T.dtype}, slots {slots_T.dtype}; expected torch.int64")
    tensors = (qkv_TX, cos_PF, sin_PF, positions_T, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("kernels: qk_rope_store got a strided tensor, expected contiguous ones")


def qk_rope_store(
    qkv_TX: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    positions_T: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    slots_T: Tensor,
    q_out_TND: Tensor,
) -> None:
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
        k_pool_SHD, v_pool_SHD: one layer's pools; changed in place; dtype of qkv.
        slots_T: int64; token t goes to slot slots_T[t]. Distinct, except for padding tokens, which go to 0.
        q_out_TND: changed in place; dtype of qkv.
    Raises:
        ValueError: shapes or dtypes disagree, or a tensor is strided.
    """
    check_qk_rope_store(qkv_TX, cos_PF, sin_PF, positions_T, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND)
    tokens = qkv_TX.shape[0]
    heads, kv_heads, size = q_out_TND.shape[1], k_pool_SHD.shape[1], q_out_TND.shape[2]
    rows_TXD = qkv_TX.view(tokens, -1, size)
    q, k, v = rows_TXD[:, :heads], rows_TXD[:, heads : heads + kv_heads], rows_TXD[:, heads + kv_heads :]
    if q_norm_D is not None:
        q = rms_norm(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm(k, k_norm_D, eps)
    cos = cos_PF[positions_T].unsqueeze(1)
    sin = sin_PF[positions_T].unsqueeze(1)
    q_out_TND.copy_(_rotate(q, cos, sin))
    k_pool_SHD[slots_T] = _rotate(k, cos, sin)
    v_pool_SHD[slots_T] = v


def _rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    low, high = x_THD.float().chunk(2, dim=-1)
    turned = torch.cat([low * cos_T1F - high * sin_T1F, high * cos_T1F + low * sin_T1F], dim=-1)
    return turned.to(x_THD.dtype)
