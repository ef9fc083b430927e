"""How the families of models write tool calls, as data; and which of them a chat template asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serinus.text.tool_bodies import CallBody, EitherBody, HeaderBody, ObjectBody, PairForm, PairsBody, Tools

__all__ = ["FORCED_CALLS", "HARMONY_NAMES", "TOOL_FORMATS", "ToolFormat", "tool_format_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The form of one family."""

    name: str
    """As `--tool-call-parser` has it."""
    aliases: tuple[str, ...] = ()
    """Its names in vLLM and SGLang."""
    hints: tuple[str, ...] = ()
    """A chat template with any of these texts asks for it."""
    begins: tuple[str, ...] = ()
    """Marks that open a call wherever they stand."""
    starts: str = ""
    """Characters that open a call where the answer begins with one."""
    follows: str = ""
    """Characters that open a call right behind another one."""
    body: Callable[[Tools], CallBody]
    """What stands in a call."""
    closers: tuple[str, ...] = ()
    """What may follow a call and belongs to it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        return (*self.begins, *self.closers, *self.hints)


_GLM = PairForm(
    name_ends=("<arg_key>", "</tool_call>"),
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
)
_QWEN_CODER = PairForm(
    name_begin="<function=",
    name_ends=(">",),
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    end="</function>",
)
_MISTRAL = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?")
_DEEPSEEK = re.compile(r"(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json)")

HARMONY_NAMES = ("openai", "gpt-oss", "gpt_oss", "harmony")
"""Names of the form whose channels hold calls and reasoning alike; `harmony.py` reads it."""

TOOL_FORMATS = (
    ToolFormat(
        name="deepseek",
        aliases=("deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31"),
        hints=("<｜tool▁call▁begin｜>",),
        begins=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
        body=partial(HeaderBody, pattern=_DEEPSEEK),
        closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(
        name="mistral",
        hints=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
        follows="{",
        body=partial(EitherBody, pattern=_MISTRAL),
        closers=(",", "]"),
    ),
    ToolFormat(
        name="glm45", aliases=("glm", "glm47"), hints=("<arg_key>",), begins=("<tool_call>",),
        body=partial(PairsBody, form=_GLM),
    ),
    ToolFormat(
        name="qwen3_coder", aliases=("qwen3_xml",), hints=("<function=",), begins=("<tool_call>",),
        body=partial(PairsBody, form=_QWEN_CODER), closers=("</tool_call>",),
    ),
    ToolFormat(
        name="hermes", aliases=("qwen", "qwen25"), hints=("<tool_call>",), begins=("<tool_call>",),
        body=ObjectBody, closers=("</tool_call>",),
    ),
    ToolFormat(
        name="llama3_json",
        aliases=("llama3", "llama4_json"),
        hints=("<|python_tag|>", '{"name": function name, "parameters":'),
        begins=("<|python_tag|>",),
        starts="{",
        follows="{",
        body=ObjectBody,
        closers=(";",),
    ),
)  # fmt: skip
"""Most particular hints first."""

FORCED_CALLS = ToolFormat(name="forced", starts="[", follows="{", body=ObjectBody, closers=(",", "]"))
"""A list of calls as JSON, whatever the family: what a grammar makes of `tool_choice` required or a named function."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The form that a chat template asks models for; None = none that is known. Harmony is not among them."""
    found = (each for each in TOOL_FORMATS if any(hint in template for hint in each.hints))
    return next(found, None)
