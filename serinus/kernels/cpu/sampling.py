"""Tokens and log-probabilities from logits, row by row, in few passes over each. B = rows, V = vocabulary.

A row is lifted to fp32 in a scratch of its thread (600 KB at V = 150,000: it stays in the second cache), and adjusted
and scaled there. Nothing is sorted: the thresholds of top_k and top_p are found by weighted quickselect, which looks at
two or three times V scores in all. Nor is noise computed for each token: only where a bound on it, from the leading
zeros of the token's hash, lets the token win; for the few that may, it is computed as the reference does, in fp64.

Measured by `benchmarks/sampling.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_logits, check_mask
from serinus.kernels.contracts import ChooseTokens, RowMasks, RowSampling, TopTokens
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import LOG2_E, at, carray, exp2, fetch_add, inlined, splitmix, widen
from serinus.kernels.cpu.selection import (
    SCORE_MAX,
    count_from,
    gather,
    highest,
    lift,
    next_at_least,
    next_to_win,
    penalise,
    raise_all,
    weigh,
)

_Arguments = fields("ticket thread logits stride bf16 rows count vocab room scratch out values listed")
_FIELDS = len(_Arguments._fields_)
_LANES = 16
_SAMPLE = 128
"""Scores that are looked at for a pivot; as many or fewer are sorted."""
_SLACK = 7
"""Places of the sample by which a pivot is moved: the wrong side, a second look at nearly all, is then rare."""
_MARGIN = 1e-4
"""By how much the bound on a token's noise may be short for rounding."""

_ROW = struct.Struct("<13q6dq")
"""Addresses and lengths of bias, history and forbidden ids, seed, position, top_k; then what are fractions; the address
of a mask."""
_ROW_WORDS = _ROW.size // 8
_GREEDY = (*[0] * 13, 0.0, 1.0, -math.inf, 1.0, 0.0, 0.0)
"""A row of which the largest logit is taken as it is."""
_LIST = struct.Struct("<2q")
"""Chosen token, tokens to list."""


class _Scratch:
    """Memory of the threads of one op: three rows each, and the rows' records."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def address(self, vocab: int, threads: int) -> int:
        """Where it lies, with room for so many."""
        needed = threads * 3 * _room(vocab) // 4
        if len(self._memory) < needed:
            self._memory = torch.empty(needed, dtype=torch.float32)
        return self._memory.data_ptr()


def _room(vocab: int) -> int:
    """Bytes of a row, rounded up to whole vectors, and of one vector more."""
    return (vocab + 2 * _LANES - 1) // _LANES * _LANES * 4


def new_choose_tokens() -> ChooseTokens:
    """The op, with scratch of its own."""
    scratch = _Scratch()

    def choose_tokens(logits_BV: Tensor, rows: Sequence[RowSampling], masks: RowMasks | None = None) -> Tensor:
        """One token for each row; see the reference. Cost: at 151,936 tokens 20 us a greedy row, up to 250 others, also
        under masks, which are read with the logits."""
        check_logits(logits_BV, len(rows))
        kept: list[NDArray[Any]] = []
        of_row: dict[int, int] = {}
        if masks is not None:
            check_mask(logits_BV, *masks)
            kept.append(np.ascontiguousarray(masks[1]))
            first, row_bytes = kept[0].ctypes.data, kept[0].strides[0]
            of_row = {row: first + at * row_bytes for at, row in enumerate(masks[0])}
        vocab = logits_BV.shape[1]
        records = b"".join([_ROW.pack(*_record(row, vocab, kept), of_row.get(b, 0)) for b, row in enumerate(rows)])
        out_B = np.empty(len(rows), np.int64)
        _run(_choose_body(VERSION), logits_BV, records, scratch, out_B.ctypes.data)
        return torch.from_numpy(out_B)

    return choose_tokens


def new_top_tokens() -> Callable[[Tensor, Sequence[int], Sequence[int]], list[TopTokens]]:
    """The op, with scratch of its own."""
    scratch = _Scratch()

    def top_tokens(logits_BV: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TopTokens]:
        """Log-probabilities of the model's own distribution; see the reference."""
        check_logits(logits_BV, len(chosen), len(counts), chosen=chosen)
        vocab = logits_BV.shape[1]
        listed = min(max(counts, default=0), vocab)
        records = b"".join([_LIST.pack(token, min(n, vocab)) for token, n in zip(chosen, counts, strict=True)])
        ids = np.empty((len(chosen), listed + 1), np.int64)
        values = np.empty((len(chosen), listed + 1), np.float32)
        body = _list_body(VERSION)
        _run(body, logits_BV, records, scratch, ids.ctypes.data, values.ctypes.data, listed + 1)
        lists = zip(ids.tolist(), values.tolist(), counts, strict=True)
        return [
            TopTokens(logprob=row[0], ids=tuple(some[1 : n + 1]), logprobs=tuple(row[1 : n + 1]))
            for some, row, n in lists
        ]

    return top_tokens


