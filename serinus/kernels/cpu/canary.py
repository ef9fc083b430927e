"""The canary's kernels: expand a plan, digest KV, verify stamps, write stamps; see the reference for what they mean.

S = slots, R, C = rows and columns of req_to_token, B = sequences, T = tokens written, E = entries verified,
L = layers, W = 16-bit lanes of one layer's row of one half, Q = ring rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.canary import ANCHOR, RING_FIELDS, UNKNOWN, DuePages, Reason, differing
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import LayersKv
from serinus.kernels.cpu.body import VERSION, Body, address_of, compile_body, fields, thread_count
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.digest import BLOCK, ROWS, add_packed, ask_for, digest_1, digest_8, digest_rows
from serinus.kernels.cpu.scalar import at, carray, count_sequence, fetch_add, inlined, mix

Digest = fields("ticket pools slots coefficients out count layers lanes slot_bytes step ahead adds halves")
"""`adds`: the sums are added to what `out` holds. `halves`: pools of each layer."""
Due = fields("ticket reads out count page_size live entry_count slot_count bound")
"""The last four are answers. `out`: [7, live], and behind [7, count] what is bound, [5, bound]."""
Plan = fields("ticket table due out sequence_count entry_count columns page_size slot_count")
"""Entries of rows from `slot_count` on, or below 0, are slot 0: damage, and no address."""
Verify = fields(
    "ticket stamps slot_count lane slots positions previous tokens digests names ring ring_rows violations"
    " checked count step sums cuts sums_stride halves by_sequence numbers"
)
"""`sums`: sums_P22E of `watched_attention`, of P `cuts`, with room for `sums_stride` entries; they are added to the
digests. `halves`: 2, or 1 of latent rows, which have no lanes of V. `by_sequence`: counts by sequence, of so many
`numbers`; 0 = none are asked for."""
Write = fields(
    "ticket stamps slot_count lane slots positions tokens starts rows table columns digests sequence_count total halves"
)
_AHEAD_BYTES = 8192
"""How far before its use a row is asked for."""
_DIGEST_STEP = 16
_DIGEST_ALONE_BYTES = 1 << 18
VERIFY_STEP = 2048
"""Entries that a thread verifies at a time."""
_PLAN_ALONE = 4 * VERIFY_STEP
_ANCHOR = np.uint64(ANCHOR)
_POSITION = int(Reason.VERIFY_POSITION)


def canary_digest(layers_kv: LayersKv, slots_E: Tensor, coefficients_L22W: Tensor) -> Tensor:
    """Digests [E, 2] of K and V of all layers' rows in some slots; of latent rows that of V is 0."""
    check_digest(layers_kv, coefficients_L22W)
    slots_E, coefficients_L22W = slots_E.contiguous(), coefficients_L22W.contiguous()
    out_E2 = torch.empty((len(slots_E), 2), dtype=torch.int64)
    addresses = [half.data_ptr() for halves in layers_kv for half in halves]
    pools = (ctypes.c_int64 * len(addresses))(*addresses)
    pool = layers_kv[0][0]
    arguments = Digest(
        0, ctypes.addressof(pools), slots_E.data_ptr(), coefficients_L22W.data_ptr(), out_E2.data_ptr(), len(slots_E),
        len(layers_kv), coefficients_L22W.shape[-1], pool.stride(0) * pool.element_size(), 0, 0, 0,
        len(layers_kv[0]),
    )  # fmt: skip
    run_digest(arguments)
    return out_E2


