"""Serinus serves large language models with a KV cache that is proved intact.

from serinus import LLM, SamplingParams
LLM("path/or/hub-id").generate(["Hello!"], SamplingParams(temperature=0, max_tokens=16))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serinus.core.grammar import Grammar
    from serinus.core.sampling import SamplingParams
    from serinus.engine.llm import LLM

__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_FILE_OF = {
    "Grammar": "serinus.core.grammar",
    "LLM": "serinus.engine.llm",
    "SamplingParams": "serinus.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FILE_OF[name]), name)
