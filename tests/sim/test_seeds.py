"""Seeds that found something once, and find nothing now."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from serinus.sim import draw, run


@pytest.mark.parametrize(
    ("seed", "drawn", "what"),
    [
        (3473, {}, "a read was lost, all peers were given up, and reads from one of them went on into free pages"),
        (5034, {"canary": "sound"}, "the floor of an ABORT overtook a FAIL, which a link in order never lets it"),
        (
            20022,
            {"canary": "damaged"},
            "a page was loaded after the last step, what the idle sweep found of it dropped",
        ),
        (252, {"backend": "push"}, "a sweep spent more time than it swept pages for, and was late"),
    ],
)
def test_a_seed_that_found_something_finds_nothing_now(seed: int, drawn: dict[str, Any], what: str) -> None:
    finding = run(draw(seed, **drawn)).finding
    assert finding is None, f"{what}: {finding}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["push", "pull", "ipc"])
def test_unequal_engines_that_reach_into_each_others_memory_hand_over_under_faults(backend: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(8):
        found = run(draw(seed, backend=backend, unequal=True))
        assert found.finding is None, f"seed {seed}: {found.finding}"
        counts.update(found.counts)
    assert counts["landed"] >= 5
    assert counts["operations lost"] or backend == "ipc", "a read of opened memory never fails"
    assert counts["quarantined"]
