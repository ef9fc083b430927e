"""The linear layer for few rows, straight on the bytes that oneDNN packed. T = rows, I = input width, O = output width.

A decode step reads every weight once and does little with it, so it should cost what reading costs; oneDNN takes more.
This kernel walks the packed blocks, [O/64][I/2][64][2] bf16, with one bf16 dot product per 16 outputs and row
(AVX512-BF16): a chunk of 64 input pairs (16 KiB of weight) serves all rows, four at a time, while the next chunk is
fetched. Nothing is packed twice: oneDNN takes the calls with more rows, on the same bytes.

Measured on 2 Zen 4 cores of a shared machine, oneDNN and this in turn over weights that no cache holds, 1024 x 4096 to
1024 x 32000: T=1 1.2 to 1.8 times as fast (90 % of the bandwidth of a plain sum over memory, oneDNN 70 %), T=2 1.3 to
1.5, T=4 1.0 to 1.25, T=8 1.25 to 1.6, T=16 1.15 to 1.35 (370 GFLOP/s where many rows reach 448), T=32 1.04 to 1.15,
T=64 the same. On 2 Zen 5 cores 16 rows in the caches reach 880 GFLOP/s where many rows reach 1,000; all linears of a
221M model take 8.9 ms for them, of which 7.1 are their operations.

A norm before the product and a gated activation behind it can be done in the same start of the threads: alone, each
takes 30 us of a decode step's layer, of which it computes for 5; the rest is its start, from caches that the weights
have emptied. The threads share out the rows to be normed and wait for each other; a block of the gate and the block
of what it lets through are multiplied one after the other.

Same bits. oneDNN sums the inputs of an output in order, pair by pair, in parts that start from zero (1024 inputs here,
512 where I <= 1024) and are then added in order; so does this kernel, hence a row's result does not depend on which of
the two computed it. (oneDNN itself breaks that for one row where I > 1024: its parts are then of 512.)

Quantized weights lie in blocks of their own (`quantized`): a chunk is unpacked into the words that it would have been,
scales are applied to the sums of their parts, and any number of rows is multiplied here, by ROWS_MAX at a time: a row's
result hangs on no other. Rows of fp32 are words of one input instead of two; they are taken of quantized weights only.

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
from torch import Tensor

from serinus.kernels.contracts import Gate
from serinus.kernels.cpu.blocks import CHUNK, GROUP, multiply_block, word_bytes
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.products import BLOCK
from serinus.kernels.cpu.quantized import IN_STEP
from serinus.kernels.cpu.row_steps import gate_row, norm_row
from serinus.kernels.cpu.scalar import (
    FAST,
    at,
    await_count,
    carray,
    fetch_add,
    host_has,
    inlined,
    narrow,
    publish,
    widen,
)
from serinus.kernels.packed import PackedLinear, RowBlocks

ROWS_MAX = 32
"""Rows up to which this kernel was the faster one, or as fast, on every shape tried; at 64 nothing is left of it."""

GATED_BLOCK = 2 * BLOCK
"""Outputs that a gated linear takes together: a block of the gate and one of what it lets through."""
_RUN_MAX = 16
"""Blocks claimed at once, at most: long runs please the memory, short ones balance the threads. So runs begin long and
get shorter: 2 % faster than all of 16, on 2 threads and 16 rows of 1024 x 6144."""
_SERIAL_PRODUCTS = 1 << 16
"""Below this many products the start of a second thread costs more than it saves."""
_PROBE_ROWS = (2, 16, 64, 512)
"""Row counts at which the parts of oneDNN's sums are measured."""

_GELU = 2
_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu": _GELU}
_Arguments = fields(
    "ticket x weight bias out rows words blocks threads part gate norm_ticket normed residual norm_weight wide source"
    " outs scales zeros",
    "eps",
)
_FIELDS = len(_Arguments._fields_)
_NORM_TICKET, _NORMED = 11, 12


