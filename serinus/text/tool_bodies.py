"""The inside of one tool call, in each of the forms that models write: the name and the arguments are found in it.

A body takes text until it is done or seen to be no call. From the moment its name and the beginning of its arguments
are known it has `begun`: then it stays a call, and the arguments are handed on as they come.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from re import Pattern
from typing import Any

from serinus.text.answer import first_of, held_back, parsed
from serinus.text.json_scan import JsonScan
from serinus.text.schema_types import types_allowed, types_of

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of the functions that may be called, by name."""

_HEAD_CHARS_MAX = 16384
"""A call whose name is not known after so many characters is none: until then nothing of it can be shown."""


class BodyState(Enum):
    """MORE -> DONE, or MORE -> BROKEN where it has not begun."""

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


class CallBody(ABC):
    """One call. `feed` returns the text behind its end."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.state = BodyState.MORE
        self.begun = False
        self.name = ""
        self.pieces: list[str] = []
        """Text of the arguments that was not taken away yet."""

    @abstractmethod
    def feed(self, text: str) -> str:
        """Take a piece that is not empty; what is not part of the call is returned."""

    def _break(self) -> None:
        self.state = BodyState.DONE if self.begun else BodyState.BROKEN

    def _begin(self, name: Any, place: int) -> None:
        """`place`: how many characters the body has, up to here."""
        self.name = name if isinstance(name, str) else ""
        self.begun = self.name in self.tools and place <= _HEAD_CHARS_MAX
        if not self.begun:
            self.state = BodyState.BROKEN


class ObjectBody(CallBody):
    """A JSON object with `name`, and `arguments` or `parameters`; it may stand in a list."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._phase: Callable[[str, int], int] = self._open
        self._scan = JsonScan()
        self._read: list[str] = []
        """Of the key, or of a value that is needed whole."""
        self._key = ""
        self._found: Any = None
        """The name, where it is known."""
        self._arguments = ""
        """...and the arguments, where they stand before the name."""
        self._flows = False
        self._place = 0

    def feed(self, text: str) -> str:
        at = 0
        while at < len(text) and self.state is BodyState.MORE:
            before, at = at, self._phase(text, at)
            self._place += at - before
        if not self.begun and self._place > _HEAD_CHARS_MAX:
            self._break()
        return text[at:]

    def _open(self, text: str, at: int) -> int:
        if text[at] == "{":
            self._phase = self._before_key
        elif text[at] != "[" and not text[at].isspace():
            self._break()
            return at
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == "}":
            return self._finish(at + 1)
        if text[at] != '"':
            self._break()
            return at
        self._scan, self._read, self._phase = JsonScan(), [], self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        end = self._scan.feed(text, at)
        self._read.append(text[at:] if end < 0 else text[at:end])
        if end >= 0:
            self._key, self._phase = str(parsed("".join(self._read))), self._before_value
        return len(text) if end < 0 else end

    def _before_value(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._scan, self._read = JsonScan(), []
            self._phase = self._value_starts
        elif not text[at].isspace():
            self._break()
            return at
        return at + 1

    def _value_starts(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._flows = self._is_arguments() and self._found is not None and text[at] == "{"
        if self._flows and not self.begun:
            self._begin(self._found, self._place)
        self._phase = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._scan.feed(text, at)
        (self.pieces if self._flows else self._read).append(text[at:] if end < 0 else text[at:end])
        if end < 0:
            return len(text)
        self._phase = self._after_value
        if not self._flows:
            self._value("".join(self._read), self._place + end - at)
        return end

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._finish(at + 1)
        if text[at] == ",":
            self._phase = self._before_key
        elif not text[at].isspace():
            self._break()
            return at
        return at + 1

    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.begun

    def _value(self, raw: str, place: int) -> None:
        if self._key == "name" and self._found is None:
            self._found = parsed(raw)
            if not isinstance(self._found, str) or self._found not in self.tools:
                self._break()
        elif self._is_arguments():
            value = parsed(raw)
            self._arguments = value if isinstance(value, str) else "{}" if raw == "null" else raw
        if self._found is not None and self._arguments and not self.begun:
            self._begin(self._found, place)
            self.pieces.append(self._arguments)

    def _finish(self, end: int) -> int:
        if not self.begun and self._found is not None:
            self._begin(self._found, self._place)
            self.pieces.append("{}")
        self.state = BodyState.DONE if self.begun else BodyState.BROKEN
        return end


class HeaderBody(CallBody):
    """A header that a pattern finds the name in (its first group), then the arguments as a JSON object."""

    def __init__(self, tools: Tools, pattern: Pattern[str]) -> None:
        super().__init__(tools)
        self._pattern = pattern
        self._header = ""
        self._scan = JsonScan()

    def feed(self, text: str) -> str:
        if not self.begun:
            head, brace, rest = text.partition("{")
            self._header += head
            if len(self._header) > _HEAD_CHARS_MAX // 16:
                self._break()
                return text
            if not brace:
                return ""
            match = self._pattern.fullmatch(self._header.strip())
            self._begin(match[1] if match else None, len(self._header))
            if not self.begun:
                return text
            text = brace + rest
        end = self._scan.feed(text)
        self.pieces.append(text if end < 0 else text[:end])
        if end < 0:
            return ""
        self.state = BodyState.DONE
        return text[end:]


class EitherBody(CallBody):
    """An ObjectBody where the text begins with a bracket, a HeaderBody where it does not."""

    def __init__(self, tools: Tools, pattern: Pattern[str]) -> None:
        super().__init__(tools)
        self._pattern = pattern
        self._chosen: CallBody | None = None

    def feed(self, text: str) -> str:
        if self._chosen is None:
            text = text.lstrip()
            if not text:
                return ""
            self._chosen = ObjectBody(self.tools) if text[0] in "[{" else HeaderBody(self.tools, self._pattern)
            self.pieces = self._chosen.pieces
        rest = self._chosen.feed(text)
        self.state, self.begun, self.name = self._chosen.state, self._chosen.begun, self._chosen.name
        return rest


@dataclass(frozen=True, slots=True, kw_only=True)
class PairForm:
    """How a body of keys and values is marked."""

    name_begin: str = ""
    """Stands before the name."""
    name_ends: tuple[str, ...]
    """Any of them stands behind it; `key_begin` and `end` may be among them."""
    key_begin: str
    key_end: str
    value_begin: str = ""
    value_end: str
    value_lines: bool = False
    """A value stands in lines of its own: the line feeds around it are none of it."""
    end: str
    """Stands at the end of the call."""


class PairsBody(CallBody):
    """Keys and values between marks, each value a JSON value or a bare text, as the schema of its function says."""

    def __init__(self, tools: Tools, form: PairForm) -> None:
        super().__init__(tools)
        self._form = form
        self._text = ""
        """What may be the beginning of a mark."""
        self._before: list[str] = []
        """What stands before it, since the last mark."""
        self._before_chars = 0
        self._key = ""
        self._count = 0
        self._sought: tuple[str, ...] = (form.name_begin,) if form.name_begin else form.name_ends
        self._phase: Callable[[str, str], None] = self._named_next if form.name_begin else self._named

    def feed(self, text: str) -> str:
        self._text += text
        while self.state is BodyState.MORE:
            at, mark = first_of(self._text, self._sought)
            safe = at if mark else len(self._text) - held_back(self._text, self._sought)
            self._before.append(self._text[:safe])
            self._before_chars += safe
            self._text = self._text[safe + len(mark) :]
            if not self.begun and self._before_chars > _HEAD_CHARS_MAX // 16:
                self._break()
            elif mark:
                before, self._before, self._before_chars = "".join(self._before), [], 0
                self._phase(before, mark)
            else:
                return ""
        return self._text

    def _seek(self, phase: Callable[[str, str], None], *marks: str) -> None:
        self._phase, self._sought = phase, marks

    def _named_next(self, before: str, mark: str) -> None:
        if before.strip():
            self._break()
        self._seek(self._named, *self._form.name_ends)

    def _named(self, before: str, mark: str) -> None:
        self._begin(before.strip(), len(before))
        if self.begun:
            self._between("", mark)

    def _between(self, before: str, mark: str) -> None:
        """After the name, or after a value."""
        form = self._form
        if mark == form.end:
            self.pieces.append("}" if self._count else "{}")
            self.state = BodyState.DONE
        elif mark == form.key_begin:
            self._seek(self._keyed, form.key_end)
        else:
            self._seek(self._between, form.key_begin, form.end)

    def _keyed(self, before: str, mark: str) -> None:
        self._key = before.strip()
        if self._form.value_begin:
            self._seek(self._valued_next, self._form.value_begin)
        else:
            self._seek(self._valued, self._form.value_end)

    def _valued_next(self, before: str, mark: str) -> None:
        self._seek(self._valued, self._form.value_end)

    def _valued(self, before: str, mark: str) -> None:
        text = before.removeprefix("\n").removesuffix("\n") if self._form.value_lines else before
        value = _value_json(text, self.tools[self.name], self._key)
        self.pieces.append(f"{', ' if self._count else '{'}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._count += 1
        self._seek(self._between, self._form.key_begin, self._form.end)


def _value_json(text: str, schema: Mapping[str, Any], key: str) -> str:
    """The JSON of a value that was written bare: a text where it is no JSON, where the schema says so, and where the
    schema allows texts but not what the JSON is."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    kind = declared.get("type") if isinstance(declared, Mapping) else None
    value, allowed = parsed(text), types_allowed(declared, schema)
    is_text = kind == "string" or ("string" in allowed and allowed.isdisjoint(types_of(value)))
    is_json = not is_text and (value is not None or text.strip() == "null")
    return text.strip() if is_json else json.dumps(text, ensure_ascii=False)
