"""world: a cluster in one thread, with virtual time, one seed and an adversary."""

from __future__ import annotations

from serinus.testing.world.cluster import Cluster, Finding, Run, run
from serinus.testing.world.draw import draw
from serinus.testing.world.options import Options, Scenario
from serinus.testing.world.shrink import shrink
from serinus.testing.world.sweep import at_every_step, calm_scenario, pairs_of_faults

__all__ = [
    "Cluster",
    "Finding",
    "Options",
    "Run",
    "Scenario",
    "at_every_step",
    "calm_scenario",
    "draw",
    "pairs_of_faults",
    "run",
    "shrink",
]
