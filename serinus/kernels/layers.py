"""The layers of a decoder as the kernels see them: their weights, and how a column runs those of a decode step.

T = tokens of the step, one of each sequence, E = hidden size, N = query heads, H = KV heads, D = head size, F = MLP
columns; all of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serinus.core.parts import Part
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.contracts import Gate, LayerDigest, LayerDigests, LayersKv, WrittenRows
from serinus.kernels.packed import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer: its weights, and what its part makes of attention."""

    part: Part
    """The part of which it uses pool and table."""
    window: int | None
    """Positions a token sees; None = all before it."""
    cos_PF: torch.Tensor
    """Cosines of the rotation, shared by the layers of a part."""
    sin_PF: torch.Tensor
    """Sines of the rotation, likewise."""
    sinks_N: torch.Tensor | None
    """Scores that join each head's softmax, fp32, where the family has them."""
    input_norm_E: torch.Tensor | None
    """Weight of the norm before attention, where the family has one."""
    qkv: PackedLinear
    """Query, key and value projections as one, [(N + 2H)D, E]."""
    q_norm_D: torch.Tensor | None
    """Norm of each query head, where the family has one."""
    k_norm_D: torch.Tensor | None
    """Norm of each key head."""
    qk_norm_X: tuple[torch.Tensor, torch.Tensor] | None
    """Norms over all query heads, and over all key heads, where the family has them in place of those."""
    output: PackedLinear
    """Attention's output projection, [E, ND]."""
    attention_norm_E: torch.Tensor | None
    """Norm of what attention adds, where the family has one."""
    mlp_norm_E: torch.Tensor | None
    """Norm before the MLP, where the family has one."""
    output_norm_E: torch.Tensor | None
    """Norm of what the MLP adds, where the family has one."""
    gate_up: PackedLinear | None
    """Gate and up projections as one, [2F, E]; None where the MLP is a mixture of experts."""
    down: PackedLinear | None
    """Down projection, [E, F]; likewise."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """What keys, and values, are divided by before they go to a pool of FP8; 1.0 where the checkpoint says nothing."""


class LayerSteps(Protocol):
    """The layers of one decode step."""

    def take(self, layer: int, written: WrittenRows | None, digest: LayerDigest | None) -> None:
        """What a layer digests of what it stores and reads. Said of each layer, in order, before it runs."""

    def take_all(self, digests: Sequence[LayerDigests]) -> None:
        """The same of all layers at once; empty: nothing. Cheap where it is the same object as in the step before."""
        ...

    def run(self, begin: int, end: int) -> None:
        """Run the layers from `begin` to `end` - 1, which are the next. Raises ValueError as `qk_rope_store` and
        `paged_attention` do."""

    def finish(self) -> Tensor:
        """The residual stream behind the last layer, [T, E], a tensor of its own."""


class DecodeLayers(Protocol):
    """What a column keeps of a model's layers from decode step to decode step."""

    def begin(
        self, kv: LayersKv, tables: Mapping[Part, Tensor], batch: AttentionBatch, positions_T: Tensor,
        slots: Mapping[Part, Tensor], residual_TE: Tensor,
    ) -> LayerSteps | None:  # fmt: skip
        """A step begins: arguments as the ops take them, pools of all layers, tables and slots of all parts. None: it
        is none of these steps (more than one token of a sequence, too many tokens, something wrong with the batch)."""


class MakeDecodeLayers(Protocol):
    """The signature of decode_layers."""

    def __call__(
        self, layers: Sequence[LayerWeights], heads: int, eps: float, scale: float, softcap: float | None, gate: Gate,
        total: Callable[[Tensor], Tensor] | None, /,
    ) -> DecodeLayers | None: ...  # fmt: skip
