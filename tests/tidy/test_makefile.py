"""What `make` hands to the commands that it runs."""

from __future__ import annotations

import os
import subprocess

from .house import REPO


def test_what_make_runs_keeps_its_bytecode_whatever_the_environment_says() -> None:
    """A process under test that had to compile all it imports would need twice the time to start."""
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["make", "-s", "--no-print-directory", "--eval", "seen: ; @echo [$$PYTHONDONTWRITEBYTECODE]", "seen"]
    assert subprocess.run(words, cwd=REPO, env=told, capture_output=True, text=True, check=True).stdout == "[]\n"
