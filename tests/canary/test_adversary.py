"""The adversary, in short: no answer that ends well is wrong, but where docs/CANARY.md says that it may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .adversary import BLIND, Cell, run, table
from .adversary_weights import strike

DOCS = Path(__file__).resolve().parents[2] / "docs" / "CANARY.md"
OTHERS = (
    "The digest is linear",
    "KV that was computed on wrong KV",
    "Values: NaN",
    "A byte that changes, on a CPU",
    "A row of this very step",
    "With `rotating:N`, a row entry of a page whose turn it is not",
)
"""What the page lists that no damage to KV, stamps, rows, files or copies brings about here: it stays, and is found."""


def test_what_the_adversary_may_not_see_is_what_the_page_lists() -> None:
    section = DOCS.read_text().split("## What it cannot see")[1].split("\n## ")[0]
    listed = [" ".join(item.split()) for item in section.split("\n- ")[1:]]
    assert sorted(set(BLIND.values())) == sorted(item for item in listed if not item.startswith(OTHERS))


def test_a_wrong_answer_is_a_blind_cell_unless_its_setting_is_listed() -> None:
    seen = Cell("tiers", "kv bit", "running", "raise", "full", faults=3, wrong=1)
    assert seen.is_blind
    assert "BLIND" in table([seen])
    assert not Cell("tiers", "kv bit", "running", "raise", "full", faults=3, told=3).is_blind
    assert Cell("tiers", "kv bit", "running", "raise", "full", faults=3, stopped=1).is_blind
    twice = Cell("tiers", "mover: twice", "running", "raise", "rotating:16", faults=3, wrong=1)
    assert not twice.is_blind
    assert replace(twice, copies=1).is_blind


@pytest.mark.proof
def test_no_answer_that_ends_well_is_wrong(tmp_path: Path) -> None:
    cells = run(160, 1, tmp_path)
    print(table(cells))
    assert not [cell.line() for cell in cells if cell.is_blind]
    read = sum(cell.told + cell.refused for cell in cells)
    assert read > sum(cell.faults for cell in cells) // 4, "too few faults were read at all"


@pytest.mark.proof
def test_one_copy_that_comes_twice_makes_no_answer_wrong(tmp_path: Path) -> None:
    settings = [("heal", "rotating:16"), ("confirmed", "rotating:16")]
    cells = run(48, 4, tmp_path, settings=settings, sites=["mover: twice"], copies=1)
    assert not [cell.line() for cell in cells if cell.is_blind], table(cells)
    assert sum(cell.told for cell in cells) > 12, table(cells)


@pytest.mark.proof
@pytest.mark.parametrize("shape", ["moe", "mla"])
def test_no_answer_of_a_model_with_experts_is_wrong(tmp_path: Path, shape: str) -> None:
    cells = run(24, 3, tmp_path, shapes=[shape], settings=[("heal", "full")])
    assert not [cell.line() for cell in cells if cell.is_blind], table(cells)
    assert sum(cell.told for cell in cells) > 12, table(cells)


@pytest.mark.proof
def test_an_engine_that_only_logs_does_answer_wrong(tmp_path: Path) -> None:
    """Else the right answers above prove nothing."""
    cells = run(30, 2, tmp_path, settings=[("log", "full")], sites=["kv 64 bytes", "pages swapped", "table entry"])
    assert sum(cell.wrong for cell in cells) > 0, table(cells)


@pytest.mark.proof
def test_kv_that_was_stored_with_other_weights_is_not_used(tmp_path: Path) -> None:
    found = strike(3, 1, tmp_path)
    assert not [each for each in found if each.is_wrong], found
    assert any(each.differs for each in found), "no change of weights changed an answer"
