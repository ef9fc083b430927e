"""The kernels of sampling: lifted and adjusted scores, thresholds of top_k and top_p, noise, the largest of each row.

A threshold is found by bisection over the bits of the scores, which are in the order of the floats: 16 turns where the
logits are bf16, 32 otherwise, each a pass over the row in the second cache. The noise is computed as the reference
computes it, in fp64. B = rows, V = vocabulary, P = parts of a row, E = adjusted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.triton.dependent import dependent, wait_for_earlier
from serinus.kernels.triton.pinned import sent

SCORE_MAX = 1e30
"""Scores are held to this."""
_PARTS = 16
_BLOCK = 2048
_SEARCH_BLOCK = 8192


def lift(logits_BV: Tensor) -> Tensor:
    """A copy in fp32, finite: [B, V] contiguous."""
    rows, vocab = logits_BV.shape
    scores_BV = torch.empty((rows, vocab), dtype=torch.float32, device=logits_BV.device)
    _lift[(rows, triton.cdiv(vocab, _BLOCK))](logits_BV, *logits_BV.stride(), scores_BV, vocab, BLOCK=_BLOCK)
    return scores_BV


def adjust(
    scores_BV: Tensor, lists: Sequence[NDArray[np.int32]], repeated: Sequence[tuple[int, NDArray[np.uint8], float]]
) -> None:
    """Change some scores in place: add the first list, apply repetition penalties to what was seen, add the second
    list, set the third. A list: int32 [3, E], row, id and bits of the value; `repeated`: row, bits of what was seen,
    penalty."""
    device, vocab = scores_BV.device, scores_BV.shape[1]
    entries_3E = sent(torch.from_numpy(np.concatenate(lists, axis=1)), device)
    first = 0
    for turn, entries in enumerate(lists):
        count = entries.shape[1]
        if count:
            _put[(triton.cdiv(count, _BLOCK),)](
                scores_BV, entries_3E, entries_3E.shape[1], first, count, vocab, SETS=turn == 2, BLOCK=_BLOCK
            )
        first += count
        if turn == 0 and repeated:
            _repeat_seen(scores_BV, repeated)


def _repeat_seen(scores_BV: Tensor, repeated: Sequence[tuple[int, NDArray[np.uint8], float]]) -> None:
    device, vocab = scores_BV.device, scores_BV.shape[1]
    lengths = [len(seen) for _, seen, _ in repeated]
    offsets = np.cumsum([0, *lengths[:-1]])
    penalties = np.array([penalty for _, _, penalty in repeated], np.float32).view(np.int32)
    table = np.stack(([row for row, _, _ in repeated], offsets, lengths, penalties)).astype(np.int64)
    seen = sent(torch.from_numpy(np.concatenate([seen for _, seen, _ in repeated])), device)
    _repeat[(len(repeated), triton.cdiv(vocab, _BLOCK))](
        scores_BV, sent(torch.from_numpy(table), device), len(repeated), seen, vocab, BLOCK=_BLOCK
    )


def choose(scores_BV: Tensor, rows_B6: Tensor | None, *, cuts: bool) -> Tensor:
    """int64 [B] on the device: the token of each row.

    Args:
        scores_BV: logits, or scores of `lift`.
        rows_B6: int64; seed, position, top_k, and the bits of fp64: inverse temperature, top_p, least score; None = all
            rows are greedy.
        cuts: whether a row has top_k or top_p.
    """
    rows, vocab = scores_BV.shape
    stride, step = scores_BV.stride()
    device = scores_BV.device
    values_BP = torch.empty((rows, _PARTS), dtype=torch.float32, device=device)
    ids_BP = torch.empty((rows, _PARTS), dtype=torch.int32, device=device)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    ahead = dependent(device)
    _best[(rows, _PARTS)](scores_BV, stride, step, vocab, values_BP, ids_BP, PARTS=_PARTS, BLOCK=_BLOCK, **ahead)
    if rows_B6 is not None:
        least_B = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
        if cuts:
            _threshold[(rows,)](
                scores_BV, stride, step, vocab, rows_B6, values_BP, least_B, PARTS=_PARTS, BLOCK=_SEARCH_BLOCK,
                SHIFT=16 if scores_BV.dtype == torch.bfloat16 else 0, num_warps=16,
            )  # fmt: skip
        drawn_BP, drawn_ids_BP = torch.empty_like(values_BP), torch.empty_like(ids_BP)
        _draw[(rows, _PARTS)](
            scores_BV, stride, step, vocab, rows_B6, values_BP, ids_BP, least_B, drawn_BP, drawn_ids_BP, PARTS=_PARTS,
            BLOCK=_BLOCK,
        )  # fmt: skip
        values_BP, ids_BP = drawn_BP, drawn_ids_BP
    _pick[(rows,)](values_BP, ids_BP, tokens_B, PARTS=_PARTS, num_warps=1, **ahead)
    return tokens_B


_jit: Any = triton.jit
_SCORE_MAX_C = tl.constexpr(SCORE_MAX)


@_jit
def _lifted(x):
    x = x.to(tl.float32)
    x = tl.where(x != x, -_SCORE_MAX_C, x)
    return tl.minimum(tl.maximum(x, -_SCORE_MAX_C), _SCORE_MAX_C)


@_jit
def _lift(logits, stride, step, scores, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i * step, mask=i < vocab, other=0.0)
    tl.store(scores + row * vocab + i, _lifted(x), mask=i < vocab)


@_jit(do_not_specialize=["total", "first", "count"])
def _put(scores, entries, total, first, count, vocab, SETS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = e < count
    row = tl.load(entries + first + e, mask=live, other=0).to(tl.int64)
    at = scores + row * vocab + tl.load(entries + total + first + e, mask=live, other=0)
    value = tl.load(entries + 2 * total + first + e, mask=live, other=0).to(tl.float32, bitcast=True)
    if not SETS:
        value += tl.load(at, mask=live, other=0.0)
    tl.store(at, value, mask=live)


@_jit(do_not_specialize=["count"])
def _repeat(scores, table, count, seen, vocab, BLOCK: tl.constexpr):
    entry = tl.program_id(0)
    row, offset = tl.load(table + entry), tl.load(table + count + entry)
    length = tl.load(table + 2 * count + entry)
    penalty = tl.load(table + 3 * count + entry).to(tl.int32).to(tl.float32, bitcast=True)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    flags = tl.load(seen + offset + i // 8, mask=(i < vocab) & (i // 8 < length), other=0).to(tl.int32)
    is_seen = ((flags >> (i % 8)) & 1) == 1
    at = scores + row * vocab + i
    x = tl.load(at, mask=is_seen, other=0.0)
    changed = tl.where(x > 0.0, tl.div_rn(x, penalty + x * 0.0), x * penalty)
    tl.store(at, tl.minimum(tl.maximum(changed, -_SCORE_MAX_C), _SCORE_MAX_C), mask=is_seen)


@_jit
def _best(scores, stride, step, vocab, values, ids, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_earlier(DEPENDENT)
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for at in range(part * BLOCK, vocab, PARTS * BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = _lifted(tl.load(scores + b * stride + i * step, mask=i < vocab, other=0.0))
        better = (i < vocab) & (x > best)
        best, where = tl.where(better, x, best), tl.where(better, i, where)
    top = tl.max(best, 0)
    tl.store(values + b * PARTS + part, top)
    tl.store(ids + b * PARTS + part, tl.min(tl.where(best == top, where, 2147483647), 0))


@_jit
def _pick(values, ids, tokens, PARTS: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_earlier(DEPENDENT)
    b, p = tl.program_id(0), tl.arange(0, PARTS)
    x = tl.load(values + b * PARTS + p)
    found = tl.min(tl.where(x == tl.max(x, 0), tl.load(ids + b * PARTS + p), 2147483647), 0)
    tl.store(tokens + b, found.to(tl.int64))


@_jit
def _key(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@_jit
def _value(key, SHIFT: tl.constexpr):
    """The float of such an integer of which SHIFT bits were cut off."""
    KEPT: tl.constexpr = 0x7FFF0000 if SHIFT == 16 else 0x7FFFFFFF
    whole = key << SHIFT
    return (whole ^ ((whole >> 31) & KEPT)).to(tl.float32, bitcast=True)


@_jit
def _from(row, step, vocab, least, best, inverse, floor, BLOCK: tl.constexpr):
    """Of the scores that are at least `least` and `floor`: how many, their mass, the lowest of them."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for at in range(0, vocab, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = _lifted(tl.load(row + i * step, mask=i < vocab, other=0.0))
        kept = (i < vocab) & (x >= least) & (x >= floor)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x - best) * inverse), 0.0)
        lowest = tl.minimum(lowest, tl.where(kept, x, float("inf")))
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0), tl.min(lowest, 0)


