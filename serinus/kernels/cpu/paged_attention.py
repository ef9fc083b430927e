"""Causal attention over paged KV: decoding tokens read pages in place, prompt chunks go through `chunk_attention`.

Shapes: T = tokens of this step, N = query heads, H = KV heads, G = N / H, D = head size, S = slots, R = rows,
C = context, B = sequences, U = work items of the decode kernel, L = tokens that one sequence has so far.

A decode item is one query token and a range of KV heads. bf16 rows go through `decode_attention` where the processor
has bf16 dot products. For fp32, other head sizes and other processors this file has a kernel of its own: it walks the
context in blocks: scores of a block, running maximum and sum (online softmax, Milakov and Gimelshein, 2018), then the
weighted values, four rows at a time so that the accumulator is loaded and stored a quarter as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.cpu import chunk_attention
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.chunk_attention import Chunk, attend_chunks, make_units, serves
from serinus.kernels.cpu.decode_attention import decode_body
from serinus.kernels.cpu.decode_attention import serves as decodes
from serinus.kernels.cpu.scalar import FAST, LOG2_E, at, carray, exp2, fetch_add, inlined, narrow, widen
from serinus.kernels.cpu.vector import add_weighted_4, dots, largest
from serinus.kernels.ref.paged_attention import check_paged_attention
from serinus.kernels.ref.paged_attention import paged_attention as plain

__all__ = ["PagedAttention", "warm"]

_BLOCK = 64
"""Positions whose scores are kept at once."""
_UNEVEN = 1.25
"""Sequences are split where the busiest thread would have more than this times its even part. Measured on 2 threads:
5 sequences of 290 tokens (1.2) take 2.57 ms whole and 2.80 ms in halves, 4 of them 1.79 and 2.17 ms."""
_DECODE_QUERIES_MAX = 8
"""Sequences with at most this many query tokens go through the decode kernel, token by token."""

_Arguments = fields("ticket q k_pool v_pool table out unit_count units heads kv_heads context slot_count bad", "scale")
_FIELDS = len(_Arguments._fields_)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A batch, sorted by the kernel that serves each sequence; the same for every layer of a step."""

    batch: AttentionBatch
    units_U5: NDArray[np.int64]
    """Row, context, token, first KV head, end of KV heads."""
    work: int
    """Sum of the contexts of the decode items."""
    chunks: tuple[Chunk, ...]
    """Sequences for torch's flash kernel."""
    chunk_units_U7: NDArray[np.int64]
    """Work items of those for the chunk kernel."""


