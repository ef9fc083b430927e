"""selftest: does the canary of this machine find what it promises? What `serinus canary selftest` runs.

plan_matrix, run_cell   every fault that can be planted, one at a time, against every detector (matrix.py)
WEAKNESSES, grade       the self-test under planted weaknesses of the canary: each must turn it red (mutants.py)
CanaryPDFixture         a prefill and a decode engine, each under its canary, and faults planted in either (fixture.py)
EnginePair              the two engines, in one thread (pair.py), each turned by an EngineDriver (driver.py)

The engines are whole, of one rank or of several (threads); only processes and the router are left out, and sockets
where an engine has one rank.
"""

from serinus.selftest.driver import EngineDriver
from serinus.selftest.fixture import CANARY_SHAPES, SIDES, CanaryPDFixture, Planted, make_canary_toy
from serinus.selftest.matrix import Cell, Subject, plan_matrix, run_cell
from serinus.selftest.mutants import RANK_WEAKNESSES, WEAKNESSES, Weakness, grade
from serinus.selftest.pair import EnginePair
from serinus.selftest.scenes import CLEAN, OVERFLOW

__all__ = [
    "CANARY_SHAPES",
    "CLEAN",
    "OVERFLOW",
    "RANK_WEAKNESSES",
    "SIDES",
    "WEAKNESSES",
    "CanaryPDFixture",
    "Cell",
    "EngineDriver",
    "EnginePair",
    "Planted",
    "Subject",
    "Weakness",
    "grade",
    "make_canary_toy",
    "plan_matrix",
    "run_cell",
]
