"""canary: decides what KV is checked when, reads what the kernels found, and says who had to do with it.

Canary        the face for an engine: begin and end of a step, arrivals, sweep, reports (canary.py)
CanaryHook    what stands around the forward pass (hook.py)
Violation     one broken promise, with its evidence (violation.py)
perturb/      faults on purpose: data with a seed, each with the detector that must find it
"""

from __future__ import annotations

from serinus.canary.canary import Canary, PageFacts
from serinus.canary.settings import CanarySettings
from serinus.canary.violation import Violation, ViolationLog, launch_tag, reason_names

__all__ = [
    "Canary",
    "CanarySettings",
    "PageFacts",
    "Violation",
    "ViolationLog",
    "launch_tag",
    "reason_names",
]
