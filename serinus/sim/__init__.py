"""A cluster in one thread, with virtual time, one seed and an adversary: the product runs, the rest is simulated."""

from serinus.sim.cluster import Cluster, Run, run
from serinus.sim.draw import draw
from serinus.sim.moments import Moment
from serinus.sim.options import Options, Scenario
from serinus.sim.shrink import shrink
from serinus.sim.sweep import at_every_step, calm_scenario, pairs_of_faults

__all__ = [
    "Cluster",
    "Moment",
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
