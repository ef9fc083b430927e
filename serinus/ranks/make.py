"""A rank's body from its parts, and the loop of a rank that does not lead from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

from serinus.canary import CANARY_COMMANDS
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.parallel.comm import Comm
from serinus.pd import AnyBackend
from serinus.ranks.body import Meanwhile, RankBody, StepCanary, StepRunner
from serinus.ranks.build import RankParts, build_rank, record_steps
from serinus.ranks.layouts import data_backends
from serinus.ranks.page_workers import attach_page_worker
from serinus.ranks.rank_loop import LeaderLink, RankLoop
from serinus.ranks.steps_ahead import StepsAhead
from serinus.ranks.tiers import attach_tiers


def make_body(parts: RankParts, clock: Clock, backends: Sequence[AnyBackend]) -> RankBody:
    """A rank that obeys every command. `backends`: how pages travel between engines, of this rank."""
    comm = parts.comm
    canary = parts.canary
    runner: StepRunner = parts.runner
    around: StepCanary | None = canary
    meanwhile: Meanwhile | None = None
    if parts.mesh.pp == 1:
        meanwhile = None if parts.device == "cpu" else Meanwhile()
        runner = ahead = StepsAhead(parts.runner, canary, meanwhile)
        around = None if canary is None else ahead
    body = RankBody(
        rank=comm.rank, mesh=parts.mesh, runner=runner, clock=clock, canary=around, waited=lambda: comm.waited_s,
        meanwhile=meanwhile,
    )  # fmt: skip
    attach_tiers(body, parts.tiers)
    if canary is not None:
        for command in CANARY_COMMANDS:
            body.on(command, canary.obey)
        if canary.host_check is not None:
            body.attend(canary.host_check)
    attach_page_worker(body, parts, clock, parts.outgoing, backends)
    return body


def make_rank_loop(config: ServeConfig, *, rank: int, comm: Comm, link: LeaderLink, clock: Clock) -> RankLoop:
    """Load a rank's share of the model; `link` to the leader and `comm` are this rank's own.

    Raises ConfigError, PeerGone: see build_rank.
    """
    with ExitStack() as undo:
        parts = build_rank(config, comm.mesh, rank, comm, clock)
        undo.callback(parts.close)
        record_steps(parts, lambda title, total: nullcontext(lambda: None))
        body = make_body(parts, clock, data_backends(config, rank, parts.device))
        undo.pop_all()
    return RankLoop(body, link, ends=(parts.close,))
