"""Hypothesis drives the tiny engine of this room in every order it can think of; all oracles after every rule.

It draws the numbers behind the driver's rules (drive.py), so what turns an oracle red is shrunk to a few of them.
Together with the seeds (test_driver.py) the proofs run 20,000 rules and more, the normal suite 6,000: so many are run,
whatever Hypothesis draws. `python -m tests.cache.night --minutes N` goes on from there.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import serinus.cache
from tests.cache.drive import drive


def explore(examples: int, steps_max: int = 60, *, rules: int = 1) -> int:
    """Let Hypothesis look for a run that turns an oracle red, `examples` runs at a time, until at least `rules` rules
    ran: how long its runs are is its own choice. Returns how many ran."""
    ran = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(chance=st.randoms(use_true_random=False), steps=st.integers(10, steps_max))
    def run(chance: Random, steps: int) -> None:
        nonlocal ran
        ran += drive(serinus.cache, chance, steps).steps

    while ran < rules:
        run()
    return ran


@pytest.mark.slow
def test_the_cache_keeps_its_promises_in_any_order_of_events() -> None:
    explore(40, rules=1_000)


@pytest.mark.proof
def test_the_cache_keeps_its_promises_in_many_more_orders_of_events() -> None:
    explore(200, rules=4_000)
