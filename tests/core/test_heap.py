"""What is told to the garbage collector of a caller's process holds for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from serinus.core.heap import seldom_collected


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    """A process in which nothing is frozen, as a caller's is."""
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    if was_frozen:
        gc.freeze()


def test_what_is_there_is_not_looked_at_for_a_while() -> None:
    gc.set_threshold(700, 10, 10)
    with seldom_collected():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (10_000, 10, 10)
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == (700, 10, 10)


def test_what_the_caller_has_told_stays() -> None:
    gc.set_threshold(0)
    gc.freeze()
    with seldom_collected():
        assert gc.get_threshold()[0] == 0, "a collector that is off stays off"
    assert gc.get_freeze_count() > 1000
