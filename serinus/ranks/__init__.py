"""ranks: one engine of n >= 1 ranks. The leader commands down one ordered, hashed line; each rank obeys and answers.

    leader     LeaderLine(body, mesh, clock, links): command(...), run(plan), flush(), pump(), finished()
    others     make_rank_loop(config, rank=..., comm=..., ...).run()
    every rank RankBody: the runner, and what obeys the commands of tiers, handoffs and the canary

Everything that touches a rank's pages, tables and pools comes down this line, and is done in its order. Knows nothing
of fronts, requests or roles. Names are imported when they are first used: the command line reads exit codes here
without loading torch.
"""

from typing import TYPE_CHECKING

from serinus.core.lazy import lazy_names

if TYPE_CHECKING:
    from serinus.ranks.body import RankBody
    from serinus.ranks.commands import RankHoldings, RunStep, StepDone, Stop
    from serinus.ranks.line import FinishedStep, LeaderLine, LineReader, RankLinks
    from serinus.ranks.links import LeaderLinks, RankLink
    from serinus.ranks.make import make_body, make_rank_loop
    from serinus.ranks.rank_loop import RankLoop

__all__ = [
    "FinishedStep",
    "LeaderLine",
    "LeaderLinks",
    "LineReader",
    "RankBody",
    "RankHoldings",
    "RankLink",
    "RankLinks",
    "RankLoop",
    "RunStep",
    "StepDone",
    "Stop",
    "make_body",
    "make_rank_loop",
]

__getattr__ = lazy_names(
    __name__,
    body="RankBody",
    commands="RankHoldings RunStep StepDone Stop",
    line="FinishedStep LeaderLine LineReader RankLinks",
    links="LeaderLinks RankLink",
    make="make_body make_rank_loop",
    rank_loop="RankLoop",
)
