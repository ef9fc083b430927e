"""The layers of a decode step, one or all of them by one compiled call: norm and projection, rotation and store,
attention, output, norm, gate and MLP one after the other (`calls`). The bits are those of the ops one by one.

What stays from step to step stays where it is: buffers for the rows, work items of attention, and of each layer the
arguments of its kernels. What differs is written into those buffers when a step begins.

Shapes: T = tokens of the step, one of each sequence, E = hidden size, N = query heads, H = KV heads, D = head size.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from serinus.core.parts import Part
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_layer_digest, check_paged_attention
from serinus.kernels.contracts import Gate, LayerDigest, LayerDigests, LayersKv, WrittenRows
from serinus.kernels.cpu.body import thread_count
from serinus.kernels.cpu.calls import Calls, KernelCall
from serinus.kernels.cpu.decode_attention import UNIT_FIELDS
from serinus.kernels.cpu.decode_attention import serves as decodes
from serinus.kernels.cpu.decode_units import Lay, run_lay
from serinus.kernels.cpu.paged_attention import (
    ALONE_BELOW,
    UNEVEN,
    decode_call,
    digest_unseen,
    refuse_row,
    threads_of,
)
from serinus.kernels.cpu.qk_rope_store import refuse_token, store_call
from serinus.kernels.cpu.rms_norm import norm_call
from serinus.kernels.cpu.row_linear import GATED_BLOCK, ROWS_MAX, fused_rows, normed_call, rows_call
from serinus.kernels.layers import DecodeLayers, LayerSteps, LayerWeights
from serinus.kernels.packed import PackedLinear, RowBlocks

_ENGINES_KEPT = 4
"""Sets of pools of which something is kept; an engine has one."""
_DIGESTS_KEPT = 4
"""Digests of a layer for which there is a call of attention."""
_STORE, _ATTEND = 1, 2
"""Where they stand among the calls of a layer."""
_OUTPUT, _ADDED = 4, 6
"""Calls up to what attention adds, and up to what the MLP adds, beside norms of what they add."""


def decode_layers(
    layers: Sequence[LayerWeights], heads: int, eps: float, scale: float, softcap: float | None, gate: Gate,
    total: Callable[[Tensor], Tensor] | None,
) -> DecodeLayers | None:  # fmt: skip
    """The layers of a model.

    Args:
        layers: all that the rank has.
        heads: N.
        scale, softcap: as `paged_attention` takes them.
        gate: the activation of the MLP.
        total: sums what attention and MLP add over the ranks of a stage, in place; None = there is one.
    Returns: None where the weights are none that few rows are multiplied with (`row_linear`), or of experts.
    """
    linears = [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if any(linear is None or fused_rows(linear) is None for linear in linears):
        return None
    if any(_dense(layer.gate_up).out_size % GATED_BLOCK for layer in layers):
        return None
    return _Layers(_Model(layers=tuple(layers), heads=heads, eps=eps, scale=scale, softcap=softcap, gate=gate), total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    layers: tuple[LayerWeights, ...]
    heads: int
    eps: float
    scale: float
    softcap: float | None
    gate: Gate


@dataclass(slots=True, eq=False)
class _Engine:
    """What belongs to a set of pools."""

    kv: LayersKv
    tables: Mapping[Part, Tensor]
    rows: _Rows
    steps: dict[tuple[int, int, bool], _Steps] = field(default_factory=dict)
    """By tokens, threads, and whether rows are looked up again."""


class _Layers:
    def __init__(self, model: _Model, total: Callable[[Tensor], Tensor] | None) -> None:
        self._model, self._total = model, total
        self._engines: list[_Engine] = []

    def begin(
        self, kv: LayersKv, tables: Mapping[Part, Tensor], batch: AttentionBatch, positions_T: Tensor,
        slots: Mapping[Part, Tensor], residual_TE: Tensor,
    ) -> LayerSteps | None:  # fmt: skip
        count = len(positions_T)
        if count > ROWS_MAX or batch.sequence_count != count:
            return None
        engine = next((each for each in self._engines if each.kv is kv and each.tables is tables), None)
        if engine is None:
            pool = kv[0][0]
            if not decodes(pool.shape[2], self._model.heads // pool.shape[1], residual_TE.dtype):
                return None
            engine = _Engine(kv, tables, _Rows(self._model, pool.shape[1], pool.shape[2], set(tables)))
            self._engines = [engine, *self._engines[: _ENGINES_KEPT - 1]]
        key = count, thread_count(), batch.is_watched
        steps = engine.steps.get(key)
        if steps is None:
            steps = engine.steps[key] = _Steps(self._model, engine, count, batch.is_watched, self._total)
        return steps if steps.begin(batch, positions_T, slots, residual_TE) else None


class _Rows:
    """Room for the rows of a step. Steps of fewer tokens use the first of them."""

    def __init__(self, model: _Model, kv_heads: int, size: int, parts: set[Part]) -> None:
        layer, heads = model.layers[0], model.heads
        width = layer.output.out_size

        def rows(*shape: int) -> Tensor:
            return torch.zeros((ROWS_MAX, *shape), dtype=torch.bfloat16)

        self.residual_RE, self.x_RE, self.normed_RE, self.scaled_RE = (rows(width) for _ in range(4))
        self.qkv_RX, self.q_RND, self.mixed_RND = rows(layer.qkv.out_size), rows(heads, size), rows(heads, size)
        self.gated_RF = rows(_dense(layer.down).in_size)
        self.positions_R = torch.zeros(ROWS_MAX, dtype=torch.int64)
        self.slots = {part: torch.zeros(ROWS_MAX, dtype=torch.int64) for part in parts}
        windows = {layer.window for layer in model.layers}
        self.units = {window: np.zeros((ROWS_MAX * kv_heads, UNIT_FIELDS), np.int64) for window in windows}


@dataclass(slots=True, eq=False)
class _Taken:
    """What the calls of a layer digest, as they are."""

    written: WrittenRows | None
    digest: LayerDigest | None
    attend: KernelCall
    attends: dict[int, KernelCall]
    """Attention that digests nothing, and that of the latest digests, by their identities: from one step to the next
    pages of a sequence are due, and are not."""
    laid: tuple[int, int] = (-1, -1)
    """Items of attention and the threads that they are shared by, as its arguments have them."""


class _Steps:
    """Steps of so many tokens."""

    def __init__(
        self, model: _Model, engine: _Engine, count: int, is_watched: bool, total: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._model, self._kv, self._tables, self._rows = model, engine.kv, engine.tables, engine.rows
        self._count, self._is_watched, self._total = count, is_watched, total
        rows = engine.rows
        self._residual_TE, self._x_TE = rows.residual_RE[:count], rows.x_RE[:count]
        self._added_TE = self._x_TE if model.layers[-1].output_norm_E is None else rows.scaled_RE[:count]
        self._positions_T = rows.positions_R[:count]
        self._slots = {part: slots_R[:count] for part, slots_R in rows.slots.items()}
        self._batch: AttentionBatch | None = None
        self._taken: list[_Taken | None] = [None] * len(model.layers)
        self._told: tuple[Sequence[LayerDigests], list[tuple[int, bool]]] | None = None
        """What all layers were told at once, and what their threads follow from beside it."""
        self._sees_all = all(layer.window is None for layer in model.layers)
        sizes = [_size_of(layer) for layer in model.layers]
        self._begins = [0, *accumulate(sizes)]
        """Where the calls of each layer begin."""
        self._calls = Calls(sum(sizes))
        kv_heads, part_of = engine.kv[0][0].shape[1], {layer.window: layer.part for layer in model.layers}
        self._lays = {}
        for window, units in rows.units.items():
            row_count, width = engine.tables[part_of[window]].shape
            self._lays[window] = Lay(
                0, 0, 0, units.ctypes.data, count, row_count, width, window or width, thread_count(), kv_heads, 0, 0,
                0, UNEVEN,
            )  # fmt: skip

    def begin(
        self, batch: AttentionBatch, positions_T: Tensor, slots: Mapping[Part, Tensor], residual_TE: Tensor
    ) -> bool:
        """Whether the batch is in order: else the ops one by one say what is wrong."""
        rows_B, contexts_B = batch.rows_B.contiguous(), batch.context_B.contiguous()
        for lay in self._lays.values():
            lay.rows, lay.contexts = rows_B.data_ptr(), contexts_B.data_ptr()
            run_lay(lay)
            if lay.bad:
                return False
        self._batch = batch
        self._positions_T.copy_(positions_T)
        for part, slots_T in self._slots.items():
            slots_T.copy_(slots[part])
        self._residual_TE.copy_(residual_TE)
        return True

    def take_all(self, digests: Sequence[LayerDigests]) -> None:
        told = digests, [(lay.unit_count, lay.work * lay.kv_heads >= ALONE_BELOW) for lay in self._lays.values()]
        if self._told is not None and self._told[0] is digests and self._told[1] == told[1]:
            return
        for layer, each in enumerate(digests or [(None, None)] * len(self._taken)):
            self.take(layer, *each)
        if not digests or self._sees_all:  # else each step digests what lies before the windows
            self._told = told

    def take(self, layer: int, written: WrittenRows | None, digest: LayerDigest | None) -> None:
        self._told = None
        taken = self._taken[layer]
        if taken is None:
            taken = self._taken[layer] = self._make(layer, written, digest)
        elif taken.written is not written:
            taken.written = written
            self._calls.put(self._begins[layer] + _STORE, [self._store(layer, written)])
        if taken.digest is not digest:
            self._watch(layer, taken, digest)
        weights, batch = self._model.layers[layer], self._batch
        assert batch is not None, "kernels: a layer of a step that has not begun"
        window, lay = weights.window, self._lays[weights.window]
        if digest is not None and window is not None:
            lows_B = np.maximum(0, batch.context_B.numpy() - window)
            k_SHD, v_SHD = self._kv[layer]
            digest_unseen(k_SHD, v_SHD, self._tables[weights.part], batch, lows_B, digest)
        cuts = len(digest.sums_P22E) if digest is not None and lay.unit_count > self._count else 0
        laid = lay.unit_count, threads_of(lay.unit_count, lay.work * lay.kv_heads, cuts)
        if taken.laid != laid:
            taken.laid, taken.attend.arguments.unit_count = laid, laid[0]
            self._calls.set_threads(self._begins[layer] + _ATTEND, laid[1])

    def run(self, begin: int, end: int) -> None:
        if self._total is None:
            self._run(self._begins[begin], self._begins[end])
            return
        for layer in range(begin, end):
            first = self._begins[layer]
            added = first + _ADDED + (self._model.layers[layer].attention_norm_E is not None)
            for start, stop in ((first, first + _OUTPUT), (first + _OUTPUT, added)):
                self._run(start, stop)
                self._total(self._x_TE)
            self._run(added, self._begins[layer + 1])

    def finish(self) -> Tensor:
        return self._residual_TE + self._added_TE

    def _run(self, begin: int, end: int) -> None:
        refused = self._calls.run(begin, end)
        if refused is None:
            return
        call, said = refused
        layer = bisect(self._begins, call) - 1
        weights, slot_count = self._model.layers[layer], len(self._kv[layer][0])
        if call - self._begins[layer] == _STORE:
            slots_T = self._slots[weights.part]
            refuse_token(said, self._positions_T, slots_T, len(weights.cos_PF), slot_count)
        refuse_row(said, slot_count)

    def _make(self, layer: int, written: WrittenRows | None, digest: LayerDigest | None) -> _Taken:
        """All calls of a layer."""
        model, rows, count = self._model, self._rows, self._count
        weights = model.layers[layer]
        gate_up, down = _dense(weights.gate_up), _dense(weights.down)
        residual_TE, x_TE, eps = self._residual_TE, self._x_TE, model.eps
        normed_TE, scaled_TE = rows.normed_RE[:count], rows.scaled_RE[:count]
        gated_TF = rows.gated_RF[:count]
        assert weights.input_norm_E is not None, "kernels: a whole layer without a norm before attention"
        assert weights.mlp_norm_E is not None, "kernels: a whole layer without a norm before its MLP"
        before = None if not layer else x_TE if model.layers[layer - 1].output_norm_E is None else scaled_TE
        attend = self._attend(layer, digest)
        calls = [
            normed_call(
                before, residual_TE, weights.input_norm_E, eps, weights.qkv, _rows_of(weights.qkv), None, normed_TE,
                rows.qkv_RX[:count],
            ),
            self._store(layer, written),
            attend,
            rows_call(rows.mixed_RND[:count].view(count, -1), weights.output, _rows_of(weights.output), x_TE),
        ]  # fmt: skip
        after = x_TE
        if weights.attention_norm_E is not None:
            calls.append(norm_call(x_TE, None, weights.attention_norm_E, scaled_TE, eps))
            after = scaled_TE
        calls += [
            normed_call(
                after, residual_TE, weights.mlp_norm_E, eps, gate_up, _rows_of(gate_up), model.gate, normed_TE,
                gated_TF,
            ),
            rows_call(gated_TF, down, _rows_of(down), x_TE),
        ]  # fmt: skip
        if weights.output_norm_E is not None:
            calls.append(norm_call(x_TE, None, weights.output_norm_E, scaled_TE, eps))
        self._calls.put(self._begins[layer], calls)
        return _Taken(written, digest, attend, {id(digest): attend})

    def _store(self, layer: int, written: WrittenRows | None) -> KernelCall:
        model, rows, count = self._model, self._rows, self._count
        weights, (k_SHD, v_SHD) = model.layers[layer], self._kv[layer]
        return store_call(
            rows.qkv_RX[:count], weights.cos_PF, weights.sin_PF, self._positions_T, weights.q_norm_D, weights.k_norm_D,
            model.eps, k_SHD, v_SHD, self._slots[weights.part], rows.q_RND[:count], written,
        )  # fmt: skip

    def _attend(self, layer: int, digest: LayerDigest | None) -> KernelCall:
        model, rows, count = self._model, self._rows, self._count
        weights, (k_SHD, v_SHD) = model.layers[layer], self._kv[layer]
        table_RC, window, sinks_N = self._tables[weights.part], weights.window, weights.sinks_N
        q_TND, mixed_TND = rows.q_RND[:count], rows.mixed_RND[:count]
        assert self._batch is not None, "kernels: a layer of a step that has not begun"
        check_paged_attention(q_TND, k_SHD, v_SHD, table_RC, self._batch, window, model.softcap, sinks_N)
        if digest is not None:
            check_layer_digest(k_SHD, self._batch, digest)
        attend = decode_call(
            q_TND, k_SHD, v_SHD, table_RC, rows.units[window], model.scale, window, model.softcap, sinks_N,
            mixed_TND, digest, count,
        )  # fmt: skip
        if self._is_watched:
            attend.refusal = ""  # what is no slot was read as slot 0, and the canary finds it
        return attend

    def _watch(self, layer: int, taken: _Taken, digest: LayerDigest | None) -> None:
        """Have the attention of a layer digest this from now on."""
        attend = taken.attends.get(id(digest))  # a call holds its digest, so no other one has that identity
        if attend is None:
            if len(taken.attends) >= _DIGESTS_KEPT:
                taken.attends.clear()
            attend = taken.attends[id(digest)] = self._attend(layer, digest)
        taken.digest, taken.attend, taken.laid = digest, attend, (-1, -1)
        self._calls.put(self._begins[layer] + _ATTEND, [attend])


def _size_of(layer: LayerWeights) -> int:
    """How many calls a layer has."""
    return _ADDED + (layer.attention_norm_E is not None) + (layer.output_norm_E is not None)


def _dense(linear: PackedLinear | None) -> PackedLinear:
    assert linear is not None, "kernels: a layer without an MLP"
    return linear


def _rows_of(linear: PackedLinear) -> RowBlocks:
    assert linear.rows is not None, "kernels: a linear that few rows are not multiplied with"
    return linear.rows
