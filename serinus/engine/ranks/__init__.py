"""ranks: an engine of several ranks. The leader decides and orders, each rank obeys in order.

    leader     RankExecutor(RankGroup(...), body, mesh, clock): submit(plan), take(); order(...), subscribe(...), pump()
    follower   make_follower(config, rank=..., comm=..., ...).run()
    both       RankBody: runner, request table, whoever obeys orders with what this rank holds

Everything that touches a rank's pages, tables and pools comes down one ordered line, and is done in that order.
"""

from __future__ import annotations

from serinus.engine.ranks.body import RankBody
from serinus.engine.ranks.executor import RankExecutor
from serinus.engine.ranks.follow import Follower
from serinus.engine.ranks.group import FollowerGroup, RankGroup
from serinus.engine.ranks.line import Line
from serinus.engine.ranks.make import make_body, make_follower
from serinus.engine.ranks.orders import RunStep, StepDone, Stop

__all__ = [
    "Follower",
    "FollowerGroup",
    "Line",
    "RankBody",
    "RankExecutor",
    "RankGroup",
    "RunStep",
    "StepDone",
    "Stop",
    "make_body",
    "make_follower",
]
