"""Hypothesis drives the tiny engine of this room in every order it can think of; all oracles after every rule.

It draws the numbers behind the driver's rules (drive.py), so what turns an oracle red is shrunk to a few of them.
Together with the seeds (test_driver.py) the proofs run 20,000 rules and more, the normal suite 6,000; both count what
they ran. `python -m tests.cache.night --minutes N` goes on from there.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import serinus.cache
from tests.cache.drive import drive


def explore(examples: int, steps_max: int = 60) -> int:
    """Let Hypothesis look for a run that turns an oracle red. Returns how many rules ran."""
    ran = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(chance=st.randoms(use_true_random=False), steps=st.integers(10, steps_max))
    def run(chance: Random, steps: int) -> None:
        nonlocal ran
        ran += drive(serinus.cache, chance, steps).steps

    run()
    return ran


@pytest.mark.slow
def test_the_cache_keeps_its_promises_in_any_order_of_events() -> None:
    rules = explore(40)
    assert rules >= 1_000, f"{rules} rules ran, expected 1,000 or more"


@pytest.mark.proof
def test_the_cache_keeps_its_promises_in_many_more_orders_of_events() -> None:
    rules = explore(200)
    assert rules >= 4_000, f"{rules} rules ran, expected 4,000 or more"
