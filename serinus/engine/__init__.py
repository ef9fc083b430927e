"""engine: one engine as an object that takes messages and time; around it the process loop, start-up, the offline LLM.

Names are imported when they are first used: the command line looks at this room without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serinus.engine.build import Built, KvSizes, build_engine, kv_sizes
    from serinus.engine.engine import Engine
    from serinus.engine.launch import launch
    from serinus.engine.llm import LLM, CompletionOutput, RequestOutput
    from serinus.engine.loop import EngineLoop

__all__ = [
    "LLM",
    "Built",
    "CompletionOutput",
    "Engine",
    "EngineLoop",
    "KvSizes",
    "RequestOutput",
    "build_engine",
    "kv_sizes",
    "launch",
]

_FILE_OF = {
    "Built": "build",
    "KvSizes": "build",
    "build_engine": "build",
    "kv_sizes": "build",
    "Engine": "engine",
    "EngineLoop": "loop",
    "launch": "launch",
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
