"""The canary's kernels: expand a plan, digest KV, verify stamps, write stamps; see the reference for what they mean.

No call waits for the device. S = slots, R, C = rows and columns of req_to_token, B = sequences, T = tokens written,
E = entries verified, L = layers, W = 16-bit lanes of one layer's row of one half, Q = ring rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.canary import ANCHOR, RING_FIELDS, SEQUENCES, Reason, differing, first_lane
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import LayersKv, RingTensors
from serinus.kernels.pool_rows import page_gap, row_elements
from serinus.kernels.triton.pool_rows import row_starts

_BLOCK = 256
_VERIFY_PROGRAMS = 512
"""Of one half, at most: what there is room for is more than what is verified."""
_PLAN_SPLITS = 8
_WRITE_BLOCK = 128
_DIGEST_SLOTS = ((4096, 16), (256, 4), (0, 1))
"""From so many slots on, so many a program: they share the loads of the factors."""
_DIGEST_LANES = 256
_DIGEST_PROGRAMS = 4096
"""Few slots are split by layers, up to so many programs; their sums are added atomically."""


def canary_digest(layers_kv: LayersKv, slots_E: Tensor, coefficients_L22W: Tensor) -> Tensor:
    """Digests [E, 2] of K and V of all layers' rows in some slots; of latent rows that of V is 0."""
    out_E2 = torch.zeros((len(slots_E), 2), dtype=torch.int64, device=slots_E.device)
    digest_into(out_E2, layers_kv, slots_E, coefficients_L22W)
    return out_E2