@_jit
def _threshold(
    scores, stride, step, vocab, rows, values, least, PARTS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    mine = rows + b * 6
    top_k, inverse = tl.load(mine + 2), tl.load(mine + 3).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(mine + 4).to(tl.float64, bitcast=True)
    if (inverse > 0.0) & ((top_k < vocab) | (top_p < 1.0)):
        row = scores + b * stride
        best = tl.max(tl.load(values + b * PARTS + tl.arange(0, PARTS)), 0)
        none = best * 0.0 - 2.0 * _SCORE_MAX_C
        floor = none
        # What is at least `low` is enough, what is at least `high` is not: it is nothing.
        low, end = (_key(none) >> SHIFT) - 1, (_key(best) >> SHIFT) + 1
        high = end
        if top_k < vocab:
            while low + 1 < high:
                middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
                count, _, _ = _from(row, step, vocab, _value(middle, SHIFT), best, inverse, none, BLOCK)
                enough = count >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            floor = _value(low, SHIFT)
        if top_p < 1.0:
            _, mass, _ = _from(row, step, vocab, none, best, inverse, floor, BLOCK)
            wanted = mass * top_p
            high = end
            while low + 1 < high:
                middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
                count, mass, _ = _from(row, step, vocab, _value(middle, SHIFT), best, inverse, floor, BLOCK)
                enough = (mass >= wanted) & (count > 0)
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        _, _, lowest = _from(row, step, vocab, _value(low, SHIFT), best, inverse, floor, BLOCK)
        tl.store(least + b, (lowest - best) * inverse)


@_jit
def _mix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@_jit
def _draw(
    scores, stride, step, vocab, rows, values, ids, least, drawn, drawn_ids, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = rows + b * 6
    inverse = tl.load(mine + 3).to(tl.float64, bitcast=True).to(tl.float32)
    top, token = tl.load(values + b * PARTS + part), tl.load(ids + b * PARTS + part)
    if inverse > 0.0:
        key = _mix(_mix(tl.load(mine).to(tl.uint64, bitcast=True)) + tl.load(mine + 1).to(tl.uint64, bitcast=True))
        floor = tl.maximum(tl.load(mine + 5).to(tl.float64, bitcast=True).to(tl.float32), tl.load(least + b))
        row_best = tl.max(tl.load(values + b * PARTS + tl.arange(0, PARTS)), 0)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        where = tl.zeros((BLOCK,), tl.int32)
        for at in range(part * BLOCK, vocab, PARTS * BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = _lifted(tl.load(scores + b * stride + i * step, mask=i < vocab, other=0.0))
            score = tl.where(i < vocab, (x - row_best) * inverse, float("-inf"))
            # Noise is from -2.9 to 22.9: of what lies 26 below the best nothing wins.
            if tl.max(score, 0) >= tl.maximum(floor, -26.0):
                word = (_mix(key + i.to(tl.uint64)) >> 32).to(tl.int64).to(tl.float64)
                v = tl.minimum((word + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
                # -log1p(-v); near 0 a logarithm of 1 - v has lost the digits of v.
                inner = tl.where(v < 1e-5, v + v * v * (0.5 + v * (1.0 / 3.0)), -tl.log(1.0 - v))
                noised = score + (-tl.log(inner)).to(tl.float32)
                better = (i < vocab) & (score >= floor) & (noised > best)
                best, where = tl.where(better, noised, best), tl.where(better, i, where)
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, where, 2147483647), 0)
    tl.store(drawn + b * PARTS + part, top)
    tl.store(drawn_ids + b * PARTS + part, token)
