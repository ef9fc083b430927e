"""The linear layer for few rows, straight on the bytes that oneDNN packed. T = rows, I = input width, O = output width.

A decode step reads every weight once and does little with it, so it should cost what reading costs; oneDNN takes more.
This kernel walks the packed blocks, [O/64][I/2][64][2] bf16, with one bf16 dot product per 16 outputs and row
(AVX512-BF16): a chunk of 64 input pairs (16 KiB of weight) serves all rows, four at a time, while the next chunk is
fetched. Nothing is packed twice: oneDNN takes the calls with more rows, on the same bytes.

Measured on 2 Zen 4 cores of a shared machine, oneDNN and this in turn over weights that no cache holds, 1024 x 4096 to
1024 x 32000: T=1 1.2 to 1.8 times as fast (90 % of the bandwidth of a plain sum over memory, oneDNN 70 %), T=2 1.3 to
1.5, T=4 1.0 to 1.25, T=8 1.25 to 1.6, T=16 1.15 to 1.35 (370 GFLOP/s where many rows reach 448), T=32 1.04 to 1.15,
T=64 the same.

Same bits. oneDNN sums the inputs of an output in order, pair by pair, in parts that start from zero (1024 inputs here,
512 where I <= 1024) and are then added in order; so does this kernel, hence a row's result does not depend on which of
the two computed it. (oneDNN itself breaks that for one row where I > 1024: its parts are then of 512.)

Neither the layout nor the parts are promised by oneDNN, so both are looked at: `find_blocks` compares the packed bytes
with the weight, and `find_part` measures the parts. Where one is not as said here, where O or I is no multiple of 64
(oneDNN then pads), for fp32, and on processors without AVX512-BF16, the answer is None and oneDNN takes every call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.llvm import (
    FLOATS,
    I32,
    I64,
    LANES,
    PAIRS,
    WORDS,
    dot_pairs,
    load,
    prefetch,
    shifted,
    splat,
    store,
)
from serinus.kernels.cpu.scalar import at, carray, cgutils, fetch_add, host_has, intrinsic, narrow, widen
from serinus.kernels.packed import PackedLinear, RowBlocks

__all__ = ["ROWS_MAX", "find_blocks", "find_part", "multiply_rows", "warm"]

ROWS_MAX = 32
"""Rows up to which this kernel was the faster one, or as fast, on every shape tried; at 64 nothing is left of it."""

_BLOCK = 64
"""Outputs of a block; also what oneDNN pads I to."""
_CHUNK = 64
"""Input pairs that serve all rows before the next: 16 KiB of weight, half of the first cache."""
_GROUP = 4
"""Rows in registers at a time: 16 sums, 4 vectors of weight, 1 of input."""
_RUN_MAX = 16
"""Blocks claimed at once: long runs please the memory, short ones balance the threads. Measured on 2 threads, 16 rows,
1024 x 4096: 8 are 3 %, 16 are 5 % faster than 8 of which the first chunk is not fetched ahead."""
_LOCALITY = 2
"""LLVM's word for the second cache, where the next chunk goes: the first one is full of this chunk and the rows."""
_SERIAL_PRODUCTS = 1 << 16
"""Below this many products the start of a second thread costs more than it saves."""
_PROBE_ROWS = (2, 16, 64, 512)
"""Row counts at which the parts of oneDNN's sums are measured."""

_Arguments = fields("ticket x weight bias out rows pairs blocks run part")
_FIELDS = 10


