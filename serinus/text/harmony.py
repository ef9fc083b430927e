"""The channels of gpt-oss (harmony): messages with a header each, some of which are thoughts and some are calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{"a": 1}<|call|>

See https://cookbook.openai.com/articles/openai-harmony. Its marks are special tokens, which the text must show.
"""

from __future__ import annotations

import re

from serinus.text.answer import AnswerDelta, DeltaKind, first_of, held_back
from serinus.text.tool_bodies import Tools

HARMONY_HINT = "<|channel|>"
"""A chat template with this text asks for it."""
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_HEADS = ("<|channel|>", "<|start|>")
HARMONY_MARKS = frozenset((_MESSAGE, *_ENDS, *_HEADS))
_HEADERS = (*_HEADS, " to=")
"""What headers begin with. The last one goes on with a header that the prompt has begun: `<|start|>assistant`."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEAD_CHARS_MAX = 1024


class HarmonyParser:
    """One answer. `analysis` is reasoning, a message to a function that may be called is a call, the rest is content.

    A header without an end is content; so is a message to any other recipient, with its header.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._head: str | None = ""
        """What was read of a header; None = in a message."""
        self._kind = DeltaKind.CONTENT
        """Of the present message; ARGUMENTS in a call."""
        self._raw: list[str] = []
        self._count = 0

    def feed(self, text: str) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        self._text += text
        while self._text and (self._in_head(out) if self._head is not None else self._in_message(out)):
            pass
        return out

    def end(self) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        rest, self._text = self._text, ""
        if self._head is not None:
            self._take(self._head + rest, out)
        else:
            self._take(rest, out)
            self._finish("", out)
        return out

    def _in_head(self, out: list[AnswerDelta]) -> bool:
        assert self._head is not None, "text: no header"
        head = self._head + self._text
        if not any(mark.startswith(head[: len(mark)]) for mark in _HEADERS):  # a text without a header
            self._head, self._text, self._kind = None, head, DeltaKind.CONTENT
            return True
        at = head.find(_MESSAGE)
        size = at if at >= 0 else len(head) - held_back(head, (_MESSAGE,))
        if size > _HEAD_CHARS_MAX:
            self._head, self._text, self._kind = None, head, DeltaKind.CONTENT
            self._take(head[:1], out)
            self._text = head[1:]
            return True
        if at < 0:
            self._head, self._text = head, ""
            return False
        self._open(head[:at], out)
        self._head, self._text = None, head[at + len(_MESSAGE) :]
        return True

    def _open(self, head: str, out: list[AnswerDelta]) -> None:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._raw = [head, _MESSAGE]
        if recipient is not None and recipient[1] in self._tools:
            self._kind = DeltaKind.ARGUMENTS
            out.append(AnswerDelta(DeltaKind.CALL, recipient[1], self._count))
            return
        thinks = channel is not None and channel[1] == "analysis"
        self._kind = DeltaKind.REASONING if thinks else DeltaKind.CONTENT
        if recipient is not None and not thinks:
            self._take(head + _MESSAGE, out)

    def _in_message(self, out: list[AnswerDelta]) -> bool:
        at, mark = first_of(self._text, _ENDS)
        if mark:
            self._take(self._text[:at], out)
            self._finish(mark, out)
            self._text = mark + self._text[at + len(mark) :] if mark == "<|start|>" else self._text[at + len(mark) :]
            self._head = ""
            return True
        safe = len(self._text) - held_back(self._text, _ENDS)
        self._take(self._text[:safe], out)
        self._text = self._text[safe:]
        return False

    def _take(self, text: str, out: list[AnswerDelta]) -> None:
        if text:
            self._raw.append(text)
            out.append(AnswerDelta(self._kind, text, self._count if self._kind is DeltaKind.ARGUMENTS else 0))

    def _finish(self, mark: str, out: list[AnswerDelta]) -> None:
        if self._kind is DeltaKind.ARGUMENTS:
            out.append(AnswerDelta(DeltaKind.CALL_END, "".join(self._raw) + mark, self._count))
            self._count += 1
        self._kind, self._raw = DeltaKind.CONTENT, []
