"""The Triton column equals the reference: in Triton's interpreter on any machine, and on a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import serinus.kernels.triton

from .triton_cases import CASES, differences

COLUMN = Path(serinus.kernels.triton.__path__[0])


def run_cases(argument: str, *variables: str) -> str:
    """What the cases print in a process of their own: Triton reads TRITON_INTERPRET when it is imported."""
    command = ["env", *variables, sys.executable, "-m", "tests.kernels.triton_cases", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(count: int) -> dict[str, Any]:
    """What differs of all cases."""
    found: dict[str, Any] = json.loads(run_cases(str(count), "TRITON_INTERPRET=1"))
    return found


@pytest.mark.slow
def test_every_triton_kernel_compiles_for_a_gpu_on_a_machine_without_one(tmp_path: Path) -> None:
    assert run_cases("compile", f"TRITON_CACHE_DIR={tmp_path}") == ""
    started = re.findall(r"^ +(_\w+)\[\(", "".join(map(Path.read_text, COLUMN.glob("*.py"))), re.M)
    assert len(started) >= 6
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == set(started)


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
