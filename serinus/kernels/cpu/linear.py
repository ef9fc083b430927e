"""The linear layer on weights packed once for oneDNN. T = tokens, I = input width, O = output width.

One packing serves every T: up to ROWS_MAX rows `row_linear` reads oneDNN's bytes itself where it can (see there), and
oneDNN takes the rest. oneDNN, measured on 2 Zen 4 cores, 8 layers of 1024 x 6144, against F.linear on the plain weight:
bf16 T=16 5.0 ms (8.3), T=512 116 ms (121); fp32 T=1 7.7 ms (11.6), T=16 9.5 ms (25.9), T=512 231 ms (294).

The result of a row does not depend, to the bit, on how many others are in the call: `row_linear` sums as oneDNN does
for two rows or more, and a single row that is left to oneDNN, which would sum that in other parts, goes there together
with a copy of itself. Processors with AMX are the exception: there oneDNN itself sums few rows in another order than
many, and the last bits of a row may depend on its company.

Where oneDNN has no bf16 (processors without AVX512), weights of bf16 are widened as they are packed: twice the memory,
products in fp32, results rounded to bf16.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import check_pack_linear
from serinus.kernels.cpu import row_linear
from serinus.kernels.cpu.quantized import IN_STEP, packed_blocks
from serinus.kernels.cpu.row_linear import ROWS_MAX, find_blocks, multiply_rows
from serinus.kernels.cpu.scalar import host_has
from serinus.kernels.huge_pages import collapse_to_huge_pages
from serinus.kernels.packed import PackedLinear, RowBlocks
from serinus.kernels.quantized import QuantizedWeight

_reorder = torch.ops.mkldnn._reorder_linear_weight
_multiply = torch.ops.mkldnn._linear_pointwise
_BATCH_HINT = 16


def pack_linear(weight: Tensor | QuantizedWeight, bias_O: Tensor | None) -> PackedLinear:
    """Reorder a weight into oneDNN's blocks, a quantized one into our own; the result shares no memory with it."""
    weight_OI, quantized = check_pack_linear(weight, bias_O)
    out_size, in_size = weight_OI.shape
    if quantized is not None:
        values, blocks = packed_blocks(quantized)
        bias = None if bias_O is None else bias_O.detach().clone()
        return PackedLinear(weight=values, bias_O=bias, in_size=in_size, out_size=out_size, blocked=True, rows=blocks)
    widened = weight_OI.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if widened:
        weight_OI, bias_O = weight_OI.float(), None if bias_O is None else bias_O.float()
    blocked: Tensor = _reorder(weight_OI.detach(), _BATCH_HINT)
    collapse_to_huge_pages(torch.ops.mkldnn.data_ptr(blocked), torch.ops.mkldnn._nbytes(blocked))
    bias = None if bias_O is None else bias_O.detach().clone()
    rows = None if bias is not None and bias.dtype != torch.bfloat16 else find_blocks(weight_OI, blocked)
    if rows is not None:
        row_linear.warm()  # loading a model may wait for a compiler, the first request may not
    return PackedLinear(
        weight=blocked, bias_O=bias, in_size=in_size, out_size=out_size, blocked=True, rows=rows, widened=widened
    )


def linear(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias. Raises ValueError: the weight was packed by another column, or for rows of another type."""
    if not packed.blocked:
        raise ValueError("kernels: linear of column cpu got a plain weight, expected one packed by column cpu")
    rows = x_TI.shape[0]
    if packed.rows is not None and packed.rows.bits < 16:
        return _multiply_quantized(x_TI, packed, packed.rows)
    if packed.rows is not None and x_TI.dim() == 2 and 0 < rows <= ROWS_MAX:
        return multiply_rows(x_TI, packed, packed.rows)
    if rows == 1:
        return _multiply_blocked(x_TI.expand(2, *x_TI.shape[1:]).contiguous(), packed)[:1]
    return _multiply_blocked(x_TI, packed)


def warm(dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    if dtype == torch.bfloat16:
        row_linear.warm()


def _multiply_quantized(x_TI: Tensor, packed: PackedLinear, blocks: RowBlocks) -> Tensor:
    """Rows that are no multiple of 8 inputs are filled up. Without bf16 dot products bf16 is computed in fp32."""
    missing = -packed.in_size % IN_STEP
    rows_TI = F.pad(x_TI, (0, missing)) if missing and x_TI.shape[-1] == packed.in_size else x_TI
    if x_TI.dtype != torch.bfloat16 or host_has("avx512bf16"):
        return multiply_rows(rows_TI, packed, blocks)
    bias_O = None if packed.bias_O is None else packed.bias_O.float()
    return multiply_rows(rows_TI.float(), replace(packed, bias_O=bias_O), blocks).to(x_TI.dtype)


def _multiply_blocked(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    if packed.widened:
        if x_TI.dtype != torch.bfloat16:
            raise ValueError(f"kernels: linear got rows of {x_TI.dtype}, expected those of its weight, torch.bfloat16")
        wide: Tensor = _multiply(x_TI.float(), packed.weight, packed.bias_O, "none", [], "")
        return wide.to(torch.bfloat16)
    out: Tensor = _multiply(x_TI, packed.weight, packed.bias_O, "none", [], "")
    return out
