"""The oracles are held to account: a planted fault must turn them red, and without one they stay green.

The faults that the design names are planted here; all of them among the proofs, or by `python -m tests.cache.mutants`.
"""

from __future__ import annotations

import pytest

from serinus.cache import PrefixCache
from tests.cache.mutants import LATE, MUTANTS, NAMED, Mutant, seeds_until_red


def test_a_scheduler_that_skips_the_row_rewrite_is_caught() -> None:
    seeds, what = seeds_until_red(rewrite_rows=False)
    assert seeds, "expected an oracle to see that a row still names freed duplicates"
    assert "K1" in what or "O5" in what or "insertion" in what.lower(), what


def _caught(mutant: Mutant) -> None:
    with mutant.planted():
        seeds, _ = seeds_until_red(LATE.get(mutant.name, 0))
    assert seeds, f"the oracles do not see: {mutant.name}"


def _named(mutant: Mutant) -> object:
    """Faults in storage keys need many seeds: they are proof."""
    return pytest.param(mutant, marks=pytest.mark.proof if "storage keys" in mutant.name else pytest.mark.slow)


@pytest.mark.parametrize(
    "mutant", [_named(each) for each in MUTANTS[:NAMED]], ids=[each.name.replace(" ", "-") for each in MUTANTS[:NAMED]]
)
def test_a_planted_fault_turns_an_oracle_red(mutant: Mutant) -> None:
    _caught(mutant)


@pytest.mark.proof
@pytest.mark.parametrize("mutant", MUTANTS[NAMED:], ids=lambda m: m.name.replace(" ", "-"))
def test_every_other_planted_fault_turns_an_oracle_red_too(mutant: Mutant) -> None:
    _caught(mutant)


def test_the_real_cache_is_back_after_a_mutant() -> None:
    before = {(owner, name): getattr(owner, name) for mutant in MUTANTS for owner, name, _ in mutant.patches}
    load_back = PrefixCache.load_back
    for mutant in MUTANTS:
        with mutant.planted():
            assert any(getattr(owner, name) is not before[owner, name] for owner, name, _ in mutant.patches)
    assert PrefixCache.load_back is load_back
    assert all(getattr(owner, name) is real for (owner, name), real in before.items())


def test_each_fault_has_a_name_of_its_own() -> None:
    assert LATE.keys() <= {mutant.name for mutant in MUTANTS}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS), "two faults have one name"
