"""How to make the machine code of the cpu column ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serinus.kernels.cpu import (
    calls,
    canary,
    canary_bind,
    canary_lookup,
    decode_units,
    hashed_pages,
    linear,
    mask_logits,
    paged_attention,
    pages,
    qk_rope_store,
    rms_norm,
    sampling,
    silu_mul,
    watched_attention,
)


def warm(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, watched: bool, windows: Sequence[bool], capped: bool,
    kv_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compile, or load from the disk, every kernel that does not depend on the model, and those for models of these
    shapes; where `watched`, of the latter only attention that digests what it reads, windows and caps as said. What
    else only some models need (windows, caps, the GELU of many rows) is compiled at first use."""
    for kernel in (calls, decode_units, pages, hashed_pages, mask_logits, sampling, canary, canary_bind, canary_lookup):
        kernel.warm()
    for head_size, group in shapes:
        if watched:
            watched_attention.warm(head_size, group, (dtype, kv_dtype), windows, capped)
            continue
        linear.warm(dtype)
        rms_norm.warm(dtype)
        silu_mul.warm(dtype)
        qk_rope_store.warm(head_size, dtype)
        paged_attention.warm(head_size, group, (dtype, kv_dtype), (False,), capped=False, watched=False)
