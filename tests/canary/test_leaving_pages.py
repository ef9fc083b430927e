"""The horizon, held against an account of what each step read and when that was verified (account.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.plan import SeqWork
from serinus.sched.request_state import ReqState

from .little_memory import TIERS, alike, answer_all, flip, flip_host, shift


@pytest.mark.slow
def test_what_the_horizon_covers_was_verified_after_its_last_read_on_the_page_that_was_read(
    tmp_path: Path,
) -> None:
    left = answer_all(tmp_path)
    assert all(left[how] for how in ("exchanged", "behind the window", "given back", "retracted")), left
    assert not left["found"], left


@pytest.mark.slow
def test_it_was_also_where_pages_become_wrong_at_any_time_and_every_answer_is_right(
    tmp_path: Path,
) -> None:
    assert answer_all(tmp_path, damage=[shift])["found"]


@pytest.mark.proof
@pytest.mark.parametrize("stride", [4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_it_was_also_over_tiers_under_write_back_in_storms_of_evictions_and_heals(
    tmp_path: Path, seed: int, stride: int
) -> None:
    left = answer_all(
        tmp_path, damage=[shift, alike, flip, flip_host], seed=seed, stride=stride, storms=True, **TIERS
    )  # fmt: skip
    assert all(left[how] for how in ("behind the window", "given back")), left


@pytest.mark.slow
def test_a_horizon_that_is_ahead_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weakness that this account is for. The product's own is one step behind what it could be."""
    done = ReqState.step_done

    def done_early(state: ReqState, work: SeqWork, slots: int) -> None:
        steps, state.verify_steps = state.verify_steps, max(0, state.verify_steps - 2)
        done(state, work, slots)
        state.verify_steps = steps

    monkeypatch.setattr(ReqState, "step_done", done_early)
    with pytest.raises(AssertionError, match="is within the horizon"):
        answer_all(tmp_path)


@pytest.mark.slow
def test_a_slot_that_leaves_a_window_alone_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of another prompt, of the same positions, agrees with itself: the slot behind it is what tells."""
    from serinus.canary import rank

    def alone(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def due(reads_6B: NDArray[np.int64], size: int) -> Any:
            reads_6B[3] = np.where(reads_6B[4] == 1, np.minimum(reads_6B[3], reads_6B[2] + 1), reads_6B[3])
            return kernel(reads_6B, size)

        return lambda reads, size: due(reads.copy(), size) if (reads[3] - reads[2] <= 2).all() else kernel(reads, size)

    due = rank.due_pages
    monkeypatch.setattr(rank, "due_pages", lambda kernel, *more: due(alone(kernel), *more))
    with pytest.raises(AssertionError, match="is within the horizon"):
        answer_all(tmp_path)


@pytest.mark.slow
def test_a_slot_that_leaves_a_window_before_its_turn_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serinus.canary import rank

    due = rank.due_pages
    monkeypatch.setattr(rank, "due_pages", lambda kernel, reads, size, window: due(kernel, reads, size, None))
    with pytest.raises(AssertionError, match="is within the horizon"):
        answer_all(tmp_path)
