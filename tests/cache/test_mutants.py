"""The oracles are held to account: each planted fault must turn them red, and without one they stay green."""

from __future__ import annotations

import pytest

import serinus.cache
from tests.cache.drive import drive
from tests.cache.mutants import MUTANTS, STEPS, Mutant, loaded, seeds_until_red


@pytest.mark.slow
def test_without_a_fault_no_oracle_speaks() -> None:
    worlds = [drive(serinus.cache, seed, STEPS) for seed in range(40)]
    assert sum(w.cache.stats().evicted_pages for w in worlds) > 500, "the driver must bring the pools under pressure"
    assert sum(w.cache.stats().duplicate_pages for w in worlds) > 50, "the driver must make duplicates"
    assert sum(w.cache.stats().hit_tokens for w in worlds) > 1000, "the driver must share prefixes"


def test_a_scheduler_that_skips_the_row_rewrite_is_caught() -> None:
    seeds, what = seeds_until_red(serinus.cache, rewrite_rows=False)
    assert seeds, "expected an oracle to see that a row still names freed duplicates"
    assert "K1" in what or "O5" in what or "insertion" in what.lower(), what


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_planted_fault_turns_an_oracle_red(mutant: Mutant) -> None:
    with loaded(mutant) as room:
        seeds, _ = seeds_until_red(room)
    assert seeds, f"the oracles do not see: {mutant.name}"


def test_the_real_cache_is_back_after_a_mutant() -> None:
    before = serinus.cache.PrefixCache
    with loaded(MUTANTS[0]) as room:
        assert room.PrefixCache is not before
    import serinus.cache as again

    assert again.PrefixCache is before
