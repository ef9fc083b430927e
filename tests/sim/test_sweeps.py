"""One fault at every single step of a recorded run; pairs of faults for a world of one request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest

from serinus.sim import Scenario, at_every_step, calm_scenario, draw, pairs_of_faults, run
from tests.cells import some
from tests.sim.rank_mutants import one_leaves_another_follows

BACKENDS = ("local", "shm", "tcp", "push", "pull", "ipc")


def _check(scenarios: Iterable[Scenario]) -> int:
    count = 0
    for count, scenario in enumerate(scenarios, 1):  # noqa: B007
        finding = run(scenario).finding
        assert finding is None, f"{finding}\n{scenario.to_json()}"
    return count


@pytest.mark.slow
@pytest.mark.parametrize("backend", some(BACKENDS, "tcp"))
def test_a_crash_a_cancel_a_lost_or_repeated_frame_at_steps_of_a_handoff(backend: str) -> None:
    """Each third step and frame; `python -m tests.sim.night` takes every one, and all pairs."""
    base = calm_scenario(draw(3, backend=backend), works=1)
    recorded = run(base)
    assert recorded.finding is None
    assert recorded.counts["landed"] == 1, f"nothing was handed over: {recorded.counts}"
    steps, frames = -(-recorded.busy_steps // 3), -(-recorded.busy_frames // 3)
    assert _check(at_every_step(base, every=3)) == 5 * steps + 2 * frames


@pytest.mark.slow
def test_pages_that_a_rank_is_still_to_fill_go_to_the_next_request_at_once() -> None:
    """What was ordered first is done first, on every rank."""
    assert _check(one_leaves_another_follows(step) for step in range(0, 120, 2)) == 60


@pytest.mark.slow
@pytest.mark.parametrize("backend", some(BACKENDS, "shm"))
def test_pairs_of_faults_in_a_world_of_one_request(backend: str) -> None:
    """Each 211th pair; the others are for the night."""
    base = calm_scenario(draw(3, backend=backend), works=1)
    assert _check(islice(pairs_of_faults(base, every=211), 60)) > 20
