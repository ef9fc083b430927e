"""Decoder: the Llama, Mistral, Qwen and Gemma families as one forward pass over packed weights and the paged pools.

The families differ by a few flags of ModelSpec (biases, norms, rope, windows, caps), not by code. Knows kernels; knows
nothing of requests, sampling or who owns a page.

Shapes: T = tokens of the step, E = hidden size, W = rows wanted of the last layer, V = vocabulary, N = query heads,
H = KV heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from serinus.core.parts import Part
from serinus.kernels import AttentionBatch, Kernels, PackedLinear
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.rope import rope_tables
from serinus.models.spec import ModelSpec, RopeSpec
from serinus.models.weights import WeightSource

__all__ = ["Decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer: its weights, and what its part makes of attention."""

    part: Part
    """Whose pool and table it uses."""
    window: int | None
    """Positions a token sees; None = all before it."""
    cos_PF: torch.Tensor
    """Rotation, shared by the layers of a part."""
    sin_PF: torch.Tensor
    """Rotation."""
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
    attention_norm_E: torch.Tensor | None
    """Norm of what attention adds, where the family has one."""
    mlp_norm_E: torch.Tensor
    """Norm before the MLP."""
    output_norm_E: torch.Tensor | None
    """Norm of what the MLP adds, where the family has one."""
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
        ropes = _ropes(spec, positions or spec.context_length, self._embedding_VE.device)
        self._layers = tuple(_layer(spec, source, kernels, i, ropes[p]) for i, p in enumerate(spec.layer_parts))
        self._norm_E = _norm(spec, take("model.norm.weight", (width,)))
        head_VE = self._embedding_VE if spec.tied else take("lm_head.weight", (spec.vocab_size, width))
        self._head = kernels.pack_linear(head_VE, None)
        source.finish(ignore=("lm_head.weight",) if spec.tied else ())
        self._scale = spec.head_size**-0.5 if spec.attention_scale is None else spec.attention_scale
        scale = spec.embedding_scale  # rounded to the model's dtype, as in training
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._gate = kernels.gelu_mul if spec.gelu else kernels.silu_mul

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
    ) -> torch.Tensor:
        """Compute a step: write its KV into the pools, return hidden states before the final norm.

        Args:
            batch: the tokens; their rows already name the slots of all positions that are read.
            kv: (k, v) pool of each layer, [S, H, D] in the model's dtype, S being that of the layer's part.
            tables: req_to_token of each part, int32.
            hook: called before the first, before each and after the last layer.
        Returns: [W, E] where batch.wanted_W is set, else [T, E].
        Cost: one read of all weights; no host wait of its own.
        """
        hook.before(batch)
        kernels, eps, cap = self._kernels, self.spec.norm_eps, self.spec.attention_softcap
        residual_TE = self._embed(batch.tokens_T)
        x_TE = kernels.rms_norm(residual_TE, self._layers[0].input_norm_E, eps)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            hook.before_layer(i)
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
            table_RC = tables[layer.part]
            mixed_TND = kernels.paged_attention(
                q_TND, k_SHD, v_SHD, table_RC, attention, self._scale, layer.window, cap
            )
            x_TE = kernels.linear(mixed_TND.view(len(mixed_TND), -1), layer.output)
            if layer.attention_norm_E is not None:
                x_TE = kernels.rms_norm(x_TE, layer.attention_norm_E, eps)
            x_TE = kernels.add_rms_norm(x_TE, residual_TE, layer.mlp_norm_E, eps)
            x_TE = kernels.linear(self._gate(kernels.linear(x_TE, layer.gate_up)), layer.down)
            if layer.output_norm_E is not None:
                x_TE = kernels.rms_norm(x_TE, layer.output_norm_E, eps)
            if i < last:
                x_TE = kernels.add_rms_norm(x_TE, residual_TE, self._layers[i + 1].input_norm_E, eps)
            else:
                residual_TE += x_TE
        hook.after(batch)
        return residual_TE

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """[B, V] in the model's dtype (sampling widens what it needs), fp32 where they are capped.

        Cost: one read of the output head.
        """
        x_BE = self._kernels.rms_norm(hidden_BE, self._norm_E, self.spec.norm_eps)
        logits_BV = self._kernels.linear(x_BE, self._head)
        cap = self.spec.logit_softcap
        return logits_BV if cap is None else logits_BV.float().div_(cap).tanh_().mul_(cap)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        hidden_TE = self._embedding_VE.index_select(0, tokens_T)
        return hidden_TE if self._embedding_scale is None else hidden_TE.mul_(self._embedding_scale)

    def _project(
        self, layer: _Layer, x_TE: torch.Tensor, batch: ForwardBatch, k_SHD: torch.Tensor, v_SHD: torch.Tensor
    ) -> torch.Tensor:
        """Queries [T, N, D], rotated; keys and values go to the pool."""
        spec = self.spec
        qkv_TX = self._kernels.linear(x_TE, layer.qkv)
        q_TND = qkv_TX.new_empty((len(qkv_TX), spec.head_count, spec.head_size))
        self._kernels.qk_rope_store(
            qkv_TX,
            layer.cos_PF,
            layer.sin_PF,
            batch.positions_T,
            layer.q_norm_D,
            layer.k_norm_D,
            spec.norm_eps,
            k_SHD,
            v_SHD,
            batch.slots_of(layer.part),
            q_TND,
        )
        return q_TND