def canary_due(reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
    """What of these reads is due, in arrays of its own."""
    return DueWords().work_out(np.ascontiguousarray(reads_6B), page_size)


class DueWords:
    """`canary_due` into words that stay where they are: all that it returned before is overwritten."""

    def __init__(self) -> None:
        self._arguments = Due(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._start = _due_body(VERSION).alone(self._arguments)
        self._words: NDArray[np.int64] = np.empty(0, np.int64)
        self._size = (-1, -1)
        """Columns and bound sequences of the arrays."""
        self.columns_7B, self.bound_5B = self._words.reshape(7, 0), self._words.reshape(5, 0)
        self.columns_at, self.bound_at = 0, 0
        """Where these two lie."""
        self._reads_6B: NDArray[np.int64] | None = None
        """What was given last: its address is noted."""

    def work_out(self, reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
        """`canary_due`; its arrays are these. `reads_6B`: contiguous, and writable."""
        arguments, count = self._arguments, reads_6B.shape[1]
        if count != arguments.count:
            self._words, self._size = np.empty(12 * count, np.int64), (-1, -1)
            arguments.count, arguments.out = count, address_of(self._words)
        if reads_6B is not self._reads_6B:
            self._reads_6B, arguments.reads = reads_6B, address_of(reads_6B)
        arguments.page_size = page_size
        self._start()
        size = live, bound = arguments.live, arguments.bound
        if size != self._size:
            self._size, begin = size, 7 * count
            self.columns_7B = self._words[: 7 * live].reshape(7, live)
            self.bound_5B = self._words[begin : begin + 5 * bound].reshape(5, bound)
            self.columns_at, self.bound_at = arguments.out, arguments.out + begin * 8
        return DuePages(self.columns_7B, arguments.entry_count, arguments.slot_count, self.bound_5B)


def canary_plan(
    table_RC: Tensor, due_7B: Tensor, entry_count: int, *, page_size: int, slot_count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, positions, previous slots and names of what to verify, [E] each."""
    out_4E = torch.empty((4, entry_count), dtype=torch.int64)
    due_7B = due_7B.contiguous()
    arguments = Plan(
        0, table_RC.data_ptr(), due_7B.data_ptr(), out_4E.data_ptr(), due_7B.shape[1], entry_count, table_RC.shape[1],
        page_size, slot_count,
    )  # fmt: skip
    plan_call(arguments).run()
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
    by_sequence_N4: Tensor | None = None,
) -> None:
    """Hold the stamps of lanes `lane` and `lane` + 1 against what they should be."""
    inputs = [t.contiguous() for t in (slots_E, positions_E, previous_E, sequences_E)]
    tokens = None if tokens_E is None else tokens_E.contiguous()
    digests = None if digests_E2 is None else digests_E2.contiguous()
    count = len(slots_E)
    arguments = Verify(
        0, stamps_LS4.data_ptr(), stamps_LS4.shape[1], lane, inputs[0].data_ptr(), inputs[1].data_ptr(),
        inputs[2].data_ptr(), 0 if tokens is None else tokens.data_ptr(), 0 if digests is None else digests.data_ptr(),
        inputs[3].data_ptr(), ring_QF.data_ptr(), len(ring_QF), count_1.data_ptr(), checked_L.data_ptr(), count,
        VERIFY_STEP, 0, 0, 0, len(stamps_LS4) // 2, *counts_at(by_sequence_N4),
    )  # fmt: skip
    verify_call(arguments).run()


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
    inputs = [t.contiguous() for t in (slots_T, positions_T, tokens_T, q_starts_B1, rows_B)]
    digests = None if digests_T2 is None else digests_T2.contiguous()
    arguments = Write(
        0, stamps_LS4.data_ptr(), stamps_LS4.shape[1], lane, *(t.data_ptr() for t in inputs), table_RC.data_ptr(),
        table_RC.shape[1], 0 if digests is None else digests.data_ptr(), len(rows_B), len(slots_T),
        len(stamps_LS4) // 2,
    )  # fmt: skip
    write_call(arguments).run()


def warm() -> None:
    """Compile, or load from the disk."""
    for body in (_digest_body, _due_body, _plan_body, _verify_body, _write_body):
        body(VERSION)


def counts_at(by_sequence_N4: Tensor | None) -> tuple[int, int]:
    """Where the counts by sequence lie, and of how many numbers they are."""
    return (0, 0) if by_sequence_N4 is None else (by_sequence_N4.data_ptr(), len(by_sequence_N4))


def plan_call(arguments: ctypes.Structure) -> KernelCall:
    """Expand a plan (Plan)."""
    return KernelCall(body=_plan_body(VERSION), arguments=arguments, threads=plan_threads(arguments.entry_count))


def verify_call(arguments: ctypes.Structure) -> KernelCall:
    """Hold stamps against what they should be (Verify)."""
    return KernelCall(body=_verify_body(VERSION), arguments=arguments, threads=verify_threads(arguments.count))


def write_call(arguments: ctypes.Structure) -> KernelCall:
    """Stamp new tokens (Write)."""
    return KernelCall(body=_write_body(VERSION), arguments=arguments, threads=verify_threads(arguments.total))


def digest_call(arguments: ctypes.Structure) -> KernelCall:
    """Digest the rows of some slots (Digest)."""
    return KernelCall(body=_digest_body(VERSION), arguments=arguments, threads=cut_digest(arguments))


def plan_threads(entry_count: int) -> int:
    """Threads that expand a plan of so many entries."""
    return 1 if entry_count <= _PLAN_ALONE else thread_count()


def verify_threads(count: int) -> int:
    """Threads that verify, or stamp, so many slots."""
    return 1 if count <= VERIFY_STEP else thread_count()


def cut_digest(arguments: ctypes.Structure, *, alone: bool = False) -> int:
    """Say how the rows that are to be digested (Digest) are cut; the threads for them. `alone`: the calling one,
    however many they are."""
    row_bytes, count = arguments.lanes * 2, arguments.count
    alone = alone or count * row_bytes * arguments.halves * arguments.layers <= _DIGEST_ALONE_BYTES
    threads = 1 if alone else thread_count()
    step = max(ROWS, min(_DIGEST_STEP, -(-count // (threads * ROWS)) * ROWS))
    arguments.step, arguments.ahead = step, min(step, -(-_AHEAD_BYTES // (row_bytes * ROWS)) * ROWS)
    return threads


def run_digest(arguments: ctypes.Structure, *, alone: bool = False) -> None:
    """Digest the rows of some slots (Digest); `alone` as above."""
    _digest_body(VERSION)(arguments, cut_digest(arguments, alone=alone))


_differing = inlined(fastmath=set())(differing)


@cache
def _digest_body(version: int) -> Body:
    def digest_slots(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 13, np.int64)
        halves = a[12]
        count, strips, lanes, slot_bytes, step, ahead = a[5], a[6] * halves, a[7], a[8], a[9], a[10]
        blocks, whole = lanes // BLOCK, lanes // 8
        pools = carray(at(a[1]), strips, np.int64)
        slots = carray(at(a[2]), count, np.int64)
        out = carray(at(a[4]), count * 2, np.int64)
        rows = np.empty(2 * ROWS, np.int64)
        sums = np.empty(ROWS, np.int64)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= count:
                break
            end = min(first + step, count)
            if a[11] == 0:
                for e in range(first * 2, end * 2):
                    out[e] = 0
            # Strip by strip: the slots of a page lie side by side there, and the factors stay in the first cache.
            for strip in range(strips):
                factors = a[3] + strip * lanes * 8
                others = factors + lanes * 4
                following = pools[min(strip + 1, strips - 1)]
                if lanes == 8:
                    # One line of each row: nothing but latency, so those of the next strip are asked for meanwhile.
                    for e in range(first, end):
                        at_slot = slots[e] * slot_bytes
                        ask_for(following + at_slot)
                        total = digest_8(pools[strip] + at_slot, factors, others)
                        out[e * 2 + strip % halves] = add_packed(out[e * 2 + strip % halves], total)
                    continue
                for e in range(first, end, ROWS):
                    for r in range(ROWS):
                        rows[r] = pools[strip] + slots[min(e + r, end - 1)] * slot_bytes
                        later, base = e + ahead + r, pools[strip]
                        if e + ahead >= end:
                            later, base = first + e + ahead + r - end, following
                        rows[ROWS + r] = base + slots[min(later, end - 1)] * slot_bytes
                    digest_rows(rows.ctypes.data, factors, others, blocks, sums.ctypes.data, 1)
                    for r in range(min(ROWS, end - e)):
                        total = sums[r]
                        for i in range(blocks * (BLOCK // 8), whole):
                            total = add_packed(total, digest_8(rows[r] + i * 16, factors + i * 32, others + i * 32))
                        for i in range(whole * 8, lanes):
                            total = add_packed(total, digest_1(rows[r] + i * 2, factors + i * 4, others + i * 4))
                        at_sum = (e + r) * 2 + strip % halves
                        out[at_sum] = add_packed(out[at_sum], total)

    return compile_body(digest_slots)


@cache
def _due_body(version: int) -> Body:
    def due(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 9, np.int64)
        count, page_size = a[3], a[4]
        reads = carray(at(a[1]), 6 * count, np.int64)
        live, bound = 0, 0
        for b in range(count):
            bound += reads[3 * count + b] > 0
            live += _due_count(reads[2 * count + b], reads[3 * count + b], reads[4 * count + b], page_size)[1] > 0
        out = carray(at(a[2]), 7 * count, np.int64)
        to_bind = carray(at(a[2] + 56 * count), 5 * count, np.int64)
        i, j, entries, slots = 0, 0, 0, 0
        for b in range(count):
            low, high, stride = reads[2 * count + b], reads[3 * count + b], reads[4 * count + b]
            first, pages = _due_count(low, high, stride, page_size)
            if pages > 0:
                out[i], out[live + i], out[2 * live + i], out[3 * live + i] = reads[b], reads[count + b], low, high
                out[4 * live + i], out[5 * live + i], out[6 * live + i] = first, stride, entries
                entries += pages * page_size
                last = first + (pages - 1) * stride
                slots += pages * page_size - max(0, low - first * page_size)
                slots -= max(0, (last + 1) * page_size - high)
                i += 1
            if high > 0:
                to_bind[j], to_bind[bound + j], to_bind[2 * bound + j] = reads[b], reads[count + b], low
                to_bind[3 * bound + j], to_bind[4 * bound + j] = high - 1, reads[5 * count + b]
                j += 1
        a[5], a[6], a[7], a[8] = live, entries, slots, bound

    return compile_body(due)


@inlined(fastmath=set())
def _due_count(low: Any, high: Any, stride: Any, page_size: Any) -> Any:
    """(first page due, how many)."""
    start, end = low // page_size, (high + page_size - 1) // page_size
    turn = (high - start) % stride
    first = start + (turn if turn >= 0 else turn + stride)
    return first, (0 if high <= low or first >= end else (end - first + stride - 1) // stride)


@cache
def _plan_body(version: int) -> Body:
    def expand(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 9, np.int64)
        count, total, columns, page_size, slot_count = a[4], a[5], a[6], a[7], a[8]
        due = carray(at(a[2]), 7 * count, np.int64)
        out = carray(at(a[3]), 4 * total, np.int64)
        while True:
            b = fetch_add(a.ctypes.data, 1)
            if b >= count:
                break
            row = carray(at(a[1] + due[count + b] * columns * 4), columns, np.int32)
            low, high = due[2 * count + b], due[3 * count + b]
            first, step = due[4 * count + b] * page_size, due[5 * count + b] * page_size
            end, inside = total if b + 1 == count else due[6 * count + b + 1], 0
            for e in range(due[6 * count + b], end):
                if inside == page_size:
                    first, inside = first + step, 0
                position, inside = first + inside, inside + 1
                out[3 * total + e] = due[b]
                if position < low or position >= high:
                    out[e] = 0
                    out[total + e] = -1
                    out[2 * total + e] = 0
                    continue
                out[total + e] = position
                out[e] = row[position] if 0 <= row[position] < slot_count else 0
                if position == 0:
                    out[2 * total + e] = 0
                elif position == low:
                    out[2 * total + e] = UNKNOWN
                else:
                    out[2 * total + e] = row[position - 1] if 0 <= row[position - 1] < slot_count else 0

    return compile_body(expand)


@cache
def _verify_body(version: int) -> Body:
    def verify(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 22, np.int64)
        slot_count, lane, count, step, halves = a[2], a[3], a[14], a[15], a[19]
        slots = carray(at(a[4]), count, np.int64)
        positions = carray(at(a[5]), count, np.int64)
        previous = carray(at(a[6]), count, np.int64)
        names = carray(at(a[9]), count, np.int64)
        ring = carray(at(a[10]), a[11] * RING_FIELDS, np.int64)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= count:
                break
            end = min(first + step, count)
            for e in range(first, end):  # pages lie far apart: their stamps are asked for before any of them is needed
                for half in range(halves):
                    of_lane = a[1] + (lane // 2 * halves + half) * slot_count * 32
                    ask_for(of_lane + slots[e] * 32)
                    ask_for(of_lane + previous[e] * 32)
            for half in range(halves):
                own = lane // 2 * halves + half
                stamps = carray(at(a[1] + own * slot_count * 32), slot_count * 4, np.int64)
                twin = carray(at(a[1] + (own ^ 1) * slot_count * 32), slot_count * 4, np.int64)
                checked, counted = 0, 0
                for e in range(first, end):
                    slot = slots[e]
                    if e > first and names[e] != names[e - 1]:
                        count_sequence(a[20], a[21], names[e - 1], lane + half, checked - counted)
                        counted = checked
                    if positions[e] < 0:
                        continue
                    checked += 1
                    token, position = stamps[slot * 4], stamps[slot * 4 + 1]
                    stored_hash, stored_digest = stamps[slot * 4 + 2], stamps[slot * 4 + 3]
                    before = previous[e]
                    if before == 0:
                        expected_hash = np.int64(_ANCHOR)
                    elif before == UNKNOWN:
                        expected_hash = twin[slot * 4 + 2]
                    else:
                        expected_hash = np.int64(
                            mix(
                                np.uint64(stamps[before * 4 + 2]),
                                np.uint64(stamps[before * 4]),
                                np.uint64(stamps[before * 4 + 1]),
                            )
                        )
                    wanted = twin[slot * 4]
                    if a[7] != 0:
                        given = carray(at(a[7]), count, np.int64)[e]
                        if given != UNKNOWN:
                            wanted = given
                    found = np.int64(0)
                    if a[8] != 0:
                        found = carray(at(a[8]), count * 2, np.int64)[e * 2 + half]
                    for cut in range(a[17]):
                        sums = carray(at(a[16] + (cut * 4 + half * 2) * a[18] * 4), a[18] * 2, np.uint32)
                        found = add_packed(found, np.int64(sums[e]) | np.int64(sums[a[18] + e]) << np.int64(32))
                    reasons = _differing(
                        token, position, stored_hash, stored_digest, wanted, positions[e], expected_hash, found
                    )
                    if slot == 0:
                        reasons |= _POSITION
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
                        ring[base + 11] = names[e]
                count_sequence(a[20], a[21], names[end - 1], lane + half, checked - counted)
                fetch_add(a[13] + (lane + half) * 8, checked)

    return compile_body(verify)


@cache
def _write_body(version: int) -> Body:
    def write(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 15, np.int64)
        slot_count, lane, columns, count, total, halves = a[2], a[3], a[10], a[12], a[13], a[14]
        starts = carray(at(a[7]), count + 1, np.int64)
        rows = carray(at(a[8]), count, np.int64)
        slots = carray(at(a[4]), total, np.int64)
        positions = carray(at(a[5]), total, np.int64)
        tokens = carray(at(a[6]), total, np.int64)
        while True:
            item = fetch_add(a.ctypes.data, 1)
            if item >= halves * count:
                break
            b, half = item // halves, item % halves
            stamps = carray(at(a[1] + (lane // 2 * halves + half) * slot_count * 32), slot_count * 4, np.int64)
            before = np.int64(0)
            if starts[b] < starts[b + 1] and positions[starts[b]] > 0:
                row = carray(at(a[9] + rows[b] * columns * 4), columns, np.int32)
                before = np.int64(row[positions[starts[b]] - 1]) * 4
                if before < 0 or before >= slot_count * 4:
                    before = np.int64(0)
            chain = _ANCHOR
            if before != 0:
                chain = mix(np.uint64(stamps[before + 2]), np.uint64(stamps[before]), np.uint64(stamps[before + 1]))
            for t in range(starts[b], starts[b + 1]):
                slot = slots[t] * 4
                if slot != 0:
                    stamps[slot] = tokens[t]
                    stamps[slot + 1] = positions[t]
                    stamps[slot + 2] = np.int64(chain)
                    stamps[slot + 3] = 0
                    if a[11] != 0:
                        stamps[slot + 3] = carray(at(a[11]), total * 2, np.int64)[t * 2 + half]
                chain = mix(chain, np.uint64(tokens[t]), np.uint64(positions[t]))

    return compile_body(write)
