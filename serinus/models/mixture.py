"""A mixture of experts in place of a layer's MLP: the choice of experts, and what they add.

T = tokens, E = hidden size, X = experts, K = experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serinus.kernels import Gate, Kernels, PackedExperts, PackedLinear
from serinus.models.experts import ExpertSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """The expert that all tokens go through."""

    gate_up: PackedLinear
    """Gate and up projections as one."""
    down: PackedLinear
    """Down projection, scaled as the residual wants it."""
    scale_E: Tensor | None
    """What it adds is scaled by the sigmoid of the product with this; None: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of one layer, as far as a rank has them: of each a slice, or some whole, but the router whole."""

    spec: ExpertSpec
    """The rule by which tokens choose."""
    router: PackedLinear
    """[X, E], fp32: a choice should not hang on the last bits of bf16."""
    correction_X: Tensor | None
    """Of the scores, for the choice; fp32."""
    experts: PackedExperts
    """The projections of those that it has."""
    held: range
    """Numbers of these among all."""
    shared: SharedExpert | None
    """The expert of all tokens; its down projection is scaled already."""
    scale: float
    """What the other experts add is multiplied by this."""

    def add(self, kernels: Kernels, x_TE: Tensor, gate: Gate) -> Tensor:
        """What this rank's slices add to the stream, [T, E], of the normed stream. Costs no host wait of its own."""
        logits_TX = kernels.linear(x_TE.float(), self.router)
        weights_TK, ids_TK = choose_experts(logits_TX, self.spec, self.correction_X)
        if self.experts.is_part:
            here_TK = (ids_TK >= self.held.start) & (ids_TK < self.held.stop)
            ids_TK = torch.where(here_TK, ids_TK - self.held.start, len(self.held))
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        added_TE = kernels.fused_moe(x_TE, weights_TK, ids_TK, self.experts, self.spec.gate)
        if self.shared is None:
            return added_TE
        gated_TF = (kernels.silu_mul if gate == "silu" else kernels.gelu_mul)(kernels.linear(x_TE, self.shared.gate_up))
        shared_TE = kernels.linear(gated_TF, self.shared.down)
        if self.shared.scale_E is not None:
            shared_TE = shared_TE * (x_TE.float() @ self.shared.scale_E).sigmoid_()[:, None].to(x_TE.dtype)
        return added_TE.add_(shared_TE)


def choose_experts(logits_TX: Tensor, spec: ExpertSpec, correction_X: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights, fp32 [T, K], and numbers, int64 [T, K], of each token's experts, of the router's fp32 logits."""
    if not spec.sigmoid and spec.normalized and spec.groups == 1 and correction_X is None:
        best_TK, ids_TK = logits_TX.topk(spec.chosen)  # the softmax of all, made to sum to 1, is that of the chosen
        weights_TK = best_TK.softmax(-1)
        return weights_TK if spec.scale == 1.0 else weights_TK.mul_(spec.scale), ids_TK
    scores_TX = logits_TX.sigmoid() if spec.sigmoid else logits_TX.softmax(-1)
    ranked_TX = scores_TX if correction_X is None else scores_TX + correction_X
    if spec.groups > 1:
        grouped = ranked_TX.view(len(ranked_TX), spec.groups, -1)
        best = grouped.amax(-1) if correction_X is None else grouped.topk(2)[0].sum(-1)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.groups_chosen)[1], False)
        ranked_TX = grouped.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
    ids_TK = ranked_TX.topk(spec.chosen)[1]
    weights_TK = scores_TX.gather(1, ids_TK)
    if spec.normalized:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK if spec.scale == 1.0 else weights_TK * spec.scale, ids_TK
