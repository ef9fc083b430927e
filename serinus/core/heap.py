"""What a process that serves, or computes for its caller, tells Python's garbage collector."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collect_seldom", "seldom_collected", "settle_heap"]

_YOUNG = 10_000


def collect_seldom() -> None:
    """Call as a process begins: young objects are looked at when there are 10,000, not at 700 as by default.

    Most of a step's objects are gone by then without a collection. At 700 one fell into each step of 256 requests and
    took 1 ms of it, and 2.5 s of an engine's start were collections; cycles are freed later now.
    """
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def settle_heap() -> None:
    """Call once all that a process needs is loaded: it is kept to the end, and no collection looks at it again.

    A full collection beside the 465,000 objects of an engine's start takes 0.5 to 0.75 s, in which no token leaves.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of what is not let go then


@contextmanager
def seldom_collected() -> Iterator[None]:
    """The same in a process of another's, for a while: what is there is looked at again at its end. A caller's own
    frozen objects stay frozen, and are all that is. Cost: nothing.

    A full collection took 5 to 8 ms of a decode step of 64, once in a hundred steps.
    """
    thresholds, is_free = gc.get_threshold(), not gc.get_freeze_count()
    if is_free:
        gc.freeze()
    gc.set_threshold(max(_YOUNG, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_free:
            gc.unfreeze()
