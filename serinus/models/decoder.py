"""Decoder: the Llama, Mistral, Qwen and Gemma families as one forward pass over packed weights and the paged pools.

The families differ by a few flags of ModelSpec (norms, windows, caps) and by what is done to weights as they are loaded
(layers.py), not by code. Knows kernels; knows nothing of requests, sampling or the owners of pages.

One rank of several runs the layers of its stage, and of each its own heads and MLP columns: what the ranks of a stage
add to the residual stream is summed twice per layer. Between stages goes the residual, nothing else. Embedding and
output head are cut by rows of the vocabulary: a rank looks up what it has, and the sum over ranks is the embedding.

Shapes: T = tokens of the step, E = hidden size, W = rows wanted of the last layer, V = vocabulary, N = query heads of
this rank, H = its KV heads, D = head size, F = its MLP columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.kernels import (
    FP8_FORMATS,
    AttentionBatch,
    Gate,
    Kernels,
    LayerDigest,
    LayerDigests,
    LayersKv,
    LayerSteps,
    PackedLinear,
    WrittenRows,
)
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.layers import take_weights
from serinus.models.spec import ModelSpec
from serinus.models.weights import WeightSource
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm, SoloComm

_UNSCALED = 1.0, 1.0


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
        self._all_heads = spec.head_count, spec.kv_head_count
        self._comm = comm or SoloComm()
        self._kernels = kernels
        weights = take_weights(spec, source, kernels, positions or spec.context_length, self.shard)
        self._embedding_VE, self._norm_E = weights.embedding_VE, weights.norm_E
        self._head, self._head_norm_E = weights.head, weights.head_norm_E
        self._layers, self._mixtures, self._latents = weights.layers, weights.mixtures, weights.latents
        self.has_kv_scales = any(layer.kv_scales != _UNSCALED for layer in self._layers)
        norms = [(layer.k_norm_D, layer.kv_scales[0]) for layer in self._layers]
        self._fp8_k_norms = [None if norm_D is None else norm_D / scale for norm_D, scale in norms]
        """Norms of keys that go to FP8 by their scale. Made here: kernels read norms before the kernel before them has
        ended."""
        self._scale = spec.head_size**-0.5 if spec.attention_scale is None else spec.attention_scale
        scale = spec.embedding_scale  # rounded to the model's dtype, as in training
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._gate: Gate = "gelu" if spec.gelu else "silu"
        self._has_parts = self.shard.tp > 1
        """Whether what blocks say is a part of what the stage says, which its ranks add up."""
        self._is_alike = spec.quantization is None and not spec.intermediate_size % self.shard.tp
        """Whether all ranks of the stage hold their parts of a weight in the same shape and form, so that a kernel that
        one has for it all of them have. Of a quantized one a rank may hold its part dequantized, if it begins within a
        group."""
        total = self._comm.all_reduce if self._has_parts else None
        wanted = self.spec.head_count, spec.norm_eps, self._scale, spec.attention_softcap, self._gate, total
        make = kernels.decode_layers
        op_by_op = spec.is_latent or spec.is_parallel or spec.norm_names[0] is None
        self._decode_layers = None if make is None or op_by_op else make(self._layers, *wanted)

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what goes from stage to stage: the residual stream, [T, E]."""
        return (token_count, self.spec.hidden_size), self.dtype

    def forward(
        self,
        batch: ForwardBatch,
        kv: LayersKv,
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
        inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a step: write its KV into the pools, return hidden states before the final norm.

        Args:
            batch: the tokens; their rows already name the slots of all positions that are read.
            kv: (k, v) pools (or that of latent rows) of each layer of this rank, [S, H, D] in the
                model's dtype, S being that of its part.
            tables: req_to_token of each part, int32.
            hook: called before the first, before each and after the last layer of this rank, which count from 0.
            inflow: what the stage before returned; written to. None on the first stage.
        Returns: [W, E] on the last stage where batch.wanted_W is set, else [T, E].
        Cost: one read of all weights; two sums over the ranks of the stage per layer; no host wait of its own.
        """
        hook.before(batch)
        kernels = self._kernels
        residual_TE = self._embed(batch.tokens_T) if inflow is None else inflow
        x_TE: torch.Tensor | None = None  # what the last block added, not in the residual yet
        last = len(self._layers) - 1
        steps = self._begin_steps(batch, kv, tables, residual_TE)
        if steps is not None:
            return self._run_steps(steps, batch, hook)
        told: Sequence[LayerDigests] = ()
        for i, layer in enumerate(self._layers):
            hook.before_layer(i)
            if not i and self._asks_at_once(batch, hook):
                told = hook.layer_digests(batch.attention)
            written, digest = told[i] if told else (hook.writes(i), None)
            queries_TNX = self._rotate(
                i, self._project(x_TE, residual_TE, layer.input_norm_E, layer.qkv), batch, kv[i], written
            )
            attention: AttentionBatch = batch.attention
            if i == last and self.shard.is_last and batch.wanted_W is not None and batch.wanted_attention is not None:
                # All KV is written: above the last attention only the wanted rows matter.
                attention = batch.wanted_attention
                queries_TNX = queries_TNX.index_select(0, batch.wanted_W)
                residual_TE = residual_TE.index_select(0, batch.wanted_W)
                if not len(residual_TE):
                    break
            if not told:
                digest = hook.reads(i, attention)
            mixed_TX = self._attend(i, queries_TNX, kv[i], tables[layer.part], attention, digest)
            if self.spec.is_parallel:
                assert layer.down is not None, "models: experts in a parallel layer"
                x_TE = kernels.linear(mixed_TX, layer.output)
                del queries_TNX, mixed_TX  # the MLP, which takes most of a step's memory, does without them
                x_TE.add_(kernels.linear(self._gated(i, None, residual_TE), layer.down))
                x_TE = self._centred(self._comm.all_reduce(x_TE))
            else:
                x_TE = self._added(mixed_TX, layer.output, residual_TE, layer.attention_norm_E)
                del queries_TNX, mixed_TX
                x_TE = self._fed(i, x_TE, residual_TE)
            if i == last and x_TE is not None:
                residual_TE += x_TE
        hook.after(batch)
        return residual_TE

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """[B, V] in the model's dtype (sampling widens what it needs), fp32 where they are capped. On slice 0 of the
        last stage; its other slices, which must call this too, get None.

        Raises InvariantError: this rank is not of the last stage.
        Cost: one read of the output head; B * V elements gathered.
        """
        if self._head is None or self._head_norm_E is None:
            raise InvariantError(f"models: logits on {self.shard.name}, expected that of the last stage alone")
        logits_BV = self._comm.gather_last(
            self._kernels.norm_linear(None, hidden_BE, self._head_norm_E, self.spec.norm_eps, self._head)
        )
        if logits_BV is None:
            return None
        if logits_BV.shape[1] != self.spec.vocab_size:
            logits_BV = logits_BV[:, : self.spec.vocab_size]
        cap = self.spec.logit_softcap
        return logits_BV if cap is None else logits_BV.float().div_(cap).tanh_().mul_(cap)

    def final_hidden(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """[B, E] in the model's dtype. Raises InvariantError: this rank is not of the last stage."""
        if self._norm_E is None:
            raise InvariantError(f"models: final hidden states on {self.shard.name}, expected that of the last stage")
        return self._kernels.rms_norm(hidden_BE, self._norm_E, self.spec.norm_eps)

    def _begin_steps(
        self, batch: ForwardBatch, kv: LayersKv, tables: Mapping[Part, torch.Tensor],
        residual_TE: torch.Tensor,
    ) -> LayerSteps | None:  # fmt: skip
        """What runs whole layers of this step; None: it goes op by op."""
        if self._decode_layers is None or batch.wanted_W is not None:
            return None
        if self.has_kv_scales and kv[0][0].dtype in FP8_FORMATS:
            return None
        slots = {part: batch.slots_of(part) for part in tables}
        return self._decode_layers.begin(kv, tables, batch.attention, batch.positions_T, slots, residual_TE)

    def _asks_at_once(self, batch: ForwardBatch, hook: ForwardHook) -> bool:
        """Whether the hook is asked at once what all layers of a decode step digest. On a CPU alone: there each call of
        Python between layers is time of the step."""
        count = batch.attention.sequence_count
        is_decode = len(batch.tokens_T) == count and batch.wanted_W is None  # all layers read for the same queries
        return is_decode and self._kernels.device == "cpu" and hook.can_replay(count)

    def _run_steps(self, steps: LayerSteps, batch: ForwardBatch, hook: ForwardHook) -> torch.Tensor:
        """All layers of a decode step by one call, where nothing is awaited or done between them; else one by one."""
        count, attention = len(self._layers), batch.attention
        at_once = hook.can_replay(attention.sequence_count)
        for i in range(count):
            hook.before_layer(i)
            if not at_once:
                steps.take(i, hook.writes(i), hook.reads(i, attention))
                steps.run(i, i + 1)
        if at_once:
            steps.take_all(hook.layer_digests(attention))
            steps.run(0, count)
        hook.after(batch)
        return steps.finish()

    def _attend(
        self, index: int, queries_TNX: torch.Tensor, kv: tuple[torch.Tensor, ...], table_RC: torch.Tensor,
        attention: AttentionBatch, digest: LayerDigest | None,
    ) -> torch.Tensor:  # fmt: skip
        """What the heads of this rank say, side by side, [T, N * values of a head]; queries: of `_rotate`."""
        layer, latent, kernels, cap = (
            self._layers[index],
            self._latents[index],
            self._kernels,
            self.spec.attention_softcap,
        )
        k_scale, v_scale = self._kv_scales(index, kv)
        if latent is not None:
            said_TNV = kernels.latent_attention(
                queries_TNX, kv[0], latent.spec.rank, table_RC, attention, self._scale * k_scale, digest, latent.heads
            )  # fmt: skip
            return (said_TNV if k_scale == 1.0 else said_TNV.mul_(k_scale)).flatten(1)
        k_SHD, v_SHD = kv
        inputs = queries_TNX, k_SHD, v_SHD, table_RC, attention, self._scale * k_scale
        if digest is None:
            mixed_TND = kernels.paged_attention(*inputs, layer.window, cap, layer.sinks_N)
        else:
            mixed_TND = kernels.watched_attention(*inputs, digest, None, layer.window, cap, layer.sinks_N)
        if v_scale != 1.0:
            mixed_TND.mul_(v_scale)
        return mixed_TND.view(len(mixed_TND), -1)

    def _fed(self, index: int, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> torch.Tensor | None:
        """What the MLP, or the experts, add to the stream, as `_added` says; x joins it before."""
        layer, mixture, kernels, eps = self._layers[index], self._mixtures[index], self._kernels, self.spec.norm_eps
        if mixture is None:
            assert layer.down is not None, "models: an MLP without a down projection"
            return self._added(self._gated(index, x_TE, residual_TE), layer.down, residual_TE, layer.output_norm_E)
        norm_E = layer.mlp_norm_E
        assert norm_E is not None, "models: experts without a norm before them"
        if x_TE is None:
            normed_TE = kernels.rms_norm(residual_TE, norm_E, eps)
        else:
            normed_TE = kernels.add_rms_norm(x_TE, residual_TE, norm_E, eps)
        return self._whole(mixture.add(kernels, normed_TE, self._gate), layer.output_norm_E)

    def _gated(self, index: int, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> torch.Tensor:
        """What this rank's part of an MLP has before its down projection; x joins the stream before."""
        layer = self._layers[index]
        assert layer.gate_up is not None, "models: a layer with neither MLP nor experts"
        return self._project(x_TE, residual_TE, layer.mlp_norm_E, layer.gate_up, self._gate)

    def _added(
        self, x_TX: torch.Tensor, packed: PackedLinear, residual_TE: torch.Tensor, norm_E: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What a block adds to the stream by its last linear, of all ranks of the stage, behind a norm where there is
        one. None: it has joined the stream."""
        if norm_E is None and not self._has_parts:
            return self._kernels.add_linear(x_TX, packed, residual_TE)
        peers = self._comm.peers
        x_TE = peers.linear_all_reduce(x_TX, packed) if peers is not None and self._is_alike else None
        return self._whole(self._kernels.linear(x_TX, packed), norm_E) if x_TE is None else self._normed(x_TE, norm_E)

    def _whole(self, part_TE: torch.Tensor, norm_E: torch.Tensor | None) -> torch.Tensor:
        """What all ranks of the stage say together, behind a norm where there is one."""
        return self._normed(self._comm.all_reduce(part_TE), norm_E)

    def _normed(self, x_TE: torch.Tensor, norm_E: torch.Tensor | None) -> torch.Tensor:
        return x_TE if norm_E is None else self._kernels.rms_norm(x_TE, norm_E, self.spec.norm_eps)

    def _project(
        self, x_TE: torch.Tensor | None, residual_TE: torch.Tensor, norm_E: torch.Tensor | None, packed: PackedLinear,
        gate: Gate | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """A linear of the stream, once x has joined it, behind a norm where there is one (`norm_linear`)."""
        if norm_E is not None:
            return self._kernels.norm_linear(x_TE, residual_TE, norm_E, self.spec.norm_eps, packed, gate)
        if x_TE is not None:
            residual_TE += x_TE
        out_TX = self._kernels.linear(residual_TE, packed)
        if gate is None:
            return out_TX
        return (self._kernels.silu_mul if gate == "silu" else self._kernels.gelu_mul)(out_TX)

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self._embedding_VE is None:
            raise InvariantError(f"models: {self.shard.name} has no embedding, expected an inflow")
        if self.shard.tp == 1:
            hidden_TE = self._embedding_VE.index_select(0, tokens_T)
        else:
            own_T = tokens_T - self.shard.vocab.start
            near_T = own_T.clamp(0, len(self._embedding_VE) - 1)
            hidden_TE = self._embedding_VE.index_select(0, near_T)
            self._comm.all_reduce(hidden_TE.masked_fill_((near_T != own_T)[:, None], 0.0))
        return self._centred(hidden_TE if self._embedding_scale is None else hidden_TE.mul_(self._embedding_scale))

    def _centred(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Less its mean, where norms of the stream subtract that: a norm of a stream without one is an RMS norm."""
        return x_TE.sub_(x_TE.mean(-1, keepdim=True, dtype=torch.float32)) if self.spec.is_centred else x_TE

    def _kv_scales(self, index: int, kv: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        """What keys and values of a layer are divided by in its pools."""
        return self._layers[index].kv_scales if kv[0].dtype in FP8_FORMATS else _UNSCALED

    def _rotate(
        self, index: int, qkv_TX: torch.Tensor, batch: ForwardBatch, kv: tuple[torch.Tensor, ...],
        written: WrittenRows | None,
    ) -> torch.Tensor:  # fmt: skip
        """Queries [T, N, D] of this rank, rotated; keys and values go to the pool, their digests to `written`."""
        spec, layer, latent = self.spec, self._layers[index], self._latents[index]
        slots_T = batch.slots_of(layer.part)
        k_norm_D, (k_scale, v_scale) = layer.k_norm_D, self._kv_scales(index, kv)
        if latent is not None:
            return latent.queries(self._kernels, layer, qkv_TX, batch.positions_T, kv[0], slots_T, written, k_scale)
        if layer.qk_norm_X is not None:
            self._norm_heads(qkv_TX, layer.qk_norm_X)
        if (k_scale, v_scale) != _UNSCALED:
            kv_size = spec.kv_head_count * spec.head_size
            qkv_TX[:, -kv_size:].div_(v_scale)
            k_norm_D = self._fp8_k_norms[index]
            if k_norm_D is None:
                qkv_TX[:, -2 * kv_size : -kv_size].div_(k_scale)
        q_TND = qkv_TX.new_empty((len(qkv_TX), spec.head_count, spec.head_size))
        self._kernels.qk_rope_store(
            qkv_TX,
            layer.cos_PF,
            layer.sin_PF,
            batch.positions_T,
            layer.q_norm_D,
            k_norm_D,
            spec.norm_eps,
            *kv,
            slots_T,
            q_TND,
            written,
        )
        return q_TND

    def _norm_heads(self, qkv_TX: torch.Tensor, norms_X: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Norms over all query heads and over all key heads, in place: those of all ranks of the stage, by one sum. Or
        of each head, less its mean."""
        spec, dtype = self.spec, qkv_TX.dtype
        sizes = [count * spec.head_size for count in (spec.head_count, spec.kv_head_count)]
        parts = torch.split_with_sizes(qkv_TX, [*sizes, sizes[1]], 1)[:2]
        if spec.qk_norm_each:
            for part_TX, norm_X in zip(parts, norms_X, strict=True):
                wide_TND = part_TX.float().view(len(part_TX), -1, spec.head_size)
                wide_TND -= wide_TND.mean(-1, keepdim=True)
                wide_TND *= torch.rsqrt(wide_TND.square().mean(-1, keepdim=True) + spec.norm_eps)
                part_TX.copy_(wide_TND.flatten(1) * norm_X)
            return
        if self.shard.tp == 1:
            for part_TX, norm_X in zip(parts, norms_X, strict=True):
                part_TX.copy_(self._kernels.rms_norm(part_TX.contiguous(), norm_X, spec.norm_eps))
            return
        wide = [part_TX.float() for part_TX in parts]
        sums_T2 = self._comm.all_reduce(torch.stack([each.square().sum(1) for each in wide], 1))
        for i, (part_TX, norm_X) in enumerate(zip(parts, norms_X, strict=True)):
            mean_T1 = sums_T2[:, i : i + 1] / self._all_heads[i] / spec.head_size
            normed_TX = wide[i] * torch.rsqrt(mean_T1 + spec.norm_eps)
            part_TX.copy_(normed_TX * norm_X if norm_X.dtype != dtype else normed_TX.to(dtype) * norm_X)
