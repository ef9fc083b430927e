"""Programmatic dependent launch, of Hopper and later: a kernel is put on the GPU while the last programs of the one
before it still run, and waits there. Without it a kernel begins some half of a microsecond after the one before it has
ended, which a decode step of one request does three hundred times.

A kernel that is started with `dependent(device)` calls `wait_for_earlier(DEPENDENT)` before it reads what another
kernel has written, and before it writes anything. All that was queued before it has ended then, as a kernel that is
started so does not end before the one before it either. Constants (weights) may be read before. One that is started as
usual begins behind the end of all before it, as ever.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 90

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
