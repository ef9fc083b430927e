"""How the answers of a checkpoint are read: its forms of reasoning and tool calls, named or seen in its template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serinus.core.errors import ConfigError
from serinus.text.answer import AnswerParser, PlainAnswer
from serinus.text.harmony import HARMONY_HINT, HarmonyParser
from serinus.text.reasoning import REASONING_FORMATS, ReasoningFormat, ThinkParser, reasoning_format_of
from serinus.text.tool_bodies import Tools
from serinus.text.tool_formats import FORCED_CALLS, HARMONY_NAMES, TOOL_FORMATS, ToolFormat, tool_format_of
from serinus.text.tool_parser import ToolParser

__all__ = ["AnswerStyle", "answer_style", "reasoning_parser_names", "tool_parser_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """The forms of one checkpoint."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    harmony_tools: bool = False
    harmony_reasoning: bool = False

    @property
    def reads_tools(self) -> bool:
        """Whether tool calls are found in its answers."""
        return self.tools is not None or self.harmony_tools

    @property
    def reads_reasoning(self) -> bool:
        """Whether thoughts are."""
        return self.reasoning is not None or self.harmony_reasoning

    def shows_special(self, *, tools: bool, reasoning: bool) -> bool:
        """Whether the text must show special tokens for what is to be read."""
        in_tools = tools and (self.harmony_tools or (self.tools is not None and self.tools.special))
        in_thoughts = self.harmony_reasoning or (self.reasoning is not None and self.reasoning.special)
        return in_tools or (reasoning and in_thoughts)

    def parser(self, *, prompt: str, tools: Tools | None, reasoning: bool, forced: bool = False) -> AnswerParser | None:
        """A parser for one answer to this prompt; None = all of it is content.

        `tools`: may be called, None = none may; `forced`: a grammar makes a list of calls (FORCED_CALLS) of the answer.
        """
        if forced:
            return ToolParser(FORCED_CALLS, tools or {})
        if (tools is not None and self.harmony_tools) or (reasoning and self.harmony_reasoning):
            return HarmonyParser(tools or {})
        form = self.tools if tools is not None else None
        inner = ToolParser(form, tools or {}) if form is not None else None
        if not reasoning or self.reasoning is None:
            return inner
        return ThinkParser(self.reasoning, inner or PlainAnswer(), is_open=self.reasoning.is_open(prompt))


def _by_name(formats: tuple[ToolFormat, ...] | tuple[ReasoningFormat, ...]) -> Mapping[str, int]:
    return {name: index for index, each in enumerate(formats) for name in (each.name, *each.aliases)}


_TOOLS, _REASONING = _by_name(TOOL_FORMATS), _by_name(REASONING_FORMATS)


def tool_parser_names() -> list[str]:
    """Values of `--tool-call-parser`, aliases among them."""
    return ["auto", "none", *sorted({*_TOOLS, *HARMONY_NAMES})]


def reasoning_parser_names() -> list[str]:
    """Values of `--reasoning-parser`, aliases among them."""
    return ["auto", "none", *sorted({*_REASONING, "openai_gptoss", *HARMONY_NAMES})]


def answer_style(template: str, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerStyle:
    """The forms that the names say, auto = as the chat template shows. Raises ConfigError: no such name."""
    for setting, name, names in (
        ("tool_call_parser", tool_call_parser, tool_parser_names()),
        ("reasoning_parser", reasoning_parser, reasoning_parser_names()),
    ):
        if name not in names:
            raise ConfigError(f"text: {setting} is {name!r}, expected one of {', '.join(names)}")
    is_harmony = HARMONY_HINT in template
    tools, reasoning = None, None
    if tool_call_parser in _TOOLS:
        tools = TOOL_FORMATS[_TOOLS[tool_call_parser]]
    elif tool_call_parser == "auto" and not is_harmony:
        tools = tool_format_of(template)
    if reasoning_parser in _REASONING:
        reasoning = REASONING_FORMATS[_REASONING[reasoning_parser]]
    elif reasoning_parser == "auto" and not is_harmony:
        reasoning = reasoning_format_of(template)
    harmony = {*HARMONY_NAMES, "openai_gptoss", *(("auto",) if is_harmony else ())}
    return AnswerStyle(
        tools=tools,
        reasoning=reasoning,
        harmony_tools=tool_call_parser in harmony,
        harmony_reasoning=reasoning_parser in harmony,
    )
