"""The world would notice: every broken rule shows within two hundred seeds, and the shrinker keeps what shows it."""

from __future__ import annotations

import pytest

from serinus.sim import draw, run, shrink
from tests.sim.line_mutants import STOPPED
from tests.sim.mutants import MUTANTS, Mutant, hunt

LINE = [mutant for mutant in MUTANTS if mutant.says == STOPPED]
"""Those that the hash of the line must catch."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", LINE, ids=lambda mutant: mutant.name)
def test_a_fault_of_the_line_stops_the_engine_at_the_header_that_shows_it(mutant: Mutant) -> None:
    kill = hunt(mutant)
    assert kill is not None, f"{mutant.name} survived"
    assert STOPPED in kill.finding


@pytest.mark.proof
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m not in LINE], ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    kill = hunt(mutant)
    assert kill is not None, f"{mutant.name} survived"


@pytest.mark.slow
def test_a_failing_schedule_shrinks_to_what_is_needed_and_still_fails() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "free at once on abort (push)")
    kill = hunt(mutant)
    assert kill is not None
    scenario = draw(kill.seed, backend="push")
    with mutant.apply():
        small = shrink(scenario, runs_max=120)
        assert run(small).finding is not None
    assert run(small).finding is None, "the sound protocol fails on it too"
    assert len(small.works) <= 2
    assert len(small.faults) <= 1
    assert small.to_json() != scenario.to_json()
