"""Attention that digests the KV it reads, on the processor's 16-bit products; see the reference for what it means.

Positions are digested right after attention read them, while their rows are in the core's own caches: memory is read
once. The bodies of `paged_attention` do it, by what `watching` gives them: those of bf16 queries whole rows 16 at a
time, by packed factors; all others row by row, by plain ones. Torch's kernel for chunks (fp32, a processor without bf16
dot products) attends over rows that were gathered before, and these are digested.

S = slots, H = KV heads, W = 16-bit lanes of a row of one half, E = slots digested.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_layer_digest, check_pack_factors
from serinus.kernels.contracts import LayerDigest, Tiling, WatchedAttention
from serinus.kernels.cpu import paged_attention
from serinus.kernels.cpu.digest import BLOCK
from serinus.kernels.cpu.paged_attention import LaidAttention
from serinus.kernels.packed import PackedFactors

_HALF = 1 << 15


def pack_factors(coefficients_22W: Tensor, kv_heads: int) -> PackedFactors:
    """Cut coefficients into signed halves, [half, W / 32, low and high of both sums, 32] int16; plain where heads are
    no whole blocks. Raises ValueError: they are not those of so many heads."""
    check_pack_factors(coefficients_22W, kv_heads)
    lanes = coefficients_22W.shape[-1]
    if lanes // kv_heads % BLOCK:
        return PackedFactors(factors=coefficients_22W, bias=None, plain_22W=coefficients_22W)
    low = (coefficients_22W.long() + _HALF) % (1 << 16) - _HALF
    high = ((coefficients_22W.long() - low) >> 16) + _HALF
    high = high % (1 << 16) - _HALF
    packed = torch.stack((low, high), 2).view(2, 4, lanes // BLOCK, BLOCK).transpose(1, 2)
    bias = (_HALF * coefficients_22W.long().view(2, 2, kv_heads, -1).sum(3)).transpose(1, 2)
    return PackedFactors(
        factors=packed.to(torch.int16).contiguous(),
        bias=_wrapped(bias).contiguous(),
        plain_22W=coefficients_22W,
    )


def new_watched_attention() -> WatchedAttention:
    """The op, with a memory of its own: it keeps the layouts of the last batch, which the layers of a step share."""
    return _WatchedAttention()


def warm(
    head_size: int, group: int, dtypes: tuple[torch.dtype, torch.dtype], windows: Sequence[bool], capped: bool
) -> None:
    """Compile, or load from the disk, what digests whole rows. `dtypes`: of queries and of pools."""
    paged_attention.warm(head_size, group, dtypes, windows, capped=capped, watched=True)


class _WatchedAttention:
    def __init__(self) -> None:
        self._attend = LaidAttention()

    def __call__(
        self, q_BND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
        scale: float, digest: LayerDigest | None = None, tiling: Tiling | None = None, window: int | None = None,
        softcap: float | None = None, sinks_N: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`paged_attention`; with a digest, that of what is due is added to its sums.

        Raises:
            ValueError: as in the reference.
        Cost: one read of the KV.
        """
        inputs = q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch
        if digest is not None:
            check_layer_digest(k_pool_SHD, batch, digest)
        return self._attend(*inputs, scale, window, softcap, sinks_N, digest)


def _wrapped(words: Tensor) -> Tensor:
    """Modulo 2**32, as int32."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
