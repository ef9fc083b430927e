"""From a checkpoint's tensors to what one rank computes with: taken, cut, fused, put in order, scaled and packed.

Where families differ by what can be done to weights once, it is done here, and the forward pass knows nothing of it:
projections that are stored as one, rotations of other elements (rope.head_order), layers that do not rotate, and
multipliers.

Shapes: E = hidden size, V = vocabulary, D = head size, P = positions, F = pairs of elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.kernels import Kernels, LatentHeads, LayerWeights, PackedLinear, QuantizedWeight
from serinus.models.expert_weights import take_experts
from serinus.models.experts import ExpertSpec
from serinus.models.latent import LatentSpec
from serinus.models.latent_attention import Latent
from serinus.models.mixture import Mixture, SharedExpert
from serinus.models.quantized import joined
from serinus.models.rope import head_order, rope_tables
from serinus.models.spec import ModelSpec
from serinus.models.weights import WeightSource
from serinus.parallel import Shard, share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Everything that a rank multiplies by."""

    layers: tuple[LayerWeights, ...]
    """Of its stage, in order."""
    mixtures: tuple[Mixture | None, ...]
    """What layers have in place of an MLP; None where they have one."""
    latents: tuple[Latent | None, ...]
    """What layers have for latent attention; None where theirs is another."""
    embedding_VE: torch.Tensor | None
    """Its rows of the vocabulary; None but on the first stage."""
    norm_E: torch.Tensor | None
    """Weight of the last norm; None but on the last stage."""
    head_norm_E: torch.Tensor | None
    """The same as logits want it, scaled as they are."""
    head: PackedLinear | None
    """Its rows of the output head, filled up with zeros; None but on the last stage."""


def take_weights(spec: ModelSpec, source: WeightSource, kernels: Kernels, positions: int, shard: Shard) -> RankWeights:
    """Take every weight of a rank, one at a time.

    Args:
        spec: the whole model; shard: what of it this rank holds.
        positions: longest sequence that will be run.
    Raises ConfigError: a tensor is missing, misshapen or unexpected.
    Cost: reads every weight of this rank once; at most one layer's largest weight is resident twice.
    """
    embedding_VE, head_VE = _vocabulary(spec, source, shard)
    norm_E = head_norm_E = None
    if shard.is_last:
        norm_E = _norm(spec, source.take("model.norm.weight", (spec.hidden_size,)))
        head_norm_E = norm_E if spec.logit_scale == 1.0 else norm_E.float() * spec.logit_scale
    head = None if head_VE is None else kernels.pack_linear(_padded(head_VE, shard.vocab_share), None)
    taken = _Recorder(source)
    rotations = _rotations(spec, positions, torch.device(source.device))
    readers = [(i, _Layer(spec, taken, kernels, i, shard)) for i in shard.layers]
    is_mixture = spec.experts.layers if spec.experts is not None else ()
    loaded = [
        (each.packed(rotations[i], i not in is_mixture), i in is_mixture and each.mixture(), each.latent())
        for i, each in readers
    ]
    source.finish(_Elsewhere(spec, shard, taken.names))
    return RankWeights(
        layers=tuple(layer for layer, _, _ in loaded),
        mixtures=tuple(mixture or None for _, mixture, _ in loaded),
        latents=tuple(latent for _, _, latent in loaded),
        embedding_VE=embedding_VE,
        norm_E=norm_E,
        head_norm_E=head_norm_E,
        head=head,
    )


_BLOCKS = ("mlp", "block_sparse_moe")
"""Names of a layer's mixture."""
_KV_SCALES = ("{0}_scale", "{0}_proj.output_scale", "{0}_proj.{0}_scale", "kv_scale")
"""Names of a scale of keys or values."""
_Rotation = tuple[torch.Tensor, torch.Tensor]
_Weight = torch.Tensor | QuantizedWeight
"""The weight of a linear."""