def warm() -> None:
    """Compile, or load from the disk."""
    _choose_body(VERSION)
    _list_body(VERSION)


def _record(row: RowSampling, vocab: int, kept: list[NDArray[Any]]) -> tuple[float, ...]:
    """A row as the kernel reads it, but for its mask. `kept`: the arrays it points to, for as long as it does."""
    if row.temperature <= 0.0 and row.bias is None and not row.forbidden and not _is_penalised(row):
        return _GREEDY

    def pointed(array: NDArray[Any]) -> int:
        kept.append(np.ascontiguousarray(array))
        address: int = kept[-1].__array_interface__["data"][0]
        return address

    bias = seen = output = (0, 0, 0)
    if row.bias is not None:
        bias = (pointed(row.bias[0]), pointed(row.bias[1]), len(row.bias[0]))
    history = row.history
    if history is not None and row.repetition_penalty != 1.0:
        seen = (pointed(history.seen), 0, len(history.seen))
    if history is not None and (row.frequency_penalty or row.presence_penalty):
        output = (pointed(history.output_ids), pointed(history.output_times), len(history.output_ids))
    inside = [token for token in row.forbidden if token < vocab]
    forbidden = (pointed(np.array(inside, np.int64)), len(inside)) if inside else (0, 0)
    seed = (row.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return (
        *bias, seen[0], seen[2], *output, *forbidden, seed, row.position, row.top_k,
        1.0 / row.temperature if row.temperature > 0.0 else 0.0, row.top_p,
        math.log(row.min_p) if row.min_p > 0.0 else -math.inf,
        row.repetition_penalty, row.frequency_penalty, row.presence_penalty,
    )  # fmt: skip


def _is_penalised(row: RowSampling) -> bool:
    return row.repetition_penalty != 1.0 or row.frequency_penalty != 0.0 or row.presence_penalty != 0.0


def _run(
    body: Body, logits_BV: Tensor, records: bytes, scratch: _Scratch, out: int, values: int = 0, listed: int = 0
) -> None:
    """Start a body on all rows. Logits that are neither bf16 nor fp32, or strided within a row, are copied."""
    if logits_BV.dtype not in (torch.bfloat16, torch.float32):
        logits_BV = logits_BV.float()
    count, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    bf16 = logits_BV.dtype == torch.bfloat16
    threads = max(1, min(count, thread_count()))
    rows = np.frombuffer(records, np.uint8)
    body(
        _Arguments(
            0, 0, logits_BV.data_ptr(), logits_BV.stride(0) * logits_BV.element_size(), bf16,
            rows.ctypes.data, count, vocab, _room(vocab), scratch.address(vocab, threads), out, values, listed,
        ),
        threads,
    )  # fmt: skip


@inlined(fastmath=set())
def _vectors(count: Any) -> Any:
    return (count + _LANES - 1) // _LANES


@inlined(fastmath=set())
def _held(score: Any) -> Any:
    """Within the bounds of a score; NaN as the lowest."""
    score = score if score > np.float32(-SCORE_MAX) else np.float32(-SCORE_MAX)
    return score if score < np.float32(SCORE_MAX) else np.float32(SCORE_MAX)


@inlined(fastmath=set())
def _lift_row(source: Any, row: Any, vocab: Any, bf16: Any, mask: Any) -> Any:
    """A row of logits into scratch, NaN behind it. `mask`: the address of one, 0 = all may be chosen. Returns the
    largest."""
    whole = vocab // _LANES
    if mask:
        best = lift(source, row, whole, mask, 1, 1) if bf16 else lift(source, row, whole, mask, 0, 1)
    else:
        best = lift(source, row, whole, mask, 1, 0) if bf16 else lift(source, row, whole, mask, 0, 0)
    scores = carray(at(row), vocab + _LANES, np.float32)
    for i in range(whole * _LANES, vocab):
        if bf16:
            scores[i] = _held(widen(carray(at(source), vocab, np.uint16)[i]))
        else:
            scores[i] = _held(carray(at(source), vocab, np.float32)[i])
        if mask and not (carray(at(mask), vocab // 8 + 1, np.uint8)[i >> 3] >> (i & 7)) & 1:
            scores[i] = np.float32(-SCORE_MAX)
        best = max(best, scores[i])
    for i in range(vocab, _vectors(vocab) * _LANES):
        scores[i] = np.float32(np.nan)
    return best


@inlined(fastmath=set())
def _adjust(row: Any, vocab: Any, r: Any, f: Any) -> None:
    """Bias, penalties and forbidden ids of the record r, f."""
    scores = carray(at(row), vocab, np.float32)
    if r[2]:
        ids, values = carray(at(r[0]), r[2], np.int32), carray(at(r[1]), r[2], np.float32)
        inside = r[2]
        while inside and ids[inside - 1] >= vocab:  # they rise
            inside -= 1
        for i in range(inside):
            scores[ids[i]] += values[i]
    if r[4]:
        seen, penalty = carray(at(r[3]), r[4], np.uint8), np.float32(f[16])
        whole = min(r[4] // 2, vocab // _LANES)
        penalise(row, r[3], whole, penalty)
        for i in range(whole * _LANES, min(r[4] * 8, vocab)):
            if (seen[i >> 3] >> (i & 7)) & 1:
                scores[i] = _held(scores[i] / penalty if scores[i] > 0 else scores[i] * penalty)
    if r[7]:
        ids, times = carray(at(r[5]), r[7], np.int32), carray(at(r[6]), r[7], np.float32)
        for i in range(r[7]):
            if ids[i] < vocab:
                scores[ids[i]] -= times[i] * np.float32(f[17]) + np.float32(f[18])
    if r[9]:
        forbidden = carray(at(r[8]), r[9], np.int64)
        for i in range(r[9]):
            scores[forbidden[i]] = np.float32(-SCORE_MAX)


@inlined(fastmath=set())
def _weight(score: Any, weighted: Any) -> Any:
    return np.float64(exp2(score * np.float32(LOG2_E))) if weighted else 1.0


@inlined(fastmath=set())
def _take_sample(source: Any, count: Any, sample: Any) -> Any:
    """Evenly spread scores of a list (all of a short one), the largest first. Returns how many."""
    scores = carray(at(source), count, np.float32)
    taken = min(count, _SAMPLE)
    drawn = np.empty(_SAMPLE, np.float32)
    for i in range(taken):
        drawn[i] = scores[i * count // taken]
    for i in range(taken):  # to its rank, which vectors count: insertion takes five times as long
        score, rank = drawn[i], np.int32(0)
        for j in range(taken):
            rank += np.int32((drawn[j] > score) | ((drawn[j] == score) & (np.int32(j) < np.int32(i))))
        sample[rank] = score
    return taken


@inlined(fastmath=set())
def _pivot(sample: Any, share: Any, weighted: Any) -> Any:
    """A score of a full sample, about where those end that hold `share` of the list: some places to the side that
    probably leaves the shorter rest."""
    total = 0.0
    for i in range(_SAMPLE):
        total += _weight(sample[i], weighted)
    place, reached = 0, _weight(sample[0], weighted)
    while place < _SAMPLE - 1 and reached < share * total:
        place += 1
        reached += _weight(sample[place], weighted)
    return sample[place + _SLACK if place < _SAMPLE // 2 else place - _SLACK]


@inlined(fastmath=set())
def _threshold(source: Any, count: Any, spare: Any, room: Any, wanted: Any, weighted: Any) -> Any:
    """The largest score of a list such that `wanted` are not below it, or, weighted, that those not below it hold the
    share `wanted` of the sum of exp(score); -inf where all together do not, for rounding.

    Quickselect: a list is cut at a pivot, and the part that holds the answer is the next one. `spare`: two rows of
    `room` bytes; the list may lie in the first.
    """
    sample, whole = np.empty(_SAMPLE, np.float32), np.zeros(1, np.float64)
    otherwise, have = np.float32(-np.inf), 0.0  # the answer if all of the list falls short; what lies above the list
    total = 0.0 if weighted else np.float64(count)
    target = spare + room if source == spare else spare
    while count > _SAMPLE:
        _take_sample(source, count, sample)
        vectors = _vectors(count)
        if weighted:
            pivot = _pivot(sample, (wanted - have) / total if total > 0.0 else wanted, True)
            upper = weigh(source, vectors, np.float32(0.0), pivot, whole.ctypes.data)
            if total == 0.0:
                wanted *= whole[0]
            total = whole[0]
        else:
            pivot = _pivot(sample, (wanted - have) / total, False)
            upper = np.float64(count_from(source, vectors, pivot))
        if have + upper >= wanted:
            otherwise, total = pivot, upper
            count = gather(source, vectors, pivot, target, 1)
        else:
            have, total = have + upper, max(total - upper, 1e-300)
            count = gather(source, vectors, pivot, target, 0)
        source, target = target, 2 * spare + room - target
    taken = _take_sample(source, count, sample)
    if weighted and total == 0.0:
        for i in range(taken):
            total += _weight(sample[i], True)
        wanted *= total
    for i in range(taken):
        have += _weight(sample[i], weighted)
        if have >= wanted:
            return sample[i]
    return otherwise


@inlined(fastmath=set())
def _floor(row: Any, vocab: Any, room: Any, top_k: Any, top_p: Any) -> Any:
    """The lowest score that top_k and then top_p keep of a scaled row."""
    floor, source, count = np.float32(-np.inf), row, vocab
    if 0 < top_k < vocab:
        floor = _threshold(row, vocab, row + room, room, np.float64(top_k), False)
        if top_p < 1.0:
            source, count = (
                row + room,
                gather(row, _vectors(vocab), np.nextafter(floor, np.float32(-np.inf)), row + room, 1),
            )
    if top_p < 1.0:
        floor = max(floor, _threshold(source, count, row + room, room, top_p, True))
    return floor


@inlined(fastmath=set())
def _noise(key: Any, token: Any) -> Any:
    """Gumbel noise of a token, as the reference computes it."""
    v = (np.float64(np.int64(splitmix(key + np.uint64(token)) >> np.uint64(32))) + 0.5) * 2.0**-32
    return np.float32(-math.log(-math.log1p(-min(v, 1.0 - 2.0**-24))))


@inlined(fastmath=set())
def _first_at_least(row: Any, vocab: Any, least: Any) -> Any:
    """The lowest id with a score of at least `least`, which there is."""
    token = next_at_least(row, 0, _vectors(vocab), least) * _LANES
    scores = carray(at(row), vocab, np.float32)
    while token < vocab - 1 and not scores[token] >= least:
        token += 1
    return token


@inlined(fastmath=set())
def _draw(row: Any, vocab: Any, key: Any, floor: Any) -> Any:
    """The token with the largest score + noise, of those not below the floor; the lowest id of equals."""
    vectors = _vectors(vocab)
    scores = carray(at(row), vectors * _LANES, np.float32)
    token = _first_at_least(row, vocab, np.float32(0.0))
    best = np.float32(scores[token] + _noise(key, token))
    vector = np.int64(0)
    while True:
        vector = next_to_win(row, vector, vectors, key, floor, best - np.float32(_MARGIN))
        if vector >= vectors:
            return token
        for rival in range(vector * _LANES, vector * _LANES + _LANES):
            if scores[rival] >= floor:  # NaN behind the row is not
                found = np.float32(scores[rival] + _noise(key, rival))
                if found > best or (found == best and rival < token):
                    token, best = rival, found
        vector += 1


@cache
def _choose_body(version: int) -> Body:
    words, row_bytes = _ROW_WORDS, _ROW.size

    def choose_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        vocab, bf16, room = a[7], a[4] != 0, a[8]
        row = a[9] + fetch_add(a.ctypes.data + 8, 1) * 3 * room
        out = carray(at(a[10]), a[6], np.int64)
        while True:
            b = fetch_add(a.ctypes.data, 1)
            if b >= a[6]:
                break
            r = carray(at(a[5] + b * row_bytes), words, np.int64)
            f = carray(at(a[5] + b * row_bytes), words, np.float64)
            top = _lift_row(a[2] + b * a[3], row, vocab, bf16, r[19])
            if r[2] + r[4] + r[7] + r[9]:
                _adjust(row, vocab, r, f)
                top = highest(row, _vectors(vocab))
            if f[13] == 0.0:
                out[b] = _first_at_least(row, vocab, top)
                continue
            raise_all(row, _vectors(vocab), top, np.float32(f[13]))
            floor = max(np.float32(f[15]), _floor(row, vocab, room, r[12], f[14]))
            key = splitmix(splitmix(np.uint64(r[10])) + np.uint64(r[11]))
            out[b] = _draw(row, vocab, key, floor)

    return compile_body(choose_rows)


@inlined(fastmath=set())
def _list(row: Any, vocab: Any, room: Any, wanted: Any, ids: Any, values: Any) -> None:
    """The `wanted` largest of a row and their ids, of equals the lowest first, into the two arrays."""
    least = _threshold(row, vocab, row + room, room, np.float64(wanted), False)
    scores, vectors = carray(at(row), vocab, np.float32), _vectors(vocab)
    found, vector = 0, np.int64(0)
    while True:
        vector = next_at_least(row, vector, vectors, least)
        if vector >= vectors:
            return
        for token in range(vector * _LANES, min(vector * _LANES + _LANES, vocab)):
            score = scores[token]
            if score >= least and (found < wanted or score > values[wanted - 1]):
                place = min(found, wanted - 1)
                while place > 0 and values[place - 1] < score:
                    values[place], ids[place] = values[place - 1], ids[place - 1]
                    place -= 1
                values[place], ids[place] = score, token
                found = min(found + 1, wanted)
        vector += 1


@inlined(fastmath=set())
def _log_probability(score: Any, top: Any, less: Any) -> Any:
    """In this order: large scores, which LLVM may add the logarithm to first, would lose it."""
    return (score - top) - less


@cache
def _list_body(version: int) -> Body:
    def list_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        vocab, room, listed = a[7], a[8], a[12]
        row = a[9] + fetch_add(a.ctypes.data + 8, 1) * 3 * room
        all_ids = carray(at(a[10]), (a[6], listed), np.int64)
        all_values = carray(at(a[11]), (a[6], listed), np.float32)
        asked = carray(at(a[5]), (a[6], 2), np.int64)
        whole = np.empty(1, np.float64)
        while True:
            b = fetch_add(a.ctypes.data, 1)
            if b >= a[6]:
                break
            ids, values = all_ids[b], all_values[b]
            top = _lift_row(a[2] + b * a[3], row, vocab, a[4] != 0, 0)
            weigh(row, _vectors(vocab), top, top, whole.ctypes.data)
            less = np.float32(math.log(whole[0]))
            values[0] = _log_probability(carray(at(row), vocab, np.float32)[asked[b, 0]], top, less)
            if asked[b, 1]:
                _list(row, vocab, room, asked[b, 1], ids[1:], values[1:])
                for i in range(1, asked[b, 1] + 1):
                    values[i] = _log_probability(values[i], top, less)

    return compile_body(list_rows)
