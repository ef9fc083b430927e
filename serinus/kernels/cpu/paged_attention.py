"""Causal attention over paged KV: decoding tokens read pages in place, prompt chunks go through `chunk_attention`.

Shapes: T = tokens of this step, N = query heads, H = KV heads, G = N / H, D = head size, S = slots, R = rows,
C = context, B = sequences, U = work items of the decode kernel, L = tokens that one sequence has so far.

A decode item is one query token and a range of KV heads. bf16 goes through `decode_attention` where the processor
has bf16 dot products. For fp32, other head sizes and other processors this file has a kernel of its own: it walks the
context in blocks: scores of a block, running maximum and sum (online softmax, Milakov and Gimelshein, 2018), then the
weighted values, four rows at a time so that the accumulator is loaded and stored a quarter as often.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch, slots_in
from serinus.kernels.checks import check_paged_attention
from serinus.kernels.contracts import LayerDigest, PagedAttention
from serinus.kernels.cpu import chunk_attention
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.chunk_attention import Chunk, attend_chunks, make_units, serves
from serinus.kernels.cpu.decode_attention import UNIT_FIELDS, decode_body
from serinus.kernels.cpu.decode_attention import serves as decodes
from serinus.kernels.cpu.digest import BLOCK, ROWS
from serinus.kernels.cpu.fp8 import bytes_of, kind_of
from serinus.kernels.cpu.scalar import FAST, LOG2_E, at, cap_score, carray, exp2, fetch_add, inlined, narrow, widen
from serinus.kernels.cpu.vector import add_weighted_4, begin_shares, dots, largest
from serinus.kernels.cpu.watching import (
    PACKED,
    PLAIN,
    WATCH_INTEGERS,
    digest_due,
    find_entries,
    is_packed,
    own_sums,
    watch_integers,
    weigh,
)
from serinus.kernels.pool_rows import rows_of
from serinus.kernels.ref.watched_attention import GatheredRows

_BLOCK = 64
"""Positions of which the scores are kept at once."""
ALONE_BELOW = 256
"""Positions times heads, for which a second thread is not worth its start."""
UNEVEN = 1.25
"""Sequences are split where the busiest thread would have more than this times its even part. Measured on 2 threads:
5 sequences of 290 tokens (1.2) take 2.57 ms whole and 2.80 ms in halves, 4 of them 1.79 and 2.17 ms."""
_DECODE_QUERIES_MAX = 8
"""Sequences with at most this many query tokens go through the decode kernel, token by token."""
_PIECE = 256
"""Query tokens of a chunk that go through torch at once where there is a window or a cap."""

_INTEGERS = "ticket q k_pool v_pool table out unit_count units heads kv_heads context slot_count bad"
_Arguments = fields(_INTEGERS + " sinks", "scale cap")
_Watched = fields(_INTEGERS + WATCH_INTEGERS + " sinks", "scale cap")
_FIELDS, _WATCHED_FIELDS = len(_Arguments._fields_), len(_Watched._fields_)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A batch under a window, sorted by the kernel that serves each sequence; the same for every such layer of a
    step."""

    units_UF: NDArray[np.int64]
    """Work items of the decode kernel, UNIT_FIELDS of each."""
    work: int
    """Sum of the positions that the decode items see."""
    is_shared: bool
    """Whether a sequence has several decode items."""
    lows_B: NDArray[np.int64]
    """The first position that a query of each sequence sees."""
    chunks: tuple[Chunk, ...]
    """Sequences for torch's flash kernel."""
    chunk_units_UF: NDArray[np.int64]
    """Work items of those for the chunk kernel."""


def new_paged_attention() -> PagedAttention:
    """The op, with a memory of its own: it keeps the layouts of the last batch, which the layers of a step share."""
    return LaidAttention()


