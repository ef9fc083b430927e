"""docs/CHANGING.md keeps up with the code: its diffs fit, and its files are there. tests/docs runs its proofs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.changing import EXAMPLES, PAGE, REPO, Example, apply


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_the_diffs_of_an_example_fit(example: Example, tmp_path: Path) -> None:
    for diff, name in zip(example.diffs, example.touched, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPO / name).exists():
            shutil.copy(REPO / name, tmp_path / name)
        before = (tmp_path / name).read_text(encoding="utf-8") if (tmp_path / name).exists() else ""
        apply(diff, tmp_path)
        assert (tmp_path / name).read_text(encoding="utf-8") != before


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_an_example_touches_no_more_files_than_it_says(example: Example) -> None:
    assert len(example.named) == example.limit
    assert set(example.touched) <= set(example.named)
    for name in example.named:
        assert (REPO / name).exists() or f"new {name}\n" in PAGE, f"{example.title}: {name} is not there"
