"""A few of the flips that tests/canary/fuzz.py makes by the thousand, and a few of stability.py's runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.selftest import CANARY_SHAPES, make_canary_toy

from . import fuzz, stability


@pytest.mark.slow
@pytest.mark.parametrize("flips", [24, pytest.param(60, marks=pytest.mark.proof)])
def test_any_flipped_byte_of_a_live_page_is_reported_there_and_nowhere_else(tmp_path: Path, flips: int) -> None:
    done = fuzz.fuzz(tmp_path, flips, seed=3)
    assert done["device"] + done["in flight"] + done["host"] + done["file"] == flips
    assert done["file, found bad"] == done["file"]


@pytest.mark.slow
def test_the_stories_hold_for_any_seed(tmp_path: Path) -> None:
    toys = {shape: make_canary_toy(tmp_path / shape, shape) for shape in CANARY_SHAPES}
    for shape, part in stability.CASES:
        for mode in stability.STORIES:
            stability.story(toys, shape, part, mode, seed=1000)


@pytest.mark.proof
def test_a_round_of_the_soak_raises_no_false_alarm(tmp_path: Path) -> None:
    toys = {shape: make_canary_toy(tmp_path / shape, shape) for shape in CANARY_SHAPES}
    assert stability.soak(toys, 0.001, "cpu") == 0
