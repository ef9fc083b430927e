"""Many seeds of the driver: with test_machine.py the proofs run 20,000 rules; and what those rules reach."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import serinus.cache
from tests.cache.drive import drive
from tests.cache.model import dump
from tests.cache.tiers import COUNTERS, TieredWorld

SEEDS = 140
STEPS = 150


def _driven(seeds: range) -> Counter[str]:
    """Rules that ran, and what the caches counted."""
    total: Counter[str] = Counter()
    for seed in seeds:
        world = drive(serinus.cache, seed, STEPS)
        total["rules"] += world.steps
        total += world.counted()
    return total


@pytest.mark.slow
def test_random_rules_of_all_shapes_leave_every_oracle_silent() -> None:
    total = _driven(range(SEEDS // 4))
    short = {name: total[name] for name in COUNTERS if not total[name]}
    assert not short, f"the driver never reaches these: {short}"


@pytest.mark.proof
def test_twenty_thousand_rules_of_all_shapes_leave_every_oracle_silent() -> None:
    total = _driven(range(SEEDS))
    assert total["rules"] >= 16_000, f"{total['rules']} rules ran, expected 16,000 or more beside Hypothesis' 4,000"
    short = {name: total[name] for name in COUNTERS if total[name] < 50}
    assert not short, f"the driver reaches these too rarely: {short}"


@pytest.mark.slow
def test_replicas_whose_copies_take_other_times_decide_the_same() -> None:
    for seed in range(10):
        told: list[list[str]] = []
        for early in (False, True):
            states: list[str] = []

            def note(world: TieredWorld, states: list[str] = states) -> None:
                states.append(dump(world.cache))

            drive(serinus.cache, seed, 60, early=early, after=note)
            told.append(states)
        differ = [at for at, (a, b) in enumerate(zip(*told, strict=True)) if a != b]
        assert not differ, f"seed {seed}: replicas differ from rule {differ[0]} on:\n{told[0][differ[0]]}"


@pytest.mark.slow
def test_decisions_do_not_depend_on_the_order_of_hashes() -> None:
    code = (
        "import serinus.cache; from tests.cache.drive import drive; from tests.cache.model import dump;"
        "out = []; [drive(serinus.cache, s, 60, after=lambda w: out.append(dump(w.cache))) for s in range(8)];"
        "print(hash(0), len(out)); print('\\n'.join(out))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": str(seed), "PATH": ""}, cwd=Path(__file__).resolve().parents[2],
        ).stdout
        for seed in (1, 2)
    ]  # fmt: skip
    assert said[0] == said[1], "two processes with other hash seeds decided differently"
    assert len(said[0]) > 10_000, said[0][:1000]