class PagedAttention:
    """paged_attention of the cpu column. Keeps the layout of the last batch, which all layers of a step share."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None

    def __call__(
        self,
        q_TND: Tensor,
        k_pool_SHD: Tensor,
        v_pool_SHD: Tensor,
        req_to_token_RC: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """softmax(scale * q k) v; see the reference.

        Raises:
            ValueError: shapes disagree, or a row, a context or a slot lies outside of its table.
        """
        check_paged_attention(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap)
        if window is not None or softcap is not None:
            return plain(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap)
        layout = self._layout
        if layout is None or layout.batch is not batch:
            layout = _lay_out(batch, q_TND, k_pool_SHD, tuple(req_to_token_RC.shape))
            self._layout = layout
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        if len(layout.units_U5):
            _decode(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, layout, scale, out_TND)
        if len(layout.chunk_units_U7):
            units = layout.chunk_units_U7
            bad = attend_chunks(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, units, scale, out_TND)
            _check_slots(bad, k_pool_SHD.shape[0])
        for chunk in layout.chunks:
            end = chunk.first + chunk.count
            slots_L = req_to_token_RC[chunk.row, : chunk.context]
            _prefill(q_TND[chunk.first : end], k_pool_SHD, v_pool_SHD, slots_L, scale, out_TND[chunk.first : end])
        return out_TND


def warm(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    _pick_body(head_size, group, dtype)
    if serves(head_size, group, dtype):
        chunk_attention.warm(head_size, group)


def _lay_out(batch: AttentionBatch, q_TND: Tensor, k_pool_SHD: Tensor, table_shape: tuple[int, ...]) -> _Layout:
    tokens, heads, size = q_TND.shape
    kv_heads = k_pool_SHD.shape[1]
    rows, contexts = batch.rows_B.tolist(), batch.context_B.tolist()
    starts = batch.q_starts_B1.tolist()
    row_count, width = table_shape
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"kernels: offsets from {starts[0]} to {starts[-1]}, expected 0 to {tokens} tokens")
    singles: list[tuple[int, int, int]] = []
    chunks: list[Chunk] = []
    for b, row in enumerate(rows):
        count, context = starts[b + 1] - starts[b], contexts[b]
        if not (0 <= row < row_count and 1 <= count <= context <= width):
            raise ValueError(
                f"kernels: sequence {b} has row {row}, {count} tokens, context {context}; "
                f"expected a row below {row_count}, 1 <= tokens <= context <= {width}"
            )
        if count <= _DECODE_QUERIES_MAX:
            singles += [(row, context - count + 1 + i, starts[b] + i) for i in range(count)]
        else:
            chunks.append(Chunk(row=row, first=starts[b], count=count, context=context))
    work = sum(context for _, context, _ in singles)
    ours = bool(chunks) and serves(size, heads // kv_heads, q_TND.dtype)
    return _Layout(
        batch=batch,
        units_U5=_units(singles, work, kv_heads),
        work=work,
        chunks=() if ours else tuple(chunks),
        chunk_units_U7=make_units(chunks, heads, kv_heads) if ours else np.empty((0, 7), np.int64),
    )


def _units(singles: list[tuple[int, int, int]], work: int, kv_heads: int) -> NDArray[np.int64]:
    """Longest first; sequences are split by heads where they are too few, or too uneven, to keep all threads busy.

    Only then: part of the heads is part of every row, and memory is read faster in whole rows.
    """
    if not singles:
        return np.empty((0, 5), np.int64)
    threads = thread_count()
    singles = sorted(singles, key=lambda single: -single[1])
    loads = [0] * threads
    for _, context, _ in singles:
        loads[loads.index(min(loads))] += context
    parts = min(kv_heads, threads if max(loads) * threads > _UNEVEN * work else 1)
    edges = [kv_heads * i // parts for i in range(parts + 1)]
    return np.array([(*single, edges[i], edges[i + 1]) for single in singles for i in range(parts)], np.int64)


def _decode(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, layout: _Layout, scale: float, out: Tensor
) -> None:
    slot_count, kv_heads, size = k_pool_SHD.shape
    heads = q_TND.shape[1]
    units = layout.units_U5
    arguments = _Arguments(
        0,
        q_TND.data_ptr(),
        k_pool_SHD.data_ptr(),
        v_pool_SHD.data_ptr(),
        table_RC.data_ptr(),
        out.data_ptr(),
        len(units),
        units.ctypes.data,
        heads,
        kv_heads,
        table_RC.shape[1],
        slot_count,
        0,
        scale * LOG2_E,
    )
    body = _pick_body(size, heads // kv_heads, q_TND.dtype)
    body(arguments, 1 if len(units) == 1 or layout.work * kv_heads < 256 else thread_count())
    _check_slots(arguments.bad, slot_count)


def _check_slots(bad: int, slot_count: int) -> None:
    if bad:
        raise ValueError(f"kernels: row {bad - 1} of req_to_token holds a slot out of 0 .. {slot_count - 1}")


def _prefill(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_L: Tensor, scale: float, out_TND: Tensor
) -> None:
    """One chunk through torch's flash kernel.

    KV heads become the batch and the group its heads, so that no KV row is copied for each query head.
    """
    tokens, heads, size = q_TND.shape
    kv_heads = k_pool_SHD.shape[1]
    group, context = heads // kv_heads, slots_L.shape[0]
    k_HGLD = k_pool_SHD.index_select(0, slots_L).transpose(0, 1).unsqueeze(1).expand(kv_heads, group, context, size)
    v_HGLD = v_pool_SHD.index_select(0, slots_L).transpose(0, 1).unsqueeze(1).expand(kv_heads, group, context, size)
    q_HGTD = q_TND.view(tokens, kv_heads, group, size).permute(1, 2, 0, 3)
    mask = None
    if tokens != context:
        mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
    out_HGTD = F.scaled_dot_product_attention(
        q_HGTD, k_HGLD, v_HGLD, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    out_TND.view(tokens, kv_heads, group, size).copy_(out_HGTD.permute(2, 0, 1, 3))


@inlined(fastmath=FAST)
def _take_shares(score: Any, n: Any, count: Any, padded: Any, top: Any, mass: Any) -> Any:
    """Turn the scores of head n into shares of the running softmax; returns what its earlier total must shrink by."""
    first = n * _BLOCK
    for p in range(first + count, first + _BLOCK):
        score[p] = np.float32(-np.inf)
    best = max(top[n], largest(score.ctypes.data + first * 4, _BLOCK))
    shrink = exp2(top[n] - best)
    added = np.float32(0)
    for p in range(first, first + count):
        share = exp2(score[p] - best)
        score[p] = share
        added += share
    for p in range(first + count, first + padded):
        score[p] = np.float32(0)
    top[n] = best
    mass[n] = mass[n] * shrink + added
    return shrink


@cache
def _pick_body(size: int, group: int, dtype: torch.dtype) -> Body:
    if decodes(size, group, dtype):
        return decode_body(size, group)
    return _body(size, group, dtype == torch.bfloat16, VERSION)


@cache
def _body(size: int, group: int, bf16: bool, version: int) -> Body:
    item_bytes = 2 if bf16 else 4

    def attend(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        scale = np.float32(carray(args, _FIELDS, np.float64)[13])
        unit_count, heads, kv_heads, context_max = a[6], a[8], a[9], a[10]
        item = np.uint16 if bf16 else np.float32
        units = carray(at(a[7]), (unit_count, 5), np.int64)
        row_bytes = kv_heads * size * item_bytes
        query = np.empty(heads * size, np.float32)
        total = np.empty(heads * size, np.float32)
        score = np.empty(heads * _BLOCK, np.float32)
        top = np.empty(heads, np.float32)
        mass = np.empty(heads, np.float32)
        while True:
            u = fetch_add(a.ctypes.data, 1)
            if u >= unit_count:
                break
            row, context, token, head, head_end = units[u, 0], units[u, 1], units[u, 2], units[u, 3], units[u, 4]
            table = carray(at(a[4] + row * context_max * 4), context, np.int32)
            q = carray(at(a[1] + token * heads * size * item_bytes), heads * size, item)
            out = carray(at(a[5] + token * heads * size * item_bytes), heads * size, item)
            for i in range(head * group * size, head_end * group * size):
                query[i] = (widen(q[i]) if bf16 else q[i]) * scale
                total[i] = np.float32(0)
            for n in range(head * group, head_end * group):
                top[n], mass[n] = np.float32(-np.inf), np.float32(0)
            for start in range(0, context, _BLOCK):
                count = min(_BLOCK, context - start)
                for p in range(count):
                    slot = np.int64(table[start + p])
                    if slot < 0 or slot >= a[11]:
                        a[12] = row + 1
                        return
                    key = a[2] + slot * row_bytes
                    for h in range(head, head_end):
                        to = score.ctypes.data + (h * (group * _BLOCK) + p) * 4
                        dots(
                            query.ctypes.data + h * (group * size * 4),
                            key + h * (size * item_bytes),
                            to,
                            _BLOCK,
                            size,
                            group,
                            bf16,
                        )
                padded = (count + 3) // 4 * 4
                for n in range(head * group, head_end * group):
                    shrink = _take_shares(score, n, count, padded, top, mass)
                    if start > 0 and shrink != np.float32(1):
                        for i in range(n * size, n * size + size):
                            total[i] *= shrink
                last = start + count - 1
                for p in range(0, padded, 4):
                    v0 = a[3] + np.int64(table[start + p]) * row_bytes
                    v1 = a[3] + np.int64(table[min(start + p + 1, last)]) * row_bytes
                    v2 = a[3] + np.int64(table[min(start + p + 2, last)]) * row_bytes
                    v3 = a[3] + np.int64(table[min(start + p + 3, last)]) * row_bytes
                    for h in range(head, head_end):
                        o = h * (size * item_bytes)
                        weights = score.ctypes.data + (h * (group * _BLOCK) + p) * 4
                        add_weighted_4(
                            v0 + o,
                            v1 + o,
                            v2 + o,
                            v3 + o,
                            weights,
                            _BLOCK,
                            total.ctypes.data + h * (group * size * 4),
                            size,
                            group,
                            bf16,
                        )
            for n in range(head * group, head_end * group):
                inverse = np.float32(1) / mass[n]
                for i in range(n * size, n * size + size):
                    out[i] = narrow(total[i] * inverse) if bf16 else total[i] * inverse

    return compile_body(attend)
