"""sched: decides each step. `Scheduler.plan` assigns tokens and pages to requests, `commit` takes the result in.

Knows neither devices nor sockets: plans go to `runner`, handoffs to `pd`, tokens to the caller of the engine.
"""

from serinus.core.handoff import ChunkReady, HandoffSpec
from serinus.sched.handoff_choice import PrefillPace
from serinus.sched.request_state import Healing, Phase, ReqState
from serinus.sched.scheduler import Scheduler
from serinus.sched.settings import POLICIES, SchedSettings
from serinus.sched.stats import Outcome, SchedStats

__all__ = [
    "POLICIES",
    "ChunkReady",
    "HandoffSpec",
    "Healing",
    "Outcome",
    "Phase",
    "PrefillPace",
    "ReqState",
    "SchedSettings",
    "SchedStats",
    "Scheduler",
]
