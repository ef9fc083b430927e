"""`tools` and `tool_choice` of a chat, checked: which functions may be called, and which must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.front.schemas import ChatBody
from serinus.text import AnswerStyle, forced_tag

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What one chat may call."""

    tools: list[dict[str, Any]]
    """As the client gave them, for the chat template."""
    schemas: Mapping[str, dict[str, Any]]
    """JSON schemas of the parameters, by function: those that may be called."""
    must: tuple[str, ...] = ()
    """The answer must be calls of these; () = it may be a text too."""
    calls_max: int | None = None
    """Calls that one answer may have; None = any number."""

    def forced(self, style: AnswerStyle) -> Grammar:
        """The grammar of an answer that must be calls, in the form of the model's family."""
        form = style.call_form(self.schemas)
        tag = forced_tag(form, {name: self.schemas[name] for name in self.must}, calls_max=self.calls_max)
        return Grammar.of("structural_tag", tag)


def tool_use(body: ChatBody) -> ToolUse | None:
    """What this chat may call; None = nothing (no tools, or `tool_choice` none). Raises BadRequest."""
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(body.tools or ()):
        name, schema = _function(f"tools[{index}]", tool)
        if name in schemas:
            raise BadRequest(f"tools[{index}].function.name", name, "a name that no tool before it has")
        schemas[name] = schema
    mode, names = _choice(body.tool_choice, schemas)
    if not schemas or mode == "none":
        return None
    calls_max = 1 if body.parallel_tool_calls is False or mode == "named" else None
    return ToolUse(
        tools=list(body.tools or ()), schemas={name: schemas[name] for name in names},
        must=() if mode == "auto" else names, calls_max=calls_max,
    )  # fmt: skip


def _function(where: str, tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if tool.get("type") != "function":
        raise BadRequest(f"{where}.type", tool.get("type"), "'function' (this server runs no tools of its own)")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function", function, "an object with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.function.name", name, "1 to 128 of a-z, A-Z, 0-9, underscore, dash and dot")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise BadRequest(f"{where}.function.parameters", schema, "a JSON schema, which is an object")
    return name, schema or {}


def _choice(choice: str | dict[str, Any] | None, schemas: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """none, auto, required or named, and the functions that may be called. Raises BadRequest."""
    every = tuple(schemas)
    if choice is None or choice in ("none", "auto"):
        return str(choice or "auto"), every
    if not schemas:
        raise BadRequest("tool_choice", choice, "none or auto where there are no tools")
    if choice == "required":
        return "required", every
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        return "named", (_named("tool_choice", choice, schemas),)
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), schemas)
    expected = "none, auto, required, {'type': 'function', 'function': {'name': one of tools}} or allowed_tools"
    raise BadRequest("tool_choice", choice, expected)


def _allowed(given: Any, schemas: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Of `tool_choice` that allows some of the tools; the model is shown all."""
    where = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or given.get("mode") not in ("auto", "required"):
        raise BadRequest(where, given, "an object with mode (auto or required) and tools")
    tools = given.get("tools")
    if not isinstance(tools, list) or not tools:
        raise BadRequest(f"{where}.tools", tools, "functions, at least one")
    return given["mode"], tuple(
        dict.fromkeys(_named(f"{where}.tools[{index}]", tool, schemas) for index, tool in enumerate(tools))
    )


def _named(where: str, given: Any, schemas: Mapping[str, Any]) -> str:
    """The function of the tools that is meant."""
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict):
        raise BadRequest(where, given, "{'type': 'function', 'function': {'name': one of tools}}")
    name = function.get("name")
    if not isinstance(name, str) or name not in schemas:
        raise BadRequest(f"{where}.function.name", name, f"one of {', '.join(schemas)}")
    return name
