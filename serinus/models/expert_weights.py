"""The experts of one layer, from a checkpoint's tensors to what kernels read: floats in stacks, integers as they are.

Checkpoints have two stacks of a layer, or three tensors of each expert, or what gpt-oss has (`interleaved`). Integers
are multiplied with where the kernels can and all experts of a layer have the same bits and groups; else they are
dequantized.

Shapes: X = experts, E = hidden size, F = width inside an expert (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.kernels import Kernels, PackedExperts, QuantizedWeight
from serinus.models.experts import ExpertSpec
from serinus.models.interleaved import MXFP4, Tensors, take_biases, take_interleaved
from serinus.models.quantization import AT_LOAD
from serinus.models.quantized import joined
from serinus.models.spec import ModelSpec
from serinus.parallel import Shard

_log = get_logger("models")

_STACKS = ("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight")
"""Names of the stacks [X, 2F, E] and [X, E, F]."""
_Weight = Tensor | QuantizedWeight
_Pair = tuple[_Weight, _Weight]
"""Of an expert gate and up as one, [2F, E], and down, [E, F]."""


class ExpertTensors(Tensors, Protocol):
    """Where tensors come from, linears among them."""

    def linear(self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0) -> _Weight:
        """The weight of the linear `name`, or a span of one dimension, as it is multiplied with."""


def take_experts(
    model: ModelSpec, spec: ExpertSpec, source: ExpertTensors, kernels: Kernels, shard: Shard, block: str
) -> PackedExperts:
    """Those of a layer that a rank has, or its slices of them.

    Args:
        spec: the mixtures of `model`; block: what the names of the layer's mixture begin with.
    Raises:
        ConfigError: tensors are missing or misshapen, or groups of integers would be cut too short.
    Cost: what is resident, and beside it one expert; of integers for a moment twice what is resident.
    """
    quantized = model.quantization
    layer = _Layer(
        hidden=model.hidden_size, spec=spec, source=source, block=block, held=shard.experts(spec.count),
        span=shard.expert_columns(spec.size), method=None if quantized is None else quantized.method,
    )  # fmt: skip
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if spec.biased:
        adds_bias = shard.tp_rank == 0 or shard.ep > 1
        biases = take_biases(source, f"{block}.experts", spec, layer.hidden, layer.held, layer.span, adds_bias)
    packed = None
    if quantized is not None and quantized.expert_bits < 16 and multiplies_integers(kernels):
        try:
            packed = kernels.pack_experts(layer.integers(), *biases)
        except _Unlike:
            packed = None
        except ValueError as error:
            if quantized.at_load:
                raise ConfigError(f"models: {block} cannot be shared among ranks ({error})") from None
            _log.info("experts of %s are dequantized: %s", block, error)
    if packed is None:
        is_rounded = quantized is not None and quantized.at_load and quantized.method == "fp8"
        stacks = None if is_rounded else layer.stacks()
        gate_up, down = stacks or _filled(layer.floats(is_rounded=is_rounded), len(layer.held))
        packed = PackedExperts(gate_up=gate_up, down=down, gate_up_bias=biases[0], down_bias=biases[1])
    return replace(packed, is_part=shard.ep > 1)


def multiplies_integers(kernels: Kernels) -> bool:
    """Whether kernels have a product for quantized experts."""
    return kernels.columns.get("pack_experts") == kernels.columns["fused_moe"]


class _Unlike(Exception):
    """Not all experts of a layer are integers of the same form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The experts of a layer, as they are taken."""

    hidden: int
    """E, the width of the stream."""
    spec: ExpertSpec
    source: ExpertTensors
    block: str
    """What names begin with."""
    held: range
    """Numbers of those that this rank has."""
    span: range
    """Of the inner width, what this rank has."""
    method: str | None
    """How weights are quantized, if they are."""

    def integers(self) -> Iterator[tuple[QuantizedWeight, QuantizedWeight]]:
        """One after the other. Raises _Unlike."""
        first: tuple[tuple[int, int, bool], ...] = ()
        for gate_up, down in self._pairs(keep=True):
            if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
                raise _Unlike
            forms = (gate_up.bits, gate_up.group, gate_up.e4m3), (down.bits, down.group, down.e4m3)
            first = first or forms
            if forms != first:
                raise _Unlike
            yield gate_up, down

    def floats(self, *, is_rounded: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """One after the other, as they are stored, or what integers stand for. `is_rounded`: as the source rounds."""
        for pair in self._pairs(keep=is_rounded):
            gate_up, down = (
                each.dequantized().to(self.source.dtype) if isinstance(each, QuantizedWeight) else each for each in pair
            )
            yield gate_up, down

    def stacks(self) -> tuple[Tensor, Tensor] | None:
        """All at once, where they are stored so."""
        names = self._stack_names()
        if names is None:
            return None
        size, (rows_shape, columns_shape) = self.spec.size, self._stack_shapes()
        if len(self.span) == size:
            rows = [self.source.take(names[0], rows_shape, self._some)]
            return rows[0], self.source.take(names[1], columns_shape, self._some)
        halves = [range(first + self.span.start, first + self.span.stop) for first in (0, size)]
        rows = [self.source.take(names[0], rows_shape, half, 1) for half in halves]
        return torch.cat(rows, 1), self.source.take(names[1], columns_shape, self.span, 2)

    @property
    def _some(self) -> range | None:
        """The experts that are asked for where not all are."""
        return self.held if len(self.held) < self.spec.count else None

    def _pairs(self, *, keep: bool) -> Iterator[_Pair]:
        """`keep`: what is quantized comes as integers; else nothing does."""
        spec, source = self.spec, self.source
        names = self._stack_names()
        if spec.biased:
            yield from take_interleaved(
                source, f"{self.block}.experts", spec, self.hidden, self.held, self.span,
                mxfp4=self.method == MXFP4, keep=keep, at_load=keep and self.method in AT_LOAD,
            )  # fmt: skip
        elif names is not None:
            yield from self._of_stacks(*names)
        else:
            yield from self._single(keep=keep)

    def _stack_names(self) -> tuple[str, str] | None:
        for gate_up, down in () if self.spec.biased else _STACKS:
            if self.source.has(f"{self.block}.{gate_up}"):
                return f"{self.block}.{gate_up}", f"{self.block}.{down}"
        return None

    def _stack_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count, size = self.spec.count, self.spec.size
        return (count, 2 * size, self.hidden), (count, self.hidden, size)

    def _of_stacks(self, gate_up: str, down: str) -> Iterator[_Pair]:
        """Of weights that are quantized as they are loaded: as a whole, as all ranks have parts of the same ones."""
        size, span = self.spec.size, self.span
        rows_shape, columns_shape = self._stack_shapes()
        rows, columns = (
            self.source.take(name, shape, self._some) for name, shape in ((gate_up, rows_shape), (down, columns_shape))
        )
        for rows_2FE, columns_EF in zip(rows, columns, strict=True):
            halves = [rows_2FE[first + span.start : first + span.stop] for first in (0, size)]
            whole = self.source.quantized(down, columns_EF.contiguous())
            if len(span) < size:
                whole = whole.columns(span) if isinstance(whole, QuantizedWeight) else whole[:, span.start : span.stop]
            yield self.source.quantized(gate_up, torch.cat(halves)), whole

    def _single(self, *, keep: bool) -> Iterator[_Pair]:
        """Three tensors each, gate_proj, up_proj and down_proj, or w1, w3 and w2."""
        base, size, hidden, source = f"{self.block}.experts", self.spec.size, self.hidden, self.source
        part = None if len(self.span) == size else self.span
        is_old = source.has(f"{base}.{self.held.start}.w1.weight")
        gate, up, down = ("w1", "w3", "w2") if is_old else ("gate_proj", "up_proj", "down_proj")

        def fetch(name: str, shape: tuple[int, int], dim: int) -> _Weight:
            if keep:
                return source.linear(name, shape, part, dim)
            return source.take(f"{name}.weight", shape, part, dim)

        for number in self.held:
            rows = [fetch(f"{base}.{number}.{name}", (size, hidden), 0) for name in (gate, up)]
            yield joined(rows, source.dtype), fetch(f"{base}.{number}.{down}", (hidden, size), 1)


def _filled(pairs: Iterator[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
    """Stacks of what comes."""
    gate_ups = downs = torch.empty(0)
    for i, (gate_up, down) in enumerate(pairs):
        if not i:
            gate_ups, downs = (each.new_empty((count, *each.shape)) for each in (gate_up, down))
        gate_ups[i], downs[i] = gate_up, down
    return gate_ups, downs
