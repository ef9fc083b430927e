"""The Triton column equals the reference: in Triton's interpreter on any machine, and on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .triton_cases import CASES, differences, run_cases


def interpreted(first: int, end: int) -> dict[str, Any]:
    """What differs of all cases with these seeds."""
    found: dict[str, Any] = json.loads(run_cases(f"{first}:{end}", "TRITON_INTERPRET=1"))
    return found


@pytest.mark.slow
def test_every_triton_kernel_equals_the_reference_under_the_interpreter() -> None:
    """A case of decodes, and one of chunks."""
    assert interpreted(0, 2) == {name: {} for name in CASES}


@pytest.mark.proof
@pytest.mark.parametrize("first", [2, 5])
def test_every_triton_kernel_equals_the_reference_under_the_interpreter_on_more_cases(first: int) -> None:
    """A case takes a slow machine half a minute."""
    assert interpreted(first, first + 3) == {name: {} for name in CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 60, 15))
@pytest.mark.parametrize("name", CASES)
def test_every_triton_kernel_equals_the_reference_on_a_gpu(name: str, first: int) -> None:
    """In parts, as kernels are compiled most of the time: processes share that."""
    assert differences(name, "cuda", range(first, first + 15)) == {}
