"""Programmatic dependent launch, of Hopper and later: a kernel is put on the GPU while the last programs of the one
before it still run, and waits there. Without it a kernel begins some half of a microsecond after the one before it has
ended, which a decode step of one request does three hundred times.

A kernel that is started with `dependent(device)` calls `wait_for_earlier(DEPENDENT)` before it reads what another
kernel has written, and before it writes anything. All that was queued before it has ended then, as a kernel that is
started so does not end before the one before it either. One that is started as usual begins behind the end of all
before it, as ever.

Constants (weights) may be read before the wait, and so may what a step is told: rows, contexts, positions, slots, what
is due. All that was queued before the last kernel that was started as usual has ended by then. A step begins with the
copy of what it is told; behind it the first stage starts the embedding as usual, and a later one waits for what the
stage before it sends. What is made in the middle of a step must not be read so, or with another kernel behind it
(tests/models/test_early_reads.py). Such loads go past the first cache (`EARLY`), in which a multiprocessor may have
what lay there in the step before. Every program waits, also one that has nothing to do: else the kernel could end
before the one before it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 90
EARLY = tl.constexpr(".cg")
"""The cache modifier of loads before the wait that are not of constants."""

_jit: Any = triton.jit


@lru_cache(maxsize=16)
def dependent(device: torch.device) -> dict[str, bool]:
    """What a kernel is started with: that it may wait on its GPU, where that can."""
    if triton.knobs.runtime.interpret or triton.runtime.driver.active.get_current_target().arch < _HOPPER:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@_jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Let the next kernel be put on the GPU, and wait for the end of the one before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
