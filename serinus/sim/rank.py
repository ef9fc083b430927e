"""One rank of a simulated engine: the real body, runner, tiers, page worker and canary, on simulated parts.

Simulated are the model's arithmetic, the tensors between ranks, the file system, and when copies happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from serinus.canary import make_canary_rank
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.kernels import Kernels, load
from serinus.models import ForwardHook, ModelSpec, compose_hooks
from serinus.parallel import Mesh, Shard
from serinus.pd import AnyBackend
from serinus.pool import HostPool, LayerGate, Mover, PoolSpec, RequestTable
from serinus.pool.storage import FileStorage
from serinus.ranks import RankBody, make_body
from serinus.ranks.build import Phases, RankParts
from serinus.ranks.tier_parts import Tiers
from serinus.runner import Runner
from serinus.sim.comm import RankTensors, SimComm
from serinus.sim.disk import SimDisk
from serinus.sim.model import HEAD_SIZE, SimModel
from serinus.sim.pools import PoolFaults, SimPool, StrayWrites
from serinus.sim.toy import Lanes
from serinus.sim.workers import SimWorkers

if TYPE_CHECKING:
    from serinus.core.clock import Clock

__all__ = ["RankSeams", "SimRank", "build_sim_rank"]

_FILES_MAX = 64
"""Pages that a rank keeps in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeams:
    """What the simulation puts in the place of the world, for all ranks of one engine."""

    clock: Clock
    tensors: RankTensors
    faults: PoolFaults
    stray: Callable[[Mapping[Part, SimPool]], StrayWrites] | None
    """Makes the hook that lets late writes land; None = none do."""
    mover_workers: Callable[[int], SimWorkers]
    """Makes what copies pages of a rank."""
    storage_workers: Callable[[int], SimWorkers]
    disk: SimDisk | None
    """Where pages are kept in files; None = nowhere."""
    folder: str
    """Of this engine's files; each rank has one of its own in it."""
    backends: Sequence[AnyBackend]
    """How pages travel between engines."""


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

    @property
    def folder(self) -> str:
        """Where its files are."""
        return f"rank{self.body.rank}"


@cache
def _kernels() -> Kernels:
    """They hold nothing of a rank, and to look them up takes half a millisecond."""
    return load("cpu")


def build_sim_rank(
    config: ServeConfig, spec: ModelSpec, shards: Sequence[Shard], rank: int, *, lanes: Lanes,
    pages: Mapping[Part, int], host_pages: int, rows: int, mesh: Mesh, seams: RankSeams,
) -> SimRank:  # fmt: skip
    """One rank of an engine with these settings.

    `pages`: of the device pool of each part; `host_pages`: of each host pool, 0 = there are no tiers.
    """
    shard, kernels, context = shards[rank], _kernels(), spec.context_length
    own = spec.on(shard)
    comm = SimComm(seams.tensors, rank)
    pools = {
        part: SimPool(
            PoolSpec(
                layer_count=len(own.layers_of(part)), kv_head_count=own.kv_head_count, head_size=HEAD_SIZE,
                page_size=config.memory.page_size, page_count=count, dtype=torch.float32,
                stamped=config.canary.kv_canary != "none",
            ),
            kernels, seams.faults,
        )
        for part, count in pages.items()
    }  # fmt: skip
    tables = {part: RequestTable(rows, context) for part in pools}
    model = SimModel(spec, shard, lanes, pools, comm)
    tiers = _tiers(config, own, pools, rank, host_pages, seams) if host_pages else None
    host = {} if tiers is None else tiers.host
    canary = make_canary_rank(config, spec, shards, rank, pools, tables, host, device="cpu")
    hooks: list[ForwardHook] = [] if tiers is None else [LayerGate(tiers.mover)]
    if seams.stray is not None:
        hooks.append(seams.stray(pools))
    if canary is not None:
        hooks.append(canary.hook)
    runner = Runner(model, pools, tables, kernels, hook=compose_hooks(hooks), comm=comm)
    parts = RankParts(
        config=config, mesh=mesh, comm=comm, spec=spec, shard=shard, context=context, dtype=torch.float32,
        device="cpu", kernels=kernels, pools=pools, tables=tables, namespace="simulated", tiers=tiers, canary=canary,
        runner=runner, phases=Phases(seams.clock),
    )  # fmt: skip
    return SimRank(model=model, pools=pools, parts=parts, body=make_body(parts, seams.clock, seams.backends))


def _tiers(
    config: ServeConfig, own: ModelSpec, pools: Mapping[Part, SimPool], rank: int, host_pages: int, seams: RankSeams
) -> Tiers:
    host = {part: HostPool(pool.spec, host_pages) for part, pool in pools.items()}
    mover = Mover(pools, host, own.layer_parts, seams.clock, seams.mover_workers(rank))
    storage = None
    if seams.disk is not None:
        bytes_max = _FILES_MAX * max(pool.page_bytes + 256 for pool in host.values())
        storage = FileStorage(
            f"{seams.folder}/rank{rank}", host=host, namespace="simulated", byte_max=bytes_max, clock=seams.clock,
            disk=seams.disk, workers=seams.storage_workers(rank),
        )  # fmt: skip
    return Tiers(host=host, mover=mover, storage=storage)
