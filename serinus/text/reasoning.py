"""Splits what a model thought from what it answers: marks around the thoughts, at the beginning of the text."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.text.answer import AnswerDelta, AnswerParser, DeltaKind, held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks of one family."""

    name: str
    """As `--reasoning-parser` has it."""
    aliases: tuple[str, ...] = ()
    """Its names in vLLM and SGLang."""
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    """The answer begins with thoughts even where neither it nor the prompt opens them (unless the prompt ends them)."""

    def is_open(self, prompt: str, said: str = "") -> bool:
        """Whether the answer to this prompt begins with thoughts: the template has written their opening mark, or the
        message that the answer goes on with (`said`) has begun some."""
        begun = self.always or bool(self.begun_in(said))
        return prompt[-256:].rstrip().endswith(self.begin) or (begun and not self.is_closed(prompt, said))

    def is_closed(self, prompt: str, said: str = "") -> bool:
        """Whether the template, or the message that the answer goes on with, has thoughts that have ended: the answer
        has none."""
        return self.end in said or prompt[-256:].rstrip().endswith(self.end)

    def begun_in(self, said: str) -> str:
        """The thoughts that a message has begun and not ended."""
        text = said.lstrip()
        begun = self.always or text.startswith(self.begin)
        return text.removeprefix(self.begin) if begun and self.end not in text else ""


REASONING_FORMATS = (
    ReasoningFormat(name="qwen3", aliases=("glm45", "hermes", "think")),
    ReasoningFormat(name="deepseek_r1", aliases=("deepseek-r1", "qwen3-thinking"), always=True),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
)


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The form that a chat template speaks of; None = none. Harmony is not among them."""
    return next((each for each in REASONING_FORMATS if each.begin in template or each.end in template), None)


class ThinkParser:
    """One answer: thoughts first, where there are any; the rest goes to the parser of the content.

    Space around the thoughts is dropped. Thoughts that are cut off are thoughts.
    """

    def __init__(self, form: ReasoningFormat, inner: AnswerParser, *, is_open: bool, goes_on: bool = False) -> None:
        """`is_open`: the text begins inside of the thoughts; `goes_on`: behind some, and space between counts."""
        self._form = form
        self._inner = inner
        self._is_open = is_open
        self._shown = is_open and goes_on
        """Whether there are thoughts before the text that is looked at."""
        self._phase = self._thoughts if self._shown else self._start
        self._text = ""
        self._space = ""

    def feed(self, text: str) -> list[AnswerDelta]:
        if self._phase == self._answer and not self._text:
            return self._inner.feed(text)
        out: list[AnswerDelta] = []
        self._text += text
        while self._text and self._phase(out):
            pass
        return out

    def end(self) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        text, self._text = self._text, ""
        if self._phase == self._thoughts or (self._phase == self._start and self._is_open):
            self._think(text, out)
        elif self._phase == self._start:
            out += self._inner.feed(text)
        return out + self._inner.end()

    def _start(self, out: list[AnswerDelta]) -> bool:
        """Nothing but space and a part of the opening mark was seen."""
        rest, begin = self._text.lstrip(), self._form.begin
        if rest.startswith(begin):
            self._text, self._phase = rest[len(begin) :], self._thoughts
        elif begin.startswith(rest):
            return False
        else:
            self._phase = self._thoughts if self._is_open else self._plain
        return True

    def _plain(self, out: list[AnswerDelta]) -> bool:
        """There are no thoughts: space before the answer is its own."""
        out += self._inner.feed(self._text)
        self._text, self._phase = "", self._answer
        return False

    def _thoughts(self, out: list[AnswerDelta]) -> bool:
        before, mark, rest = self._text.partition(self._form.end)
        if mark:
            self._think(before, out)
            self._text, self._phase = rest, self._gap
            return True
        safe = len(self._text) - held_back(self._text, (self._form.end,))
        self._think(self._text[:safe], out)
        self._text = self._text[safe:]
        return False

    def _think(self, text: str, out: list[AnswerDelta]) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        shown = shown if self._shown else shown.lstrip()
        if shown:
            self._shown = True
            out.append(AnswerDelta(DeltaKind.REASONING, shown))

    def _gap(self, out: list[AnswerDelta]) -> bool:
        """Between the thoughts and the answer: space."""
        rest = self._text.lstrip()
        if rest:
            out += self._inner.feed(rest)
            self._phase = self._answer
        self._text = ""
        return False

    def _answer(self, out: list[AnswerDelta]) -> bool:
        raise AssertionError("text: feed hands the answer on itself")
