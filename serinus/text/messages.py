"""The messages of a chat, checked and made plain for a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serinus.core.errors import BadRequest

__all__ = ["checked_messages"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with plain text contents, as chat templates want it. Raises BadRequest."""
    if not messages:
        raise BadRequest("messages", [], "at least one message")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(where, message, "an object with role and content")
        role = message.get("role")
        if role not in _ROLES:
            raise BadRequest(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            content = _joined(where, content)
        elif content is None:
            if role != "assistant":
                raise BadRequest(f"{where}.content", None, "a text, or a list of parts of type text")
            content = ""
        elif not isinstance(content, str):
            raise BadRequest(f"{where}.content", content, "a text, or a list of parts of type text")
        checked.append({**message, "role": "system" if role == "developer" else role, "content": content})
    return checked


def _joined(where: str, parts: list[Any]) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        at = f"{where}.content[{index}]"
        if not isinstance(part, dict):
            raise BadRequest(at, part, "an object with type and text")
        if part.get("type") != "text":
            raise BadRequest(f"{at}.type", part.get("type"), "'text' (this server reads text only)")
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{at}.text", part.get("text"), "a text")
        texts.append(part["text"])
    return "".join(texts)
