"""Decoder: the Llama, Mistral, Qwen and Gemma families as one forward pass over packed weights and the paged pools.

The families differ by a few flags of ModelSpec (biases, norms, rope, windows, caps), not by code. Knows kernels; knows
nothing of requests, sampling or the owners of pages.

One rank of several runs the layers of its stage, and of each its own heads and MLP columns: what the ranks of a stage
add to the residual stream is summed twice per layer. Between stages goes the residual, nothing else. Embedding and
output head are cut by rows of the vocabulary: a rank looks up what it has, and the sum over ranks is the embedding.

Shapes: T = tokens of the step, E = hidden size, W = rows wanted of the last layer, V = vocabulary, N = query heads of
this rank, H = its KV heads, D = head size, F = its MLP columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.kernels import AttentionBatch, Gate, Kernels, PackedLinear, WrittenRows
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.rope import rope_tables
from serinus.models.spec import ModelSpec, RopeSpec
from serinus.models.weights import WeightSource
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm, SoloComm

__all__ = ["Decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer: its weights, and what its part makes of attention."""

    part: Part
    """The part of which it uses pool and table."""
    window: int | None
    """Positions a token sees; None = all before it."""
    cos_PF: torch.Tensor
    """Cosines of the rotation, shared by the layers of a part."""
    sin_PF: torch.Tensor
    """Sines of the rotation, likewise."""
    input_norm_E: torch.Tensor
    """Weight of the norm before attention."""
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
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        kernels: Kernels,
        positions: int | None = None,
        *,
        shard: Shard | None = None,
        comm: Comm | None = None,
    ) -> None:
        """Take, fuse and pack every weight of this rank, one at a time.

        Args:
            spec: what config.json says.
            source: where tensors come from, already in `dtype`.
            dtype: torch.float32, torch.bfloat16 or torch.float16, of weights and activations.
            kernels: ops of the device.
            positions: longest sequence that will be run; None = spec.context_length.
            shard: what this rank holds; None = everything.
            comm: to the other ranks.
        Raises: ConfigError for missing, misshapen or unexpected tensors.
        Cost: reads every weight of this rank once; at most one layer's largest weight is resident twice.
        """
        self.shard = shard or spec.shards(Mesh())[0]
        self.spec = spec.on(self.shard)
        self.dtype = dtype
        self._comm = comm or SoloComm()
        self._kernels = kernels
        self._embedding_VE, head_VE = _vocabulary(spec, source, self.shard)
        self._norm_E = (
            _norm(spec, source.take("model.norm.weight", (spec.hidden_size,))) if self.shard.is_last else None
        )
        self._head = None if head_VE is None else kernels.pack_linear(_padded(head_VE, self.shard.vocab_share), None)
        taken = _Recorder(source)
        ropes = _ropes(spec, positions or spec.context_length, torch.device(source.device))
        self._layers = tuple(
            _layer(spec, taken, kernels, i, ropes[spec.layer_parts[i]], self.shard) for i in self.shard.layers
        )
        source.finish(ignore=_elsewhere(spec, self.shard, taken.names))
        self._scale = spec.head_size**-0.5 if spec.attention_scale is None else spec.attention_scale
        scale = spec.embedding_scale  # rounded to the model's dtype, as in training
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._gate: Gate = "gelu" if spec.gelu else "silu"

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what goes from stage to stage: the residual stream, [T, E]."""
        return (token_count, self.spec.hidden_size), self.dtype

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
        inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a step: write its KV into the pools, return hidden states before the final norm.

        Args:
            batch: the tokens; their rows already name the slots of all positions that are read.
            kv: (k, v) pool of each layer of this rank, [S, H, D] in the model's dtype, S being that of its part.
            tables: req_to_token of each part, int32.
            hook: called before the first, before each and after the last layer of this rank, which count from 0.
            inflow: what the stage before returned; written to. None on the first stage.
        Returns: [W, E] on the last stage where batch.wanted_W is set, else [T, E].
        Cost: one read of all weights; two sums over the ranks of the stage per layer; no host wait of its own.
        """
        hook.before(batch)
        kernels, eps, cap, total = self._kernels, self.spec.norm_eps, self.spec.attention_softcap, self._comm.all_reduce
        residual_TE = self._embed(batch.tokens_T) if inflow is None else inflow
        x_TE: torch.Tensor | None = None  # what the last block added, not in the residual yet
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            hook.before_layer(i)
            k_SHD, v_SHD = kv[i]
            qkv_TX = kernels.norm_linear(x_TE, residual_TE, layer.input_norm_E, eps, layer.qkv)
            q_TND = self._rotate(layer, qkv_TX, batch, k_SHD, v_SHD, hook.writes(i))
            attention: AttentionBatch = batch.attention
            if i == last and self.shard.is_last and batch.wanted_W is not None and batch.wanted_attention is not None:
                # All KV is written: above the last attention only the wanted rows matter.
                attention = batch.wanted_attention
                q_TND = q_TND.index_select(0, batch.wanted_W)
                residual_TE = residual_TE.index_select(0, batch.wanted_W)
                if not len(q_TND):
                    break
            inputs = q_TND, k_SHD, v_SHD, tables[layer.part], attention, self._scale
            digest = hook.reads(i, attention)
            if digest is None:
                mixed_TND = kernels.paged_attention(*inputs, layer.window, cap)
            else:
                mixed_TND = kernels.watched_attention(*inputs, digest, None, layer.window, cap)
            x_TE = total(kernels.linear(mixed_TND.view(len(mixed_TND), -1), layer.output))
            if layer.attention_norm_E is not None:
                x_TE = kernels.rms_norm(x_TE, layer.attention_norm_E, eps)
            gated_TF = kernels.norm_linear(x_TE, residual_TE, layer.mlp_norm_E, eps, layer.gate_up, self._gate)
            x_TE = total(kernels.linear(gated_TF, layer.down))
            if layer.output_norm_E is not None:
                x_TE = kernels.rms_norm(x_TE, layer.output_norm_E, eps)
            if i == last:
                residual_TE += x_TE
        hook.after(batch)
        return residual_TE

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """[B, V] in the model's dtype (sampling widens what it needs), fp32 where they are capped. On slice 0 of the
        last stage; its other slices, which must call this too, get None.

        Raises InvariantError: this rank is not of the last stage.
        Cost: one read of the output head; B * V elements gathered.
        """
        if self._head is None or self._norm_E is None:
            raise InvariantError(f"models: logits on {self.shard.name}, expected that of the last stage alone")
        logits_BV = self._comm.gather_last(
            self._kernels.norm_linear(None, hidden_BE, self._norm_E, self.spec.norm_eps, self._head)
        )
        if logits_BV is None:
            return None
        if logits_BV.shape[1] != self.spec.vocab_size:
            logits_BV = logits_BV[:, : self.spec.vocab_size]
        cap = self.spec.logit_softcap
        return logits_BV if cap is None else logits_BV.float().div_(cap).tanh_().mul_(cap)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self._embedding_VE is None:
            raise InvariantError(f"models: {self.shard.name} has no embedding, expected an inflow")
        if self.shard.tp == 1:
            hidden_TE = self._embedding_VE.index_select(0, tokens_T)
        else:
            own_T = tokens_T - self.shard.vocab.start
            foreign_T = (own_T < 0) | (own_T >= len(self._embedding_VE))
            hidden_TE = self._embedding_VE.index_select(0, own_T.masked_fill_(foreign_T, 0))
            self._comm.all_reduce(hidden_TE.masked_fill_(foreign_T[:, None], 0.0))
        return hidden_TE if self._embedding_scale is None else hidden_TE.mul_(self._embedding_scale)

    def _rotate(
        self, layer: _Layer, qkv_TX: torch.Tensor, batch: ForwardBatch, k_SHD: torch.Tensor, v_SHD: torch.Tensor,
        written: WrittenRows | None,
    ) -> torch.Tensor:  # fmt: skip
        """Queries [T, N, D] of this rank, rotated; keys and values go to the pool, their digests to `written`."""
        spec = self.spec
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
            written,
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


