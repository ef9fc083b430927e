"""Experts as gpt-oss stores them: gate and up in turns, with biases, as [in, out] or in MXFP4 as [out, in].

They are put in order expert by expert, straight into the stacks that kernels read.

Shapes: X = experts, E = hidden size, F = width inside an expert (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels import PackedExperts
from serinus.models.experts import ExpertSpec
from serinus.models.mxfp4 import BLOCK, BLOCK_BYTES, dequantized


class Tensors(Protocol):
    """Where tensors come from (`weights.WeightSource`)."""

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """The tensor `name`, or a span of one dimension."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""


def take_interleaved(
    source: Tensors,
    base: str,
    spec: ExpertSpec,
    hidden: int,
    held: range,
    span: range,
    *,
    mxfp4: bool,
    adds_bias: bool,
) -> PackedExperts:
    """The experts of one layer.

    Args:
        base: what the names of the tensors begin with.
        hidden: E.
        held: numbers of the experts that this rank has.
        span: of the inner width, what this rank has.
        mxfp4: the projections are in MXFP4, unless there are none (dummy weights).
        adds_bias: this rank adds the bias of the down projection, which is added once.
    Raises:
        ConfigError: tensors are missing or misshapen, or a width is no whole number of MXFP4 blocks.
    Cost: the stacks, and beside them what the source holds of one tensor and the values of one expert.
    """
    count, size, inner, some = spec.count, spec.size, len(span), held if len(held) < spec.count else None
    both, is_whole = range(2 * span.start, 2 * span.stop), inner == size
    name = f"{base}.gate_up_proj"
    bias_X2F = source.take(f"{name}_bias", (count, 2 * size), *((some, 0) if is_whole else (both, 1)))
    gate_up_X2FE = bias_X2F.new_empty((len(held), 2 * inner, hidden))
    cut = (some, -1) if is_whole else (both, 0)
    rows = _matrices(source, name, (count, 2 * size, hidden), *cut, mxfp4, bias_X2F.dtype)
    for i, matrix in enumerate(rows):
        gate_up_X2FE[i, :inner], gate_up_X2FE[i, inner:] = matrix[0::2], matrix[1::2]
    name = f"{base}.down_proj"
    bias_XE = source.take(f"{name}_bias", (count, hidden), some)
    down_XEF = bias_XE.new_empty((len(held), hidden, inner))
    cut = (some, -1) if is_whole else (span, 1)
    columns = _matrices(source, name, (count, hidden, size), *cut, mxfp4, bias_XE.dtype)
    for i, matrix in enumerate(columns):
        down_XEF[i] = matrix
    return PackedExperts(
        gate_up=gate_up_X2FE,
        down=down_XEF,
        gate_up_bias=torch.cat([bias_X2F[:, 0::2], bias_X2F[:, 1::2]], 1),
        down_bias=bias_XE.contiguous() if adds_bias else None,
    )


def _matrices(
    source: Tensors, name: str, shape: tuple[int, int, int], span: range | None, dim: int, mxfp4: bool,
    dtype: torch.dtype,
) -> Iterator[Tensor]:  # fmt: skip
    """The matrix [out, in] of each expert; `shape`: [X, out, in]; `span`: of experts (dim -1), of out
    (0) or in (1), what is cut."""
    count, outs, ins = shape
    if not (mxfp4 and source.has(f"{name}_blocks")):
        yield from source.take(name, (count, ins, outs), span, (2, 1, 0)[dim]).transpose(1, 2)
        return
    if ins % BLOCK:
        raise ConfigError(f"models: {name} has {ins} inputs in MXFP4, expected a multiple of {BLOCK}")
    cut, inside = span, slice(None)
    if span is not None and dim == 1:
        cut = range(span.start // BLOCK, -(-span.stop // BLOCK))
        inside = slice(span.start - cut.start * BLOCK, span.stop - cut.start * BLOCK)
    blocks = source.take(f"{name}_blocks", (count, outs, ins // BLOCK, BLOCK_BYTES), cut, dim + 1, torch.uint8)
    scales = source.take(f"{name}_scales", (count, outs, ins // BLOCK), cut, dim + 1, torch.uint8)
    for i in range(len(blocks)):
        yield dequantized(blocks[i], scales[i], dtype)[:, inside]
