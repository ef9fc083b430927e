"""The detector matrix and the commands that show it: a perfect canary gets 0, one that misses something gets 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serinus.canary.perturb import MODES
from serinus.cli import canary as command
from serinus.cli.main import main
from serinus.core.parts import Part
from serinus.testing.canary_matrix import CLEAN, Cell, Subject, plan_matrix, run_cell
from serinus.testing.canary_pd import CANARY_SHAPES, make_canary_toy



def subject(folder: Path, shape: str, **settings: Any) -> Subject:
    return Subject(name=shape, checkpoint=make_canary_toy(folder / shape, shape), settings=settings)


@pytest.mark.parametrize("shape", CANARY_SHAPES)
def test_every_fault_has_a_cell_in_every_part_it_can_damage(tmp_path: Path, shape: str) -> None:
    cells = plan_matrix(subject(tmp_path, shape))
    parts = {"full": [Part.FULL], "swa": [Part.SWA], "both": [Part.FULL, Part.SWA]}[shape]
    wanted = {(name, part.name if mode.has_part else "tokens") for name, mode in MODES.items() for part in parts}
    assert {(cell.mode, cell.part) for cell in cells} == wanted | {(CLEAN, "all")}
    assert not any(cell.perfect for cell in cells)  # nothing is perfect that was not run


@pytest.mark.slow
@pytest.mark.parametrize("coverage", ["full", "rotating:3"])
def test_a_sound_canary_has_a_perfect_matrix(tmp_path: Path, coverage: str) -> None:
    model = subject(tmp_path, "full", kv_canary_coverage=coverage, kv_canary_real_data="partial")
    for cell in plan_matrix(model):
        assert run_cell(cell, model, faults=2, seed=5).perfect, cell
