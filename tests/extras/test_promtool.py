"""The alerts through Prometheus's own tool, which knows what a rule does over time: apt-get install prometheus."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "file"), [("check", "deploy/prometheus/alerts.yaml"), ("test", "tests/deploy/alerts_test.yaml")]
)
def test_promtool_takes_the_alerts_and_their_unit_tests(word: str, file: str) -> None:
    done = subprocess.run(["promtool", word, "rules", file], capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr
