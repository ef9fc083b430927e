"""How the families of models write tool calls, as data; and which of them a chat template asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serinus.text.tool_bodies import CallBody, EitherBody, HeaderBody, ObjectBody, PairForm, PairsBody, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes calls where it must: what a grammar makes of `tool_choice` required or a named function."""

    hint: str = ""
    """A chat template with this text asks for it; empty = any does."""
    begin: str = ""
    """Before the first call."""
    before_name: str
    """Before the name of the function."""
    before_arguments: str
    """Between the name and the arguments."""
    after: str = ""
    """Behind the arguments of each call."""
    between: str = ""
    """Between one call and the next."""
    end: str = ""
    """Behind the last call."""
    pair: tuple[str, str, str] | None = None
    """What stands before a key, before its value and behind it, where arguments are pairs; None = they are JSON."""
    single: bool = False
    """Whether an answer has one call at most."""


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
    heads: tuple[str, ...] = ()
    """The same, of marks that a body begins with: models leave out the one before."""
    starts: str = ""
    """Characters that open a call where the answer begins with one."""
    follows: str = ""
    """Characters that open a call right behind another one."""
    body: Callable[[Tools], CallBody]
    """What stands in a call."""
    closers: tuple[str, ...] = ()
    """What may follow a call and belongs to it."""
    writes: tuple[CallForm, ...]
    """How calls are written; the first that fits the chat template."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        return (*self.opens, *self.closers, *self.hints)

    @property
    def opens(self) -> tuple[str, ...]:
        """All marks that open a call."""
        return (*self.begins, *self.heads)


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
    value_lines=True,
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
        writes=(
            CallForm(
                hint="```json", begin="<｜tool▁calls▁begin｜>",
                before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", before_arguments="\n```json\n",
                after="\n```<｜tool▁call▁end｜>", between="\n", end="<｜tool▁calls▁end｜>",
            ),
            CallForm(
                begin="<｜tool▁calls▁begin｜>", before_name="<｜tool▁call▁begin｜>", before_arguments="<｜tool▁sep｜>",
                after="<｜tool▁call▁end｜>", end="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(
        name="mistral",
        hints=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
        follows="{",
        body=partial(EitherBody, pattern=_MISTRAL),
        closers=(",", "]"),
        writes=(
            CallForm(hint="[ARGS]", before_name="[TOOL_CALLS]", before_arguments="[ARGS]"),
            CallForm(
                begin="[TOOL_CALLS][", before_name='{"name": "', before_arguments='", "arguments": ', after="}",
                between=", ", end="]",
            ),
        ),
    ),
    ToolFormat(
        name="glm45", aliases=("glm", "glm47"), hints=("<arg_key>",), begins=("<tool_call>",),
        body=partial(PairsBody, form=_GLM),
        writes=(
            CallForm(
                before_name="<tool_call>", before_arguments="\n", after="</tool_call>", between="\n",
                pair=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            ),
        ),
    ),
    ToolFormat(
        name="qwen3_coder", aliases=("qwen3_xml",), hints=("<function=",), begins=("<tool_call>",),
        heads=("<function=",), body=partial(PairsBody, form=_QWEN_CODER), closers=("</tool_call>",),
        writes=(
            CallForm(
                before_name="<tool_call>\n<function=", before_arguments=">\n", after="</function>\n</tool_call>",
                between="\n", pair=("<parameter=", ">\n", "\n</parameter>\n"),
            ),
        ),
    ),
    ToolFormat(
        name="hermes", aliases=("qwen", "qwen25"), hints=("<tool_call>",), begins=("<tool_call>",),
        body=ObjectBody, closers=("</tool_call>",),
        writes=(
            CallForm(
                before_name='<tool_call>\n{"name": "', before_arguments='", "arguments": ', after="}\n</tool_call>",
                between="\n",
            ),
        ),
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
        writes=(CallForm(before_name='{"name": "', before_arguments='", "parameters": ', after="}", between="; "),),
    ),
)  # fmt: skip
"""Most particular hints first."""

FORCED_CALLS = ToolFormat(
    name="forced", starts="[", follows="{", body=ObjectBody, closers=(",", "]"),
    writes=(
        CallForm(
            begin="[", before_name='{"name": "', before_arguments='", "parameters": ', after="}", between=", ", end="]"
        ),
    ),
)  # fmt: skip
"""A list of calls as JSON: what calls that are forced are written as where the family's form is not known."""
HARMONY_WRITES = CallForm(
    before_name="<|channel|>commentary to=functions.", before_arguments=" <|constrain|>json<|message|>", single=True
)


def tool_format_of(template: str) -> ToolFormat | None:
    """The form that a chat template asks models for; None = none that is known. Harmony is not among them."""
    found = (each for each in TOOL_FORMATS if any(hint in template for hint in each.hints))
    return next(found, None)
