"""Serinus serves large language models with a KV cache that is proved intact.

from serinus import LLM, SamplingParams
LLM("path/or/hub-id").generate(["Hello!"], SamplingParams(temperature=0, max_tokens=16))
"""

from typing import TYPE_CHECKING

from serinus.core.lazy import lazy_names

if TYPE_CHECKING:
    from serinus.core.grammar import Grammar
    from serinus.core.sampling import SamplingParams
    from serinus.engine.llm import LLM

__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

__version__ = "0.1.0"

__getattr__ = lazy_names(
    __name__, **{"core.grammar": "Grammar", "core.sampling": "SamplingParams", "engine.llm": "LLM"}
)
