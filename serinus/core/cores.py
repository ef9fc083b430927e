"""Cores and threads: how many there are, how they are shared, and what a child's libraries are told. Starts nothing."""

from __future__ import annotations

import os

from serinus.core.config import environment

_SPINS = "5000"


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_threads(wanted: int | None, sharers: int) -> int:
    """Threads of each of `sharers` ranks on this machine: what was asked for, else an equal share, at least 1."""
    return wanted or max(1, cores() // sharers)


def threads_env(threads: int) -> dict[str, str]:
    """This process's environment for a child with libraries that shall use so many threads.

    Idle OpenMP workers spin before they sleep, by default long enough to starve other processes on the cores (and to be
    starved): with one other busy process on 2 cores, 5 s held 70 steps of linears by default, 121 with a short spin;
    on a quiet machine the short spin costs 3 %. A value of OMP_WAIT_POLICY or GOMP_SPINCOUNT that is set stays.
    """
    own = environment()
    calm = {} if "OMP_WAIT_POLICY" in own else {"GOMP_SPINCOUNT": _SPINS}
    count = str(threads)
    return {**calm, **own, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "NUMBA_NUM_THREADS": count}
