"""The routed experts of a mixture. T = tokens, K = experts of a token, P = T K pairs of a token and an expert, X =
experts, E = width of the stream, F = width inside an expert.

Few rows (a decode step) are a kernel of their own: rows are sorted by expert, and of each expert that is hit every
weight is read once, in the order in which it lies, and serves all of its rows. Two starts of the threads: gate, up and
activation; then down and the sum over a token's experts, a stretch of outputs on one thread, so that sums have one
order. Sums are fp32. Many rows (a prompt) go to oneDNN, expert by expert. Quantized experts have kernels of their own
(`quantized_moe`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor

from serinus.kernels.checks import Expert, check_fused_moe
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.quantized_moe import multiply_experts, packed_experts
from serinus.kernels.cpu.row_steps import gate_value, swiglu_value
from serinus.kernels.cpu.scalar import FAST, at, carray, fetch_add, inlined, intrinsic, ir
from serinus.kernels.packed import PackedExperts
from serinus.kernels.ref.fused_moe import expert_gate

ROWS_MAX = 16
"""Rows of one expert up to which the kernel was the faster one (benchmarks/experts.py)."""
_GROUP = 4
"""Rows that share a read of the weights."""
_COLUMNS = 16
"""Of the inner width, or of the output, that a thread takes at once."""
_GATE_UP, _DOWN = 1, 2
_Arguments = fields("ticket part x gate_up down gate_up_bias down_bias tokens weights starts hits inner out hit_count "
                    "width inner_width token_count")  # fmt: skip
_FIELDS = len(_Arguments._fields_)


def pack_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """Quantized experts as their kernels read them; see the reference."""
    return packed_experts(experts, gate_up_bias, down_bias)


def fused_moe(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate) -> Tensor:
    """The experts' sums; see the reference."""
    check_fused_moe(x_TE, weights_TK, ids_TK, packed)
    if packed.sizes is not None:
        return multiply_experts(x_TE, weights_TK, ids_TK, packed, gate)
    flat_P = ids_TK.numpy().reshape(-1)
    order_P = flat_P.argsort(kind="stable")
    counts_X = np.bincount(flat_P, minlength=len(packed.gate_up))[: len(packed.gate_up)]  # those elsewhere are last
    hits_H = counts_X.nonzero()[0]
    tokens_P = order_P // max(1, ids_TK.shape[1])
    weights_P = weights_TK.numpy().reshape(-1)[order_P]
    if len(flat_P) and counts_X.max() > ROWS_MAX:
        return _by_expert(x_TE, torch.from_numpy(tokens_P), torch.from_numpy(weights_P), counts_X, packed, gate)
    _, double_inner, width = packed.gate_up.shape
    inner_PF = torch.empty((len(flat_P), double_inner // 2), dtype=torch.float32)
    out_TE = torch.zeros(x_TE.shape, dtype=torch.float32)
    starts_H1 = np.zeros(len(hits_H) + 1, np.int64)
    np.cumsum(counts_X[hits_H], out=starts_H1[1:])
    rows_TE = x_TE.float().contiguous()
    body = _body(x_TE.dtype == torch.bfloat16, gate == "swiglu_oai", VERSION)
    for part in (_GATE_UP, _DOWN):
        arguments = _Arguments(
            0, part, rows_TE.data_ptr(), packed.gate_up.data_ptr(), packed.down.data_ptr(),
            0 if packed.gate_up_bias is None else packed.gate_up_bias.data_ptr(),
            0 if packed.down_bias is None else packed.down_bias.data_ptr(), tokens_P.ctypes.data,
            weights_P.ctypes.data, starts_H1.ctypes.data, hits_H.ctypes.data, inner_PF.data_ptr(), out_TE.data_ptr(),
            len(hits_H), width, double_inner // 2, len(x_TE),
        )  # fmt: skip
        body(arguments, thread_count())
    return out_TE.to(x_TE.dtype)


def warm(dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    _body(dtype == torch.bfloat16, False, VERSION)


def _by_expert(
    x_TE: Tensor, tokens_P: Tensor, weights_P: Tensor, counts_X: Any, packed: PackedExperts, gate: ExpertGate
) -> Tensor:
    out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    first = 0
    for expert in counts_X.nonzero()[0].tolist():
        end = first + int(counts_X[expert])
        tokens = tokens_P[first:end]
        bias = None if packed.gate_up_bias is None else packed.gate_up_bias[expert]
        inner = expert_gate(F.linear(x_TE.index_select(0, tokens), packed.gate_up[expert], bias), gate)
        bias = None if packed.down_bias is None else packed.down_bias[expert]
        added = F.linear(inner, packed.down[expert], bias).float()
        out_TE.index_add_(0, tokens, added.mul_(weights_P[first:end, None]))
        first = end
    return out_TE.to(x_TE.dtype)


@intrinsic(types.float32)
def _wide(builder: Any, value: Any) -> Any:
    """bf16 bits (uint16) or fp32 -> fp32, exactly."""
    if value.type == ir.FloatType():
        return value
    word = builder.shl(builder.zext(value, ir.IntType(32)), ir.IntType(32)(16))
    return builder.bitcast(word, ir.FloatType())


@inlined(fastmath=FAST)
def _dots(weight: Any, x_at: Any, places: Any, first: Any, count: Any, sums: Any) -> None:
    """sums[:count] = the products of a row of weights with rows of x, at most 4, that lie at `places` from `first`."""
    width = len(weight)
    x0 = carray(at(x_at + places[first] * width * 4), width, np.float32)
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    if count == 1:
        for i in range(width):
            a += _wide(weight[i]) * x0[i]
        sums[0] = a
        return
    x1 = carray(at(x_at + places[first + 1] * width * 4), width, np.float32)
    if count == 2:
        for i in range(width):
            w = _wide(weight[i])
            a += w * x0[i]
            b += w * x1[i]
        sums[0], sums[1] = a, b
        return
    x2 = carray(at(x_at + places[first + 2] * width * 4), width, np.float32)
    x3 = carray(at(x_at + places[first + (3 if count == 4 else 2)] * width * 4), width, np.float32)
    for i in range(width):
        w = _wide(weight[i])
        a += w * x0[i]
        b += w * x1[i]
        c += w * x2[i]
        d += w * x3[i]
    sums[0], sums[1], sums[2], sums[3] = a, b, c, d


@cache
def _body(bf16: bool, oai: bool, version: int) -> Body:
    item = np.uint16 if bf16 else np.float32
    item_bytes = 2 if bf16 else 4

    def run_experts(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        hit_count, width, inner = a[13], a[14], a[15]
        starts = carray(at(a[9]), hit_count + 1, np.int64)
        hits = carray(at(a[10]), hit_count, np.int64)
        tokens = carray(at(a[7]), starts[hit_count], np.int64)
        if a[1] == _GATE_UP:  # activation(gate(x)) * up(x) of stretches of an expert's inner columns
            stretches = (inner + _COLUMNS - 1) // _COLUMNS
            gates, ups = np.empty(_GROUP, np.float32), np.empty(_GROUP, np.float32)
            while True:
                claimed = fetch_add(a.ctypes.data, 1)
                if claimed >= hit_count * stretches:
                    break
                hit, stretch = claimed // stretches, claimed % stretches
                base = hits[hit] * 2 * inner
                for column in range(stretch * _COLUMNS, min(inner, (stretch + 1) * _COLUMNS)):
                    gate_row, up_row = base + column, base + inner + column
                    gate = carray(at(a[3] + gate_row * width * item_bytes), width, item)
                    up = carray(at(a[3] + up_row * width * item_bytes), width, item)
                    gate_bias, up_bias = np.float32(0), np.float32(0)
                    if a[5] != 0:
                        gate_bias = _wide(carray(at(a[5] + gate_row * item_bytes), 1, item)[0])
                        up_bias = _wide(carray(at(a[5] + up_row * item_bytes), 1, item)[0])
                    for first in range(starts[hit], starts[hit + 1], _GROUP):
                        count = min(_GROUP, starts[hit + 1] - first)
                        _dots(gate, a[2], tokens, first, count, gates)
                        _dots(up, a[2], tokens, first, count, ups)
                        for i in range(count):
                            out = carray(at(a[11] + ((first + i) * inner + column) * 4), 1, np.float32)
                            if oai:
                                out[0] = swiglu_value(gates[i] + gate_bias, ups[i] + up_bias)
                            else:
                                out[0] = gate_value(gates[i] + gate_bias, ups[i] + up_bias, False)
        else:  # out += weight * down(inner) of stretches of the output, all experts one after the other
            weights = carray(at(a[8]), starts[hit_count], np.float32)
            places = np.arange(starts[hit_count])
            sums = np.empty(_GROUP, np.float32)
            while True:
                begin = fetch_add(a.ctypes.data, 1) * _COLUMNS
                if begin >= width:
                    break
                for hit in range(hit_count):
                    for column in range(begin, min(width, begin + _COLUMNS)):
                        row = hits[hit] * width + column
                        weight = carray(at(a[4] + row * inner * item_bytes), inner, item)
                        bias = np.float32(0)
                        if a[6] != 0:
                            bias = _wide(carray(at(a[6] + row * item_bytes), 1, item)[0])
                        for first in range(starts[hit], starts[hit + 1], _GROUP):
                            count = min(_GROUP, starts[hit + 1] - first)
                            _dots(weight, a[11], places, first, count, sums)
                            for i in range(count):
                                out = carray(at(a[12] + (tokens[first + i] * width + column) * 4), 1, np.float32)
                                out[0] += weights[first + i] * (sums[i] + bias)

    return compile_body(run_experts)
