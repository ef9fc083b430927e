"""`serinus demo` says why where it cannot start. That it runs is shown from the wheel (test_wheel.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.proof
def test_a_demo_that_cannot_start_shows_the_reason_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingElse"]}')
    command = [sys.executable, "-m", "serinus", "demo", "--checkpoint", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    assert "the demo failed" in done.stdout
    assert "SomethingElse" in done.stdout