_Rope = tuple[torch.Tensor, torch.Tensor]


def _ropes(spec: ModelSpec, positions: int, device: torch.device) -> dict[Part, _Rope]:
    """cos and sin of each part."""

    def tables(rope: RopeSpec) -> _Rope:
        cos_PF, sin_PF = rope_tables(rope, spec.head_size, positions)
        return cos_PF.to(device), sin_PF.to(device)

    full = tables(spec.rope)
    return {Part.FULL: full, Part.SWA: full if spec.rope_swa is None else tables(spec.rope_swa)}


def _norm(spec: ModelSpec, stored: torch.Tensor) -> torch.Tensor:
    """The weight that a norm multiplies by. One that is stored less 1 stays fp32: bf16 has no digits for 1 + w."""
    return stored.float() + 1.0 if spec.norm_plus_one else stored.clone()


def _layer(spec: ModelSpec, source: WeightSource, kernels: Kernels, index: int, rope: _Rope) -> _Layer:
    base = f"model.layers.{index}."
    width, inner, size = spec.hidden_size, spec.intermediate_size, spec.head_size
    q_size, kv_size = spec.head_count * size, spec.kv_head_count * size

    def packed(names_and_sizes: tuple[tuple[str, int], ...], in_size: int, has_bias: bool) -> PackedLinear:
        weights = [source.take(f"{base}{n}.weight", (out, in_size)) for n, out in names_and_sizes]
        biases = [source.take(f"{base}{n}.bias", (out,)) for n, out in names_and_sizes] if has_bias else []
        bias_O = torch.cat(biases) if biases else None
        return kernels.pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias_O)

    def norm(name: str, size: int = width) -> torch.Tensor:
        return _norm(spec, source.take(f"{base}{name}.weight", (size,)))

    qkv = (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size))
    posts = spec.post_norms
    return _Layer(
        part=spec.layer_parts[index],
        window=spec.window if spec.layer_parts[index] is Part.SWA else None,
        cos_PF=rope[0],
        sin_PF=rope[1],
        input_norm_E=norm("input_layernorm"),
        qkv=packed(qkv, width, spec.qkv_bias),
        q_norm_D=norm("self_attn.q_norm", size) if spec.qk_norm else None,
        k_norm_D=norm("self_attn.k_norm", size) if spec.qk_norm else None,
        output=packed((("self_attn.o_proj", width),), q_size, spec.output_bias),
        attention_norm_E=norm("post_attention_layernorm") if posts else None,
        mlp_norm_E=norm("pre_feedforward_layernorm" if posts else "post_attention_layernorm"),
        output_norm_E=norm("post_feedforward_layernorm") if posts else None,
        gate_up=packed((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), width, spec.mlp_bias),
        down=packed((("mlp.down_proj", width),), inner, spec.mlp_bias),
    )
