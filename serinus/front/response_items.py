"""The input of /v1/responses, items of a conversation, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.core.errors import BadRequest
from serinus.text import call_arguments

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
"""Types of parts that hold a text, and the field that it is in."""


def messages_of(instructions: str | None, items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises BadRequest: an item that is none, or of a kind that this server does not have."""
    if isinstance(items, str):
        if not items:
            raise BadRequest("input", items, "a text that is not empty, or items")
        items = [{"role": "user", "content": items}]
    if not items:
        raise BadRequest("input", [], "at least one item")
    messages = _Messages(instructions)
    for index, item in enumerate(items):
        messages.add(f"input[{index}]", item)
    return messages.ended()


class _Messages:
    """Grows item by item: thoughts, text and calls of one turn are one message of the assistant."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = []
        self._system = [instructions] if instructions else []
        """Texts at the beginning, which are one message: many templates take one."""
        self._turn: dict[str, Any] | None = None

    def add(self, where: str, item: dict[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(where, item)
        elif kind == "function_call":
            call = {"id": text_field(where, item, "call_id"), "type": "function"}
            function = {"name": text_field(where, item, "name"), "arguments": text_field(where, item, "arguments")}
            call_arguments(f"{where}.arguments", function["arguments"])
            self._assistant().setdefault("tool_calls", []).append({**call, "function": function})
        elif kind == "function_call_output":
            content = _content(f"{where}.output", item.get("output"))
            self._push({"role": "tool", "tool_call_id": text_field(where, item, "call_id"), "content": content})
        elif kind == "reasoning":
            parts = item.get("content") or []
            if text := _content(f"{where}.content", parts):
                turn = self._assistant()
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        else:
            expected = "message, function_call, function_call_output or reasoning"
            raise BadRequest(f"{where}.type", kind, expected)

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequest(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        content = _content(f"{where}.content", item.get("content"))
        if role == "assistant":
            turn = self._assistant()
            turn["content"] += content
        elif role != "user" and not self._messages and self._turn is None:
            self._system.append(content)
        else:
            self._push({"role": role, "content": content})

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
        return self._turn

    def _push(self, message: dict[str, Any]) -> None:
        if self._turn is not None:
            self._messages.append(self._turn)
            self._turn = None
        self._messages.append(message)

    def ended(self) -> list[dict[str, Any]]:
        """The messages of all items."""
        turn = [self._turn] if self._turn is not None else []
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return [*system, *self._messages, *turn]


def text_field(where: str, item: dict[str, Any], name: str) -> str:
    """The text that a field of an object is. Raises BadRequest."""
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}", value, "a text")
    return value


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(where, content, "a text, or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise BadRequest(at, part, "an object with type and text")
        field = _TEXTS.get(str(part.get("type")))
        if field is None:
            raise BadRequest(
                f"{at}.type", part.get("type"), f"one of {', '.join(_TEXTS)} (this server reads text only)"
            )
        texts.append(text_field(at, part, field))
    return "".join(texts)
