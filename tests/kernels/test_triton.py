"""The Triton column equals the reference: in Triton's interpreter on any machine, and on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .triton_cases import CASES, differences


def interpreted(count: int) -> dict[str, Any]:
    """What differs of all cases, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "tests.kernels.triton_cases", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_triton_kernel_equals_the_reference_under_the_interpreter() -> None:
    assert interpreted(3) == {name: {} for name in CASES}


@pytest.mark.proof
def test_every_triton_kernel_equals_the_reference_under_the_interpreter_on_many_cases() -> None:
    assert interpreted(15) == {name: {} for name in CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_triton_kernel_equals_the_reference_on_a_gpu(name: str) -> None:
    assert differences(name, "cuda", 60) == {}