class _Recorder:
    """A source that remembers what was taken of it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.names: list[str] = []

    def take(self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0) -> torch.Tensor:
        self.names.append(name)
        return self._source.take(name, shape, span, dim)


def _elsewhere(spec: ModelSpec, shard: Shard, taken: Sequence[str]) -> set[str]:
    """Names that a rank leaves to others, given those of its layers: all layers have the same tensors."""
    own = f"model.layers.{shard.layers[0]}."
    each = [name.removeprefix(own) for name in taken if name.startswith(own)]
    names = {f"model.layers.{i}.{name}" for i in range(spec.layer_count) if i not in shard.layers for name in each}
    if not shard.is_first:
        names.add("model.embed_tokens.weight")
    if not shard.is_last:
        names.add("model.norm.weight")
    if spec.tied or not shard.is_last:
        names.add("lm_head.weight")
    return names


def _vocabulary(spec: ModelSpec, source: WeightSource, shard: Shard) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Embedding and output head of a rank, [its rows of V, E]; None where its stage has none. Tied, they are one."""
    shape, span = (spec.vocab_size, spec.hidden_size), None if shard.tp == 1 else shard.vocab
    both = shard.is_first or (shard.is_last and spec.tied)
    embedding_VE = source.take("model.embed_tokens.weight", shape, span) if both else None
    head_VE = embedding_VE if spec.tied else source.take("lm_head.weight", shape, span) if shard.is_last else None
    return embedding_VE if shard.is_first else None, head_VE if shard.is_last else None


