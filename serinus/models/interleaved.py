"""Experts as gpt-oss stores them: gate and up in turns, with biases, as [in, out] or in MXFP4 as [out, in].

They are put in order expert by expert.

Shapes: X = experts, E = hidden size, F = width inside an expert (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels import QuantizedWeight
from serinus.models.experts import ExpertSpec
from serinus.models.mxfp4 import BLOCK, BLOCK_BYTES, as_integers, dequantized

MXFP4: Final = "mxfp4"
"""The method of a checkpoint whose experts are in it."""
_Weight = Tensor | QuantizedWeight


class Tensors(Protocol):
    """Where tensors come from (`weights.WeightSource`)."""

    dtype: torch.dtype
    """Of floats, where no other is asked for."""

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """The tensor `name`, or a span of one dimension."""

    def quantized(self, name: str, weight_OI: Tensor) -> _Weight:
        """What a linear with this weight is multiplied with."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""


def take_biases(
    source: Tensors, base: str, spec: ExpertSpec, hidden: int, held: range, span: range, adds_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Those of gate and up, [X, 2F], and of down, [X, E]; arguments of `take_interleaved`.

    `adds_bias`: this rank adds the bias of the down projection, which is added once. Raises ConfigError: tensors are
    missing or misshapen.
    """
    some = held if len(held) < spec.count else None
    cut = (some, 0) if len(span) == spec.size else (range(2 * span.start, 2 * span.stop), 1)
    bias_X2F = source.take(f"{base}.gate_up_proj_bias", (spec.count, 2 * spec.size), *cut)
    bias_XE = source.take(f"{base}.down_proj_bias", (spec.count, hidden), some)
    return torch.cat([bias_X2F[:, 0::2], bias_X2F[:, 1::2]], 1), bias_XE.contiguous() if adds_bias else None


def take_interleaved(
    source: Tensors, base: str, spec: ExpertSpec, hidden: int, held: range, span: range, *, mxfp4: bool, keep: bool,
    at_load: bool,
) -> Iterator[tuple[_Weight, _Weight]]:  # fmt: skip
    """The experts of one layer, one after the other: gate and up as one, [2F, E], and down, [E, F].

    Args:
        base: what the names of the tensors begin with.
        hidden: E.
        held: numbers of the experts that this rank has.
        span: of the inner width, what this rank has.
        mxfp4: the projections are in MXFP4, unless there are none; `keep`: they come as integers.
        at_load: floats are quantized, as a whole.
    Raises:
        ConfigError: tensors are missing or misshapen, or a width is no whole number of MXFP4 blocks.
    Cost: what the source holds of two tensors, and the values of one expert.
    """
    count, size, inner, some = spec.count, spec.size, len(span), held if len(held) < spec.count else None
    both, is_whole = range(2 * span.start, 2 * span.stop), inner == size
    order = torch.cat([torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)])
    named = (
        (f"{base}.gate_up_proj", (count, 2 * size, hidden), (some, -1) if is_whole else (both, 0)),
        (f"{base}.down_proj", (count, hidden, size), (some, -1) if is_whole else (span, 1)),
    )
    stacks = []
    for name, shape, cut in named:
        if mxfp4 and source.has(f"{name}_blocks"):
            stacks.append(_mxfp4(source, name, shape, *cut, keep=keep))
        elif at_load:
            stacks.append(_quantized(source, name, shape, some, *cut))
        else:
            stacks.append(_floats(source, name, shape, *cut))
    for rows, columns in zip(*stacks, strict=True):
        turned = rows.rows(order) if isinstance(rows, QuantizedWeight) else torch.cat([rows[0::2], rows[1::2]])
        yield turned, columns


def _floats(source: Tensors, name: str, shape: tuple[int, int, int], span: range | None, dim: int) -> Iterator[Tensor]:
    """The matrix [out, in] of each expert; `shape`: [X, out, in]; `span`: of experts (dim -1), of out (0) or in (1),
    what is cut."""
    count, outs, ins = shape
    yield from source.take(name, (count, ins, outs), span, (2, 1, 0)[dim]).transpose(1, 2)


def _quantized(
    source: Tensors, name: str, shape: tuple[int, int, int], some: range | None, span: range | None, dim: int
) -> Iterator[_Weight]:
    """The same, quantized before it is cut: all ranks have parts of the same weights. `some`: experts taken."""
    for matrix in _floats(source, name, shape, some, -1):
        weight = source.quantized(name, matrix.contiguous())
        if dim < 0 or span is None:
            yield weight
        elif isinstance(weight, Tensor):
            yield weight.narrow(dim, span.start, len(span))
        else:
            yield weight.columns(span) if dim else weight.rows(span)


def _mxfp4(
    source: Tensors, name: str, shape: tuple[int, int, int], span: range | None, dim: int, *, keep: bool
) -> Iterator[_Weight]:
    """The same of blocks."""
    count, outs, ins = shape
    if ins % BLOCK:
        raise ConfigError(f"models: {name} has {ins} inputs in MXFP4, expected a multiple of {BLOCK}")
    cut, inside = span, range(ins)
    if span is not None and dim == 1:
        cut = range(span.start // BLOCK, -(-span.stop // BLOCK))
        inside = range(span.start - cut.start * BLOCK, span.stop - cut.start * BLOCK)
    blocks = source.take(f"{name}_blocks", (count, outs, ins // BLOCK, BLOCK_BYTES), cut, dim + 1, torch.uint8)
    scales = source.take(f"{name}_scales", (count, outs, ins // BLOCK), cut, dim + 1, torch.uint8)
    for blocks_OGY, scales_OG in zip(blocks, scales, strict=True):
        if keep:
            weight = as_integers(blocks_OGY, scales_OG)
            yield weight if len(inside) == weight.in_size else weight.columns(inside)
        else:
            yield dequantized(blocks_OGY, scales_OG, source.dtype)[:, inside.start : inside.stop]
