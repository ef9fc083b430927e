"""`serinus sim`: seeds in, findings out, as exit code, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serinus.cli.main import main
from serinus.sim import calm_scenario, draw


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "shm", "tcp", "push", "pull", "ipc"])
def test_seeds_without_findings_end_with_0_and_a_result(tmp_path: Path, backend: str) -> None:
    result = tmp_path / "result.json"
    assert main(["sim", "--seeds", "5..7", "--backend", backend, "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["seeds"] == 2
    assert found["failed"] == []
    assert found["counts"]["landed"] > 0


def test_a_time_that_is_over_at_once_is_enough_for_a_seed(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert main(["sim", "--minutes", "0", "--workers", "1", "--backend", "local", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["seeds"] > 0


def test_a_schedule_from_a_file_is_run_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(calm_scenario(draw(3, backend="local"), works=1).to_json())
    assert main(["sim", "--scenario", str(file)]) == 0
    text = capsys.readouterr().err
    assert "r0:" in text
    assert "nothing was found" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "5"], "--seeds is '5', expected A..B"),
        (["--seeds", "5..3"], "--seeds is '5..3', which are none"),
        (["--seeds", "5..5", "--minutes", "1"], "--seeds is '5..5', which are none"),
        (["--backend", "pigeon"], "expected local, shm, tcp, push, pull or ipc"),
        (["--shape", "round"], "expected full, sliding or latent"),
        (["--workers", "0"], "--workers is 0, expected at least 1"),
        (["--sedes", "1..2"], "did you mean --seeds?"),
        (["--scenario", "/nowhere/at/all"], "cannot read the scenario"),
    ],
)
def test_what_makes_no_sense_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_run_ends_with_130_and_says_what_it_did_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def batch(seeds: list[int], backend: str, shape: str) -> list[tuple[int, str, int, dict[str, int]]]:
        if 0 not in seeds:
            raise KeyboardInterrupt
        return [(seed, "", 10, {}) for seed in seeds]

    monkeypatch.setattr("serinus.cli.sim.run_batch", batch)
    assert main(["sim", "--seeds", "0..100"]) == 130
    err = capsys.readouterr().err
    assert "25 seeds, 250 events" in err
    assert err.endswith("interrupted\n")
