"""testing: shipped test support. Tests import the file they need: some bring torch, some a server, most neither. One
engine, or a pair of them, is driven by `selftest`'s EngineDriver and EnginePair.

builders, tiny_engine, fake_runner   a scheduler on a tiny pool; its tokens are hashes of what the pages really hold
fake_mover                           copies between tiers and a storage that end when the test says so, well or badly
fake_cuda                            a GPU's streams and events; what is queued runs in any order that they leave open
handoff_pair                         two of those and the handoffs between them, delivered (or not) by the test
oracle, direct                       what the toy model must say; a model driven without a scheduler
answering_line, servers, ...         stand-ins for the other side of a room, processes, fronts
"""

from __future__ import annotations

__all__: list[str] = []
