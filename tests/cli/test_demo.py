"""`make demo` keeps its promise, and says why where it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `serinus demo` on a checkpoint folder."""
    command = [sys.executable, "-m", "serinus", "demo", "--checkpoint", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
def test_the_demo_makes_a_model_chats_disaggregated_and_stops_everything(tmp_path: Path) -> None:
    done = demo(tmp_path / "model", "--max-tokens", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All went right" in done.stdout
    pages = re.search(r"prefill-0 │ +\d+ │ +0 │ +(\d+) │ +0 │", done.stdout)
    assert pages is not None, done.stdout
    assert int(pages[1]) > 0
    assert re.search(rf"decode-0 .* │ +24 │ +0 │ +{pages[1]} │ .* GB/s", done.stdout), done.stdout


@pytest.mark.slow
def test_a_demo_that_cannot_start_shows_the_reason_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingElse"]}')
    done = demo(tmp_path)
    assert done.returncode == 1
    assert "the demo failed" in done.stdout
    assert "SomethingElse" in done.stdout
