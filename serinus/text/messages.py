"""The messages of a chat, checked and made plain for a chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serinus.core.errors import BadRequest

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NULL_CONTENT = re.compile(r"content['\"\]]*\s+is\s+none")
"""Templates (DeepSeek's) that show calls only where there is no content."""
_SHORT_IDS = re.compile(r"length\s*(?:!=|==)\s*9\b")
"""Templates (Mistral's) that take ids of nine ASCII characters only."""


_THINKING = re.compile(r"message\.thinking|['\"]thinking['\"] in")
"""Templates (gpt-oss's) that show the thoughts before a call by this name, where the message has no content."""


class _Arguments(dict[str, Any]):
    """Arguments of a call for templates of both kinds: some walk through them, some paste them as text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __add__(self, after: str) -> str:
        return str(self) + after


def checked_messages(messages: Sequence[Mapping[str, Any]], template: str = "") -> list[dict[str, Any]]:
    """The conversation with plain text contents, as chat templates want it. Raises BadRequest.

    `template`: its source, where that is known; families differ in what they take for a call.
    """
    if not messages:
        raise BadRequest("messages", [], "at least one message")
    checked: list[dict[str, Any]] = []
    has_null, has_short_ids = bool(_NULL_CONTENT.search(template)), bool(_SHORT_IDS.search(template))
    shows_thinking = bool(_THINKING.search(template))
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(where, message, "an object with role and content")
        role = message.get("role")
        if role not in _ROLES:
            raise BadRequest(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        plain = {**message, "role": "system" if role == "developer" else role}
        plain["content"] = _content(where, role, message.get("content"))
        calls = plain.pop("tool_calls", None)
        if calls and role == "assistant":
            plain["tool_calls"] = _calls(f"{where}.tool_calls", calls, has_short_ids)
            if shows_thinking and plain.get("reasoning_content") and not plain["content"]:
                plain.setdefault("thinking", plain["reasoning_content"])
            if has_null and not plain["content"]:
                plain["content"] = None
        call_id = message.get("tool_call_id")
        if call_id is not None:
            if not isinstance(call_id, str):
                raise BadRequest(f"{where}.tool_call_id", call_id, "the id of a tool call, a text")
            plain["tool_call_id"] = _short(call_id) if has_short_ids else call_id
        checked.append(plain)
    return checked


def _content(where: str, role: str, content: Any) -> str:
    if isinstance(content, list):
        return _joined(where, content)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content", content, "a text, or a list of parts of type text")
    return content


def _calls(where: str, calls: Any, has_short_ids: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(where, calls, "a list of tool calls")
    plain: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        at = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(at, call, "an object with id, type 'function' and function, which has name and arguments")
        call_id = call.get("id", "")
        if not isinstance(call_id, str):
            raise BadRequest(f"{at}.id", call_id, "a text")
        arguments = call_arguments(f"{at}.function.arguments", function.get("arguments"))
        shown = {**call, "id": _short(call_id) if has_short_ids else call_id, "type": "function"}
        plain.append({**shown, "function": {**function, "arguments": arguments}})
    return plain


def call_arguments(where: str, given: Any) -> _Arguments:
    """The arguments of a call, an object or its JSON. Raises BadRequest, by the name `where`."""
    value = given
    if given is None or given == "":
        value = {}
    elif isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise BadRequest(where, given, "the JSON of an object, as a text")
    return _Arguments(value)


def _short(call_id: str) -> str:
    """Nine ASCII characters for any id, the same each time."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


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
