"""sched: decides each step. `Scheduler.plan` says who computes what on which pages, `commit` takes the result in.

Knows neither devices nor sockets: plans go to `runner`, handoffs to `pd`, tokens to whoever asked.
"""

from serinus.core.handoff import ChunkReady, HandoffSpec, Reservation
from serinus.sched.page_row import OwnPages
from serinus.sched.scheduler import Scheduler
from serinus.sched.settings import POLICIES, SchedSettings
from serinus.sched.stats import Outcome, SchedStats, Totals

__all__ = [
    "POLICIES",
    "ChunkReady",
    "HandoffSpec",
    "Outcome",
    "OwnPages",
    "Reservation",
    "SchedSettings",
    "SchedStats",
    "Scheduler",
    "Totals",
]
