"""The canary's kernels: expand a plan, digest KV, verify stamps, write stamps; see the reference for what they mean.

S = slots, R, C = rows and columns of req_to_token, B = sequences, T = tokens written, E = entries verified,
L = layers, W = 16-bit lanes of one layer's row of one half, Q = ring rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add, inlined, intrinsic, ir
from serinus.kernels.ref.canary import ANCHOR, RING_FIELDS, UNKNOWN, check_digest

__all__ = ["canary_digest", "canary_plan", "canary_verify", "canary_write", "warm"]

_Digest = fields("ticket pools slots coefficients out count layers lanes slot_bytes step")
_Plan = fields(
    "ticket table rows lows highs first_pages offsets slots positions previous sequences sequence_count columns"
    " page_size stride"
)
_Verify = fields(
    "ticket stamps slot_count lane slots positions previous tokens digests sequences ring ring_rows violations"
    " checked count step"
)
_Write = fields("ticket stamps slot_count lane slots positions tokens starts previous digests sequence_count")
_DIGEST_STEP_BYTES = 1 << 18
_VERIFY_STEP = 2048
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ANCHOR = np.uint64(ANCHOR)


def canary_digest(layers_kv: Sequence[tuple[Tensor, Tensor]], slots_E: Tensor, coefficients_L22W: Tensor) -> Tensor:
    """Digests [E, 2] of K and V. Lanes whose coefficients are zero beyond the first 16 bytes are not read."""
    check_digest(layers_kv, coefficients_L22W)
    slots_E, coefficients_L22W = slots_E.contiguous(), coefficients_L22W.contiguous()
    out_E2 = torch.empty((len(slots_E), 2), dtype=torch.int64)
    pool = layers_kv[0][0]
    slot_bytes = pool[0].numel() * pool.element_size()
    pools = torch.tensor([half.data_ptr() for pair in layers_kv for half in pair], dtype=torch.int64)
    width = coefficients_L22W.shape[-1]
    lanes = width if width <= 8 or bool(coefficients_L22W[..., 8:].any()) else 8
    step = max(1, _DIGEST_STEP_BYTES // (2 * lanes * 2 * len(layers_kv)))
    arguments = _Digest(
        0, pools.data_ptr(), slots_E.data_ptr(), coefficients_L22W.data_ptr(), out_E2.data_ptr(), len(slots_E),
        len(layers_kv), lanes, slot_bytes, step,
    )  # fmt: skip
    _digest_body(VERSION)(arguments, 1 if len(slots_E) <= step else thread_count())
    return out_E2


def canary_plan(
    table_RC: Tensor,
    rows_B: Tensor,
    low_B: Tensor,
    high_B: Tensor,
    first_page_B: Tensor,
    offsets_B1: Tensor,
    entry_count: int,
    *,
    page_size: int,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, positions, previous slots and sequences of what to verify, [E] each."""
    out_4E = torch.empty((4, entry_count), dtype=torch.int64)
    rows_B, low_B, high_B = rows_B.contiguous(), low_B.contiguous(), high_B.contiguous()
    first_page_B, offsets_B1 = first_page_B.contiguous(), offsets_B1.contiguous()
    arguments = _Plan(
        0, table_RC.data_ptr(), rows_B.data_ptr(), low_B.data_ptr(), high_B.data_ptr(), first_page_B.data_ptr(),
        offsets_B1.data_ptr(), *(row.data_ptr() for row in out_4E), len(rows_B), table_RC.shape[1], page_size, stride,
    )  # fmt: skip
    _plan_body(VERSION)(arguments, 1 if entry_count <= 4 * _VERIFY_STEP else thread_count())
    return out_4E[0], out_4E[1], out_4E[2], out_4E[3]


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
) -> None:
    """Hold the stamps of lanes `lane` and `lane` + 1 against what they should be."""
    inputs = [t.contiguous() for t in (slots_E, positions_E, previous_E, sequences_E)]
    tokens = None if tokens_E is None else tokens_E.contiguous()
    digests = None if digests_E2 is None else digests_E2.contiguous()
    count = len(slots_E)
    arguments = _Verify(
        0, stamps_LS4.data_ptr(), stamps_LS4.shape[1], lane, inputs[0].data_ptr(), inputs[1].data_ptr(),
        inputs[2].data_ptr(), 0 if tokens is None else tokens.data_ptr(), 0 if digests is None else digests.data_ptr(),
        inputs[3].data_ptr(), ring_QF.data_ptr(), len(ring_QF), count_1.data_ptr(), checked_L.data_ptr(), count,
        _VERIFY_STEP,
    )  # fmt: skip
    _verify_body(VERSION)(arguments, 1 if count <= _VERIFY_STEP else thread_count())


