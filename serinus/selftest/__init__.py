"""selftest: does the canary of this machine find what it promises? What `serinus canary selftest` runs.

plan_matrix, run_cell   every fault that can be planted, one at a time, against every detector (matrix.py)
CanaryPDFixture         a prefill and a decode engine, each under its canary, and faults planted in either (fixture.py)
EnginePair              the two engines, in one thread (pair.py), each turned by an EngineDriver (driver.py)

The engines are whole; only processes, sockets and the router are left out.
"""

from __future__ import annotations

from serinus.selftest.driver import EngineDriver
from serinus.selftest.fixture import CANARY_SHAPES, SIDES, CanaryPDFixture, Planted, make_canary_toy
from serinus.selftest.matrix import CLEAN, Cell, Subject, plan_matrix, run_cell
from serinus.selftest.pair import EnginePair

__all__ = [
    "CANARY_SHAPES",
    "CLEAN",
    "SIDES",
    "CanaryPDFixture",
    "Cell",
    "EngineDriver",
    "EnginePair",
    "Planted",
    "Subject",
    "make_canary_toy",
    "plan_matrix",
    "run_cell",
]
