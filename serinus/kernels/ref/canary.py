"""The canary's kernels: expand a plan, digest KV, verify stamps, write stamps. The specification.

A stamp is four int64 per slot and lane: token, position, hash of all before it, digest of its KV. Lanes of one part:
HEAD_K, HEAD_V, TAIL_K, TAIL_V (0 .. 3); of a part with latent rows HEAD_K and TAIL_K alone.

Shapes: S = slots, R, C = rows and columns of req_to_token, B = sequences, T = tokens written, E = entries verified,
L = layers, W = 16-bit lanes that are digested of one layer's row of one half (all, or the first 8), Q = ring rows.

The chain: next.previous_hash = mix(previous_hash, token, position); at position 0 it is ANCHOR. Content only: it holds
wherever the page lies and whichever requests share it.
The digest: two sums over all 16-bit lanes of (lane * odd coefficient) modulo 2**32, packed as low | high << 32. It is
linear: digests of layers and heads add up (add_digests), and the slot number does not enter. A change within one
lane is always seen; any other fixed change is missed with a chance of 2**-32 or less. Bug detection, no cryptography.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import slots_in
from serinus.kernels.canary import ANCHOR, SEQUENCES, UNKNOWN, DuePages, Reason, differing, first_lane
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import LayersKv, WrittenRows
from serinus.kernels.pool_rows import rows_of
from serinus.kernels.splitmix import splitmix

__all__ = [
    "add_digests",
    "canary_digest",
    "canary_due",
    "canary_plan",
    "canary_verify",
    "canary_write",
    "count_by_sequence",
    "digest_values",
    "mix",
    "note",
]

_MASK32 = (1 << 32) - 1
_PIECE_SLOTS = 1024


def mix(previous_hash: Tensor, token: Tensor, position: Tensor) -> Tensor:
    """The next hash of a chain, int64: splitmix64(previous_hash ^ splitmix64(token ^ position << 32))."""
    return splitmix(previous_hash ^ splitmix(token ^ (position << 32)))


def canary_digest(layers_kv: LayersKv, slots_E: Tensor, coefficients_L22W: Tensor) -> Tensor:
    """Digests [E, 2] int64 (of K, of V) of all layers' rows in some slots. Of latent rows that of V is 0.

    Args:
        layers_kv: pools (pool_rows.py), in the order of the coefficients.
        slots_E: int64.
        coefficients_L22W: of `digest_coefficients`, on the pools' device. Lanes of a row behind W are not read.
    Raises:
        ValueError: sizes disagree.
    Cost: E * L * 2 * W * 2 bytes read.
    """
    check_digest(layers_kv, coefficients_L22W)
    sums_E22 = torch.zeros((len(slots_E), 2, 2), dtype=torch.int64, device=slots_E.device)
    for layer, halves in enumerate(layers_kv):
        for half, pool in enumerate(halves):
            factors_2W = coefficients_L22W[layer, half].long() & _MASK32
            for at in range(0, len(slots_E), _PIECE_SLOTS):
                rows_EX = rows_of(pool, slots_E[at : at + _PIECE_SLOTS]).flatten(1).view(torch.int16)
                lanes_EW = rows_EX[:, : coefficients_L22W.shape[-1]].long() & 0xFFFF
                products = (lanes_EW[:, None, :] * factors_2W[None]) & _MASK32
                sums_E22[at : at + _PIECE_SLOTS, half] += products.sum(-1)
    sums_E22 &= _MASK32
    return sums_E22[..., 0] | (sums_E22[..., 1] << 32)


def add_digests(one: Tensor, other: Tensor) -> Tensor:
    """The digest of all that either covers (disjoint layers or heads): the two sums each modulo 2**32."""
    low = (one + other) & _MASK32
    high = ((one >> 32) + (other >> 32)) & _MASK32
    return low | (high << 32)


def digest_values(written: WrittenRows, *halves_TX: Tensor) -> None:
    """Add the digests of rows that are about to be stored: one layer's keys and values, or latent rows, [T, ...]
    contiguous."""
    rows_T = torch.arange(len(halves_TX[0]), device=halves_TX[0].device)
    found_T2 = canary_digest([halves_TX], rows_T, written.coefficients_22W[None])
    written.sums_T2.copy_(add_digests(written.sums_T2, found_T2))


def canary_due(reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
    """Which pages of each sequence are due in a step; on the host, for every column.

    Args:
        reads_6B: name, row, low and high (positions [low, high) may be verified), stride and chain hash of each
            sequence: page p is due where high % stride == p % stride. Decoding, `high` grows by one in each step of the
            sequence, so that each page is due in one of any `stride` steps of its own, in whatever steps of the engine
            they are.
    Returns: columns in the same order; slots are verified that are within [low, high).
    """
    names, rows, low, high, strides, chains = reads_6B
    start_page, end_page = low // page_size, -(-high // page_size)
    first_page = start_page + (high - start_page) % strides
    page_count = np.maximum((end_page - first_page + strides - 1) // strides, 0)
    page_count[high <= low] = 0
    last_page = first_page + (page_count - 1) * strides
    # Whole pages, less what lies before `low` on the first and behind `high` on the last.
    entries = page_count * page_size
    before = (low - start_page * page_size) * (first_page == start_page)
    behind = (end_page * page_size - high) * (last_page == end_page - 1)
    slot_count = int(((entries - before - behind) * (page_count > 0)).sum())
    offsets = np.cumsum(entries) - entries
    due_7B = np.stack((names, rows, low, high, first_page, strides, offsets))[:, page_count > 0]
    bound_5B = np.stack((names, rows, low, high - 1, chains))[:, high > 0]
    return DuePages(np.ascontiguousarray(due_7B), int(entries.sum()), slot_count, np.ascontiguousarray(bound_5B))


def canary_plan(
    table_RC: Tensor, due_7B: Tensor, entry_count: int, *, page_size: int, slot_count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What to verify: of each sequence the pages that are due, within [low, high).

    Args:
        table_RC: req_to_token of one part, int32.
        due_7B: int64, a column a sequence: its name (only handed on), row, low and high (positions that may be read),
            page index to begin at, stride in pages, where its entries begin (ascending by whole pages from 0).
        entry_count: E, known to the host, so that no call waits for the device.
        slot_count: S; entries of the table outside of it are slot 0: damage, and no address.
    Returns: slots_E, positions_E (-1 outside [low, high): not verified), previous_E (slot of the position before; 0 at
        position 0; UNKNOWN at `low` otherwise), names_E. All int64.
    Cost: one read of the table's entries.
    """
    names_B, rows_B, low_B, high_B, first_page_B, stride_B, offsets_B = due_7B
    entries_E = torch.arange(entry_count, dtype=torch.int64, device=due_7B.device)
    index_E = torch.bucketize(entries_E, offsets_B[1:].contiguous(), right=True)
    inside_E = entries_E - offsets_B[index_E]
    pages_E = first_page_B[index_E] + inside_E // page_size * stride_B[index_E]
    positions_E = pages_E * page_size + inside_E % page_size
    low_E = low_B[index_E]
    due_E = (positions_E >= low_E) & (positions_E < high_B[index_E])
    read_E = torch.where(due_E, positions_E, 0)
    rows_E = rows_B[index_E]
    slots_E = torch.where(due_E, slots_in(table_RC[rows_E, read_E], slot_count), 0)
    previous_E = slots_in(table_RC[rows_E, (read_E - 1).clamp_min(0)], slot_count)
    previous_E = torch.where(positions_E == low_E, UNKNOWN, previous_E)
    previous_E = torch.where(positions_E == 0, 0, previous_E)
    return slots_E, torch.where(due_E, positions_E, -1), torch.where(due_E, previous_E, 0), names_B[index_E]


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
    """Hold stamps of lanes `lane` (K) and `lane` + 1 (V) against what they should be; note what differs in the ring.

    Args:
        stamps_LS4: int64 stamps of one part: of 4 lanes, or of HEAD_K and TAIL_K alone (latent rows have no V).
        lane: HEAD_K or TAIL_K.
        positions_E: expected; an entry below 0 is skipped. slots_E: slot 0 holds nothing: VERIFY_POSITION.
        previous_E: slot of the position before, 0 = chain head, UNKNOWN = its hash must be that of the other lane.
        tokens_E: expected; where UNKNOWN (None = everywhere) the token must be that of the other lane.
        digests_E2: found now, of K and V; None = these stamps have none: it must be 0.
        sequences_E: the name of the sequence of each entry: noted in the ring, and counted by.
        ring_QF: int64 [Q, RING_FIELDS]; violation number n goes to row n % Q: overflow drops detail, never the count.
        count_1: int64, all violations ever. checked_L: int64, entries looked at ever, by lane.
        by_sequence_N4: the same by the number of the sequence and lane (name % SEQUENCES; one that is not below N is
            not counted); None = not asked for.
    Cost: 64 bytes read an entry and lane; no host wait. In which order violations of one call stand is not defined.
    """
    live_E = positions_E >= 0
    slots_E, positions_E, previous_E = slots_E[live_E], positions_E[live_E], previous_E[live_E]
    sequences_E = sequences_E[live_E]
    tokens_E = None if tokens_E is None else tokens_E[live_E]
    digests_E2 = None if digests_E2 is None else digests_E2[live_E]
    first, halves = first_lane(stamps_LS4, lane)
    for half in range(halves):
        own = first + half
        stored_E4, twin_E4 = stamps_LS4[own, slots_E], stamps_LS4[own ^ 1, slots_E]
        before_E4 = stamps_LS4[own, previous_E.clamp_min(0)]
        chained_E = mix(before_E4[:, 2], before_E4[:, 0], before_E4[:, 1])
        hashes_E = torch.where(previous_E == 0, ANCHOR, chained_E)
        hashes_E = torch.where(previous_E == UNKNOWN, twin_E4[:, 2], hashes_E)
        wanted_E = twin_E4[:, 0] if tokens_E is None else torch.where(tokens_E == UNKNOWN, twin_E4[:, 0], tokens_E)
        found_E = torch.zeros_like(slots_E) if digests_E2 is None else digests_E2[:, half]
        token_E, position_E, hash_E, digest_E = stored_E4.unbind(1)
        reasons_E = differing(  # type: ignore[no-untyped-call]
            token_E, position_E, hash_E, digest_E, wanted_E, positions_E, hashes_E, found_E
        )
        reasons_E = torch.where(slots_E == 0, reasons_E | int(Reason.VERIFY_POSITION), reasons_E)
        checked_L[lane + half] += len(slots_E)
        count_by_sequence(by_sequence_N4, lane + half, sequences_E)
        bad_V = torch.nonzero(reasons_E).flatten()
        fields = (
            torch.full_like(reasons_E, lane + half), reasons_E, slots_E, positions_E, stored_E4[:, 1], stored_E4[:, 0],
            wanted_E, stored_E4[:, 2], hashes_E, stored_E4[:, 3], found_E, sequences_E,
        )  # fmt: skip
        note(torch.stack(fields, dim=1)[bad_V], ring_QF, count_1)


