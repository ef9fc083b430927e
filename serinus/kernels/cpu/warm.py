"""How to make the machine code of the cpu column ready."""

from __future__ import annotations

import torch

from serinus.kernels.cpu import (
    counter_gumbel,
    hashed_pages,
    linear,
    paged_attention,
    pages,
    qk_rope_store,
    rms_norm,
    silu_mul,
)

__all__ = ["warm"]


def warm(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Compile, or load from the disk, every kernel for this shape. What only some models or settings need (windows,
    caps, GELU, fp32 norms, the canary) is compiled at first use."""
    linear.warm(dtype)
    rms_norm.warm(dtype)
    silu_mul.warm(dtype)
    qk_rope_store.warm(head_size, dtype)
    paged_attention.warm(head_size, group, dtype)
    pages.warm()
    hashed_pages.warm()
    counter_gumbel.warm()