def find_blocks(weight_OI: Tensor, packed: Tensor) -> RowBlocks | None:
    """How to read `packed`, oneDNN's form of `weight_OI`; None where this kernel cannot (see above).

    Cost: one comparison of all bytes.
    """
    out_size, in_size = weight_OI.shape
    whole = out_size > 0 and in_size > 0 and out_size % BLOCK == 0 and in_size % BLOCK == 0
    if weight_OI.dtype != torch.bfloat16 or not whole or not host_has("avx512bf16"):
        return None
    byte_count = out_size * in_size * 2
    if torch.ops.mkldnn._nbytes(packed) != byte_count:
        return None
    address = int(torch.ops.mkldnn.data_ptr(packed))
    words = torch.frombuffer((ctypes.c_char * byte_count).from_address(address), dtype=torch.int32)
    plain = weight_OI.detach().contiguous().view(torch.int32).view(-1, BLOCK, in_size // 2)
    if not torch.equal(words.view(-1, in_size // 2, BLOCK), plain.transpose(1, 2)):
        return None
    part = find_part(in_size)
    return RowBlocks(address=address, part=2 * part) if part is not None and _agrees(in_size, part) else None


@cache
def _agrees(in_size: int, part: int) -> bool:
    """Whether this kernel gives oneDNN's very bits at this width, on random rows. Processors with AMX sum in tiles, in
    an order of their own: there everything is left to oneDNN, since a row must not depend on the company it is in.
    """
    chance = torch.Generator().manual_seed(in_size)
    weight = torch.randn(BLOCK, in_size, generator=chance).to(torch.bfloat16)
    x = torch.randn(_PROBE_ROWS[-1], in_size, generator=chance).to(torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    blocks = RowBlocks(address=int(torch.ops.mkldnn.data_ptr(packed)), part=2 * part)
    linear = PackedLinear(weight=packed, bias_O=None, in_size=in_size, out_size=BLOCK, blocked=True, rows=blocks)
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
    weight = torch.zeros(-(-(len(edges) + 1) // BLOCK) * BLOCK, pairs, 2)
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


def fused_rows(packed: PackedLinear) -> RowBlocks | None:
    """How bf16 rows are multiplied that were written by a kernel, or are read by one; None: only op by op."""
    blocks = packed.rows
    is_whole = packed.in_size % IN_STEP == 0 and packed.out_size % BLOCK == 0
    return blocks if is_whole and host_has("avx512bf16") else None


def multiply_rows(x_TI: Tensor, packed: PackedLinear, blocks: RowBlocks) -> Tensor:
    """x @ weight.T + bias, [T, O] in the dtype of x: bf16, or fp32 where the weight is quantized. Any T is right, of a
    weight that is not quantized up to ROWS_MAX is fast.

    Raises:
        ValueError: x is not of such a dtype or not of width I.
    Cost: all bytes of the weight read once for each ROWS_MAX rows; 5 us of Python.
    """
    out_TO = x_TI.new_empty((*x_TI.shape[:-1], packed.out_size))
    rows_call(x_TI.contiguous(), packed, blocks, out_TO).run()
    return out_TO


def multiply_normed_rows(
    x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear, blocks: RowBlocks,
    gate: Gate | None,
) -> Tensor:  # fmt: skip
    """`norm_linear` for few rows, in one start of the threads: they share out the rows for the norm, then the blocks.
    The bits are those of the norm, the linear and the gate one after the other.

    Raises ValueError as `multiply_rows` does.
    """
    source_TI = (residual_TI if x_TI is None else x_TI).contiguous()
    out_size = packed.out_size if gate is None else packed.out_size // 2
    out_TO = source_TI.new_empty((*source_TI.shape[:-1], out_size))
    normed_TI = torch.empty_like(source_TI)
    taken_TI = None if x_TI is None else source_TI
    normed_call(taken_TI, residual_TI, weight_I, eps, packed, blocks, gate, normed_TI, out_TO).run()
    return out_TO


def rows_call(x_TI: Tensor, packed: PackedLinear, blocks: RowBlocks, out_TO: Tensor) -> KernelCall:
    """`multiply_rows` as a call, into `out_TO`; x is contiguous. Raises ValueError as it does."""
    return _call(x_TI, packed, blocks, 0, out_TO, (0, 0, 0, 0, 0, 0, 0.0), ())


def normed_call(
    x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear, blocks: RowBlocks,
    gate: Gate | None, normed_TI: Tensor, out_TO: Tensor,
) -> KernelCall:  # fmt: skip
    """`multiply_normed_rows` as a call, into `out_TO`; `normed_TI`: room for the normed rows. x is contiguous, without
    it the residual. Raises ValueError as it does."""
    source_TI = residual_TI.contiguous() if x_TI is None else x_TI
    norm = (
        0, 0, 0 if x_TI is None else residual_TI.data_ptr(), weight_I.data_ptr(), weight_I.dtype == torch.float32,
        source_TI.data_ptr(), eps,
    )  # fmt: skip
    return _call(normed_TI, packed, blocks, _GATES[gate], out_TO, norm, (source_TI, residual_TI, weight_I))


_Norm = tuple[int, int, int, int, int, int, float]
"""Rows begun and done, then what `norm_linear` has besides a linear; all 0: no norm."""


def _call(
    x_TI: Tensor, packed: PackedLinear, blocks: RowBlocks, gate: int, out_TO: Tensor, norm: _Norm,
    keeps: tuple[object, ...],
) -> KernelCall:  # fmt: skip
    """`x_TI`: the input, or where it is normed first the place for that."""
    width, outs = x_TI.shape[-1], out_TO.shape[-1]
    pairs = x_TI.dtype == torch.bfloat16
    if not (pairs or (x_TI.dtype == torch.float32 and blocks.bits < 16)) or width != _width(packed, blocks):
        raise ValueError(
            f"kernels: linear got {x_TI.dtype} of shape {tuple(x_TI.shape)}, expected bf16 [T, {packed.in_size}]"
        )
    rows = x_TI.numel() // width
    threads = 1 if rows * packed.in_size * packed.out_size < _SERIAL_PRODUCTS else thread_count()
    arguments = _Arguments(
        0, x_TI.data_ptr(), blocks.address, _address(packed.bias_O), out_TO.data_ptr(), rows, width >> pairs,
        -(-outs // BLOCK), threads, blocks.part >> pairs, gate, *norm[:-1], outs, _address(blocks.scales),
        _address(blocks.zeros), norm[-1],
    )  # fmt: skip
    body = _body(blocks.bits, pairs, blocks.levels, VERSION)
    return KernelCall(body=body, arguments=arguments, threads=threads, keeps=(x_TI, packed, out_TO, *keeps))


def _width(packed: PackedLinear, blocks: RowBlocks) -> int:
    """Of the rows: quantized weights are filled up."""
    return packed.in_size if blocks.bits == 16 else -(-packed.in_size // IN_STEP) * IN_STEP


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def warm() -> None:
    """Compile, or load from the disk, what multiplies by weights of bf16."""
    if host_has("avx512bf16"):
        _body(16, True, 0, VERSION)


@inlined(fastmath=FAST)
def _round_rows(total_at: Any, bias_at: Any, out_at: Any, rows: Any, row_bytes: Any, count: Any) -> None:
    """The first `count` outputs of rows as bf16, `row_bytes` apart; bias_at: 0, or where those of the bias are."""
    for row in range(rows):
        sums = carray(at(total_at + row * (BLOCK * 4)), BLOCK, np.float32)
        out = carray(at(out_at + row * row_bytes), BLOCK, np.uint16)
        if bias_at != 0:
            bias = carray(at(bias_at), BLOCK, np.uint16)
            for i in range(count):
                out[i] = narrow(sums[i] + widen(bias[i]))
        elif count == BLOCK:  # a number of turns that the compiler knows
            for i in range(BLOCK):
                out[i] = narrow(sums[i])
        else:
            for i in range(count):
                out[i] = narrow(sums[i])


@inlined(fastmath=FAST)
def _finish_rows(total_at: Any, bias_at: Any, out_at: Any, rows: Any, row_bytes: Any, count: Any) -> None:
    """The same of fp32."""
    for row in range(rows):
        sums = carray(at(total_at + row * (BLOCK * 4)), BLOCK, np.float32)
        out = carray(at(out_at + row * row_bytes), BLOCK, np.float32)
        if bias_at != 0:
            bias = carray(at(bias_at), BLOCK, np.float32)
            for i in range(count):
                out[i] = sums[i] + bias[i]
        else:
            for i in range(count):
                out[i] = sums[i]


@inlined(fastmath=FAST)
def _norm_rows(a: Any, eps: Any) -> None:
    """The norm of all rows, which the threads share out; it is there when this returns."""
    rows, width = a[5], a[6] * 2
    kept = np.empty(width, np.float32)
    row = fetch_add(a.ctypes.data + 8 * _NORM_TICKET, 1)
    while row < rows:
        offset = row * width * 2
        residual_at = a[13] + offset if a[13] != 0 else 0
        norm_row(a[16] + offset, residual_at, a[14], a[15] != 0, a[1] + offset, kept, eps)
        publish(a.ctypes.data + 8 * _NORMED, 1)
        row = fetch_add(a.ctypes.data + 8 * _NORM_TICKET, 1)
    await_count(a.ctypes.data + 8 * _NORMED, rows)


@inlined(fastmath=set())
def _claim(a: Any, turn: Any, first: Any) -> Any:
    """The next run of blocks that no thread has: its number, its first block and its length. `turn`, `first`: of an
    earlier run. Each is as long as all threads' shares of what is left allow, so that they end together."""
    blocks, threads = a[7], a[8]
    mine = fetch_add(a.ctypes.data, 1)
    while True:
        count = max(1, min(_RUN_MAX, (blocks - first) // (2 * threads)))
        if turn == mine:
            return turn, first, count
        turn += 1
        first += count


@cache
def _body(bits: int, pairs: bool, levels: int, version: int) -> Body:
    """For weights of so many bits, which stand for `levels`; `pairs`: rows are bf16, else fp32."""
    item_bytes, rows_max, paired = (2 if pairs else 4), ROWS_MAX, int(pairs)

    def multiply_blocks(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        words, blocks, part, gate, outs = a[6], a[7], a[9], a[10], a[17]
        room = min(a[5], rows_max) * BLOCK
        sums, total, halves = np.empty(room, np.float32), np.empty(room, np.float32), np.empty(2 * room, np.uint16)
        kept = np.empty(CHUNK * BLOCK if bits < 16 else 1, np.uint32)
        nothing = np.zeros(GROUP * BLOCK, np.float32)
        block_bytes = words * word_bytes(bits, paired)
        tables = (words + part - 1) // part * BLOCK  # scales of a block
        half_count = 2 if gate else 1
        if a[16] != 0:
            _norm_rows(a, np.float32(carray(args, _FIELDS, np.float64)[_FIELDS - 1]))
        turn, claimed, count = _claim(a, 0, 0)
        while claimed < blocks:
            first_block, end_block = claimed, claimed + count
            turn, claimed, count = _claim(a, turn, claimed)  # so early: its first chunk is fetched with our last one
            for block in range(first_block, end_block):
                # Addresses are taken where they are used: numba frees an array after the last mention of it.
                total_at, sums_at = np.int64(total.ctypes.data), np.int64(sums.ctypes.data)
                nothing_at, kept_at = np.int64(nothing.ctypes.data), np.int64(kept.ctypes.data)
                gates_at = np.int64(halves.ctypes.data)
                ups_at = gates_at + room * 2
                following = block + 1 if block + 1 < end_block else min(claimed, blocks - 1)
                valid = min(BLOCK, outs - block * BLOCK)
                for first_row in range(0, a[5], rows_max):
                    rows = min(rows_max, a[5] - first_row)
                    x_at, out_at = a[1] + first_row * words * 4, a[4] + (first_row * outs + block * BLOCK) * item_bytes
                    for half in range(half_count):  # a gate, then what it lets through
                        here = block + half * blocks
                        then = here + blocks if half + 1 < half_count else following
                        multiply_block(
                            a[2] + here * block_bytes, a[2] + then * block_bytes, x_at, rows, words, part, total_at,
                            sums_at, nothing_at, kept_at, a[18] + here * tables * 4,
                            a[19] + here * tables, bits, paired, levels,
                        )  # fmt: skip
                        bias_at = a[3] + here * BLOCK * item_bytes if a[3] != 0 else 0
                        if not pairs:
                            _finish_rows(total_at, bias_at, out_at, rows, outs * 4, valid)
                        elif gate:
                            half_at = ups_at if half else gates_at
                            _round_rows(total_at, bias_at, half_at, rows, BLOCK * 2, BLOCK)
                        else:
                            _round_rows(total_at, bias_at, out_at, rows, outs * 2, valid)
                    if gate:
                        for row in range(rows):
                            gates = carray(at(gates_at + row * (BLOCK * 2)), BLOCK, np.uint16)
                            ups = carray(at(ups_at + row * (BLOCK * 2)), BLOCK, np.uint16)
                            gate_row(gates, ups, out_at + row * outs * 2, gate == _GELU)

    return compile_body(multiply_blocks)
