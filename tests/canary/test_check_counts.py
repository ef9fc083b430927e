"""What ranks verified of each sequence: by part and lane, and over ranks."""

from __future__ import annotations

from serinus.canary import slots_checked
from serinus.canary.check_counts import by_part
from serinus.core.parts import Part


def test_a_slot_counts_that_was_looked_at_in_all_lanes_of_its_part() -> None:
    counts = {Part.FULL: [5, 5, 4, 5, 9, 9, 9, 9], Part.LATENT: [3, 0, 2, 0, 7, 0, 7, 0]}
    assert by_part(counts) == [{Part.FULL: [4, 9], Part.LATENT: [2, 7]}.get(part, []) for part in Part]


def test_a_slot_counts_that_each_rank_with_the_part_verified() -> None:
    whole = {Part.FULL: [4, 9], Part.SWA: [1, 1]}
    short = {Part.FULL: [4, 8]}
    ranks = [[of.get(part, []) for part in Part] for of in (whole, short)]
    assert slots_checked(ranks) == [5, 9]
    assert slots_checked(ranks[1:]) == [4, 8]
    assert slots_checked([None, ranks[0], None]) == [5, 10]
    assert slots_checked([None]) == []
