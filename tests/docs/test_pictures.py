"""Pictures of the docs are what their scripts draw, of the results that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from .commands import REPO

PICTURES = REPO / "docs" / "pictures"


def draw(script: str, folder: Path) -> None:
    """Run a script of the repository that writes pictures."""
    subprocess.run(
        [sys.executable, str(REPO / "scripts" / script), "--write", str(folder)], cwd=REPO, check=True,
        capture_output=True, env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "MPLCONFIGDIR": str(folder.parent)},
    )  # fmt: skip


def words_of(picture: Path) -> str:
    return " ".join(text for node in ElementTree.parse(picture).iter() if (text := (node.text or "").strip()))


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPO / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_the_drawings_of_the_docs_are_those_of_their_script(tmp_path: Path) -> None:
    draw("drawings.py", tmp_path / "drawn")
    for picture in sorted((tmp_path / "drawn").iterdir()):
        kept = PICTURES / picture.name
        assert kept.read_text(encoding="utf-8") == picture.read_text(encoding="utf-8"), f"{kept.name}: make pictures"


@pytest.mark.proof
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=REPO,
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "python.html").read_text(encoding="utf-8")
    assert "SamplingParams" in page
    assert "max_tokens" in page
    assert (tmp_path / "site" / "search" / "search_index.js").exists(), "no search in pages that are opened as files"


@pytest.mark.proof
def test_the_same_results_give_the_same_plots_with_their_numbers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw("plots.py", tmp_path / name)
    for picture in sorted((tmp_path / "one").iterdir()):
        assert picture.read_bytes() == (tmp_path / "two" / picture.name).read_bytes(), picture.name
        kept = words_of(PICTURES / picture.name)
        assert kept == words_of(picture), f"{picture.name} is not of the results that are kept: make pictures-plots"
        assert "commit" in words_of(picture), f"{picture.name} does not say where its numbers come from"
    job, matrix = result("job"), result("matrix")
    shown = words_of(tmp_path / "one" / "peers.svg")
    for name, engine in result("peers")["engines"].items():
        assert {f"{engine[word]['tok_per_cpu_s']:,.0f}" for word in ("batch", "stream")} <= set(shown.split()), name
    assert f"{job['decode_step_ms']:.1f} ms" in words_of(tmp_path / "one" / "decode.svg")
    told = f"{matrix['detected']} of {matrix['injected']} planted faults found, {matrix['alarms']} false alarms"
    assert told in words_of(tmp_path / "one" / "matrix.svg")
