"""Decoder: the Llama, Mistral, Qwen2 and Qwen3 families as one forward pass over packed weights and the paged pool.

The families differ by a few flags of ModelSpec (biases, head norms, rope), not by code. Knows kernels; knows nothing
of requests, sampling or who owns a page.

Shapes: T = tokens of the step, E = hidden size, W = rows wanted of the last layer, V = vocabulary, N = query heads,
H = KV heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serinus.kernels import AttentionBatch, Kernels, PackedLinear
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.rope import rope_tables
from serinus.models.spec import ModelSpec
from serinus.models.weights import WeightSource

__all__ = ["Decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The weights of one layer."""

    input_norm_E: torch.Tensor
    """Norm before attention."""
    qkv: PackedLinear
    """Query, key and value projections as one, [(N + 2H)D, E]."""
    q_norm_D: torch.Tensor | None
    """Norm of each query head, where the family has one."""
    k_norm_D: torch.Tensor | None
    """Norm of each key head."""
    output: PackedLinear
    """Attention's output projection, [E, ND]."""
    mlp_norm_E: torch.Tensor
    """Norm before the MLP."""
    gate_up: PackedLinear
    """Gate and up projections as one, [2F, E]."""
    down: PackedLinear
    """Down projection, [E, F]."""


class Decoder:
    """A decoder-only transformer with rotary embedding, grouped queries and gated MLP."""

    def __init__(
        self, spec: ModelSpec, source: WeightSource, dtype: torch.dtype, kernels: Kernels, positions: int | None = None
    ) -> None:
        """Take, fuse and pack every weight, one at a time.

        Args:
            spec: what config.json says.
            source: where tensors come from, already in `dtype`.
            dtype: torch.float32 or torch.bfloat16, of weights and activations.
            kernels: ops of the device.
            positions: longest sequence that will be run; None = spec.context_length.
        Raises: ConfigError for missing, misshapen or unexpected tensors.
        Cost: reads every weight once; at most one layer's largest weight is resident twice.
        """
        self.spec = spec
        self.dtype = dtype
        self._kernels = kernels
        take = source.take
        width = spec.hidden_size
        self._embedding_VE = take("model.embed_tokens.weight", (spec.vocab_size, width))
        tables = rope_tables(spec.rope, spec.head_size, positions or spec.context_length)
        self._cos_PF, self._sin_PF = (table.to(self._embedding_VE.device) for table in tables)
        self._layers = tuple(_layer(spec, source, kernels, i) for i in range(spec.layer_count))
        self._norm_E = take("model.norm.weight", (width,)).clone()
        head_VE = self._embedding_VE if spec.tied else take("lm_head.weight", (spec.vocab_size, width))
        self._head = kernels.pack_linear(head_VE, None)
        source.finish(ignore=("lm_head.weight",) if spec.tied else ())
        self._scale = spec.head_size**-0.5

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        table_RC: torch.Tensor,
        hook: ForwardHook,
    ) -> torch.Tensor:
        """Compute a step: write its KV into the pool, return hidden states before the final norm.

        Args:
            batch: the tokens; rows of `table_RC` already name the slots of all their positions.
            kv: (k, v) pool of each layer, [S, H, D] in the model's dtype.
            table_RC: req_to_token, int32.
            hook: called before the first and after the last layer.
        Returns: [W, E] where batch.wanted_W is set, else [T, E].
        Cost: one read of all weights; no host wait of its own.
        """
        hook.before(batch)
        kernels, spec = self._kernels, self.spec
        eps = spec.norm_eps
        residual_TE = self._embedding_VE.index_select(0, batch.tokens_T)
        x_TE = kernels.rms_norm(residual_TE, self._layers[0].input_norm_E, eps)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            k_SHD, v_SHD = kv[i]
            q_TND = self._project(layer, x_TE, batch, k_SHD, v_SHD)
            attention: AttentionBatch = batch.attention
            if i == last and batch.wanted_W is not None and batch.wanted_attention is not None:
                # All KV is written: above the last attention only the wanted rows matter.
                attention = batch.wanted_attention
                q_TND = q_TND.index_select(0, batch.wanted_W)
                residual_TE = residual_TE.index_select(0, batch.wanted_W)
                if not len(q_TND):
                    break
            mixed_TND = kernels.paged_attention(q_TND, k_SHD, v_SHD, table_RC, attention, self._scale)
            x_TE = kernels.linear(mixed_TND.view(len(mixed_TND), -1), layer.output)
            x_TE = kernels.add_rms_norm(x_TE, residual_TE, layer.mlp_norm_E, eps)
            x_TE = kernels.linear(kernels.silu_mul(kernels.linear(x_TE, layer.gate_up)), layer.down)
            if i < last:
                x_TE = kernels.add_rms_norm(x_TE, residual_TE, self._layers[i + 1].input_norm_E, eps)
            else:
                residual_TE += x_TE
        hook.after(batch)
        return residual_TE

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """[B, V] in the model's dtype (sampling widens what it needs). Cost: one read of the output head."""
        x_BE = self._kernels.rms_norm(hidden_BE, self._norm_E, self.spec.norm_eps)
        return self._kernels.linear(x_BE, self._head)

    def _project(
        self, layer: _Layer, x_TE: torch.Tensor, batch: ForwardBatch, k_SHD: torch.Tensor, v_SHD: torch.Tensor
    ) -> torch.Tensor:
        """Queries [T, N, D], rotated; keys and values go to the pool."""
        spec = self.spec
        qkv_TX = self._kernels.linear(x_TE, layer.qkv)
        q_TND = qkv_TX.new_empty((len(qkv_TX), spec.head_count, spec.head_size))
        self._kernels.qk_rope_store(
            qkv_TX,
            self._cos_PF,
            self._sin_PF,
            batch.positions_T,
            layer.q_norm_D,
            layer.k_norm_D,
            spec.norm_eps,
            k_SHD,
            v_SHD,
            batch.slots_T,
            q_TND,
        )
        return q_TND


def _layer(spec: ModelSpec, source: WeightSource, kernels: Kernels, index: int) -> _Layer:
    base = f"model.layers.{index}."
    width, inner, size = spec.hidden_size, spec.intermediate_size, spec.head_size
    q_size, kv_size = spec.head_count * size, spec.kv_head_count * size

    def packed(names_and_sizes: tuple[tuple[str, int], ...], in_size: int, has_bias: bool) -> PackedLinear:
        weights = [source.take(f"{base}{n}.weight", (out, in_size)) for n, out in names_and_sizes]
        biases = [source.take(f"{base}{n}.bias", (out,)) for n, out in names_and_sizes] if has_bias else []
        bias_O = torch.cat(biases) if biases else None
        return kernels.pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias_O)

    def norm(name: str, size: int) -> torch.Tensor:
        return source.take(f"{base}{name}.weight", (size,)).clone()

    qkv = (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size))
    return _Layer(
        input_norm_E=norm("input_layernorm", width),
        qkv=packed(qkv, width, spec.qkv_bias),
        q_norm_D=norm("self_attn.q_norm", size) if spec.qk_norm else None,
        k_norm_D=norm("self_attn.k_norm", size) if spec.qk_norm else None,
        output=packed((("self_attn.o_proj", width),), q_size, spec.output_bias),
        mlp_norm_E=norm("post_attention_layernorm", width),
        gate_up=packed((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), width, spec.mlp_bias),
        down=packed((("mlp.down_proj", width),), inner, spec.mlp_bias),
    )
