"""perturb: faults on purpose, to prove that the canary finds them. Off unless asked for; one seed, one run of faults.

PerturbPlan    which modes, how often, where, from which step on: data (plan.py)
fault_plan     that plan from the settings, and the share of each rank; check_faults before any starts (config.py)
Perturber      carries a plan out around the steps of a rank, and notes every injection (perturber.py)
slot_picker    the one place that chooses victims (damage.py: the bit of them that is changed)
A mode is a module's `run`; page_bytes.py serves two modes, real_kv.py has three, a function each.
"""

from serinus.canary.perturb.config import check_faults, fault_plan, rank_fault_plan
from serinus.canary.perturb.perturber import Perturber
from serinus.canary.perturb.plan import MODES, Injection, PerturbPlan, Place, parse_perturb

__all__ = [
    "MODES",
    "Injection",
    "PerturbPlan",
    "Perturber",
    "Place",
    "check_faults",
    "fault_plan",
    "parse_perturb",
    "rank_fault_plan",
]