def digest_into(out_E2: Tensor, layers_kv: LayersKv, slots_E: Tensor, coefficients_L22W: Tensor) -> None:
    """`canary_digest` into zeros that are there."""
    check_digest(layers_kv, coefficients_L22W)
    count, device = len(slots_E), slots_E.device
    if not count:
        return
    pools = _addresses(tuple(half.data_ptr() for halves in layers_kv for half in halves), device)
    first, each = layers_kv[0][0], layers_kv[0][0].element_size()
    page_slots, gap = page_gap(first)
    width, layers, halves = coefficients_L22W.shape[-1], len(layers_kv), len(layers_kv[0])
    slots = next(slots for least, slots in _DIGEST_SLOTS if count >= least)
    groups = triton.cdiv(count, slots)
    splits = max(1, min(layers, _DIGEST_PROGRAMS // (halves * groups)))
    _digest[(groups, halves, splits)](
        pools, slots_E.contiguous(), coefficients_L22W.contiguous(), out_E2.view(torch.int32), count, layers,
        gap * each // 2, width, ROWS=slots, WIDTH=min(_DIGEST_LANES, triton.next_power_of_2(width)),
        LANES=row_elements(first) * each // 2, SLOTS=page_slots, num_warps=4 if slots > 1 else 1,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _addresses(pools: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device; copied once."""
    if any(address % 16 for address in pools):
        raise ValueError(f"kernels: pools at {pools}, expected addresses of whole 16 bytes")
    return torch.tensor(pools, dtype=torch.int64).to(device)


def canary_plan(
    table_RC: Tensor, due_7B: Tensor, entry_count: int, *, page_size: int, slot_count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, positions, previous slots and names of what to verify, [E] each."""
    out_4E = torch.empty((4, entry_count), dtype=torch.int64, device=due_7B.device)
    plan_into(out_4E, table_RC, due_7B, page_size=page_size, slot_count=slot_count)
    return out_4E[0], out_4E[1], out_4E[2], out_4E[3]


def plan_into(
    out_4E: Tensor, table_RC: Tensor, due_7B: Tensor, *, page_size: int, slot_count: int, sums_22E: Tensor | None = None
) -> None:
    """`canary_plan` into what is there: of each column that reads anything the entries up to those of the next one, of
    the last one up to the end. The sums of these entries, int32, become zero."""
    entry_count = out_4E.shape[1]
    if entry_count:
        _plan[(due_7B.shape[1], _PLAN_SPLITS)](
            table_RC, table_RC.stride(0), due_7B.contiguous(), due_7B.shape[1], out_4E, entry_count, page_size,
            slot_count, out_4E if sums_22E is None else sums_22E, 0 if sums_22E is None else sums_22E.stride(1),
            ZEROES=sums_22E is not None, SPLITS=_PLAN_SPLITS, BLOCK=_BLOCK,
        )  # fmt: skip


def canary_verify(
    stamps_LS4: Tensor,
    lane: int,
    slots_E: Tensor,
    positions_E: Tensor,
    previous_E: Tensor,
    tokens_E: Tensor | None,
    digests_E2: Tensor | None,
    sequences_E: Tensor,
    ring_QF: Tensor,
    count_1: Tensor,
    checked_L: Tensor,
    by_sequence_N4: Tensor | None = None,
) -> None:
    """Hold the stamps of lanes `lane` and `lane` + 1 against what they should be."""
    entries = (slots_E.contiguous(), positions_E.contiguous(), previous_E.contiguous(), sequences_E.contiguous())
    digests = None if digests_E2 is None else digests_E2.contiguous()
    counts = () if by_sequence_N4 is None else (by_sequence_N4,)
    verify_entries(
        stamps_LS4, lane, entries, (ring_QF, count_1, checked_L, *counts), tokens_E=tokens_E, digests=digests,
        digest_kind=0 if digests is None else 1,
    )  # fmt: skip


def verify_entries(
    stamps_LS4: Tensor, lane: int, entries: tuple[Tensor, ...], ring: RingTensors, *,
    tokens_E: Tensor | None = None, digests: Tensor | None = None, digest_kind: int = 0, live_1: Tensor | None = None,
) -> None:  # fmt: skip
    """`canary_verify` of contiguous slots, positions, previous slots and names.

    Args:
        digest_kind: what `digests` are: 1: [E, 2] as `canary_digest` has them; 2: the sums that attention has made of
            these entries, int32 [2, 2, E], of which E may be a part; 0: nothing.
        live_1: how many entries there are, on the device; what lies behind them has no meaning. None: all.
    """
    slots_E, positions_E, previous_E, names_E = entries
    count = len(slots_E)
    if not count:
        return
    (ring_QF, count_1, checked_L, *counts), (first, halves) = ring, first_lane(stamps_LS4, lane)
    _verify[(min(triton.cdiv(count, _BLOCK), _VERIFY_PROGRAMS), halves)](
        stamps_LS4, stamps_LS4.shape[1], lane, first, slots_E, positions_E, previous_E,
        slots_E if tokens_E is None else tokens_E.contiguous(), slots_E if digests is None else digests,
        digests.stride(1) if digests is not None and digest_kind == 2 else 0, names_E, ring_QF, len(ring_QF), count_1,
        checked_L, count, slots_E if live_1 is None else live_1, *by_sequence(counts, checked_L),
        HAS_TOKENS=tokens_E is not None, DIGESTS=digest_kind, HAS_LIVE=live_1 is not None, COUNTS=bool(counts),
        FIELDS=RING_FIELDS, BLOCK=_BLOCK,
    )  # fmt: skip


def by_sequence(counts: Sequence[Tensor], other: Tensor) -> tuple[Tensor, int]:
    """Counts by sequence as kernels take them, and of how many numbers; without any `other` is there to be named."""
    return (counts[0], len(counts[0])) if counts else (other, 0)


def canary_write(
    stamps_LS4: Tensor,
    lane: int,
    slots_T: Tensor,
    positions_T: Tensor,
    tokens_T: Tensor,
    q_starts_B1: Tensor,
    table_RC: Tensor,
    rows_B: Tensor,
    digests_T2: Tensor | None,
) -> None:
    """Stamp new tokens in lanes `lane` and `lane` + 1."""
    if not len(rows_B):
        return
    slots_T = slots_T.contiguous()
    words_2T = torch.empty((2, len(slots_T)), dtype=torch.int64, device=slots_T.device)
    first, halves = first_lane(stamps_LS4, lane)
    _write[(len(rows_B), halves)](
        stamps_LS4, stamps_LS4.shape[1], first, slots_T, positions_T.contiguous(), tokens_T.contiguous(),
        q_starts_B1.contiguous(), table_RC, table_RC.stride(0), rows_B.contiguous(),
        slots_T if digests_T2 is None else digests_T2.contiguous(), words_2T, len(slots_T),
        HAS_DIGESTS=digests_T2 is not None, BLOCK=_WRITE_BLOCK, num_warps=1,
    )  # fmt: skip


_jit: Any = triton.jit
_ANCHOR = tl.constexpr(ANCHOR)
_POSITION = tl.constexpr(int(Reason.VERIFY_POSITION))
_SEQUENCES = tl.constexpr(SEQUENCES)
_differing = differing if triton.knobs.runtime.interpret else _jit(differing)
"""The interpreter calls a function as it is."""


@_jit
def _splitmix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@_jit
def mix(previous_hash, token, position):
    """The next hash of a chain, of uint64 values."""
    return _splitmix(previous_hash ^ _splitmix(token ^ (position << 32)))


@_jit(do_not_specialize=["count", "layers"])
def _digest(
    pools, slots, coefficients, out_words, count, layers, gap_lanes, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    half, split = tl.program_id(1), tl.program_id(2)
    e = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = e < count
    rows = row_starts(tl.load(slots + e, mask=live, other=0), gap_lanes, LANES, SLOTS)
    w = tl.arange(0, WIDTH)
    low = tl.zeros((ROWS, WIDTH), tl.uint32)
    high = tl.zeros((ROWS, WIDTH), tl.uint32)
    for layer in range(split, layers, tl.num_programs(2)):
        strip = layer * tl.num_programs(1) + half
        # Every pool begins on a whole 16 bytes: only so are 8 lanes one load.
        pool = tl.multiple_of(tl.load(pools + strip).to(tl.pointer_type(tl.uint16)), 16)
        factors = coefficients + strip.to(tl.int64) * 2 * width
        for first in range(0, width, WIDTH):
            at = first + w
            inside = live[:, None] & (at < width)[None, :]
            lanes = tl.load(pool + rows[:, None] + at[None, :], mask=inside, other=0, eviction_policy="evict_first").to(
                tl.uint32
            )
            one = tl.load(factors + at, mask=at < width, other=0).to(tl.uint32, bitcast=True)
            other = tl.load(factors + width + at, mask=at < width, other=0).to(tl.uint32, bitcast=True)
            low += lanes * one[None, :]
            high += lanes * other[None, :]
    # Sums in 64 bits, then cut: how wide a reduction of 32-bit numbers is differs between compiler and interpreter.
    low_sum = tl.sum(low.to(tl.uint64), 1) & 0xFFFFFFFF
    high_sum = tl.sum(high.to(tl.uint64), 1) & 0xFFFFFFFF
    words = out_words + (e * 2 + half) * 2
    tl.atomic_add(words, low_sum.to(tl.uint32).to(tl.int32, bitcast=True), mask=live)
    tl.atomic_add(words + 1, high_sum.to(tl.uint32).to(tl.int32, bitcast=True), mask=live)


@_jit(do_not_specialize=["count", "total", "sums_total"])
def _plan(
    table, columns, due, count, out, total, page_size, slot_count, sums, sums_total,
    ZEROES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    name, row = tl.load(due + b), table + tl.load(due + count + b) * columns
    low, high = tl.load(due + 2 * count + b), tl.load(due + 3 * count + b)
    first_page, stride = tl.load(due + 4 * count + b), tl.load(due + 5 * count + b)
    begin = tl.load(due + 6 * count + b)
    end = tl.load(due + 6 * count + b + 1, mask=b + 1 < count, other=total)
    end = tl.where(high > low, end, begin)
    for at in range(begin + tl.program_id(1) * BLOCK, end, SPLITS * BLOCK):
        e = at + tl.arange(0, BLOCK)
        live = e < end
        inside = e - begin
        position = (first_page + inside // page_size * stride) * page_size + inside % page_size
        wanted = live & (position >= low) & (position < high)
        slot = tl.load(row + position, mask=wanted, other=0).to(tl.int64)
        slot = tl.where((slot < 0) | (slot >= slot_count), 0, slot)
        chained = wanted & (position > low)
        previous = tl.load(row + position - 1, mask=chained, other=0).to(tl.int64)
        previous = tl.where((previous < 0) | (previous >= slot_count), 0, previous)
        previous = tl.where(wanted & (position == low) & (position != 0), -1, previous)
        tl.store(out + e, slot, mask=live)
        tl.store(out + total + e, tl.where(wanted, position, -1), mask=live)
        tl.store(out + 2 * total + e, previous, mask=live)
        tl.store(out + 3 * total + e, position * 0 + name, mask=live)
        if ZEROES:
            for i in range(4):
                tl.store(sums + i * sums_total + e, tl.zeros((BLOCK,), tl.int32), mask=live)


@_jit
def count_sequences(by_sequence, numbers, names, lane, live):
    """One more entry looked at in a lane, for each of these names; most of a block are of one sequence."""
    number = names & (_SEQUENCES - 1)
    live = live & (number < numbers)
    first = tl.min(tl.where(live, number, _SEQUENCES - 1), 0)
    own = live & (number == first)
    tl.atomic_add(by_sequence + first * 4 + lane, tl.sum(own.to(tl.int64), 0), mask=first < numbers)
    tl.atomic_add(by_sequence + number * 4 + lane, own.to(tl.int64) * 0 + 1, mask=live & (number != first))


@_jit(do_not_specialize=["lane", "first_lane", "count", "sums_total", "numbers"])
def _verify(
    stamps, slot_count, lane, first_lane, slots, positions, previous, tokens, digests, sums_total, sequences, ring,
    ring_rows, violations, checked, count, live_count, by_sequence, numbers,
    HAS_TOKENS: tl.constexpr, DIGESTS: tl.constexpr, HAS_LIVE: tl.constexpr, COUNTS: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    half = tl.program_id(1)
    own = (first_lane + half).to(tl.int64)
    base = stamps + own * slot_count * 4
    end = tl.load(live_count) if HAS_LIVE else count
    for begin in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        e = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + e, mask=e < end, other=0)
        expected_position = tl.load(positions + e, mask=e < end, other=-1)
        live = expected_position >= 0
        token = tl.load(base + slot * 4, mask=live, other=0)
        position = tl.load(base + slot * 4 + 1, mask=live, other=0)
        stored_hash = tl.load(base + slot * 4 + 2, mask=live, other=0)
        stored_digest = tl.load(base + slot * 4 + 3, mask=live, other=0)
        twin = stamps + (own ^ 1) * slot_count * 4 + slot * 4
        before = tl.load(previous + e, mask=live, other=0)
        known = live & (before > 0)
        chained = mix(
            tl.load(base + before * 4 + 2, mask=known, other=0).to(tl.uint64, bitcast=True),
            tl.load(base + before * 4, mask=known, other=0).to(tl.uint64, bitcast=True),
            tl.load(base + before * 4 + 1, mask=known, other=0).to(tl.uint64, bitcast=True),
        ).to(tl.int64, bitcast=True)
        twin_hash = tl.load(twin + 2, mask=live & (before < 0), other=0)
        expected_hash = tl.where(before == 0, _ANCHOR, tl.where(before < 0, twin_hash, chained))
        wanted = tl.load(twin, mask=live, other=0)
        if HAS_TOKENS:
            given = tl.load(tokens + e, mask=live, other=-1)
            wanted = tl.where(given == -1, wanted, given)
        found = token * 0
        if DIGESTS == 1:
            found = tl.load(digests + e * 2 + half, mask=live, other=0)
        if DIGESTS == 2:
            sums = digests + half * 2 * sums_total + e
            low = tl.load(sums, mask=live, other=0).to(tl.int64) & 0xFFFFFFFF
            found = low | (tl.load(sums + sums_total, mask=live, other=0).to(tl.int64) << 32)
        reasons = _differing(
            token, position, stored_hash, stored_digest, wanted, expected_position, expected_hash, found
        )  # fmt: skip
        reasons = tl.where(slot == 0, reasons | _POSITION, reasons)
        bad = live & (reasons != 0)
        tl.atomic_add(checked + lane + half, tl.sum(live.to(tl.int64), 0))
        if COUNTS:
            names = tl.load(sequences + e, mask=live, other=0)
            count_sequences(by_sequence, numbers, names, lane + half, live)
        bad_count = tl.sum(bad.to(tl.int64), 0)
        if bad_count > 0:
            first = tl.atomic_add(violations, bad_count)
            number = first + tl.cumsum(bad.to(tl.int64), 0) - 1
            at = ring + number % ring_rows * FIELDS
            tl.store(at, slot * 0 + lane + half, mask=bad)
            tl.store(at + 1, reasons, mask=bad)
            tl.store(at + 2, slot, mask=bad)
            tl.store(at + 3, expected_position, mask=bad)
            tl.store(at + 4, position, mask=bad)
            tl.store(at + 5, token, mask=bad)
            tl.store(at + 6, wanted, mask=bad)
            tl.store(at + 7, stored_hash, mask=bad)
            tl.store(at + 8, expected_hash, mask=bad)
            tl.store(at + 9, stored_digest, mask=bad)
            tl.store(at + 10, found, mask=bad)
            tl.store(at + 11, tl.load(sequences + e, mask=bad, other=0), mask=bad)


@_jit(do_not_specialize=["first_lane", "total"])
def _write(
    stamps, slot_count, first_lane, slots, positions, tokens, starts, table, columns, rows, digests, words, total,
    HAS_DIGESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, half = tl.program_id(0), tl.program_id(1)
    base = stamps + (first_lane + half).to(tl.int64) * slot_count * 4
    words += half * total
    begin, end = tl.load(starts + b), tl.load(starts + b + 1)
    # All but the chain is done side by side; its words wait in a buffer.
    for first in range(begin, end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        live = t < end
        token, position = tl.load(tokens + t, mask=live, other=0), tl.load(positions + t, mask=live, other=0)
        word = _splitmix(token.to(tl.uint64, bitcast=True) ^ (position.to(tl.uint64, bitcast=True) << 32))
        tl.store(words + t, word.to(tl.int64, bitcast=True), mask=live)
        slot = tl.load(slots + t, mask=live, other=0)
        real = slot != 0
        tl.store(base + slot * 4, token, mask=real)
        tl.store(base + slot * 4 + 1, position, mask=real)
        digest = slot * 0
        if HAS_DIGESTS:
            digest = tl.load(digests + t * 2 + half, mask=live, other=0)
        tl.store(base + slot * 4 + 3, digest, mask=real)
    tl.debug_barrier()
    start = tl.load(positions + begin, mask=begin < end, other=0)
    previous = tl.load(table + tl.load(rows + b) * columns + start - 1, mask=start > 0, other=0).to(tl.int64)
    previous = tl.where((previous < 0) | (previous >= slot_count), 0, previous)
    before = base + previous * 4
    chain = mix(
        tl.load(before + 2).to(tl.uint64, bitcast=True),
        tl.load(before).to(tl.uint64, bitcast=True),
        tl.load(before + 1).to(tl.uint64, bitcast=True),
    )
    chain = tl.where(previous == 0, tl.full((), _ANCHOR, tl.uint64), chain)
    # The next word is on its way while this one is mixed in.
    slot = tl.load(slots + begin, mask=begin < end, other=0)
    word = tl.load(words + begin, mask=begin < end, other=0)
    for t in range(begin, end):
        next_slot = tl.load(slots + t + 1, mask=t + 1 < end, other=0)
        next_word = tl.load(words + t + 1, mask=t + 1 < end, other=0)
        tl.store(base + slot * 4 + 2, chain.to(tl.int64, bitcast=True), mask=slot != 0)
        chain = _splitmix(chain ^ word.to(tl.uint64, bitcast=True))
        slot, word = next_slot, next_word
