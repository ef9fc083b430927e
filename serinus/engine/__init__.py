"""engine: one engine as an object that takes messages and time; around it the process loop, start-up, the offline LLM.

Names are imported when they are first used: the command line looks at this room without loading torch.
"""

from typing import TYPE_CHECKING

from serinus.core.lazy import lazy_names

if TYPE_CHECKING:
    from serinus.engine.build import KvSizes, build_engine, kv_sizes
    from serinus.engine.built import Built
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

__getattr__ = lazy_names(
    __name__,
    build="KvSizes build_engine kv_sizes",
    built="Built",
    engine="Engine",
    launch="launch",
    llm="LLM CompletionOutput RequestOutput",
    loop="EngineLoop",
)
