"""parallel: the ranks of one engine live by one log. The leader decides, every rank applies, none acts on what it sees.

    log, fold = DecisionLog(), ReportFold(group.size)               # leader
    log.decide(DecisionKind.PLACE, rid, queue="bootstrap")          # a request, or what became of it
    group.announce(log.header(step))                                # ahead of each step
    for report in group.reports(): fold.take(report)                # ready = all, failed = any, released = all drained

    for header in group.headers(rank):                              # every rank, the leader's own too
        for decision in follower.apply(header): table.apply(decision)
    group.report(Report(rank=rank, kind=ReportKind.DRAINED, key=rid))

`Mesh` numbers the ranks, `shards_of` says what each holds of a model. Tensors between ranks go through a `Comm`
(`parallel/comm.py`, the only file here that needs torch). Knows nothing of schedulers, KV or models.
"""

from __future__ import annotations

from serinus.parallel.decisions import Decision, DecisionFollower, DecisionKind, DecisionLog, OrderTo, StepHeader
from serinus.parallel.groups import Group, LocalGroup
from serinus.parallel.mesh import Mesh, Shard, shards_of, share
from serinus.parallel.ranks import QUEUES, RankTable, RankWorker
from serinus.parallel.reports import Report, ReportFold, ReportKind

__all__ = [
    "QUEUES",
    "Decision",
    "DecisionFollower",
    "DecisionKind",
    "DecisionLog",
    "Group",
    "LocalGroup",
    "Mesh",
    "OrderTo",
    "RankTable",
    "RankWorker",
    "Report",
    "ReportFold",
    "ReportKind",
    "Shard",
    "StepHeader",
    "shards_of",
    "share",
]