class LaidAttention:
    """The op, and the layouts of its last batch. With a digest it is `watched_attention`."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._layouts: dict[int | None, _Layout] = {}

    def __call__(
        self, q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, req_to_token_RC: Tensor, batch: AttentionBatch,
        scale: float, window: int | None = None, softcap: float | None = None, sinks_N: Tensor | None = None,
        digest: LayerDigest | None = None,
    ) -> Tensor:  # fmt: skip
        """softmax(cap(scale * q k)) v; see the reference.

        Raises:
            ValueError: shapes disagree, or a row, a context or a slot lies outside of its table.
        """
        check_paged_attention(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap, sinks_N)
        if self._batch is not batch:
            self._batch, self._layouts = batch, {}
        layout = self._layouts.get(window)
        if layout is None:
            layout = _lay_out(batch, q_TND, k_pool_SHD, tuple(req_to_token_RC.shape), window)
            self._layouts[window] = layout
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        inputs = q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC
        if digest is not None and window is not None:
            digest_unseen(*inputs[1:], batch, layout.lows_B, digest)
        bad = 0
        if len(layout.units_UF):
            bad = _decode(*inputs, layout, scale, window, softcap, sinks_N, out_TND, digest)
        if len(layout.chunk_units_UF):
            units, sequences = layout.chunk_units_UF, batch.sequence_count
            bad = attend_chunks(*inputs, units, scale, window, softcap, sinks_N, out_TND, digest, sequences) or bad
        if bad and not batch.is_watched:
            refuse_row(bad, len(k_pool_SHD))
        gathered = None if digest is None else GatheredRows(digest, batch.sequence_count)
        for chunk in layout.chunks:
            _prefill(*inputs, batch.is_watched, chunk, scale, window, softcap, sinks_N, out_TND, gathered)
        return out_TND


def refuse_row(bad: int, slot_count: int) -> None:
    """Raise ValueError for what a call has refused."""
    raise ValueError(f"kernels: row {bad - 1} of req_to_token holds a slot out of 0 .. {slot_count - 1}")


def warm(
    head_size: int, group: int, dtypes: tuple[torch.dtype, torch.dtype], windows: Sequence[bool], *, capped: bool,
    watched: bool,
) -> None:  # fmt: skip
    """Compile, or load from the disk; `watched`: what digests whole rows; `dtypes`: of queries and of pools."""
    dtype, kind = dtypes[0], kind_of(dtypes[1])
    is_packed = decodes(head_size, group, dtype) and not head_size * bytes_of(kind) // 2 % BLOCK
    how = 0 if not watched else PACKED if is_packed else PLAIN
    _pick_body(head_size, group, dtype, kind, capped, how)
    if serves(head_size, group, dtype):
        for windowed in windows:
            chunk_attention.warm(head_size, group, windowed, capped, PACKED if watched else 0, kind)


def cuts_of(seen: Sequence[int], kv_heads: int) -> int:
    """How many work items share the heads of a sequence, `seen` being the positions that each sequence's query sees.

    More than one only where sequences are too few, or too uneven, to keep all threads busy: part of the heads is part
    of every row, and memory is read faster in whole rows.
    """
    threads, work = thread_count(), sum(seen)
    loads = [0] * threads
    for positions in sorted(seen, reverse=True):
        loads[loads.index(min(loads))] += positions
    return min(kv_heads, threads if max(loads) * threads > UNEVEN * work else 1)


def _lay_out(
    batch: AttentionBatch, q_TND: Tensor, k_pool_SHD: Tensor, table_shape: tuple[int, ...], window: int | None,
) -> _Layout:  # fmt: skip
    tokens, heads, size = q_TND.shape
    kv_heads = k_pool_SHD.shape[1]
    rows, contexts = batch.rows_B.tolist(), batch.context_B.tolist()
    starts = batch.q_starts_B1.tolist()
    row_count, width = table_shape
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"kernels: offsets from {starts[0]} to {starts[-1]}, expected 0 to {tokens} tokens")
    sees = width if window is None else window
    singles: list[_Single] = []
    chunks: list[Chunk] = []
    for b, row in enumerate(rows):
        count, context = starts[b + 1] - starts[b], contexts[b]
        if not (0 <= row < row_count and 1 <= count <= context <= width):
            raise ValueError(
                f"kernels: sequence {b} has row {row}, {count} tokens, context {context}; "
                f"expected a row below {row_count}, 1 <= tokens <= context <= {width}"
            )
        if count <= _DECODE_QUERIES_MAX:
            ends = range(context - count + 1, context + 1)
            singles += [(row, end, starts[b] + i, max(0, end - sees), b, i, count) for i, end in enumerate(ends)]
        else:
            chunks.append(Chunk(row=row, first=starts[b], count=count, context=context, sequence=b))
    has_kernel = bool(chunks) and serves(size, heads // kv_heads, q_TND.dtype)
    units = _units(singles, kv_heads)
    firsts = np.array(contexts, np.int64) - np.diff(np.array(starts, np.int64))
    return _Layout(
        units_UF=units,
        work=sum(context - begin for _, context, _, begin, *_ in singles),
        is_shared=len(units) > len({b for *_, b, _, _ in singles}),
        lows_B=np.maximum(0, firsts + 1 - sees),
        chunks=() if has_kernel else tuple(chunks),
        chunk_units_UF=make_units(chunks if has_kernel else (), heads, kv_heads, window),
    )


_Single = tuple[int, int, int, int, int, int, int]
"""Row, context, token, first position seen, sequence, which of its queries, how many it has."""


def _units(singles: list[_Single], kv_heads: int) -> NDArray[np.int64]:
    """Longest first; of each as many items as are best."""
    if not singles:
        return np.empty((0, UNIT_FIELDS), np.int64)
    singles = sorted(singles, key=lambda single: single[3] - single[1])
    parts = cuts_of([context - begin for _, context, _, begin, *_ in singles], kv_heads)
    edges = [kv_heads * i // parts for i in range(parts + 1)]
    return np.array(
        [(*single[:3], edges[i], edges[i + 1], *single[3:]) for single in singles for i in range(parts)], np.int64
    )


def digest_unseen(
    k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, batch: AttentionBatch, lows_B: NDArray[np.int64],
    digest: LayerDigest,
) -> None:  # fmt: skip
    """What is due below the window of a sequence's first query: it is not used in this layer."""
    due_7D, sequences = digest.due_7B.numpy(), batch.sequence_count
    unseen_D = (due_7D[2] < np.tile(lows_B, due_7D.shape[1] // sequences)) & (due_7D[3] > due_7D[2])
    if not unseen_D.any():
        return
    gathered, rows = GatheredRows(digest, sequences), batch.rows_B.tolist()
    for b in np.unique(np.flatnonzero(unseen_D) % sequences).tolist():
        low = gathered.low(b)
        slots_L = slots_in(table_RC[rows[b], low : int(lows_B[b])], len(k_pool_SHD))
        gathered.add(b, low, rows_of(k_pool_SHD, slots_L), rows_of(v_pool_SHD, slots_L))


def _decode(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, layout: _Layout, scale: float,
    window: int | None, softcap: float | None, sinks_N: Tensor | None, out: Tensor, digest: LayerDigest | None,
) -> int:  # fmt: skip
    """Returns 1 + a row with an entry that is no slot, which was read as slot 0; 0 = there is none."""
    units, kv_heads = layout.units_UF, k_pool_SHD.shape[1]
    call = decode_call(
        q_TND, k_pool_SHD, v_pool_SHD, table_RC, units, scale, window, softcap, sinks_N, out, digest,
        len(layout.lows_B),
    )  # fmt: skip
    cuts = len(digest.sums_P22E) if digest is not None and layout.is_shared else 0
    call.threads = threads_of(len(units), layout.work * kv_heads, cuts)
    return call.run()


def threads_of(unit_count: int, work: int, cuts: int) -> int:
    """How many threads share the items. `work`: positions times heads; `cuts`: slices of the sums that threads of one
    sequence add to; 0 = there is no such sequence."""
    threads = 1 if unit_count == 1 or work < ALONE_BELOW else thread_count()
    return min(threads, cuts) if cuts else threads


def decode_call(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, units_UF: NDArray[np.int64], scale: float,
    window: int | None, softcap: float | None, sinks_N: Tensor | None, out: Tensor, digest: LayerDigest | None,
    sequences: int,
) -> KernelCall:  # fmt: skip
    """The decode kernel over work items, as a call for one thread; it refuses with 1 + a row that names no slot."""
    slot_count, kv_heads, size = k_pool_SHD.shape
    heads = q_TND.shape[1]
    given = (
        0, q_TND.data_ptr(), k_pool_SHD.data_ptr(), v_pool_SHD.data_ptr(), table_RC.data_ptr(), out.data_ptr(),
        len(units_UF), units_UF.ctypes.data, heads, kv_heads, table_RC.shape[1], slot_count, 0,
    )  # fmt: skip
    scales = scale * LOG2_E if softcap is None else scale / softcap, (softcap or 0.0) * LOG2_E
    last = 0 if sinks_N is None else sinks_N.data_ptr(), *scales
    shape, kind = (size, heads // kv_heads, q_TND.dtype), kind_of(k_pool_SHD.dtype)
    arguments: ctypes.Structure
    if digest is None:
        body, arguments = _pick_body(*shape, kind, softcap is not None, 0), _Arguments(*given, *last)
    else:
        how = PACKED if decodes(*shape) and is_packed(digest) else PLAIN
        body = _pick_body(*shape, kind, softcap is not None, how)
        key = how, window or table_RC.shape[1], sequences
        watch = digest.kept.get(key)
        if watch is None:
            watch = digest.kept[key] = watch_integers(digest, *key)
        arguments = _Watched(*given, *watch, *last)
    keeps = (q_TND, k_pool_SHD, v_pool_SHD, table_RC, units_UF, sinks_N, out, digest)
    return KernelCall(body=body, arguments=arguments, threads=1, refusal="bad", keeps=keeps)


def _prefill(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, is_watched: bool, chunk: Chunk,
    scale: float, window: int | None, softcap: float | None, sinks_N: Tensor | None, out_TND: Tensor,
    gathered: GatheredRows | None,
) -> None:  # fmt: skip
    """One chunk through torch: its flash kernel, or where there is a cap or sinks plain products. Its KV is gathered
    once, and what is digested of it is what was gathered.

    KV heads become the batch and the group its heads, so that no KV row is copied for each query head. With a window,
    a cap or sinks the chunk goes in pieces: each reads its own window only, and no piece has large scores.
    """
    _, heads, size = q_TND.shape
    kv_heads = k_pool_SHD.shape[1]
    group, past = heads // kv_heads, chunk.context - chunk.count
    begin = 0 if window is None else max(0, past - window + 1)
    slots_L = table_RC[chunk.row, begin : chunk.context]
    if is_watched:
        slots_L = slots_in(slots_L, len(k_pool_SHD))
    k_LHD, v_LHD = rows_of(k_pool_SHD, slots_L), rows_of(v_pool_SHD, slots_L)
    if gathered is not None:
        gathered.add(chunk.sequence, begin, k_LHD, v_LHD)
    k_LHD, v_LHD = k_LHD.to(q_TND.dtype), v_LHD.to(q_TND.dtype)
    piece = chunk.count if window is None and softcap is None and sinks_N is None else _PIECE
    for at_token in range(0, chunk.count, piece):
        tokens = min(piece, chunk.count - at_token)
        own, end = past + at_token, past + at_token + tokens
        low = 0 if window is None else max(0, own - window + 1)
        shape, own_rows = (kv_heads, group, end - low, size), slice(low - begin, end - begin)
        k_HGLD = k_LHD[own_rows].transpose(0, 1).unsqueeze(1).expand(shape)
        v_HGLD = v_LHD[own_rows].transpose(0, 1).unsqueeze(1).expand(shape)
        rows = slice(chunk.first + at_token, chunk.first + at_token + tokens)
        q_HGTD = q_TND[rows].view(tokens, kv_heads, group, size).permute(1, 2, 0, 3)
        seen_TL = None
        if tokens != end - low or window is not None:
            seen_TL = torch.ones(tokens, end - low, dtype=torch.bool).tril(own - low)
            if window is not None:
                seen_TL = seen_TL.triu(own - low - window + 1)
        if softcap is None and sinks_N is None:
            out_HGTD = F.scaled_dot_product_attention(
                q_HGTD, k_HGLD, v_HGLD, attn_mask=seen_TL, is_causal=seen_TL is None, scale=scale
            )
        else:
            out_HGTD = _attend_plainly(q_HGTD, k_HGLD, v_HGLD, seen_TL, scale, softcap, sinks_N)
        out_TND[rows].view(tokens, kv_heads, group, size).copy_(out_HGTD.permute(2, 0, 1, 3))


def _attend_plainly(
    q_HGTD: Tensor, k_HGLD: Tensor, v_HGLD: Tensor, seen_TL: Tensor | None, scale: float, softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:  # fmt: skip
    scores_HGTL = torch.matmul(q_HGTD.float(), k_HGLD.float().transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores_HGTL.div_(softcap).tanh_().mul_(softcap)
    if seen_TL is None:
        seen_TL = torch.ones(scores_HGTL.shape[2:], dtype=torch.bool).tril()
    scores_HGTL.masked_fill_(~seen_TL, float("-inf"))
    if sinks_N is None:
        return torch.matmul(torch.softmax(scores_HGTL, dim=-1), v_HGLD.float())
    sinks_HG11 = sinks_N.view(*scores_HGTL.shape[:2], 1, 1)
    mass_HGT1 = torch.logaddexp(scores_HGTL.logsumexp(-1, keepdim=True), sinks_HG11)
    return torch.matmul((scores_HGTL - mass_HGT1).exp_(), v_HGLD.float())


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
def _pick_body(size: int, group: int, dtype: torch.dtype, kind: int, capped: bool, watched: int) -> Body:
    if decodes(size, group, dtype):
        return decode_body(size, group, capped, watched, kind)
    return _body(size, group, dtype == torch.bfloat16, kind, capped, watched == PLAIN, VERSION)


@cache
def _body(size: int, group: int, bf16: bool, kind: int, capped: bool, watched: bool, version: int) -> Body:
    item_bytes, head_bytes = 2 if bf16 else 4, size * bytes_of(kind)
    field_count = _WATCHED_FIELDS if watched else _FIELDS
    head_lanes, unit_fields = head_bytes // 2, UNIT_FIELDS

    def attend(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, field_count, np.int64)
        scale = np.float32(carray(args, field_count, np.float64)[field_count - 2])
        cap = np.float32(carray(args, field_count, np.float64)[field_count - 1])
        sinks = a[field_count - 3]
        unit_count, heads, kv_heads, context_max = a[6], a[8], a[9], a[10]
        item = np.uint16 if bf16 else np.float32
        units = carray(at(a[7]), (unit_count, unit_fields), np.int64)
        row_bytes = kv_heads * head_bytes
        query = np.empty(heads * size, np.float32)
        total = np.empty(heads * size, np.float32)
        score = np.empty(heads * _BLOCK, np.float32)
        top = np.empty(heads, np.float32)
        mass = np.empty(heads, np.float32)
        rows = np.empty(_BLOCK, np.int64)
        entries = np.empty(_BLOCK, np.int64)
        portions = np.empty(_BLOCK, np.int32)
        words = np.empty(2 * ROWS, np.int64)
        if watched:
            sums = own_sums(a[16], a[17], a[23], a.ctypes.data + 24 * 8)
            due = carray(at(a[15]), 7 * a[19] * a[20], np.int64)
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
            begin_shares(top, mass, head * group, head_end * group, sinks)
            for start in range(units[u, 5], context, _BLOCK):
                count = min(_BLOCK, context - start)
                is_due = False
                if watched:
                    is_due = find_entries(entries, due, a[19], a[20], units[u, 6], start, count, a[18])
                    weigh(portions, units[u, 7], units[u, 8], context, a[22], start)
                for p in range(count):
                    slot = np.int64(table[start + p])
                    if slot < 0 or slot >= a[11]:
                        a[12], slot = row + 1, np.int64(0)
                    rows[p] = slot * row_bytes
                    key = a[2] + rows[p]
                    for h in range(head, head_end):
                        to = score.ctypes.data + (h * (group * _BLOCK) + p) * 4
                        dots(
                            query.ctypes.data + h * (group * size * 4),
                            key + h * head_bytes,
                            to,
                            _BLOCK,
                            size,
                            group,
                            kind,
                        )
                    if is_due and (p % ROWS == ROWS - 1 or p == count - 1):
                        digest_due(
                            sums, a[17], entries, portions, rows, a[2], p // ROWS * ROWS, p + 1, a[13], a[21],
                            head * head_lanes, head_end * head_lanes, words,
                        )  # fmt: skip
                padded = (count + 3) // 4 * 4
                if capped:
                    for n in range(head * group, head_end * group):
                        for i in range(n * _BLOCK, n * _BLOCK + count):
                            score[i] = cap_score(score[i], cap)
                for n in range(head * group, head_end * group):
                    shrink = _take_shares(score, n, count, padded, top, mass)
                    if start > units[u, 5] and shrink != np.float32(1):
                        for i in range(n * size, n * size + size):
                            total[i] *= shrink
                last = count - 1
                for p in range(0, padded, 4):
                    v0, v1 = a[3] + rows[p], a[3] + rows[min(p + 1, last)]
                    v2, v3 = a[3] + rows[min(p + 2, last)], a[3] + rows[min(p + 3, last)]
                    for h in range(head, head_end):
                        o = h * head_bytes
                        weights = score.ctypes.data + (h * (group * _BLOCK) + p) * 4
                        add_weighted_4(
                            v0 + o, v1 + o, v2 + o, v3 + o, weights, _BLOCK, total.ctypes.data + h * (group * size * 4),
                            size, group, kind,
                        )  # fmt: skip
                    if is_due:
                        digest_due(
                            sums + a[17] * 8, a[17], entries, portions, rows, a[3], p, min(p + 4, count),
                            a[13] + a[21] * 8, a[21], head * head_lanes, head_end * head_lanes, words,
                        )  # fmt: skip
            for n in range(head * group, head_end * group):
                inverse = np.float32(1) / mass[n]
                for i in range(n * size, n * size + size):
                    out[i] = narrow(total[i] * inverse) if bf16 else total[i] * inverse

    return compile_body(attend)
