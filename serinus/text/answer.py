"""What the text of an answer is made of: content, reasoning and tool calls, as deltas in the order of the text.

A parser of answers takes the text in pieces (`feed`, `end`); its deltas joined do not depend on where the pieces were
cut. Knows nothing of tokens, nor of the forms that models write in: those are `tool_formats.py` and `reasoning.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


class DeltaKind(Enum):
    """What a delta adds to."""

    CONTENT = "content"
    """The answer to the user."""
    REASONING = "reasoning"
    """What the model thought before it."""
    CALL = "call"
    """A tool call begins; the text is the name of its function."""
    ARGUMENTS = "arguments"
    """More of the arguments of the call, which are JSON (or what the model wrote in its place)."""
    CALL_END = "call_end"
    """The call is over; the text is the whole call as the model wrote it."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """One addition to an answer."""

    kind: DeltaKind
    text: str
    index: int = 0
    """Which call, from 0 on."""


class AnswerParser(Protocol):
    """Text in, deltas out. `end` is called once, after the last `feed`."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """What this piece of the text decides. Cost: linear in the piece."""

    def end(self) -> list[AnswerDelta]:
        """What was kept back until it was known what follows."""


class PlainAnswer:
    """A parser by which all text is content."""

    def feed(self, text: str) -> list[AnswerDelta]:
        return [AnswerDelta(DeltaKind.CONTENT, text)] if text else []

    def end(self) -> list[AnswerDelta]:
        return []


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a whole answer."""

    name: str
    arguments: str
    """The JSON of an object."""
    index: int
    """The index of its deltas."""


@dataclass(slots=True)
class WholeAnswer:
    """An answer that has ended, its deltas joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def parts_of(deltas: Iterable[AnswerDelta]) -> Iterator[AnswerDelta | ToolCall]:
    """Content and reasoning as they come, and each call at its end, in place of its deltas. One whose arguments are no
    JSON object is no call: its text is content."""
    name, arguments = "", list[str]()
    for delta in deltas:
        if delta.kind is DeltaKind.CALL:
            name, arguments = delta.text, []
        elif delta.kind is DeltaKind.ARGUMENTS:
            arguments.append(delta.text)
        elif delta.kind is not DeltaKind.CALL_END:
            yield delta
        elif is_object(text := "".join(arguments)):
            yield ToolCall(name, text, delta.index)
        else:
            yield AnswerDelta(DeltaKind.CONTENT, delta.text)


def answer_of(parts: Iterable[AnswerDelta | ToolCall]) -> WholeAnswer:
    """The answer that parts make up, as `parts_of` has them."""
    answer, content, reasoning = WholeAnswer(), list[str](), list[str]()
    for part in parts:
        if isinstance(part, ToolCall):
            answer.calls.append(part)
        else:
            (reasoning if part.kind is DeltaKind.REASONING else content).append(part.text)
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    return answer


def is_object(text: str) -> bool:
    """Whether this is the JSON of an object."""
    return isinstance(parsed(text), dict)


def parsed(text: str) -> Any:
    """The value of a JSON text; None where it is none (or null). What UTF-8 cannot carry is none, nor is an infinite
    number (`1e999`)."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # UnicodeEncodeError is one: a lone surrogate
        return None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"text: {constant} is no JSON")


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker: the longest such end."""
    for size in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker begins, and which it is; of two at one place the longer. (-1, "") = there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker
