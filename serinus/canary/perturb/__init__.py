"""perturb: faults on purpose, to prove that the canary finds them. Off unless asked for; one seed, one run of faults.

PerturbPlan   which modes, how often, where, from when on: data (plan.py)
Perturber     carries a plan out around the steps, and notes every injection (perturber.py)
slot_picker   the one place that chooses victims
One module a mode, each with one `run`.
"""

from __future__ import annotations

from serinus.canary.perturb.perturber import Perturber
from serinus.canary.perturb.plan import MODES, Injection, PerturbPlan, parse_perturb

__all__ = ["MODES", "Injection", "PerturbPlan", "Perturber", "parse_perturb"]