def _padded(weight_VE: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows of zeros below, so that every rank computes as many logits."""
    missing = rows - len(weight_VE)
    return torch.cat([weight_VE, weight_VE.new_zeros((missing, weight_VE.shape[1]))]) if missing else weight_VE


def _layer(spec: ModelSpec, source: _Recorder, kernels: Kernels, index: int, rope: _Rope, shard: Shard) -> _Layer:
    base = f"model.layers.{index}."
    width, inner, size = spec.hidden_size, spec.intermediate_size, spec.head_size
    alone = shard.tp == 1

    def of_heads(heads: range) -> range | None:
        return None if alone else range(heads.start * size, heads.stop * size)

    def rows(*parts: tuple[str, int, range | None], has_bias: bool) -> PackedLinear:
        """Projections as one, of each the rows of this rank."""
        weights = [source.take(f"{base}{name}.weight", (out, width), span) for name, out, span in parts]
        biases = [source.take(f"{base}{name}.bias", (out,), span) for name, out, span in parts] if has_bias else []
        return kernels.pack_linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def columns(name: str, in_size: int, span: range | None, has_bias: bool) -> PackedLinear:
        """The columns of this rank; the bias is added once, by slice 0."""
        weight = source.take(f"{base}{name}.weight", (width, in_size), span, 1)
        bias = source.take(f"{base}{name}.bias", (width,)) if has_bias else None
        return kernels.pack_linear(weight, bias if shard.tp_rank == 0 else None)

    def norm(name: str, size: int = width) -> torch.Tensor:
        return _norm(spec, source.take(f"{base}{name}.weight", (size,)))

    queries, keys, mlp = of_heads(shard.heads), of_heads(shard.kv_heads), None if alone else shard.mlp
    q_size, kv_size = spec.head_count * size, spec.kv_head_count * size
    posts, part = spec.post_norms, spec.layer_parts[index]
    return _Layer(
        part=part,
        window=spec.window if part is Part.SWA else None,
        cos_PF=rope[0],
        sin_PF=rope[1],
        input_norm_E=norm("input_layernorm"),
        qkv=rows(
            ("self_attn.q_proj", q_size, queries),
            ("self_attn.k_proj", kv_size, keys),
            ("self_attn.v_proj", kv_size, keys),
            has_bias=spec.qkv_bias,
        ),
        q_norm_D=norm("self_attn.q_norm", size) if spec.qk_norm else None,
        k_norm_D=norm("self_attn.k_norm", size) if spec.qk_norm else None,
        output=columns("self_attn.o_proj", q_size, queries, spec.output_bias),
        attention_norm_E=norm("post_attention_layernorm") if posts else None,
        mlp_norm_E=norm("pre_feedforward_layernorm" if posts else "post_attention_layernorm"),
        output_norm_E=norm("post_feedforward_layernorm") if posts else None,
        gate_up=rows(("mlp.gate_proj", inner, mlp), ("mlp.up_proj", inner, mlp), has_bias=spec.mlp_bias),
        down=columns("mlp.down_proj", inner, mlp, spec.mlp_bias),
    )