def count_by_sequence(by_sequence_N4: Tensor | None, lane: int, names_E: Tensor) -> None:
    """One more entry looked at in a lane, for each of these names."""
    if by_sequence_N4 is None:
        return
    numbers_E = names_E & (SEQUENCES - 1)
    numbers_E = numbers_E[numbers_E < len(by_sequence_N4)]
    by_sequence_N4[:, lane].index_add_(0, numbers_E, torch.ones_like(numbers_E))


def note(violations_VF: Tensor, ring_QF: Tensor, count_1: Tensor) -> None:
    """Add rows to the ring; of more than it holds, the latest stay."""
    count = len(violations_VF)
    rows_V = (int(count_1) + torch.arange(count, device=ring_QF.device)) % len(ring_QF)
    kept = slice(max(0, count - len(ring_QF)), None)
    ring_QF[rows_V[kept]] = violations_VF[kept]
    count_1 += count


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
    """Stamp new tokens in lanes `lane` (K) and `lane` + 1 (V), in place.

    Args:
        slots_T, positions_T, tokens_T: int64; sequence b has the tokens q_starts_B1[b] .. q_starts_B1[b + 1] - 1, at
            consecutive positions. A slot 0 (padding) is passed over.
        table_RC, rows_B: req_to_token and each sequence's row, which says where the position before its first lies.
        digests_T2: of K and V; None stamps 0.
    Cost: 64 bytes written a token; one after the other within a sequence.
    """
    starts_B = positions_T[q_starts_B1[:-1]]
    before_B = slots_in(table_RC[rows_B, (starts_B - 1).clamp_min(0)], stamps_LS4.shape[1])
    previous_B = torch.where(starts_B > 0, before_B, 0)
    first, halves = first_lane(stamps_LS4, lane)
    for half in range(halves):
        lane_S4 = stamps_LS4[first + half]
        before_B4 = lane_S4[previous_B]
        hash_B = torch.where(previous_B == 0, ANCHOR, mix(before_B4[:, 2], before_B4[:, 0], before_B4[:, 1]))
        counts_B = q_starts_B1[1:] - q_starts_B1[:-1]
        for step in range(int(counts_B.max()) if len(counts_B) else 0):
            at_B = q_starts_B1[:-1] + step
            live_B = step < counts_B
            at_B = at_B[live_B]
            slots, tokens, positions = slots_T[at_B], tokens_T[at_B], positions_T[at_B]
            digests = torch.zeros_like(tokens) if digests_T2 is None else digests_T2[at_B, half]
            stamps = torch.stack((tokens, positions, hash_B[live_B], digests), dim=1)
            real = slots != 0
            lane_S4[slots[real]] = stamps[real]
            hash_B = hash_B.clone()
            hash_B[live_B] = mix(hash_B[live_B], tokens, positions)