def canary_write(
    stamps_LS4: Tensor,
    lane: int,
    slots_T: Tensor,
    positions_T: Tensor,
    tokens_T: Tensor,
    q_starts_B1: Tensor,
    previous_B: Tensor,
    digests_T2: Tensor | None,
) -> None:
    """Stamp new tokens in lanes `lane` and `lane` + 1."""
    inputs = [t.contiguous() for t in (slots_T, positions_T, tokens_T, q_starts_B1, previous_B)]
    digests = None if digests_T2 is None else digests_T2.contiguous()
    arguments = _Write(
        0, stamps_LS4.data_ptr(), stamps_LS4.shape[1], lane, *(t.data_ptr() for t in inputs),
        0 if digests is None else digests.data_ptr(), len(previous_B),
    )  # fmt: skip
    _write_body(VERSION)(arguments, 1 if len(slots_T) <= _VERIFY_STEP else thread_count())


def warm() -> None:
    """Compile, or load from the disk."""
    for body in (_digest_body, _plan_body, _verify_body, _write_body):
        body(VERSION)


@intrinsic
def _multiply_add(typingctx: Any, total: Any, lane: Any, factor: Any) -> Any:
    """total + lane * factor in 32 bits, which wrap; numba's own product of 32-bit numbers has 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], builder.mul(builder.zext(args[1], ir.IntType(32)), args[2]))

    return types.uint32(types.uint32, types.uint16, types.uint32), codegen


@intrinsic
def _added(typingctx: Any, digest: Any, low: Any, high: Any) -> Any:
    """The digest with two sums more, each in its own 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, narrow = ir.IntType(64), ir.IntType(32)
        low = builder.add(builder.trunc(args[0], narrow), args[1])
        high = builder.add(builder.trunc(builder.lshr(args[0], wide(32)), narrow), args[2])
        return builder.or_(builder.zext(low, wide), builder.shl(builder.zext(high, wide), wide(32)))

    return types.int64(types.int64, types.uint32, types.uint32), codegen


@inlined(fastmath=set())
def _splitmix(x: Any) -> Any:
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@inlined(fastmath=set())
def _mix(previous_hash: Any, token: Any, position: Any) -> Any:
    return _splitmix(previous_hash ^ _splitmix(token ^ (position << np.uint64(32))))


@cache
def _digest_body(version: int) -> Body:
    def digest_slots(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 10, np.int64)
        count, layers, lanes, slot_bytes, step = a[5], a[6], a[7], a[8], a[9]
        width = slot_bytes // 2
        pools = carray(at(a[1]), layers * 2, np.int64)
        slots = carray(at(a[2]), count, np.int64)
        out = carray(at(a[4]), count * 2, np.int64)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= count:
                break
            end = min(first + step, count)
            for e in range(first, end):
                out[e * 2] = 0
                out[e * 2 + 1] = 0
            # Strip by strip: the slots of a page lie side by side there, and the factors stay in the first cache.
            for strip in range(layers * 2):
                factors = carray(at(a[3] + strip * width * 8), lanes, np.uint32)
                others = carray(at(a[3] + strip * width * 8 + width * 4), lanes, np.uint32)
                for e in range(first, end):
                    row = carray(at(pools[strip] + slots[e] * slot_bytes), lanes, np.uint16)
                    low, high = np.uint32(0), np.uint32(0)
                    for i in range(lanes):
                        low = _multiply_add(low, row[i], factors[i])
                        high = _multiply_add(high, row[i], others[i])
                    out[e * 2 + strip % 2] = _added(out[e * 2 + strip % 2], low, high)

    return compile_body(digest_slots)


