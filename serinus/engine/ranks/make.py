"""A rank's body from its parts, and a follower from the settings."""

from __future__ import annotations

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.engine.rank_build import RankParts, build_rank
from serinus.engine.ranks.body import RankBody
from serinus.engine.ranks.canary import attach_canary
from serinus.engine.ranks.crew import attach_hand
from serinus.engine.ranks.follow import Follower
from serinus.engine.ranks.group import FollowerGroup
from serinus.engine.ranks.tiers import attach_tiers
from serinus.parallel.comm import Comm

__all__ = ["make_body", "make_follower"]


def make_body(parts: RankParts, clock: Clock) -> RankBody:
    """A rank that obeys everything it can be ordered."""
    comm = parts.comm
    canary = parts.canary
    body = RankBody(
        rank=comm.rank, mesh=parts.mesh, runner=parts.runner, clock=clock, guard=canary, waited=lambda: comm.waited_s
    )
    attach_tiers(body, parts.tiers)
    attach_canary(body, canary)
    attach_hand(body, parts, clock, None if canary is None else canary.outgoing(parts.pools))
    return body


def make_follower(
    config: ServeConfig, *, rank: int, comm: Comm, control: str, clock: Clock, token: bytes = b""
) -> Follower:
    """Load a rank's share of the model and report to the leader at `control`; `comm` is this rank's own.

    Raises ConfigError, PeerGone: see build_rank.
    """
    mesh = comm.mesh
    parts = build_rank(config, mesh, rank, comm, clock)
    group = FollowerGroup(control, mesh=mesh, rank=rank, clock=clock, token=token)
    layers = parts.shard.layers
    info = {
        "layers": f"{layers.start}-{layers.stop - 1}",
        "kv_bytes": sum(spec.page_bytes * spec.page_count for spec in parts.pool_specs.values()),
    }
    return Follower(make_body(parts, clock), group, info, ends=(parts.close,))
