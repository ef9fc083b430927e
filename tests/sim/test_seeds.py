"""Seeds that found something once, and find nothing now."""

from __future__ import annotations

import pytest

from serinus.sim import draw, run


@pytest.mark.parametrize(
    ("seed", "what"),
    [(3473, "a read was lost, all peers were given up, and the reads from one of them went on into free pages")],
)
def test_a_seed_that_found_something_finds_nothing_now(seed: int, what: str) -> None:
    finding = run(draw(seed)).finding
    assert finding is None, f"{what}: {finding}"
