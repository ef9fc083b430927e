"""Causal attention of prompt chunks over paged KV, bf16 or FP8, on the processor's bf16 dot products (AVX512-BF16).

Shapes: T = tokens of this step, N = query heads, H = KV heads, G = N / H, D = head size, U = work items.

A work item is one KV head of one chunk and a run of its query tiles. It first packs that head's keys and values, read
from their pages, into pairs along the dimension that is summed over; then each tile of 64 rows (tokens times G) walks
the blocks of 64 keys from the window of its first token to its last token: blocks below and in the future cost nothing.
Blocks begin at multiples of 64, wherever an item does, so that sums do not depend on how tiles are dealt out.
What of the rows is due for the canary is digested as they are packed, by every item that packs them (see `watching`).
It keeps a running softmax with shares rounded to bf16. torch's flash kernel spends 27 ms on 8 x 256 tokens here
(2 Zen 4 cores, 16/8 heads of 128), for it computes the whole square and copies more. Where the processor lacks the
instruction, and for fp32 or other head sizes, `paged_attention` uses torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.contracts import LayerDigest
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.digest import BLOCK, ROWS, absorb_16_rows, fold_16_sums
from serinus.kernels.cpu.fp8 import BF16, bytes_of, kind_of, widen_row
from serinus.kernels.cpu.scalar import FAST, LOG2_E, at, cap_score, carray, exp2, fetch_add, host_has, inlined, narrow
from serinus.kernels.cpu.vector import TILE, copy_bytes, largest, multiply_tile
from serinus.kernels.cpu.watching import (
    GROUP,
    MISSING,
    PACKED,
    PLAIN,
    WATCH_INTEGERS,
    add_sums,
    any_due,
    digest_due,
    find_entries,
    is_packed,
    own_sums,
    watch_integers,
)

_ROWS = 64
"""Rows of a tile: tokens times G."""
_KEYS = 64
"""Keys of a block."""

UNIT_FIELDS = 11
"""Of a work item: row, context, first token, tokens, KV head, first tile, end of tiles, first position that one of them
sees, sequence in the batch, which of the items of this head it is, how many there are."""

_INTEGERS = "ticket q k_pool v_pool table out unit_count units heads kv_heads context slot_count bad window"
_Arguments = fields(_INTEGERS + " sinks", "scale cap")
_Watched = fields(_INTEGERS + WATCH_INTEGERS + " sinks", "scale cap")
_FIELDS, _WATCHED_FIELDS = len(_Arguments._fields_), len(_Watched._fields_)
_FIRST = _FIELDS - 3
"""Of the arguments of WATCH_INTEGERS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A sequence with many query tokens."""

    row: int
    """Its row of req_to_token."""
    first: int
    """Its first token in the step."""
    count: int
    """Its tokens in the step."""
    context: int
    """Its tokens so far, these included."""
    sequence: int
    """Its place in the batch."""


def serves(head_size: int, group: int, dtype: torch.dtype) -> bool:
    """Whether this kernel takes such heads on this processor."""
    return dtype == torch.bfloat16 and head_size % 64 == 0 and group <= _ROWS and host_has("avx512bf16")


def make_units(chunks: Sequence[Chunk], heads: int, kv_heads: int, window: int | None) -> NDArray[np.int64]:
    """Work items, [U, UNIT_FIELDS], the heaviest first.

    Every item packs its own keys, so tiles of one head are split only as far as the threads need.
    """
    if not chunks:
        return np.empty((0, UNIT_FIELDS), np.int64)
    tile_tokens = _ROWS // (heads // kv_heads)
    wanted = thread_count() * 4
    parts = max(1, wanted // (len(chunks) * kv_heads))
    units = []
    for chunk in chunks:
        tiles = -(-chunk.count // tile_tokens)
        split = min(parts, tiles)
        edges = [tiles * i // split for i in range(split + 1)]
        past = chunk.context - chunk.count
        lows = [0 if window is None else max(0, past + edge * tile_tokens - window + 1) for edge in edges]
        units += [
            (chunk.row, chunk.context, chunk.first, chunk.count, head, edges[i], edges[i + 1], lows[i],
             chunk.sequence, i, split)
            for i in range(split)
            for head in range(kv_heads)
        ]  # fmt: skip
    units.sort(key=lambda unit: -(unit[1] if window is None else min(unit[1], window)) * (unit[6] - unit[5]))
    return np.array(units, np.int64)


def attend_chunks(
    q_TND: Tensor, k_pool_SHD: Tensor, v_pool_SHD: Tensor, table_RC: Tensor, units_UF: NDArray[np.int64], scale: float,
    window: int | None, softcap: float | None, sinks_N: Tensor | None, out_TND: Tensor, digest: LayerDigest | None,
    sequences: int,
) -> int:  # fmt: skip
    """Fill the rows of `out_TND` that belong to the chunks; `units_UF` were made with this window, for a batch of so
    many sequences.

    Returns 0, or 1 + a row with an entry that is no slot, which was read as slot 0.
    """
    slot_count, kv_heads, size = k_pool_SHD.shape
    heads = q_TND.shape[1]
    given = (
        0, q_TND.data_ptr(), k_pool_SHD.data_ptr(), v_pool_SHD.data_ptr(), table_RC.data_ptr(), out_TND.data_ptr(),
        len(units_UF), units_UF.ctypes.data, heads, kv_heads, table_RC.shape[1], slot_count, 0, window or 0,
    )  # fmt: skip
    scales = scale * LOG2_E if softcap is None else scale / softcap, (softcap or 0.0) * LOG2_E
    last = 0 if sinks_N is None else sinks_N.data_ptr(), *scales
    how, threads = 0, thread_count()
    if digest is None:
        arguments = _Arguments(*given, *last)
    else:
        how = PACKED if is_packed(digest) else PLAIN
        threads = min(threads, len(digest.sums_P22E))
        arguments = _Watched(*given, *watch_integers(digest, how, 0, sequences), *last)
    shape, kind = (size, heads // kv_heads), kind_of(k_pool_SHD.dtype)
    _body(*shape, window is not None, softcap is not None, how, kind, VERSION)(arguments, threads)
    return int(arguments.bad)


def warm(head_size: int, group: int, windowed: bool, capped: bool, watched: int, kind: int) -> None:
    """Compile, or load from the disk. `kind`: of the pools."""
    _body(head_size, group, windowed, capped, watched, kind, VERSION)


@inlined(fastmath=FAST)
def _pack(
    k_at: Any, v_at: Any, rows: Any, count: Any, keys: Any, values: Any, size: Any,
) -> None:  # fmt: skip
    """Pack a block of at most 64 keys and values, zero beyond `count`; `rows`: of `_find_rows`."""
    half = size // 2
    for p in range(count):
        words = carray(at(k_at + rows[p]), half, np.uint32)
        for i in range(half):
            keys[i * _KEYS + p] = words[i]
    for i in range(half):
        for p in range(count, _KEYS):
            keys[i * _KEYS + p] = np.uint32(0)
    for pair in range(_KEYS // 2):
        p = pair * 2
        packed = values[pair * size : pair * size + size]
        low = carray(at(v_at + rows[p]), size, np.uint16)
        high = carray(at(v_at + rows[p + 1]), size, np.uint16)
        if p + 1 < count:
            for i in range(size):
                packed[i] = np.uint32(low[i]) | (np.uint32(high[i]) << np.uint32(16))
        elif p < count:
            for i in range(size):
                packed[i] = np.uint32(low[i])
        else:
            for i in range(size):
                packed[i] = np.uint32(0)


@inlined(fastmath=set())
def _weigh(
    weights: Any, part: Any, parts: Any, past: Any, count: Any, tile_tokens: Any, window: Any, start: Any
) -> None:  # fmt: skip
    """weights[p] of the digest that this item makes of position start + p, see `watching`. A window of 0 is none."""
    tiles = (count + tile_tokens - 1) // tile_tokens
    for p in range(_KEYS):
        readers = parts
        if window > 0:
            readers = 1
            for i in range(1, parts):
                readers += past + (tiles * i // parts) * tile_tokens - window + 1 <= start + p
        weights[p] = 1 if parts == 1 else 2 if part > 0 else 3 - 2 * readers


@inlined(fastmath=set())
def _find_rows(rows: Any, table: Any, low: Any, start: Any, count: Any, row_bytes: Any, slot_count: Any) -> Any:
    """rows[p] = the offset of position start + p; below position `low`, that of this one; behind `count`, that of the
    last. A slot out of the pool counts as slot 0. Returns whether there is none."""
    is_whole = True
    for p in range(_KEYS):
        slot = np.int64(table[max(low, start + min(p, count - 1))])
        if slot < 0 or slot >= slot_count:
            is_whole, slot = False, np.int64(0)
        rows[p] = slot * row_bytes
    return is_whole


@inlined(fastmath=FAST)
def _take_shares(score: Any, shares: Any, hidden: Any, seen: Any, scale: Any, top: Any, mass: Any, m: Any) -> Any:
    """Turn row m of the scores into bf16 shares of its running softmax; returns what its total must shrink by.

    Of the 64 keys of the block, the first `seen` are not in the row's future, and the first `hidden`, where scores are
    -inf, are below its window.
    """
    for p in range(seen, _KEYS):
        score[p] = np.float32(-np.inf)
    best = max(top[m], largest(score.ctypes.data, _KEYS) * scale)
    shrink = exp2(top[m] - best)
    added = np.float32(0)
    for p in range(_KEYS):
        share = exp2(score[p] * scale - best)
        added += share
        shares[p] = narrow(share)
    if seen < _KEYS or hidden > 0:
        added = np.float32(0)
        for p in range(hidden, seen):
            added += exp2(score[p] * scale - best)
        for p in range(seen, _KEYS):
            shares[p] = np.uint16(0)
    top[m] = best
    mass[m] = mass[m] * shrink + added
    return shrink


@inlined(fastmath=FAST)
def _hide_below(score: Any, hidden: Any) -> None:
    """The first `hidden` keys of a row's scores are below its window."""
    for p in range(hidden):
        score[p] = np.float32(-np.inf)


