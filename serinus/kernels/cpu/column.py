"""The cpu column in one piece: its ops by name, and how to make them ready."""

from __future__ import annotations

from typing import Any

import torch

from serinus.kernels.cpu import (
    counter_gumbel,
    gelu_mul,
    hashed_pages,
    linear,
    paged_attention,
    pages,
    qk_rope_store,
    rms_norm,
    silu_mul,
)

__all__ = ["ops", "warm"]


def ops() -> dict[str, Any]:
    """Op -> callable, for the fields of Kernels. A fresh PagedAttention each time: it keeps the last batch."""
    return {
        "rms_norm": rms_norm.rms_norm,
        "add_rms_norm": rms_norm.add_rms_norm,
        "silu_mul": silu_mul.silu_mul,
        "gelu_mul": gelu_mul.gelu_mul,
        "qk_rope_store": qk_rope_store.qk_rope_store,
        "paged_attention": paged_attention.PagedAttention(),
        "pack_linear": linear.pack_linear,
        "linear": linear.linear,
        "gather_pages": pages.gather_pages,
        "scatter_pages": pages.scatter_pages,
        "hashed_pages": hashed_pages.hashed_pages,
        "counter_gumbel": counter_gumbel.counter_gumbel,
    }


def warm(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Compile, or load from the disk, every kernel for this shape, but those that only some families need: windows,
    caps, GELU and fp32 norms are compiled at first use."""
    linear.warm(dtype)
    rms_norm.warm(dtype)
    silu_mul.warm(dtype)
    qk_rope_store.warm(head_size, dtype)
    paged_attention.warm(head_size, group, dtype)
    pages.warm()
    hashed_pages.warm()
    counter_gumbel.warm()
