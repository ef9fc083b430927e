"""The canary's kernels: the reference against numbers computed by hand, the other columns against the reference."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from serinus.core.rng import splitmix64
from serinus.core.stamps import digest_coefficients
from serinus.kernels import RING_FIELDS, SEQUENCES, Kernels, Reason, StampLane
from serinus.kernels.canary import ANCHOR
from serinus.kernels.ref.canary import add_digests

from .canary_case import make_case, outcome

MASK64 = (1 << 64) - 1


def chain_of(tokens: list[int]) -> list[int]:
    """The previous hash of each position, written once more in plain Python."""
    hashes = [ANCHOR]
    for position, token in enumerate(tokens):
        hashes.append(splitmix64(hashes[-1] ^ splitmix64(token ^ position << 32)))
    return hashes[:-1]


def digest_of(words: list[int], factors: list[int]) -> int:
    return sum(word * factor for word, factor in zip(words, factors, strict=True)) & 0xFFFFFFFF


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def test_a_chain_of_stamps_is_the_one_computed_by_hand(either: Kernels) -> None:
    stamps = torch.zeros((4, 12, 4), dtype=torch.int64)
    slots, tokens = [5, 6, 7, 1], [17, 3, 99, 3]
    either.canary_write(
        stamps, 0, torch.tensor(slots), torch.arange(4), torch.tensor(tokens), torch.tensor([0, 4]),
        torch.zeros((2, 8), dtype=torch.int32), torch.ones(1, dtype=torch.int64), None,
    )  # fmt: skip
    for slot, token, position, chain in zip(slots, tokens, range(4), chain_of(tokens), strict=True):
        expected = [token, position, signed(chain), 0]
        assert stamps[0, slot].tolist() == expected
        assert stamps[1, slot].tolist() == expected
    assert not stamps[2:].any()


def test_the_hash_behind_a_sequence_is_that_of_its_tokens_and_names_a_stranger(either: Kernels) -> None:
    tokens = [17, 3, 99, 3]
    by_hand = [signed(each) for each in chain_of([*tokens, 0])[1:]]
    for first in range(len(tokens)):
        chain = signed(chain_of(tokens)[first])
        assert either.chain_hashes(np.array(tokens[first:], np.int32), first, chain).tolist() == by_hand[first:]
    assert either.chain_hashes(np.empty(0, np.int32), 0, ANCHOR).tolist() == []
    stamps = torch.zeros((4, 12, 4), dtype=torch.int64)
    slots = torch.tensor([5, 6, 7, 1])
    for lane in (0, 2):
        either.canary_write(
            stamps, lane, slots, torch.arange(4), torch.tensor(tokens), torch.tensor([0, 4]),
            torch.zeros((2, 8), dtype=torch.int32), torch.ones(1, dtype=torch.int64), None,
        )  # fmt: skip
    ring, count = torch.zeros((8, RING_FIELDS), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    checked = torch.zeros(4, dtype=torch.int64)
    # Its own; another's; slot 0, which a damaged row may say; slots that no pool has.
    last, names = torch.tensor([1, 1, 0, -4, 12]), torch.arange(5)
    chains = torch.tensor([by_hand[3], by_hand[2], *[by_hand[3]] * 3])
    either.canary_bind(stamps, 2, last, torch.full((5,), 3), chains, names, ring, count, checked)
    assert checked.tolist() == [0, 0, 5, 5]
    told = sorted(ring[: int(count)].tolist(), key=lambda row: (row[0], row[11]))
    chain, both = Reason.VERIFY_CHAIN_HASH, Reason.VERIFY_CHAIN_HASH | Reason.VERIFY_POSITION
    assert [(row[0], row[1], row[2], row[11]) for row in told] == [
        (lane, reasons, slot, name)
        for lane in (2, 3)
        for slot, name, reasons in ((1, 1, chain), (0, 2, both), (0, 3, both), (0, 4, both))
    ]
    assert told[0][3:11] == [3, 3, 3, 3, by_hand[3], by_hand[2], 0, 0]


def test_a_digest_is_two_sums_of_lanes_and_odd_factors(either: Kernels) -> None:
    kv = [(torch.randn(3, 1, 4).bfloat16(), torch.randn(3, 1, 4).bfloat16())]
    factors = torch.from_numpy(digest_coefficients([0], [0], 4, 2, partial=False))
    assert (factors & 1).all()
    found = either.canary_digest(kv, torch.tensor([2]), factors)[0].tolist()
    for half in range(2):
        words = [w & 0xFFFF for w in kv[0][half][2].view(torch.int16).flatten().tolist()]
        sums = [digest_of(words, [f & 0xFFFFFFFF for f in factors[0, half, i].tolist()]) for i in range(2)]
        assert found[half] == signed(sums[0] | sums[1] << 32)


def test_a_latent_row_has_a_digest_of_k_and_its_twin_is_the_stamp_of_the_other_moment(either: Kernels) -> None:
    rows = [(torch.randn(3, 1, 6).bfloat16(),)]
    factors = torch.from_numpy(digest_coefficients([0], [0], 6, 2, partial=False, halves=1))
    both = torch.from_numpy(digest_coefficients([0], [0], 6, 2, partial=False))
    assert torch.equal(factors[:, 0], both[:, 0])
    found = either.canary_digest(rows, torch.tensor([2]), factors)
    assert found.tolist() == [[int(either.canary_digest([(*rows[0], *rows[0])], torch.tensor([2]), both)[0, 0]), 0]]
    stamps = torch.zeros((2, 3, 4), dtype=torch.int64)
    batch = (
        torch.tensor([2]), torch.tensor([0]), torch.tensor([9]), torch.tensor([0, 1]),
        torch.zeros((2, 8), dtype=torch.int32), torch.ones(1, dtype=torch.int64),
    )  # fmt: skip
    either.canary_write(stamps, StampLane.HEAD_K, *batch, None)
    either.canary_write(stamps, StampLane.TAIL_K, *batch, found)
    assert stamps[:, 2].tolist() == [[9, 0, ANCHOR, 0], [9, 0, ANCHOR, int(found[0, 0])]]
    stamps[StampLane.HEAD_K, 2, 0] = 8
    ring, count = torch.zeros((8, RING_FIELDS), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    checked = torch.zeros(4, dtype=torch.int64)
    one, zero = torch.tensor([2]), torch.tensor([0])
    either.canary_verify(stamps, StampLane.TAIL_K, one, zero, zero, None, found, zero, ring, count, checked)
    assert checked.tolist() == [0, 0, 1, 0]
    assert ring[: int(count), :2].tolist() == [[StampLane.TAIL_K, Reason.VERIFY_TOKEN]]


@pytest.mark.slow
def test_the_fast_column_equals_the_reference_to_the_byte(ref: Kernels, cpu: Kernels) -> None:
    for seed in range(60):
        case = make_case(seed)
        assert outcome(ref, case) == outcome(cpu, case), f"seed {seed}"


def test_undamaged_stamps_have_no_violation_and_every_damaged_one_is_found(cpu: Kernels) -> None:
    for seed in range(40):
        case = make_case(seed)
        found = outcome(cpu, case)
        due = {slot for slot in found["plan"][0] if slot}
        seen = {(row[0], row[2]) for row in found["violations"]}
        shown = {(case.lanes[lane], slot) for lane, slot, _ in case.damage if slot in due}
        twice = len({(lane // 2, *rest) for lane, *rest in case.damage}) < len(case.damage)  # twins that agree
        assert twice or shown <= seen, f"seed {seed}: {shown - seen} not found"
        bound = {(row[11], row[0]) for row in found["violations"] if row[11] < 70}
        strange = {(row, lane) for row, is_strange in enumerate(case.strangers, 1) if is_strange for lane in case.lanes}
        assert bound >= strange
        if not case.damage:
            assert bound == strange
        if not case.damage and not strange:
            assert not seen, f"seed {seed}: {seen} reported, nothing was damaged"


@pytest.mark.slow
def test_a_change_of_any_single_lane_changes_the_digest_at_that_slot_alone(cpu: Kernels) -> None:
    rng = random.Random(1)
    kv = [(torch.randn(9, 2, 16).bfloat16(), torch.randn(9, 2, 16).bfloat16()) for _ in range(3)]
    factors = torch.from_numpy(digest_coefficients(range(3), range(2), 16, 2, partial=False))
    slots = torch.arange(1, 9)
    before = cpu.canary_digest(kv, slots, factors)
    for _ in range(500):
        half, slot = rng.randrange(2), rng.randrange(1, 9)
        lane = kv[rng.randrange(3)][half].view(torch.int16)[slot, rng.randrange(2)]
        at = rng.randrange(16)
        kept = int(lane[at])
        lane[at] = kept ^ rng.randrange(1, 1 << 15)
        changed = cpu.canary_digest(kv, slots, factors) != before
        assert changed.nonzero().tolist() == [[slot - 1, half]]
        lane[at] = kept


def test_digests_of_shards_add_up_to_the_whole(ref: Kernels, cpu: Kernels) -> None:
    whole = [(torch.randn(5, 4, 8).bfloat16(), torch.randn(5, 4, 8).bfloat16()) for _ in range(4)]
    slots = torch.tensor([1, 4, 2])
    expected = ref.canary_digest(
        whole, slots, torch.from_numpy(digest_coefficients(range(4), range(4), 8, 2, partial=False))
    )
    total = torch.zeros_like(expected)
    for layers in ((0, 1), (2, 3)):
        for heads in ((0, 1), (2, 3)):
            shard = [
                (whole[i][0][:, list(heads)].contiguous(), whole[i][1][:, list(heads)].contiguous()) for i in layers
            ]
            factors = torch.from_numpy(digest_coefficients(layers, heads, 8, 2, partial=False))
            total = add_digests(total, cpu.canary_digest(shard, slots, factors))
    assert torch.equal(total, expected)


def test_where_the_slot_before_is_not_known_the_hash_must_be_that_of_the_stamp_beside_it(either: Kernels) -> None:
    stamps = torch.zeros((4, 12, 4), dtype=torch.int64)
    stamps[:2, 5:7, 2] = 77
    stamps[1, 6, 2] = 78
    slots, unknown, ring = torch.tensor([5, 6]), torch.full((2,), -1), torch.zeros((8, RING_FIELDS), dtype=torch.int64)
    count, checked = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    either.canary_verify(stamps, 0, slots, slots * 0, unknown, None, None, slots * 0, ring, count, checked)
    found = [(lane, reason, slot) for lane, reason, slot, *_ in ring[: int(count)].tolist()]
    assert found == [(lane, Reason.VERIFY_CHAIN_HASH, 6) for lane in (StampLane.HEAD_K, StampLane.HEAD_V)]


def test_the_ring_keeps_the_latest_and_the_count_is_never_lost(either: Kernels) -> None:
    stamps = torch.zeros((4, 41, 4), dtype=torch.int64)
    slots = torch.arange(1, 41)
    ring = torch.zeros((8, RING_FIELDS), dtype=torch.int64)
    count, checked = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    unknown = torch.full((40,), -1)
    positions = torch.ones(40, dtype=torch.int64)
    either.canary_verify(stamps, 0, slots, positions, unknown, None, None, slots * 0, ring, count, checked)
    assert int(count) == 80
    assert checked.tolist() == [40, 40, 0, 0]
    assert (ring[:, 1] == Reason.VERIFY_POSITION).all()


@pytest.mark.parametrize("count", [40, 5000])  # of one thread, and of several
def test_what_is_looked_at_is_counted_by_sequence(either: Kernels, count: int) -> None:
    rng = random.Random(count)
    stamps = torch.zeros((4, 41, 4), dtype=torch.int64)
    ring = torch.zeros((8, RING_FIELDS), dtype=torch.int64)
    violations, checked = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    numbers = sorted(rng.randrange(5) for _ in range(count)) if count > 40 else [rng.randrange(5) for _ in range(count)]
    skipped = [rng.random() < 0.3 for _ in range(count)]
    names = torch.tensor(numbers) - 7 * SEQUENCES  # of any pass, or of a command
    positions = torch.where(torch.tensor(skipped), -1, 1)
    slots = torch.arange(count) % 40 + 1
    by_sequence = torch.zeros((4, 4), dtype=torch.int64)  # no room for the last of them
    entries = slots, positions, torch.full((count,), -1)
    either.canary_verify(stamps, 0, *entries, None, None, names, ring, violations, checked, by_sequence)
    expected = [sum(n == i and not skip for n, skip in zip(numbers, skipped, strict=True)) for i in range(4)]
    assert by_sequence.tolist() == [[each, each, 0, 0] for each in expected]
    assert checked.tolist()[:2] == [skipped.count(False)] * 2
    either.canary_bind(stamps, 2, slots, positions, slots, names, ring, violations, checked, by_sequence)
    assert by_sequence.tolist() == [[each] * 4 for each in expected]


def test_reasons_and_lanes_have_names() -> None:
    assert [lane.name for lane in StampLane] == ["HEAD_K", "HEAD_V", "TAIL_K", "TAIL_V"]
    assert all(a.value * 2 == b.value for a, b in pairwise(Reason))
