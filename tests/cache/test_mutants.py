"""The oracles are held to account: a planted fault must turn them red, and without one they stay green.

The faults that the design names are planted here; all of them by `python tests/cache/mutants.py`.
"""

from __future__ import annotations

import pytest

import serinus.cache
from tests.cache.mutants import MUTANTS, NAMED, Mutant, loaded, seeds_until_red


def test_a_scheduler_that_skips_the_row_rewrite_is_caught() -> None:
    seeds, what = seeds_until_red(serinus.cache, rewrite_rows=False)
    assert seeds, "expected an oracle to see that a row still names freed duplicates"
    assert "K1" in what or "O5" in what or "insertion" in what.lower(), what


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS[:NAMED], ids=lambda m: m.name.replace(" ", "-"))
def test_a_planted_fault_turns_an_oracle_red(mutant: Mutant) -> None:
    with loaded(mutant) as room:
        seeds, _ = seeds_until_red(room)
    assert seeds, f"the oracles do not see: {mutant.name}"


def test_every_fault_stands_where_the_table_says() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS), "two faults have one name"
    for mutant in MUTANTS:
        assert mutant.old in mutant.file.read_text(), mutant.name


def test_the_real_cache_is_back_after_a_mutant() -> None:
    before = serinus.cache.PrefixCache
    with loaded(MUTANTS[0]) as room:
        assert room.PrefixCache is not before
    import serinus.cache as again

    assert again.PrefixCache is before
