"""canary: decides what KV is checked when, reads what the kernels found, and says what follows from it.

CanaryLead    the leader's half: commands sweeps and arrival checks, judges what ranks found, reports (lead.py)
Judge         what follows from violations: pages condemned, requests named (judge.py)
CanaryRank    one rank's half: checks its KV around each step and by command (rank.py)
HostCheck     host pages verified on their way to the storage, and from it (host_check.py)
make_*        both from the settings (make.py); an engine without a canary has None
Incident      violations of one slot, reason and owner, as one record (incidents.py)
Violation     one broken promise, with its evidence (violation.py)
PageHealth    which pages failed, how often, on which ranks (page_health.py)
LeadFaults    faults on purpose, as the leader plans them: from the settings, or ordered while it runs (faults.py)
perturb/      faults on purpose: data with a seed, each with the detector that must find it
"""

from serinus.canary.commands import (
    CANARY_COMMANDS,
    CanaryAnswer,
    CheckRows,
    Finding,
    HostFindings,
    RingOverflow,
    StartCanary,
    SweepSlots,
    slots_checked,
)
from serinus.canary.faults import LeadFaults
from serinus.canary.host_check import HostCheck
from serinus.canary.incidents import Incident
from serinus.canary.judge import ArrivalVerdict, Verdict
from serinus.canary.lead import CanaryLead, perturb
from serinus.canary.make import make_canary_lead, make_canary_rank
from serinus.canary.rank import CanaryRank
from serinus.canary.ring import CanaryMark
from serinus.canary.settings import CheckSettings
from serinus.canary.violation import Violation, launch_tag, reason_names

__all__ = [
    "CANARY_COMMANDS",
    "ArrivalVerdict",
    "CanaryAnswer",
    "CanaryLead",
    "CanaryMark",
    "CanaryRank",
    "CheckRows",
    "CheckSettings",
    "Finding",
    "HostCheck",
    "HostFindings",
    "Incident",
    "LeadFaults",
    "RingOverflow",
    "StartCanary",
    "SweepSlots",
    "Verdict",
    "Violation",
    "launch_tag",
    "make_canary_lead",
    "make_canary_rank",
    "perturb",
    "reason_names",
    "slots_checked",
]
