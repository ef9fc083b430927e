"""One rank of a simulated engine: the real body, runner, tiers, page worker and canary, on simulated parts.

Simulated are the model's arithmetic, the tensors between ranks, the file system, and when copies happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from serinus.core.parts import Part
from serinus.kernels import Kernels, load
from serinus.models import ModelSpec
from serinus.pool import HostPool, Mover, PoolSpec
from serinus.pool.storage import FileStorage
from serinus.ranks import RankBody, make_body
from serinus.ranks.build import Phases, RankParts, assemble
from serinus.ranks.tier_parts import Tiers
from serinus.sim.comm import SimComm
from serinus.sim.model import HEAD_SIZE, SimModel
from serinus.sim.pools import SimPool

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine

_FILES_MAX = 64
"""Pages that a rank keeps in files."""
_COPY_S = 0.001
_FILE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRank:
    """One rank with all its parts."""

    model: SimModel
    pools: Mapping[Part, SimPool]
    parts: RankParts
    body: RankBody

    @property
    def stores(self) -> dict[Part, SimPool]:
        """The pools of the parts that have layers here."""
        return {part: pool for part, pool in self.pools.items() if pool.page_bytes}


@cache
def _kernels() -> Kernels:
    """They hold nothing of a rank, and to look them up takes half a millisecond."""
    return load("cpu")


def build_sim_rank(engine: SimEngine, rank: int) -> SimRank:
    """A rank of an engine that starts."""
    config, spec, kernels = engine.config, engine.spec, _kernels()
    comm = SimComm(engine.tensors, rank)
    shard = spec.shards(comm.mesh)[rank]
    own = spec.on(shard)
    pools = {
        part: SimPool(
            PoolSpec(
                layer_count=len(own.layers_of(part)), kv_head_count=own.kv_head_count, head_size=HEAD_SIZE,
                page_size=config.memory.page_size, page_count=count, dtype=torch.float32,
                halves=part.halves, stamped=config.canary.kv_canary != "none",
            ),
            kernels, engine.faults, part,
        )
        for part, count in engine.pages.items()
    }  # fmt: skip
    tiers = _tiers(engine, own, pools, rank)
    damage = engine.damage(pools, {} if tiers is None else tiers.host) if engine.options.damages else None
    model = SimModel(spec, shard, engine.lanes, pools, comm, damage)
    parts = assemble(
        config, comm, spec, model, pools, tiers, kernels, context=spec.context_length, namespace="simulated",
        phases=Phases(engine.timeline),
    )  # fmt: skip
    return SimRank(
        model=model, pools=pools, parts=parts, body=make_body(parts, engine.timeline, engine.ends[rank])
    )  # fmt: skip


def _tiers(engine: SimEngine, own: ModelSpec, pools: Mapping[Part, SimPool], rank: int) -> Tiers | None:
    if not engine.shape.host_pages:
        return None
    clock, storage = engine.timeline, None
    host = {part: HostPool(pool.spec, engine.shape.host_pages) for part, pool in pools.items()}
    mover = Mover(pools, host, own.layer_parts, clock, engine.workers(rank, _COPY_S, 0.1))
    if engine.disk is not None:
        bytes_max = _FILES_MAX * max(pool.page_bytes + 256 for pool in host.values())
        storage = FileStorage(
            f"{engine.folder}/rank{rank}", host=host, namespace="simulated", byte_max=bytes_max, clock=clock,
            disk=engine.disk, workers=engine.workers(rank, _FILE_S, 0.5),
        )  # fmt: skip
    return Tiers(host=host, mover=mover, storage=storage)
