"""The linear of a quantized weight: integers become fp16, bf16 or fp32 in the kernel, exactly; scales are applied to
sums of groups; see the reference. Any number of rows takes the same path. T = tokens, I = input width, O = output
width.

8 bits: a byte each. 4 bits: two inputs in a byte, the first in its lower half, each plus 8; products of the even and of
the odd inputs are summed one after the other, so that nothing has to be put in order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.packed import PackedLinear, RowBlocks
from serinus.kernels.quantized import QuantizedWeight

__all__ = ["multiply_quantized", "pack_quantized"]

_BLOCK = 64
"""Inputs of one step, at most; they share a scale."""
_BLOCK_MIN = 32
_OUTPUTS = 64
"""Outputs of one program."""


def pack_quantized(weight: QuantizedWeight, bias_O: Tensor | None) -> PackedLinear:
    """As the kernel reads it, on the device where it is. Raises ValueError: groups are too small."""
    out_size, in_size = weight.values_OI.shape
    single = weight.scales_OG.shape[1] == 1
    if not single and weight.group % _BLOCK_MIN:
        raise ValueError(f"kernels: a weight in groups of {weight.group}, expected a multiple of {_BLOCK_MIN}")
    values = weight.values_OI.contiguous()
    if weight.bits == 4:
        digits = (F.pad(values, (0, in_size % 2)) + 8).view(torch.uint8)
        values = digits[:, ::2] | digits[:, 1::2] << 4
    rows = RowBlocks(
        address=values.data_ptr(), part=0 if single else weight.group, bits=weight.bits,
        scales=weight.scales_OG.contiguous(),
        zeros=None if weight.zeros_OG is None else weight.zeros_OG.contiguous(),
    )  # fmt: skip
    return PackedLinear(weight=values, bias_O=bias_O, in_size=in_size, out_size=out_size, blocked=True, rows=rows)


def multiply_quantized(x_TI: Tensor, packed: PackedLinear, how: RowBlocks) -> Tensor:
    """x @ weight.T + bias, [T, O] in the dtype of x. Raises ValueError: x is not of width I.

    Cost: one read of the integers for every 64 rows, one write of the output; no host wait.
    """
    if x_TI.shape[-1] != packed.in_size:
        raise ValueError(f"kernels: linear got {tuple(x_TI.shape)}, expected [T, {packed.in_size}]")
    rows_TI = x_TI.reshape(-1, packed.in_size).contiguous()
    count = len(rows_TI)
    out_TO = rows_TI.new_empty((count, packed.out_size))
    if not out_TO.numel():
        return out_TO.view(*x_TI.shape[:-1], packed.out_size)
    assert how.scales is not None, "kernels: a quantized weight without scales"
    rows = min(64, max(16, int(triton.next_power_of_2(count))))
    _quantized[(triton.cdiv(packed.out_size, _OUTPUTS), triton.cdiv(count, rows))](
        rows_TI, packed.weight, how.scales, how.scales if how.zeros is None else how.zeros,
        rows_TI if packed.bias_O is None else packed.bias_O, out_TO, count, packed.out_size, packed.in_size,
        how.scales.shape[1], max(how.part, 1), BITS=how.bits, ROWS=rows, OUTPUTS=_OUTPUTS,
        BLOCK=math.gcd(how.part, _BLOCK) if how.part else _BLOCK, GROUPED=how.part > 0,
        HAS_ZEROS=how.zeros is not None, HAS_BIAS=packed.bias_O is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_TO.view(*x_TI.shape[:-1], packed.out_size)


_jit: Any = triton.jit


@_jit
def _quantized(
    x, weight, scales, zeros, bias, out, rows, outs, inner, groups, group,
    BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    o, t = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_out, is_row = o < outs, t < rows
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    row = x + t[None, :].to(tl.int64) * inner
    for first in range(0, inner, BLOCK):
        table = o.to(tl.int64) * groups
        if GROUPED:
            table += first // group
        scale = tl.load(scales + table, mask=is_out, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros + table, mask=is_out, other=0).to(tl.int32)[:, None]
        else:
            zero = tl.zeros((OUTPUTS, 1), tl.int32)
        if BITS == 8:
            i = first + tl.arange(0, BLOCK)
            inside = is_out[:, None] & (i < inner)[None, :]
            value = tl.load(weight + o[:, None].to(tl.int64) * inner + i[None, :], mask=inside, other=0).to(tl.int32)
            some = tl.load(row + i[:, None], mask=(i < inner)[:, None] & is_row[None, :], other=0.0)
            part = tl.dot((value - zero).to(dtype), some, input_precision="ieee")
        else:
            i = first // 2 + tl.arange(0, BLOCK // 2)
            half = (inner + 1) // 2
            inside = is_out[:, None] & (i < half)[None, :]
            both = tl.load(weight + o[:, None].to(tl.int64) * half + i[None, :], mask=inside, other=0).to(tl.int32)
            even = tl.load(row + 2 * i[:, None], mask=(2 * i < inner)[:, None] & is_row[None, :], other=0.0)
            odd = tl.load(row + 2 * i[:, None] + 1, mask=(2 * i + 1 < inner)[:, None] & is_row[None, :], other=0.0)
            part = tl.dot(((both & 15) - 8 - zero).to(dtype), even, input_precision="ieee")
            part = tl.dot(((both >> 4) - 8 - zero).to(dtype), odd, part, input_precision="ieee")
        total += part * scale[:, None]
    if HAS_BIAS:
        total += tl.load(bias + o, mask=is_out, other=0.0).to(tl.float32)[:, None]
    spot = out + t[None, :].to(tl.int64) * outs + o[:, None]
    tl.store(spot, total.to(dtype), mask=is_out[:, None] & is_row[None, :])
