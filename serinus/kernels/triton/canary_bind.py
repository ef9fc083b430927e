"""The canary's check of the last slots that sequences read; see the reference for what it means.

No call waits for the device. S = slots, B = sequences, Q = ring rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.canary import RING_FIELDS, Reason, first_lane
from serinus.kernels.triton.canary import by_sequence, count_sequences, mix

_BLOCK = 256


def canary_bind(
    stamps_LS4: Tensor,
    lane: int,
    slots_B: Tensor,
    positions_B: Tensor,
    chains_B: Tensor,
    sequences_B: Tensor,
    ring_QF: Tensor,
    count_1: Tensor,
    checked_L: Tensor,
    by_sequence_N4: Tensor | None = None,
) -> None:
    """Hold the hash behind the last slots that sequences read against those of the requests."""
    count = len(slots_B)
    if not count:
        return
    first, halves = first_lane(stamps_LS4, lane)
    counts = () if by_sequence_N4 is None else (by_sequence_N4,)
    _bind[(triton.cdiv(count, _BLOCK), halves)](
        stamps_LS4, stamps_LS4.shape[1], lane, first, slots_B.contiguous(), positions_B.contiguous(),
        chains_B.contiguous(), sequences_B.contiguous(), ring_QF, len(ring_QF), count_1, checked_L, count,
        *by_sequence(counts, checked_L), COUNTS=bool(counts), FIELDS=RING_FIELDS, BLOCK=_BLOCK,
    )  # fmt: skip


_jit: Any = triton.jit
_CHAIN_HASH, _POSITION = tl.constexpr(int(Reason.VERIFY_CHAIN_HASH)), tl.constexpr(int(Reason.VERIFY_POSITION))


@_jit(do_not_specialize=["lane", "first_lane", "count", "numbers"])
def _bind(
    stamps, slot_count, lane, first_lane, slots, positions, chains, sequences, ring, ring_rows, violations, checked,
    count, by_sequence, numbers, COUNTS: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    half = tl.program_id(1)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(positions + b, mask=b < count, other=-1)
    live = read >= 0
    slot = tl.load(slots + b, mask=live, other=0)
    slot = tl.where((slot < 0) | (slot >= slot_count), 0, slot)
    base = stamps + (first_lane + half).to(tl.int64) * slot_count * 4 + slot * 4
    token, position = tl.load(base, mask=live, other=0), tl.load(base + 1, mask=live, other=0)
    stored_hash, digest = tl.load(base + 2, mask=live, other=0), tl.load(base + 3, mask=live, other=0)
    behind = mix(
        stored_hash.to(tl.uint64, bitcast=True), token.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    ).to(tl.int64, bitcast=True)
    wanted = tl.load(chains + b, mask=live, other=0)
    bad = live & (behind != wanted)
    tl.atomic_add(checked + lane + half, tl.sum(live.to(tl.int64), 0))
    if COUNTS:
        count_sequences(by_sequence, numbers, tl.load(sequences + b, mask=live, other=0), lane + half, live)
    bad_count = tl.sum(bad.to(tl.int64), 0)
    if bad_count > 0:
        first = tl.atomic_add(violations, bad_count)
        at = ring + (first + tl.cumsum(bad.to(tl.int64), 0) - 1) % ring_rows * FIELDS
        tl.store(at, slot * 0 + lane + half, mask=bad)
        tl.store(at + 1, (position != read).to(tl.int64) * _POSITION + _CHAIN_HASH, mask=bad)
        tl.store(at + 2, slot, mask=bad)
        tl.store(at + 3, read, mask=bad)
        tl.store(at + 4, position, mask=bad)
        tl.store(at + 5, token, mask=bad)
        tl.store(at + 6, token, mask=bad)
        tl.store(at + 7, behind, mask=bad)
        tl.store(at + 8, wanted, mask=bad)
        tl.store(at + 9, digest, mask=bad)
        tl.store(at + 10, digest, mask=bad)
        tl.store(at + 11, tl.load(sequences + b, mask=bad, other=0), mask=bad)
