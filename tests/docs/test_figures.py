"""The figures of the README: as the kept results have them, with their goals, machines and commits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_results import gathered
from benchmarks.table_rows import ROWS, Row

ROOT = Path(__file__).parents[2]


def row(*met: str) -> Row:
    return Row(benchmark="b", what="w", here="h", beside="", goal="g" if met else "", met=met)


@pytest.mark.parametrize(
    ("met", "reached"),
    [
        ((), ""),
        (("{a[x]} <= 2",), "met"),
        (("{a[x]} < 2",), "missed"),
        (("{a[x]} >= 1 + {b}",), "met"),
        (("{a[x]} >= 1", "{b} >= 1.01"), "missed"),
    ],
)
def test_a_goal_is_met_where_all_that_it_asks_for_holds(met: tuple[str, ...], reached: str) -> None:
    assert row(*met).reached({"a": {"x": 2.0}, "b": 1.0}) == reached


def test_each_row_with_a_goal_says_when_it_is_met() -> None:
    assert [each.what for each in ROWS if bool(each.goal) != bool(each.met)] == []


def test_what_a_session_on_gpus_said_is_kept_for_the_table(tmp_path: Path) -> None:
    """Slices on two GPUs beside the faster one of them alone; what the table does not show is left out."""
    decode = {"benchmark": "gpu_engine_decode", "model": "qwen3-8b", "weights": "auto", "graphs": True, "gpu": "G"}
    decode |= {"canary": "rotating:16", "batch": 64, "floor_ms": 2.0, "tok_s": 9}
    one = {"decode": {"rotating_16": {"of_64": {"step_ms": 4.0, "floor_ms": 2.0, "tok_s": 9}}}}
    for name, tp, step_ms in (("engine_64", 1, 4.0), ("slices", 2, 2.0), ("first", 1, 3.9), ("second", 1, 3.2)):
        folder = tmp_path / ("one" if name == "engine_64" else "two")
        folder.mkdir(exist_ok=True)
        lines = [{**decode, "tp": tp, "step_ms": step_ms}, {**decode, "tp": tp, "weights": "fp8", "step_ms": 1.0}]
        (folder / f"{name}.txt").write_text("a log\n" + "\n".join(map(json.dumps, lines)))
    assert gathered(tmp_path / "one") == {"gpu": {"benchmark": "gpu", "gpu": "G", **one}}
    found = gathered(tmp_path / "two")["gpus"]
    assert found["gain"] == pytest.approx(1.6)
    assert found["first"]["decode"]["step_ms"] == 3.9
    (tmp_path / "two/second.txt").write_text("ended")
    with pytest.raises(ValueError, match="has no decode step of second, expected one of each"):
        gathered(tmp_path / "two")


@pytest.mark.slow
def test_the_table_of_the_readme_is_that_of_the_kept_results(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page.write_text(readme, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/table.py"), "--write", str(page)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert page.read_text(encoding="utf-8") == readme
    for place in ("2 cores of AMD EPYC", "16 cores of Intel(R) Xeon(R) Processor"):
        assert f" {place}, torch " in done.stdout
    assert "| **missed** | a |" in done.stdout
