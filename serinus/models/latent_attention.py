"""Latent attention of one layer on one rank: from projections to queries, and what attention is told of the heads.

Scores of a head are those of its query against keys W_uk c of the latent c: equal to the query times W_uk against c
itself. Its output is W_uv times the shares' sum of latents. So keys and values of heads need not be made, and in
decoding never are. A score takes more arithmetic by it (rank + rotated against plain + rotated elements), so they are
made for long chunks of prompts.

Shapes: T = tokens of the step, N = query heads of this rank, R = rank of the latent, P = plain and O = rotated elements
of a head, W = R + O, S = slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serinus.kernels import Kernels, LatentHeads, LayerWeights, PackedLinear, WrittenRows
from serinus.models.latent import LatentSpec

_EPS: Final = 1e-6
"""Of the norms of latents; as transformers has it, whatever rms_norm_eps is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The weights of a layer beside those of LayerWeights; the `qkv` there gives queries (or what they are made of)
    and rows."""

    spec: LatentSpec
    heads: LatentHeads
    """What heads make of latents."""
    query_norm_Q: Tensor | None
    """Norm of the compressed query; None where there is none."""
    query: PackedLinear | None
    """From it the queries of this rank's heads, [N * (P + O), query_rank]; likewise."""
    row_norm_R: Tensor
    """Norm of the latent."""

    def queries(
        self, kernels: Kernels, layer: LayerWeights, mixed_TX: Tensor, positions_T: Tensor, pool_S1W: Tensor,
        slots_T: Tensor, written: WrittenRows | None, scale: float,
    ) -> Tensor:  # fmt: skip
        """Queries, [T, N, P + O], strided; rows go to the pool, their digests to `written`.

        `mixed_TX`: what `layer.qkv` gave; `scale`: what rows are divided by in the pool.
        """
        spec = self.spec
        first_TX, rows_TW = torch.split_with_sizes(mixed_TX, [mixed_TX.shape[1] - spec.row, spec.row], 1)
        if self.query is not None and self.query_norm_Q is not None:
            first_TX = kernels.linear(kernels.rms_norm(first_TX.contiguous(), self.query_norm_Q, _EPS), self.query)
        queries_TNX = first_TX.view(len(mixed_TX), -1, spec.query)
        norm_R = self.row_norm_R
        if scale != 1.0:
            norm_R = norm_R / scale
            rows_TW[:, spec.rank :].div_(scale)
        kernels.latent_rope_store(
            rows_TW, norm_R, _EPS, queries_TNX, layer.cos_PF, layer.sin_PF, positions_T, pool_S1W, slots_T, written
        )  # fmt: skip
        return queries_TNX