@cache
def _plan_body(version: int) -> Body:
    def expand(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 15, np.int64)
        count, columns, page_size, stride = a[11], a[12], a[13], a[14]
        rows = carray(at(a[2]), count, np.int64)
        lows = carray(at(a[3]), count, np.int64)
        highs = carray(at(a[4]), count, np.int64)
        first_pages = carray(at(a[5]), count, np.int64)
        offsets = carray(at(a[6]), count + 1, np.int64)
        total = offsets[count]
        slots = carray(at(a[7]), total, np.int64)
        positions = carray(at(a[8]), total, np.int64)
        previous = carray(at(a[9]), total, np.int64)
        sequences = carray(at(a[10]), total, np.int64)
        while True:
            b = fetch_add(a.ctypes.data, 1)
            if b >= count:
                break
            row = carray(at(a[1] + rows[b] * columns * 4), columns, np.int32)
            for e in range(offsets[b], offsets[b + 1]):
                inside = e - offsets[b]
                position = (first_pages[b] + inside // page_size * stride) * page_size + inside % page_size
                positions[e] = position
                sequences[e] = b
                if position < lows[b] or position >= highs[b]:
                    slots[e] = 0
                    previous[e] = 0
                    continue
                slots[e] = row[position]
                if position == 0:
                    previous[e] = 0
                elif position == lows[b]:
                    previous[e] = UNKNOWN
                else:
                    previous[e] = row[position - 1]

    return compile_body(expand)


@cache
def _verify_body(version: int) -> Body:
    def verify(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 16, np.int64)
        slot_count, lane, count, step = a[2], a[3], a[14], a[15]
        slots = carray(at(a[4]), count, np.int64)
        positions = carray(at(a[5]), count, np.int64)
        previous = carray(at(a[6]), count, np.int64)
        sequences = carray(at(a[9]), count, np.int64)
        ring = carray(at(a[10]), a[11] * RING_FIELDS, np.int64)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= count:
                break
            end = min(first + step, count)
            for half in range(2):
                stamps = carray(at(a[1] + (lane + half) * slot_count * 32), slot_count * 4, np.int64)
                checked = 0
                for e in range(first, end):
                    slot = slots[e]
                    if slot == 0:
                        continue
                    checked += 1
                    token, position = stamps[slot * 4], stamps[slot * 4 + 1]
                    stored_hash, stored_digest = stamps[slot * 4 + 2], stamps[slot * 4 + 3]
                    before = previous[e]
                    if before == 0:
                        expected_hash = np.int64(_ANCHOR)
                    elif before == UNKNOWN:
                        expected_hash = stored_hash
                    else:
                        expected_hash = np.int64(
                            _mix(
                                np.uint64(stamps[before * 4 + 2]),
                                np.uint64(stamps[before * 4]),
                                np.uint64(stamps[before * 4 + 1]),
                            )
                        )
                    wanted = token
                    if a[7] != 0:
                        given = carray(at(a[7]), count, np.int64)[e]
                        if given != UNKNOWN:
                            wanted = given
                    found = stored_digest
                    if a[8] != 0:
                        found = carray(at(a[8]), count * 2, np.int64)[e * 2 + half]
                    reasons = 0
                    if stored_hash != expected_hash:
                        reasons |= 1
                    if position != positions[e]:
                        reasons |= 2
                    if token != wanted:
                        reasons |= 4
                    if stored_digest != found:
                        reasons |= 8
                    if reasons != 0:
                        base = fetch_add(a[12], 1) % a[11] * RING_FIELDS
                        ring[base] = lane + half
                        ring[base + 1] = reasons
                        ring[base + 2] = slot
                        ring[base + 3] = positions[e]
                        ring[base + 4] = position
                        ring[base + 5] = token
                        ring[base + 6] = wanted
                        ring[base + 7] = stored_hash
                        ring[base + 8] = expected_hash
                        ring[base + 9] = stored_digest
                        ring[base + 10] = found
                        ring[base + 11] = sequences[e]
                fetch_add(a[13] + (lane + half) * 8, checked)

    return compile_body(verify)


@cache
def _write_body(version: int) -> Body:
    def write(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 11, np.int64)
        slot_count, lane, count = a[2], a[3], a[10]
        starts = carray(at(a[7]), count + 1, np.int64)
        previous = carray(at(a[8]), count, np.int64)
        total = starts[count]
        slots = carray(at(a[4]), total, np.int64)
        positions = carray(at(a[5]), total, np.int64)
        tokens = carray(at(a[6]), total, np.int64)
        while True:
            item = fetch_add(a.ctypes.data, 1)
            if item >= 2 * count:
                break
            b, half = item // 2, item % 2
            stamps = carray(at(a[1] + (lane + half) * slot_count * 32), slot_count * 4, np.int64)
            before = previous[b] * 4
            chain = _ANCHOR
            if before != 0:
                chain = _mix(np.uint64(stamps[before + 2]), np.uint64(stamps[before]), np.uint64(stamps[before + 1]))
            for t in range(starts[b], starts[b + 1]):
                slot = slots[t] * 4
                if slot != 0:
                    stamps[slot] = tokens[t]
                    stamps[slot + 1] = positions[t]
                    stamps[slot + 2] = np.int64(chain)
                    stamps[slot + 3] = 0
                    if a[9] != 0:
                        stamps[slot + 3] = carray(at(a[9]), total * 2, np.int64)[t * 2 + half]
                chain = _mix(chain, np.uint64(tokens[t]), np.uint64(positions[t]))

    return compile_body(write)
