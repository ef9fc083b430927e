"""The routed experts of a mixture whose weights are integers: those of the experts that are hit, unpacked as they are
read. T = tokens, K = experts of a token, P = T K pairs of a token and an expert, X = experts, E = width of the stream,
F = width inside an expert.

Each projection lies as that of a quantized linear (`quantized`), expert after expert; gate and up are filled up to
whole blocks by themselves. Rows are sorted by expert. Two starts of the threads: of each expert that is hit a block of
the gate, one of what it lets through, and the activation; then a block of the output, all experts one after the other,
so that sums have one order. A row's result hangs on no other, so any number of rows is multiplied here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import Expert, check_experts
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.cpu.blocks import CHUNK, GROUP, multiply_block, word_bytes
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.products import BLOCK
from serinus.kernels.cpu.quantized import IN_STEP, packed_blocks
from serinus.kernels.cpu.row_steps import gate_value, swiglu_value
from serinus.kernels.cpu.scalar import at, carray, fetch_add, host_has, narrow
from serinus.kernels.huge_pages import collapse_to_huge_pages
from serinus.kernels.packed import ExpertRows, PackedExperts, RowBlocks

_ROWS_MAX = 32
"""Rows that an unpacked chunk serves."""
_TOKENS_MAX = 512
"""That are sorted at once: their rows lie in memory once for each expert."""
_Arguments = fields(
    "ticket part x inner out tokens weights starts hits hit_count width inner_width inner_stride"
    " weight scales zeros bias words group blocks"
)
_FIELDS = len(_Arguments._fields_)
_GATE_UP, _DOWN = 0, 1
_Packed = tuple[Tensor, RowBlocks]


def packed_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """As the kernels read them; see the reference. Cost: two copies of them for a moment, and some of one expert."""
    gates: list[_Packed] = []
    ups: list[_Packed] = []
    downs: list[_Packed] = []
    inner = width = 0
    for gate_up, down in check_experts(experts):
        inner, width = down.in_size, down.out_size
        gates.append(packed_blocks(gate_up.rows(range(inner))))
        ups.append(packed_blocks(gate_up.rows(range(inner, 2 * inner))))
        downs.append(packed_blocks(down))
    both = [each for pair in zip(gates, ups, strict=True) for each in pair]
    sizes = len(downs), inner, width
    return PackedExperts.of_integers(_stacked(both), _stacked(downs), gate_up_bias, down_bias, sizes)


def _stacked(parts: list[_Packed]) -> _Packed:
    """One behind the other. Zero points are written out where some have them."""
    first = parts[0][1]
    blocks = torch.cat([each for each, _ in parts])
    scales = [rows.scales for _, rows in parts if rows.scales is not None]
    zeros = None
    if any(rows.zeros is not None for _, rows in parts):
        zeros = torch.cat([
            torch.zeros_like(scale, dtype=torch.int8) if rows.zeros is None else rows.zeros
            for scale, (_, rows) in zip(scales, parts, strict=True)
        ])  # fmt: skip
    collapse_to_huge_pages(blocks.data_ptr(), blocks.nbytes)
    rows = RowBlocks(
        address=blocks.data_ptr(), part=first.part, bits=first.bits, levels=max(rows.levels for _, rows in parts),
        scales=torch.cat(scales), zeros=zeros,
    )  # fmt: skip
    return blocks, rows


def multiply_experts(
    x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate
) -> Tensor:
    """`fused_moe` of arguments that were checked. Without bf16 dot products bf16 is computed in fp32.

    Raises ValueError: the experts were packed by another column.
    Cost: the integers of the experts that are hit, once for each _ROWS_MAX rows of one.
    """
    if packed.rows is None:
        raise ValueError("kernels: fused_moe of column cpu got experts of another, expected those of its pack_experts")
    pairs = x_TE.dtype == torch.bfloat16 and host_has("avx512bf16")
    kind = torch.bfloat16 if pairs else torch.float32
    rows_TE = F.pad(x_TE.to(kind), (0, -x_TE.shape[1] % IN_STEP))
    out_TE = torch.zeros(x_TE.shape, dtype=torch.float32)
    for first in range(0, len(x_TE), _TOKENS_MAX):
        some = slice(first, first + _TOKENS_MAX)
        _add_experts(rows_TE[some], weights_TK[some], ids_TK[some], packed, packed.rows, gate, out_TE[some])
    return out_TE.to(x_TE.dtype)


def _add_experts(
    x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, rows: ExpertRows, gate: ExpertGate,
    out_TE: Tensor,
) -> None:  # fmt: skip
    """Into `out_TE`, which is of zeros. x: as wide as rows are filled up to."""
    count, inner, width = packed.shape
    flat_P = ids_TK.numpy().reshape(-1)
    order_P = flat_P.argsort(kind="stable")
    counts_X = np.bincount(flat_P, minlength=count)[:count]  # those elsewhere are last
    hits_H = counts_X.nonzero()[0]
    starts_H1 = np.zeros(len(hits_H) + 1, np.int64)
    np.cumsum(counts_X[hits_H], out=starts_H1[1:])
    order_P = order_P[: starts_H1[-1]]
    tokens_P = order_P // max(1, ids_TK.shape[1])
    weights_P = weights_TK.numpy().reshape(-1)[order_P]
    rows_PE = x_TE.index_select(0, torch.from_numpy(tokens_P))
    stride = -(-inner // IN_STEP) * IN_STEP
    inner_PF = torch.empty((len(tokens_P), stride), dtype=x_TE.dtype)
    inner_PF[:, inner:] = 0
    pairs = x_TE.dtype == torch.bfloat16
    for part, blocks, stack, bias, wide in (
        (_GATE_UP, rows.gate_up, packed.gate_up, packed.gate_up_bias, x_TE.shape[1]),
        (_DOWN, rows.down, packed.down, packed.down_bias, stride),
    ):
        assert blocks.scales is not None, "kernels: quantized experts without scales"
        arguments = _Arguments(
            0, part, rows_PE.data_ptr(), inner_PF.data_ptr(), out_TE.data_ptr(), tokens_P.ctypes.data,
            weights_P.ctypes.data, starts_H1.ctypes.data, hits_H.ctypes.data, len(hits_H), width, inner, stride,
            stack.data_ptr(), blocks.scales.data_ptr(), 0 if blocks.zeros is None else blocks.zeros.data_ptr(),
            0 if bias is None else bias.data_ptr(), wide >> pairs, blocks.part >> pairs,
            -(-(width if part == _DOWN else inner) // BLOCK),
        )  # fmt: skip
        _body(blocks.bits, pairs, blocks.levels, gate == "swiglu_oai", VERSION)(arguments, thread_count())


@cache
def _body(bits: int, pairs: bool, levels: int, oai: bool, version: int) -> Body:
    """For weights of so many bits, which stand for `levels`; `pairs`: rows are bf16, else fp32."""
    item, item_bytes = (np.uint16, 2) if pairs else (np.float32, 4)
    paired, down_part = int(pairs), _DOWN

    def run_experts(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        down, hit_count, width, inner, stride = a[1] == down_part, a[9], a[10], a[11], a[12]
        words, part, blocks = a[17], a[18], a[19]
        starts = carray(at(a[7]), hit_count + 1, np.int64)
        hits = carray(at(a[8]), hit_count, np.int64)
        tokens = carray(at(a[5]), starts[hit_count], np.int64)
        weights = carray(at(a[6]), starts[hit_count], np.float32)
        room = _ROWS_MAX * BLOCK
        sums, totals, uppers = np.empty(room, np.float32), np.empty(room, np.float32), np.empty(room, np.float32)
        kept, nothing = np.empty(CHUNK * BLOCK, np.uint32), np.zeros(GROUP * BLOCK, np.float32)
        block_bytes = words * word_bytes(bits, paired)
        tables = (words + part - 1) // part * BLOCK  # scales of a block
        halves = 1 if down else 2
        outs = width if down else inner
        items = blocks if down else hit_count * blocks
        row_bytes = words * 4
        mine = fetch_add(a.ctypes.data, 1)
        while mine < items and hit_count > 0:
            following = fetch_add(a.ctypes.data, 1)  # so early: its first chunk is fetched with our last one
            then = following if following < items else mine
            begin, end = (0, hit_count) if down else (mine // blocks, mine // blocks + 1)
            block, then_block = (mine, then) if down else (mine % blocks, then % blocks)
            valid = min(BLOCK, outs - block * BLOCK)
            for hit in range(begin, end):
                here = hits[hit] * halves * blocks + block
                next_hit = hit + 1 if hit + 1 < end else (0 if down else then // blocks)
                next_block = block if hit + 1 < end else then_block
                beyond = a[13] + (hits[next_hit] * halves * blocks + next_block) * block_bytes
                bias_at = a[16] + (hits[hit] * halves * outs + block * BLOCK) * 4 if a[16] != 0 else 0
                for first in range(starts[hit], starts[hit + 1], _ROWS_MAX):
                    # Addresses are taken where they are used: numba frees an array after the last mention of it.
                    sums_at, totals_at = np.int64(sums.ctypes.data), np.int64(totals.ctypes.data)
                    uppers_at, kept_at = np.int64(uppers.ctypes.data), np.int64(kept.ctypes.data)
                    nothing_at = np.int64(nothing.ctypes.data)
                    rows = min(_ROWS_MAX, starts[hit + 1] - first)
                    x_at = (a[3] if down else a[2]) + first * row_bytes
                    for half in range(halves):
                        spot = here + half * blocks
                        ahead = a[13] + (spot + blocks) * block_bytes if half + 1 < halves else beyond
                        multiply_block(
                            a[13] + spot * block_bytes, ahead, x_at, rows, words, part,
                            uppers_at if half else totals_at, sums_at, nothing_at, kept_at, a[14] + spot * tables * 4,
                            a[15] + spot * tables, bits, paired, levels,
                        )  # fmt: skip
                    for row in range(rows):
                        values = carray(at(totals_at + row * (BLOCK * 4)), BLOCK, np.float32)
                        if down:  # out += weight * (sum + bias)
                            out_at = a[4] + (tokens[first + row] * width + block * BLOCK) * 4
                            out, weight = carray(at(out_at), BLOCK, np.float32), weights[first + row]
                            if bias_at != 0:
                                bias = carray(at(bias_at), valid, np.float32)
                                for i in range(valid):
                                    out[i] += weight * (values[i] + bias[i])
                            else:
                                for i in range(valid):
                                    out[i] += weight * values[i]
                        else:
                            inner_at = a[3] + ((first + row) * stride + block * BLOCK) * item_bytes
                            let = carray(at(inner_at), BLOCK, item)
                            ups = carray(at(uppers_at + row * (BLOCK * 4)), BLOCK, np.float32)
                            if bias_at != 0:
                                gate_bias = carray(at(bias_at), valid, np.float32)
                                up_bias = carray(at(bias_at + inner * 4), valid, np.float32)
                                for i in range(valid):
                                    values[i] += gate_bias[i]
                                    ups[i] += up_bias[i]
                            for i in range(valid):
                                value = swiglu_value(values[i], ups[i]) if oai else gate_value(values[i], ups[i], False)
                                if pairs:
                                    let[i] = narrow(value)
                                else:
                                    let[i] = value
            mine = following

    return compile_body(run_experts)