def find_blocks(weight_OI: Tensor, packed: Tensor) -> RowBlocks | None:
    """How to read `packed`, oneDNN's form of `weight_OI`; None where this kernel cannot (see above).

    Cost: one comparison of all bytes.
    """
    out_size, in_size = weight_OI.shape
    whole = out_size > 0 and in_size > 0 and out_size % _BLOCK == 0 and in_size % _BLOCK == 0
    if weight_OI.dtype != torch.bfloat16 or not whole or not host_has("avx512bf16"):
        return None
    byte_count = out_size * in_size * 2
    if torch.ops.mkldnn._nbytes(packed) != byte_count:
        return None
    address = int(torch.ops.mkldnn.data_ptr(packed))
    words = torch.frombuffer((ctypes.c_char * byte_count).from_address(address), dtype=torch.int32)
    plain = weight_OI.detach().contiguous().view(torch.int32).view(-1, _BLOCK, in_size // 2)
    if not torch.equal(words.view(-1, in_size // 2, _BLOCK), plain.transpose(1, 2)):
        return None
    part = find_part(in_size)
    return RowBlocks(address=address, part=part) if part is not None and _agrees(in_size, part) else None


@cache
def _agrees(in_size: int, part: int) -> bool:
    """Whether this kernel gives oneDNN's very bits at this width, on random rows. Processors with AMX sum in tiles, in
    an order of their own: there everything is left to oneDNN, since a row must not depend on the company it is in.
    """
    chance = torch.Generator().manual_seed(in_size)
    weight = torch.randn(_BLOCK, in_size, generator=chance).to(torch.bfloat16)
    x = torch.randn(_PROBE_ROWS[-1], in_size, generator=chance).to(torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    blocks = RowBlocks(address=int(torch.ops.mkldnn.data_ptr(packed)), part=part)
    linear = PackedLinear(weight=packed, bias_O=None, in_size=in_size, out_size=_BLOCK, blocked=True, rows=blocks)
    wanted = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return torch.equal(multiply_rows(x, linear, blocks), wanted)


@cache
def find_part(in_size: int) -> int | None:
    """Input pairs of each part in which oneDNN sums bf16 products of width `in_size`; None if there is no such number.

    Output b - 1 of the probe has 1 just before pair 32 b, and there 2**30 and then -2**30. Within one part the 1 is
    lost to rounding; it survives where a part begins at that pair. O and the number of threads do not matter (measured
    up to O = 16384), nor do two rows or more.
    """
    pairs = in_size // 2
    edges = torch.arange(32, pairs, 32)
    weight = torch.zeros(-(-(len(edges) + 1) // _BLOCK) * _BLOCK, pairs, 2)
    rows = torch.arange(len(edges))
    weight[rows, edges - 1, 0] = 1.0
    weight[rows, edges, 0] = 2.0**30
    weight[rows, edges + 1, 0] = -(2.0**30)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.view(-1, in_size).to(torch.bfloat16), 16)
    found = set()
    for count in _PROBE_ROWS:
        x = torch.ones(count, in_size, dtype=torch.bfloat16)
        survived = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")[:, : len(edges)] != 0
        found |= {tuple(edges[row].tolist()) for row in survived}
    if len(found) != 1:
        return None
    begins = found.pop()
    part = int(begins[0]) if begins else pairs
    return part if begins == tuple(range(part, pairs, part)) else None


def multiply_rows(x_TI: Tensor, packed: PackedLinear, blocks: RowBlocks) -> Tensor:
    """x @ weight.T + bias for T <= ROWS_MAX (any T is right), [T, O] bf16.

    Raises:
        ValueError: x is not bf16 of width I.
    Cost: O * I * 2 bytes read once; 5 us of Python.
    """
    if x_TI.dtype != torch.bfloat16 or x_TI.shape[-1] != packed.in_size:
        raise ValueError(
            f"kernels: linear got {x_TI.dtype} of shape {tuple(x_TI.shape)}, expected bf16 [T, {packed.in_size}]"
        )
    x_TI = x_TI.contiguous()
    out_TO = x_TI.new_empty((*x_TI.shape[:-1], packed.out_size))
    rows = x_TI.numel() // packed.in_size
    count = packed.out_size // _BLOCK
    threads = 1 if rows * packed.in_size * packed.out_size < _SERIAL_PRODUCTS else thread_count()
    arguments = _Arguments(
        0, x_TI.data_ptr(), blocks.address, 0 if packed.bias_O is None else packed.bias_O.data_ptr(), out_TO.data_ptr(),
        rows, packed.in_size // 2, count, max(1, min(_RUN_MAX, count // (threads * 2))), blocks.part,
    )  # fmt: skip
    _body(VERSION)(arguments, threads)
    return out_TO


def warm() -> None:
    """Compile, or load from the disk."""
    if host_has("avx512bf16"):
        _body(VERSION)


@intrinsic
def _add_products(
    typingctx: Any, x: Any, x_stride: Any, weight: Any, sums: Any, pairs: Any, fetch: Any, fetch_step: Any, ROWS: Any
) -> Any:
    """sums += x weight for ROWS rows and one block of outputs, pair after pair.

    x: rows of `pairs` bf16 pairs, `x_stride` bytes apart. weight: [pairs, 64] bf16 pairs. sums: fp32 [ROWS, 64].
    With pair p the four cache lines from `fetch` + p * `fetch_step` are called for.
    """
    count = ROWS.literal_value
    columns = range(_BLOCK // LANES)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, x_step, weight_at, sums_at, pair_count, fetch_at, fetch_by = args[:7]
        cells = [(i, j, shifted(builder, sums_at, i * _BLOCK * 4 + j * 64)) for i in range(count) for j in columns]
        held = {(i, j): cgutils.alloca_once(builder, FLOATS) for i, j, _ in cells}
        for i, j, spot in cells:
            builder.store(load(builder, spot, FLOATS), held[i, j])
        rows = [builder.add(x_at, builder.mul(x_step, I64(i))) for i in range(count)]
        with cgutils.for_range(builder, pair_count, intp=I64) as loop:
            ahead = builder.add(fetch_at, builder.mul(fetch_by, loop.index))
            for j in columns:
                prefetch(builder, shifted(builder, ahead, j * 64), _LOCALITY)
            here = builder.add(weight_at, builder.mul(loop.index, I64(_BLOCK * 4)))
            weights = [builder.bitcast(load(builder, shifted(builder, here, j * 64), WORDS), PAIRS) for j in columns]
            for i in range(count):
                word = load(builder, builder.add(rows[i], builder.mul(loop.index, I64(4))), I32)
                pair = builder.bitcast(splat(builder, word), PAIRS)
                for j in columns:
                    builder.store(dot_pairs(builder, builder.load(held[i, j]), pair, weights[j]), held[i, j])
        for i, j, spot in cells:
            store(builder, builder.load(held[i, j]), spot)
        return context.get_dummy_value()

    return types.void(x, x_stride, weight, sums, pairs, fetch, fetch_step, ROWS), codegen


@cache
def _body(version: int) -> Body:
    def multiply_blocks(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        rows, pairs, blocks, run, part = a[5], a[6], a[7], a[8], a[9]
        groups = (rows + _GROUP - 1) // _GROUP
        size = rows * _BLOCK
        sums = np.empty(size, np.float32)
        total = np.empty(size, np.float32)
        row_bytes = pairs * 4
        fetch_step = _BLOCK * 4 // max(1, groups)
        block_bytes = pairs * _BLOCK * 4
        claimed = fetch_add(a.ctypes.data, run)
        while claimed < blocks:
            first_block, end_block = claimed, min(claimed + run, blocks)
            claimed = fetch_add(a.ctypes.data, run)  # before it is needed: its first chunk is fetched with our last one
            for block in range(first_block, end_block):
                block_at = a[2] + block * block_bytes
                next_at = a[2] + (block + 1 if block + 1 < end_block else min(claimed, blocks - 1)) * block_bytes
                for begin in range(0, pairs, part):
                    end = min(begin + part, pairs)
                    sums[:] = np.float32(0)
                    for chunk in range(begin, end, _CHUNK):
                        count = min(_CHUNK, end - chunk)
                        chunk_at = block_at + chunk * _BLOCK * 4
                        fetch = chunk_at + _CHUNK * _BLOCK * 4 if chunk + _CHUNK < pairs else next_at
                        row = 0
                        for group in range(groups):
                            taken = (rows - row + groups - group - 1) // (groups - group)
                            x = a[1] + row * row_bytes + chunk * 4
                            s = sums.ctypes.data + row * _BLOCK * 4
                            if taken == 4:
                                _add_products(x, row_bytes, chunk_at, s, count, fetch, fetch_step, 4)
                            elif taken == 3:
                                _add_products(x, row_bytes, chunk_at, s, count, fetch, fetch_step, 3)
                            elif taken == 2:
                                _add_products(x, row_bytes, chunk_at, s, count, fetch, fetch_step, 2)
                            else:
                                _add_products(x, row_bytes, chunk_at, s, count, fetch, fetch_step, 1)
                            row += taken
                            fetch += count * fetch_step
                    if begin == 0:
                        total[:] = sums
                    else:
                        for i in range(size):
                            total[i] += sums[i]
                for row in range(rows):
                    out = carray(at(a[4] + (row * blocks + block) * _BLOCK * 2), _BLOCK, np.uint16)
                    done = total[row * _BLOCK : row * _BLOCK + _BLOCK]
                    if a[3] != 0:
                        bias = carray(at(a[3] + block * _BLOCK * 2), _BLOCK, np.uint16)
                        for i in range(_BLOCK):
                            out[i] = narrow(done[i] + widen(bias[i]))
                    else:
                        for i in range(_BLOCK):
                            out[i] = narrow(done[i])

    return compile_body(multiply_blocks)
