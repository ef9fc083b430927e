"""Finds tool calls in the text of an answer, piece by piece, in the form that a ToolFormat describes."""

from __future__ import annotations

from enum import Enum

from serinus.text.answer import AnswerDelta, DeltaKind, first_of, held_back
from serinus.text.tool_bodies import BodyState, CallBody, Tools
from serinus.text.tool_formats import ToolFormat


class _Phase(Enum):
    OUTSIDE = "outside"
    """In the text between calls."""
    INSIDE = "inside"
    """In the body of a call."""
    CLOSING = "closing"
    """Behind a call, where marks that belong to it may follow."""


class ToolParser:
    """One answer. What looks like a call and is none (a wrong form, an unknown function) is content, as it was written.

    Space around calls is dropped.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._phase = _Phase.OUTSIDE
        self._text = ""
        """What was not decided yet."""
        self._space = ""
        """Space that is content if content follows."""
        self._may_open = form.starts
        """Characters that open a call here without a mark."""
        self._begin = ""
        """The mark that opened the present call; once it is one, with the space before it."""
        self._body: CallBody | None = None
        self._raw: list[str] = []
        """The present call as written, behind its mark."""
        self._announced = False
        self._count = 0

    def feed(self, text: str) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        self._text += text
        steps = {_Phase.OUTSIDE: self._outside, _Phase.INSIDE: self._inside, _Phase.CLOSING: self._closing}
        while self._text and steps[self._phase](out):
            pass
        return out

    def end(self) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        while self._phase is _Phase.INSIDE and not self._announced:
            self._give_up(out)
            out += self.feed("")
        if self._phase is _Phase.CLOSING:  # what is not decided there is space, or a mark that was cut
            self._raw.append(self._text)
            self._text = ""
        if self._phase is not _Phase.OUTSIDE:
            self._close(out)
        self._content(self._text, out)
        self._text = ""
        if self._space and not self._count:
            out.append(AnswerDelta(DeltaKind.CONTENT, self._space))
        self._space = ""
        return out

    # ---- the phases: each looks at the text once, and says whether there is more to decide ----------------------

    def _outside(self, out: list[AnswerDelta]) -> bool:
        if self._may_open:
            rest = self._text.lstrip()
            self._space += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if not rest:
                return False
            may_open, self._may_open = self._may_open, ""
            if rest[0] in may_open:
                self._open("", rest)
                return True
        at, mark = first_of(self._text, self._form.opens)
        if at >= 0:
            self._content(self._text[:at], out)
            self._open(mark, self._text[at + len(mark) :])
            return True
        safe = len(self._text) - held_back(self._text, self._form.opens)
        self._content(self._text[:safe], out)
        self._text = self._text[safe:]
        return False

    def _content(self, text: str, out: list[AnswerDelta]) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            out.append(AnswerDelta(DeltaKind.CONTENT, shown))

    def _open(self, mark: str, rest: str) -> None:
        self._begin, self._text, self._raw, self._announced = mark, rest, [], False
        self._body = self._form.body(self._tools)
        if mark in self._form.heads:
            self._body.feed(mark)
        self._phase = _Phase.INSIDE

    def _inside(self, out: list[AnswerDelta]) -> bool:
        body = self._body
        assert body is not None, "text: inside of no call"
        text, self._text = self._text, ""
        self._raw.append(text)
        rest = body.feed(text)
        if body.state is BodyState.BROKEN:
            self._give_up(out)
            return True
        if body.begun and not self._announced:
            self._announced, self._space, self._begin = True, "", self._space + self._begin
            out.append(AnswerDelta(DeltaKind.CALL, body.name, self._count))
        if body.begun and body.pieces:
            out.append(AnswerDelta(DeltaKind.ARGUMENTS, "".join(body.pieces), self._count))
            body.pieces.clear()
        if body.state is BodyState.MORE:
            return False
        self._raw = [self._begin, "".join(self._raw).removesuffix(rest) if rest else "".join(self._raw)]
        self._text, self._phase = rest, _Phase.CLOSING
        return True

    def _give_up(self, out: list[AnswerDelta]) -> None:
        """It is no call: its mark is content, and what follows is looked at anew."""
        self._content(self._begin, out)
        self._text, self._body = "".join(self._raw) + self._text, None
        self._phase = _Phase.OUTSIDE

    def _closing(self, out: list[AnswerDelta]) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        for mark in self._form.closers:
            if rest.startswith(mark):
                end = len(self._text) - len(rest) + len(mark)
                self._raw.append(self._text[:end])
                self._text = self._text[end:]
                return True
        if any(mark.startswith(rest) for mark in self._form.closers):
            return False
        self._close(out)
        return True

    def _close(self, out: list[AnswerDelta]) -> None:
        raw = "".join(self._raw) if self._phase is _Phase.CLOSING else self._begin + "".join(self._raw)
        out.append(AnswerDelta(DeltaKind.CALL_END, raw, self._count))
        self._count += 1
        self._body, self._phase, self._may_open = None, _Phase.OUTSIDE, self._form.follows
