"""How the answers of a checkpoint are read: its forms of reasoning and tool calls, named or seen in its template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from serinus.core.errors import ConfigError
from serinus.text.answer import AnswerParser, PlainAnswer
from serinus.text.forced_calls import reads_pairs
from serinus.text.harmony import HARMONY_HINT, HARMONY_MARKS, HarmonyParser
from serinus.text.reasoning import REASONING_FORMATS, ReasoningFormat, ThinkParser, reasoning_format_of
from serinus.text.tool_bodies import Tools
from serinus.text.tool_formats import (
    FORCED_CALLS,
    HARMONY_NAMES,
    HARMONY_WRITES,
    TOOL_FORMATS,
    CallForm,
    ToolFormat,
    tool_format_of,
)
from serinus.text.tool_parser import ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """The forms of one checkpoint."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    template: str = ""
    """The chat template, by which a family's form of calls is chosen."""
    harmony_tools: bool = False
    harmony_reasoning: bool = False

    @property
    def reads_tools(self) -> bool:
        """Whether tool calls are found in its answers."""
        return self.tools is not None or self.harmony_tools

    @property
    def reads_thoughts(self) -> bool:
        """Whether thoughts are told apart in its answers."""
        return self.reasoning is not None or self.harmony_reasoning

    def marks(self, *, tools: bool, reasoning: bool) -> frozenset[str]:
        """What tools or reasoning are known by: where any is a special token, the text must show special tokens."""
        marks: set[str] = set()
        if tools and self.tools is not None:
            marks.update(self.tools.marks)
        if reasoning and self.reasoning is not None:
            marks.update((self.reasoning.begin, self.reasoning.end))
        if (tools and self.harmony_tools) or (reasoning and self.harmony_reasoning):
            marks.update(HARMONY_MARKS)
        return frozenset(marks)

    def call_form(self, schemas: Tools) -> CallForm:
        """How calls of these functions are written where they must be."""
        if self.harmony_tools:
            return HARMONY_WRITES
        form = self._forced_format(schemas)
        return next(each for each in form.writes if each.hint in self.template)

    def _forced_format(self, schemas: Tools) -> ToolFormat:
        form = self.tools or FORCED_CALLS
        as_pairs = form.writes[0].pair is not None
        return FORCED_CALLS if as_pairs and not all(map(reads_pairs, schemas.values())) else form

    def parser(
        self, *, prompt: str, tools: Tools | None, reasoning: bool, forced: bool = False, said: str = ""
    ) -> AnswerParser | None:
        """A parser for one answer to this prompt; None = all of it is content.

        `tools`: may be called, None = none may; `forced`: a grammar makes calls of the answer (`call_form`);
        `said`: the message at the end of the prompt that the answer goes on with.
        """
        is_harmony = (tools is not None and self.harmony_tools) or (reasoning and self.harmony_reasoning)
        if is_harmony:
            return HarmonyParser(tools or {})
        form = None if tools is None else self._forced_format(tools) if forced else self.tools
        inner = ToolParser(form, tools or {}) if form is not None else None
        thoughts = self.reasoning
        if not reasoning or thoughts is None:
            return inner
        is_open, goes_on = thoughts.is_open(prompt, said), bool(thoughts.begun_in(said).strip())
        return ThinkParser(thoughts, inner or PlainAnswer(), is_open=is_open, goes_on=goes_on)


_TOOLS = {name: each for each in TOOL_FORMATS for name in (each.name, *each.aliases)}
_REASONING = {name: each for each in REASONING_FORMATS for name in (each.name, *each.aliases)}


def tool_parser_names() -> list[str]:
    """Values of `--tool-call-parser`, aliases among them."""
    return ["auto", "none", *sorted({*_TOOLS, *HARMONY_NAMES})]


def reasoning_parser_names() -> list[str]:
    """Values of `--reasoning-parser`, aliases among them."""
    return ["auto", "none", *sorted({*_REASONING, "openai_gptoss", *HARMONY_NAMES})]


@lru_cache(maxsize=64)
def answer_style(template: str, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerStyle:
    """The forms that the names say, auto = as the chat template shows. Raises ConfigError: no such name."""
    for setting, name, names in (
        ("tool_call_parser", tool_call_parser, tool_parser_names()),
        ("reasoning_parser", reasoning_parser, reasoning_parser_names()),
    ):
        if name not in names:
            raise ConfigError(f"text: {setting} is {name!r}, expected one of {', '.join(names)}")
    is_harmony = HARMONY_HINT in template
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    if tool_call_parser in _TOOLS:
        tools = _TOOLS[tool_call_parser]
    elif tool_call_parser == "auto" and not is_harmony:
        tools = tool_format_of(template)
    if reasoning_parser in _REASONING:
        reasoning = _REASONING[reasoning_parser]
    elif reasoning_parser == "auto" and not is_harmony:
        reasoning = reasoning_format_of(template)
    harmony = {*HARMONY_NAMES, "openai_gptoss", *(("auto",) if is_harmony else ())}
    return AnswerStyle(
        template=template,
        tools=tools,
        reasoning=reasoning,
        harmony_tools=tool_call_parser in harmony,
        harmony_reasoning=reasoning_parser in harmony,
    )