def _rotations(spec: ModelSpec, positions: int, device: torch.device) -> list[_Rotation]:
    """cos and sin, [P, F] each, of every layer; layers with the same rotation share them."""
    made: dict[Part | None, _Rotation] = {}
    size = spec.head_size if spec.latent is None else spec.latent.rotated
    for part, rope in ((Part.FULL, spec.rope), (Part.SWA, spec.rope_swa)):
        if rope is not None:
            cos_PF, sin_PF = rope_tables(rope, size, positions, spec.context_length)
            made[part] = cos_PF.to(device), sin_PF.to(device)
    made.setdefault(Part.SWA, made[Part.FULL])
    made[Part.LATENT] = made[Part.FULL]
    if spec.plain_layers:
        cos_PF, sin_PF = made[Part.FULL]
        made[None] = torch.ones_like(cos_PF), torch.zeros_like(sin_PF)
    return [made[None if i in spec.plain_layers else part] for i, part in enumerate(spec.layer_parts)]


class _Layer:
    """The tensors of one layer, as they are taken."""

    def __init__(self, spec: ModelSpec, source: _Recorder, kernels: Kernels, index: int, shard: Shard) -> None:
        self._spec, self._source, self._kernels, self._shard = spec, source, kernels, shard
        self._base = f"model.layers.{index}."
        self._part = spec.layer_parts[index]
        rope = spec.rope_swa if self._part is Part.SWA and spec.rope_swa is not None else spec.rope
        self._order = head_order(rope, spec.head_size if spec.latent is None else spec.latent.rotated)

    def packed(self, rotation: _Rotation, is_dense: bool) -> LayerWeights:
        """All of it, as kernels take it, the MLP where it is one."""
        spec, size, shard = self._spec, self._spec.head_size, self._shard
        queries, keys = (range(heads.start * size, heads.stop * size) for heads in (shard.heads, shard.kv_heads))
        before, added, before_mlp, added_by_mlp = spec.norm_names
        width = size if spec.latent is None else spec.latent.value
        outputs = range(shard.heads.start * width, shard.heads.stop * width)
        gate_up, down = ("gate_up_proj", "down_proj") if not spec.shared_mlp else ("input_linear", "output_linear")
        mlp = "shared_mlp" if spec.shared_mlp else "mlp"
        q_size, kv_size, inner = spec.head_count * size, spec.kv_head_count * size, spec.intermediate_size
        return LayerWeights(
            part=self._part,
            window=spec.window if self._part is Part.SWA else None,
            cos_PF=rotation[0],
            sin_PF=rotation[1],
            sinks_N=self._take("self_attn.sinks", (spec.head_count,), shard.heads).float() if spec.sinks else None,
            input_norm_E=None if before is None else self._norm(before),
            qkv=self._latent_inputs() if spec.latent is not None else self._rows(
                (("self_attn.q_proj", q_size, queries), ("self_attn.k_proj", kv_size, keys),
                 ("self_attn.v_proj", kv_size, keys)),
                "self_attn.qkv_proj" if spec.fused_qkv else None, has_bias=spec.qkv_bias, in_order=2,
            ),
            q_norm_D=self._head_norm("self_attn.q_norm") if spec.qk_norm else None,
            k_norm_D=self._head_norm("self_attn.k_norm") if spec.qk_norm else None,
            qk_norm_X=(
                self._head_norms("self_attn.q_norm", spec.head_count, queries),
                self._head_norms("self_attn.k_norm", spec.kv_head_count, keys),
            ) if spec.qk_norm_whole or spec.qk_norm_each else None,
            output=self._columns("self_attn.o_proj", spec.head_count * width, outputs, spec.output_bias),
            attention_norm_E=None if added is None else self._norm(added),
            mlp_norm_E=None if before_mlp is None else self._norm(before_mlp),
            output_norm_E=None if added_by_mlp is None else self._norm(added_by_mlp),
            gate_up=self._rows(
                (("mlp.gate_proj", inner, shard.mlp), ("mlp.up_proj", inner, shard.mlp)),
                f"{mlp}.{gate_up}" if spec.fused_mlp else None, has_bias=spec.mlp_bias,
            ) if is_dense else None,
            down=self._columns(f"{mlp}.{down}", inner, shard.mlp, spec.mlp_bias) if is_dense else None,
            kv_scales=(self._kv_scale("k"), self._kv_scale("v")),
        )  # fmt: skip

    def _kv_scale(self, half: str) -> float:
        """What the checkpoint divides keys or values by in FP8. Raises ConfigError: no positive number."""
        for name in (f"self_attn.{each.format(half)}" for each in _KV_SCALES):
            if self._source.has(self._base + name):
                taken = self._take(name, (1,), dtype=torch.float32)
                scale = 1.0 if taken.is_meta else float(taken)
                if not 0.0 < scale < math.inf:
                    raise ConfigError(f"models: {self._base}{name} is {scale}, expected a positive number")
                return scale
        return 1.0

    def latent(self) -> Latent | None:
        """What latent attention has beside its inputs and outputs, of the heads of this rank; None: it is another."""
        spec, heads = self._spec.latent, self._shard.heads
        if spec is None:
            return None
        each, count = spec.plain + spec.value, self._spec.head_count
        span = None if len(heads) == count else range(heads.start * each, heads.stop * each)
        made_NXR = self._take("self_attn.kv_b_proj.weight", (count * each, spec.rank), span).view(-1, each, spec.rank)
        query = None if not spec.query_rank else self._kernels.pack_linear(self._latent_queries(spec, "q_b_proj"), None)
        return Latent(
            spec=spec,
            query_norm_Q=self._norm("self_attn.q_a_layernorm", spec.query_rank) if spec.query_rank else None,
            query=query,
            row_norm_R=self._norm("self_attn.kv_a_layernorm", spec.rank),
            heads=LatentHeads(
                key_NPR=made_NXR[:, : spec.plain].clone(),
                value_NRV=made_NXR[:, spec.plain :].transpose(1, 2).contiguous(),
            ),
        )

    def _latent_inputs(self) -> PackedLinear:
        """Queries, or what they are made of, and rows, as one."""
        spec, hidden = self._spec.latent, self._spec.hidden_size
        assert spec is not None, "models: inputs of a latent attention that is none"
        names, parts = [("kv_a_proj_with_mqa", spec.row)], []
        if spec.query_rank:
            names.insert(0, ("q_a_proj", spec.query_rank))
        else:
            parts.append(self._latent_queries(spec, "q_proj"))
        parts += [self._take(f"self_attn.{name}.weight", (size, hidden)) for name, size in names]
        parts[-1] = self._turned(parts[-1], spec.rotated)
        if not self._spec.qkv_bias:
            return self._kernels.pack_linear(torch.cat(parts), None)
        biases = [self._take(f"self_attn.{name}.bias", (size,)) for name, size in names]
        biases[-1] = self._turned(biases[-1], spec.rotated)
        return self._kernels.pack_linear(torch.cat(parts), torch.cat(biases))

    def _latent_queries(self, spec: LatentSpec, name: str) -> torch.Tensor:
        """Rows of this rank's heads."""
        heads, count, width = self._shard.heads, self._spec.head_count, spec.query_rank or self._spec.hidden_size
        span = None if len(heads) == count else range(heads.start * spec.query, heads.stop * spec.query)
        rows = self._take(f"self_attn.{name}.weight", (count * spec.query, width), span)
        return torch.cat([self._turned(head, spec.rotated) for head in rows.view(-1, spec.query, width)])

    def _turned(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """With the last `count` in the order of the rotation."""
        if self._order is None:
            return rows
        return torch.cat([rows[:-count], rows[-count:].index_select(0, self._order.to(rows.device))])

    def mixture(self) -> Mixture:
        """The experts of this layer, those or the slices of this rank, and what chooses among them."""
        spec = self._spec.experts
        assert spec is not None, "models: a mixture of a model that has none"
        router = self._named(*(f"{block}.{name}" for block in _BLOCKS for name in ("gate", "router", "router.layer")))
        block = router.split(".")[0]
        weight = self._take(f"{router}.weight", (spec.count, self._spec.hidden_size)).float()
        bias = self._take(f"{router}.bias", (spec.count,)).float() if spec.biased else None
        correction = f"{block}.gate.e_score_correction_bias"
        return Mixture(
            spec=spec,
            router=self._kernels.pack_linear(weight, bias),
            correction_X=self._take(correction, (spec.count,), dtype=torch.float32) if spec.corrected else None,
            experts=take_experts(self._spec, spec, self._source, self._kernels, self._shard, f"{self._base}{block}"),
            held=self._shard.experts(spec.count),
            shared=self._shared(spec) if spec.shared_size else None,
            scale=self._spec.residual_scale,
        )

    def _shared(self, spec: ExpertSpec) -> SharedExpert:
        size, hidden = spec.shared_size, self._spec.hidden_size
        span = share(size, self._shard.tp, self._shard.tp_rank)
        base = self._named("mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj", "shared_mlp.input_linear")
        is_fused, base = base.endswith("input_linear"), base.rpartition(".")[0]
        return SharedExpert(
            gate_up=self._rows(
                ((f"{base}.gate_proj", size, span), (f"{base}.up_proj", size, span)),
                f"{base}.input_linear" if is_fused else None, has_bias=False,
            ),
            down=self._columns(f"{base}.{'output_linear' if is_fused else 'down_proj'}", size, span, False),
            scale_E=self._take(f"{base}_gate.weight", (1, hidden))[0].float() if spec.shared_gate else None,
        )  # fmt: skip

    def _named(self, *names: str) -> str:
        """The first of these linears that the checkpoint has; where it has none, the first."""
        return next((name for name in names if self._source.has(f"{self._base}{name}.weight")), names[0])

    def _rows(
        self, parts: Sequence[tuple[str, int, range]], fused: str | None, *, has_bias: bool, in_order: int = 0
    ) -> PackedLinear:
        """Projections as one, of each the rows of this rank: (name, rows of the whole, rows here). `fused`: the name
        where they are stored as one, too. The first `in_order` are put in the order of the kernels' rotation."""
        weights: list[_Weight] = []
        biases: list[torch.Tensor] = []
        total, start, width = sum(count for _, count, _ in parts), 0, self._spec.hidden_size
        for number, (name, count, span) in enumerate(parts):
            here = None if span == range(count) else span
            if fused is not None:
                name, count, here = fused, total, range(start + span.start, start + span.stop)
            weight = self._linear(name, (count, width), here)
            weights.append(self._ordered_weight(weight) if number < in_order else weight)
            if has_bias:
                bias = self._take(f"{name}.bias", (count,), here)
                biases.append(self._ordered(bias) if number < in_order else bias)
            start += parts[number][1]
        return self._kernels.pack_linear(joined(weights, self._source.dtype), torch.cat(biases) if has_bias else None)

    def _columns(self, name: str, count: int, span: range, has_bias: bool) -> PackedLinear:
        """The columns of this rank, scaled as the residual wants it; the bias is added once, by slice 0."""
        width = self._spec.hidden_size
        weight = self._linear(name, (width, count), None if span == range(count) else span, 1)
        bias = self._scaled(self._take(f"{name}.bias", (width,))) if has_bias else None
        scale = self._spec.residual_scale
        scaled = self._scaled(weight) if isinstance(weight, torch.Tensor) else weight.scaled(scale)
        return self._kernels.pack_linear(scaled, bias if self._shard.tp_rank == 0 else None)

    def _scaled(self, weight: torch.Tensor) -> torch.Tensor:
        scale = self._spec.residual_scale
        return weight if scale == 1.0 else (weight.float() * scale).to(weight.dtype)

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of whole heads, each in the order of the kernels' rotation."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._spec.head_size, *rows.shape[1:])
        return heads.index_select(1, self._order.to(rows.device)).flatten(0, 1)

    def _ordered_weight(self, weight: _Weight) -> _Weight:
        if isinstance(weight, torch.Tensor):
            return self._ordered(weight)
        return weight.rows(self._ordered(torch.arange(weight.out_size)))

    def _norm(self, name: str, size: int | None = None) -> torch.Tensor:
        return _norm(self._spec, self._take(f"{name}.weight", (size or self._spec.hidden_size,)))

    def _head_norm(self, name: str) -> torch.Tensor:
        return _norm(self._spec, self._ordered(self._take(f"{name}.weight", (self._spec.head_size,))))

    def _head_norms(self, name: str, count: int, span: range) -> torch.Tensor:
        """Of all heads, one behind the other, what this rank has; stored so, or a row for each head."""
        size = self._spec.head_size
        shape = (count, size) if self._spec.qk_norm_each else (count * size,)
        return _norm(self._spec, self._ordered(self._take(f"{name}.weight", shape).view(-1)))[span.start : span.stop]

    def _linear(self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0) -> _Weight:
        return self._source.linear(self._base + name, shape, span, dim)

    def _take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self._source.take(self._base + name, shape, span, dim, dtype)


def _norm(spec: ModelSpec, stored: torch.Tensor) -> torch.Tensor:
    """The weight that a norm multiplies by; fp32 where the family rounds after it alone, or it is stored less 1, for
    which bf16 has no digits."""
    if spec.norm_plus_one:
        return stored.float() + 1.0
    return stored.float() if spec.is_centred else stored.clone()


class _Recorder:
    """A source that remembers what was taken of it."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.dtype = source, source.dtype
        self.names: list[str] = []

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.names += [name, *(self._source.names_of(name.removesuffix(".weight")) if name.endswith(".weight") else ())]
        return self._source.take(name, shape, span, dim, dtype)

    def linear(self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0) -> _Weight:
        self.names.extend(self._source.names_of(name))
        return self._source.linear(name, shape, span, dim)

    def quantized(self, name: str, weight_OI: torch.Tensor) -> _Weight:
        return self._source.quantized(name, weight_OI)

    def has(self, name: str) -> bool:
        """Whether the source has it."""
        return self._source.has(name)


class _Elsewhere:
    """Whether a rank leaves a tensor to others, given the names of those it took: layers of a kind have the same."""

    def __init__(self, spec: ModelSpec, shard: Shard, taken: Sequence[str]) -> None:
        self._spec, self._shard = spec, shard
        self._layers: dict[bool, set[str]] = {}
        for i in shard.layers:
            own = f"model.layers.{i}."
            if self._is_mixture(i) not in self._layers:
                names = {name.removeprefix(own) for name in taken if name.startswith(own)}
                self._layers[self._is_mixture(i)] = names

    def __call__(self, name: str) -> bool:
        spec, shard = self._spec, self._shard
        if name.startswith("model.layers."):
            index, _, rest = name.removeprefix("model.layers.").partition(".")
            layer = int(index) if index.isdecimal() else -1
            if spec.layer_count <= layer < spec.layer_count + spec.extra_layers:
                return True
            number = rest.partition(".experts.")[2].partition(".")[0]
            if spec.experts is not None and number.isdecimal() and int(number) < spec.experts.count:
                if int(number) not in shard.experts(spec.experts.count):
                    return True  # its rank knows what belongs there
                rest = rest.replace(f".experts.{number}.", f".experts.{shard.experts(spec.experts.count).start}.")
            if not 0 <= layer < spec.layer_count or layer in shard.layers:
                return False
            known = self._layers.get(self._is_mixture(layer))
            return known is None or rest in known
        not_first = name == "model.embed_tokens.weight" and not shard.is_first
        not_last = name == "model.norm.weight" and not shard.is_last
        return not_first or not_last or (name == "lm_head.weight" and (spec.tied or not shard.is_last))

    def _is_mixture(self, layer: int) -> bool:
        return self._spec.experts is not None and layer in self._spec.experts.layers


def _vocabulary(spec: ModelSpec, source: WeightSource, shard: Shard) -> tuple[torch.Tensor | None, _Weight | None]:
    """Embedding and output head of a rank, [its rows of V, E]; None where its stage has none. Tied, they are one."""
    shape, span = (spec.vocab_size, spec.hidden_size), None if shard.tp == 1 else shard.vocab
    both = shard.is_first or (shard.is_last and spec.tied)
    embedding_VE = source.take("model.embed_tokens.weight", shape, span) if both else None
    head_VE: _Weight | None = None
    if shard.is_last and embedding_VE is not None and spec.tied:
        head_VE = source.quantized("lm_head", embedding_VE)
    elif shard.is_last:
        head_VE = source.linear("lm_head", shape, span)
    return embedding_VE if shard.is_first else None, head_VE


def _padded(weight_VE: _Weight, rows: int) -> _Weight:
    """With rows of zeros below, so that every rank computes as many logits."""
    if isinstance(weight_VE, QuantizedWeight):
        return weight_VE.padded(rows - weight_VE.out_size)
    missing = rows - len(weight_VE)
    return torch.cat([weight_VE, weight_VE.new_zeros((missing, weight_VE.shape[1]))]) if missing else weight_VE
