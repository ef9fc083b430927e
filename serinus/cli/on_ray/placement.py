"""What an engine asks of a Ray cluster, and why it may have to wait for it. Plain functions of plain data.

An engine is a placement group with one bundle for each stage, spread over nodes. A bundle is on one node, so the ranks
of a stage, an actor each, are together: their tensors travel by shared memory or NVLink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serinus.core.addresses import host_port
from serinus.core.config import ServeConfig
from serinus.parallel import Mesh

Bundle = dict[str, float]
NodeTable = Sequence[Mapping[str, Any]]
"""As `ray.nodes()` gives it."""


def bundles_of(config: ServeConfig, *, gpus: bool) -> list[Bundle]:
    """For each stage: a GPU and a core for each of its ranks, or without GPUs the cores of `--threads` (1)."""
    ranks = float(config.parallel.tp_size)
    one = {"GPU": ranks, "CPU": ranks} if gpus else {"CPU": ranks * (config.kernels.threads or 1)}
    return [dict(one) for _ in range(config.parallel.pp_size)]


def actor_name(engine: str, mesh: Mesh, rank: int) -> str:
    """`decode-0` for the leader, `decode-0-TP1-PP0` for another rank: as the log calls it."""
    return f"{engine}-{mesh.name(rank).replace(' ', '-')}" if rank else engine


def shown_resources(resources: Mapping[str, float]) -> str:
    """`2 GPU, 16 CPU`: what matters of some resources."""
    named = [f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name)]
    return ", ".join(named) or "nothing"


def why_unplaced(bundles: Sequence[Bundle], nodes: NodeTable, free: Mapping[str, float]) -> str:
    """The bundle that no node has room for, and what the cluster has. `free`: in the whole cluster."""
    alive = [node for node in nodes if node["Alive"]]
    has = ", ".join(f"{node['NodeManagerAddress']} ({shown_resources(node['Resources'])})" for node in alive[:8])
    more = f" and {len(alive) - 8} more" if len(alive) > 8 else ""
    too_large = [
        number
        for number, bundle in enumerate(bundles)
        if not any(all(node["Resources"].get(key, 0) >= need for key, need in bundle.items()) for node in alive)
    ]
    which = too_large[0] if too_large else 0
    what = f"bundle {which} of {len(bundles)} ({shown_resources(bundles[which])} on one node)"
    why = "is more than any node has" if too_large else "finds no room"
    return f"{what} {why}: {len(alive)} nodes, {has}{more}; free in all: {shown_resources(free)}"


def rank_config(
    config: ServeConfig, nodes: Sequence[str], mesh: Mesh, rank: int, http: int, meeting: int
) -> ServeConfig:  # fmt: skip
    """The settings of one rank of an engine, on the node that it has got: each actor is a machine of its own, with one
    rank. `nodes`: of each stage; `http`, `meeting`: ports of the leader's."""
    node = nodes[mesh.pp_rank(rank)]
    several: dict[str, Any] = {
        "nnodes": mesh.size,
        "node_rank": rank,
        "dist_init_addr": host_port(nodes[0], meeting),
    }
    hands_over = config.role != "unified"
    return replace(
        config,
        server=replace(config.server, host=node, port=http),
        pd=replace(config.pd, bootstrap_host=node, bootstrap_port=0) if hands_over else config.pd,
        parallel=replace(config.parallel, **several) if mesh.size > 1 else config.parallel,
    )