@inlined(fastmath=FAST)
def _drop_shares(shares: Any, hidden: Any) -> None:
    """No share for the first `hidden` keys: 2 ** -126, the least that exp2 gives, is not nothing to a NaN."""
    for p in range(hidden):
        shares[p] = np.uint16(0)


@cache
def _body(size: int, group: int, windowed: bool, capped: bool, watched: int, kind: int, version: int) -> Body:
    tile_tokens = _ROWS // group
    field_count = _WATCHED_FIELDS if watched else _FIELDS
    head_bytes = size * bytes_of(kind)
    lanes = head_bytes // 2
    digest_blocks = lanes // BLOCK
    columns = TILE * 16

    def attend(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, field_count, np.int64)
        scale = np.float32(carray(args, field_count, np.float64)[field_count - 2])
        cap = np.float32(carray(args, field_count, np.float64)[field_count - 1])
        heads, context_max = a[8], a[10]
        units = carray(at(a[7]), (a[6], UNIT_FIELDS), np.int64)
        row_bytes = a[9] * head_bytes
        block_words = _KEYS * size // 2
        query = np.zeros(_ROWS * size, np.uint16)
        score = np.empty(_ROWS * _KEYS, np.float32)
        share = np.zeros(_ROWS * _KEYS, np.uint16)
        total = np.empty(_ROWS * size, np.float32)
        top = np.empty(_ROWS, np.float32)
        mass = np.empty(_ROWS, np.float32)
        entries = np.empty(_KEYS, np.int64)
        weights = np.empty(_KEYS, np.int32)
        rows_at = np.empty(_KEYS, np.int64)
        wide_at = np.arange(_KEYS) * (size * 2)
        wide = np.empty(2 * _KEYS * size, np.uint16)
        parts = np.zeros(GROUP * 32, np.int32)
        found = np.empty(2 * GROUP, np.int32)
        words = np.empty(2 * ROWS, np.int64)
        if watched:
            w = a[_FIRST:]
            sums = own_sums(w[3], w[4], w[10], a.ctypes.data + (_FIRST + 11) * 8)
            due = carray(at(w[2]), 7 * w[6] * w[7], np.int64)
        while True:
            u = fetch_add(a.ctypes.data, 1)
            if u >= a[6]:
                break
            row, context, first, count, head = units[u, 0], units[u, 1], units[u, 2], units[u, 3], units[u, 4]
            low = units[u, 7] if windowed else 0
            table = carray(at(a[4] + row * context_max * 4), context, np.int32)
            past = context - count
            end = min(context, past + units[u, 6] * tile_tokens)
            base = low // _KEYS * _KEYS
            blocks = (end - base + _KEYS - 1) // _KEYS
            keys = np.empty(blocks * block_words, np.uint32)
            values = np.empty(blocks * block_words, np.uint32)
            head_at = head * head_bytes
            for b in range(blocks):
                packed = slice(b * block_words, b * block_words + block_words)
                start = base + b * _KEYS
                here = min(_KEYS, end - start)
                if not _find_rows(rows_at, table, low, start, here, row_bytes, a[11]):
                    a[12] = row + 1
                if kind == BF16:
                    _pack(a[2] + head_at, a[3] + head_at, rows_at, here, keys[packed], values[packed], size)
                else:
                    k_at = np.int64(wide.ctypes.data)
                    v_at = k_at + _KEYS * size * 2
                    for p in range(here):
                        widen_row(a[2] + head_at + rows_at[p], k_at + wide_at[p], size, kind)
                        widen_row(a[3] + head_at + rows_at[p], v_at + wide_at[p], size, kind)
                    _pack(k_at, v_at, wide_at, here, keys[packed], values[packed], size)
                if watched and find_entries(entries, due, w[6], w[7], units[u, 8], start, here, w[5]):
                    entries[: max(0, low - start)] = MISSING
                    _weigh(weights, units[u, 9], units[u, 10], past, count, tile_tokens, a[13], start)
                    for kv in range(2):
                        pool, own = a[2 + kv], sums + kv * w[4] * 8
                        for p in range(0, _KEYS, GROUP):
                            if not any_due(entries, p):
                                continue
                            if watched == PACKED:
                                factors = w[0] + (kv * a[9] + head) * (lanes * 8)
                                absorb_16_rows(
                                    pool + head_at, rows_at.ctypes.data + p * 8, factors, parts.ctypes.data,
                                    0, 0, digest_blocks, 0,
                                )  # fmt: skip
                                fold_16_sums(
                                    parts.ctypes.data, w[1] + (kv * a[9] + head) * 8, found.ctypes.data
                                )  # fmt: skip
                                add_sums(own, w[4], entries, weights, p, found)
                            else:
                                digest_due(
                                    own, w[4], entries, weights, rows_at, pool, p, min(p + GROUP, here),
                                    w[0] + kv * w[8] * 8, w[8], head * lanes, (head + 1) * lanes, words,
                                )  # fmt: skip
            for tile in range(units[u, 5], units[u, 6]):
                token = tile * tile_tokens
                tokens = min(tile_tokens, count - token)
                rows = tokens * group
                q_at = a[1] + ((first + token) * heads + head * group) * size * 2
                out_at = a[5] + ((first + token) * heads + head * group) * size * 2
                for t in range(tokens):
                    copy_bytes(query.ctypes.data + t * group * size * 2, q_at + t * heads * size * 2, group * size * 2)
                total[:] = np.float32(0)
                top[:] = np.float32(-np.inf)
                mass[:] = np.float32(0)
                if a[field_count - 3] != 0:
                    sinks = carray(at(a[field_count - 3]), heads, np.float32)
                    for m in range(rows):
                        top[m] = sinks[head * group + m % group] * np.float32(LOG2_E)
                        mass[m] = np.float32(1)
                begin = max(0, past + token - a[13] + 1 - base) // _KEYS if windowed else 0
                for b in range(begin, (past + token + tokens - base + _KEYS - 1) // _KEYS):
                    keys_at = keys.ctypes.data + b * block_words * 4
                    for m in range(0, rows, TILE):
                        multiply_tile(
                            query.ctypes.data + m * size * 2, size * 2, keys_at, _KEYS * 4,
                            score.ctypes.data + m * _KEYS * 4, _KEYS * 4, size // 2, False,
                        )  # fmt: skip
                    if capped:
                        for i in range(rows * _KEYS):
                            score[i] = cap_score(score[i] * scale, cap)
                    for m in range(rows):
                        seen = min(_KEYS, max(0, past + token + m // group + 1 - base - b * _KEYS))
                        line = slice(m * _KEYS, m * _KEYS + _KEYS)
                        hidden = 0
                        if windowed:
                            hidden = min(_KEYS, max(0, past + token + m // group + 1 - a[13] - base - b * _KEYS))
                            if hidden >= seen:
                                _drop_shares(share[line], _KEYS)
                                continue
                            _hide_below(score[line], hidden)
                        factor = np.float32(1) if capped else scale
                        shrink = _take_shares(score[line], share[line], hidden, seen, factor, top, mass, m)
                        if windowed:
                            _drop_shares(share[line], hidden)
                        if b > begin and shrink != np.float32(1):
                            for i in range(m * size, m * size + size):
                                total[i] *= shrink
                    values_at = values.ctypes.data + b * block_words * 4
                    for m in range(0, rows, TILE):
                        for i in range(0, size, columns):
                            multiply_tile(
                                share.ctypes.data + m * _KEYS * 2, _KEYS * 2, values_at + i * 4, size * 4,
                                total.ctypes.data + (m * size + i) * 4, size * 4, _KEYS // 2, True,
                            )  # fmt: skip
                for m in range(rows):
                    out = carray(at(out_at + ((m // group) * heads + m % group) * size * 2), size, np.uint16)
                    inverse = np.float32(1) / mass[m]
                    for i in range(size):
                        out[i] = narrow(total[m * size + i] * inverse)

    return compile_body(attend)
