"""Bodies: compiled once on a machine, not once in each process."""

from __future__ import annotations

from typing import Any

import pytest

from serinus.kernels.cpu.body import compile_body
from serinus.kernels.cpu.scalar import inlined


def test_a_body_that_closes_over_a_compiled_function_is_refused() -> None:
    """numba's cache has what a body closes over in its key, and a compiled function is another one in each process."""

    @inlined(fastmath=set())
    def part(number: Any) -> Any:
        return number + 1

    def whole(args: Any) -> None:
        part(args)

    with pytest.raises(AssertionError, match=r"whole closes over \['part'\], and would be compiled by each process"):
        compile_body(whole)
