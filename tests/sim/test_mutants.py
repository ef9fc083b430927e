"""The world would notice: every broken rule shows within two hundred seeds, and the shrinker keeps what shows it."""

from __future__ import annotations

import pytest

from serinus.testing.world import draw, run, shrink
from tests.sim.mutants import MUTANTS, Mutant, hunt


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
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
