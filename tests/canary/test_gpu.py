"""The self-test on an accelerator, where verdicts are read behind the step."""

from __future__ import annotations

import pytest

from serinus.cli.main import main

pytestmark = pytest.mark.gpu


def test_every_planted_fault_is_found_on_a_gpu_too() -> None:
    assert main(["canary", "selftest", "--device", "cuda", "--faults", "1"]) == 0
