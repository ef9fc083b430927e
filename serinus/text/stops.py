"""Finds stop texts in a stream of pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class _Stop:
    """How much of one stop text the end of the stream is (Knuth, Morris and Pratt, 1977).

    `take` looks at a character once or, where it does not continue the text, at most a dozen times for a text of 1,024.
    The table grows with what was matched: a text that is never begun costs nothing.
    """

    __slots__ = ("_back", "_border", "known", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.known = 0
        """Characters of `text` that the stream ends with, the most there are."""
        self._back = [-1]
        """Place -> the next shorter beginning to try where the character at this place is another one."""
        self._border = 0
        """Longest beginning of text[:len(_back)] that is also its end."""

    def take(self, char: str) -> None:
        text, back, known = self.text, self._back, self.known
        while known >= 0 and text[known] != char:
            known = back[known]
        self.known = known + 1
        if len(back) == self.known < len(text):
            self._grow()

    def _grow(self) -> None:
        text, back, border = self.text, self._back, self._border
        char = text[len(back)]
        back.append(back[border] if char == text[border] else border)
        while border >= 0 and char != text[border]:
            border = back[border]
        self._border = border + 1


class StopTexts:
    """Finds the first stop text to be complete in a stream of pieces, holding back whatever may become one.

    The result does not depend on how the text was cut into pieces: the stop that is complete first wins, and of two
    that end together the longer one. Cost: per character, one look-up, and a step for each stop text that is begun.
    """

    __slots__ = ("_begun", "_held", "_include", "_of_first", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._of_first: dict[str, list[_Stop]] = {}
        """The stop texts by their first character."""
        for text in dict.fromkeys(stops):
            self._of_first.setdefault(text[0], []).append(_Stop(text))
        self._begun: list[_Stop] = []
        """Those that the stream ends with a part of."""
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop that was found; afterwards `feed` must not be called."""

    def feed(self, piece: str) -> str:
        """Text that is safe to show. Sets `matched` where a stop text is complete."""
        assert self.matched is None, f"text: text after the stop {self.matched!r}: {piece!r}"
        of_first, begun = self._of_first, self._begun
        for index, char in enumerate(piece):
            first = of_first.get(char)
            if first is not None:
                begun = [*begun, *(stop for stop in first if not stop.known)]
            if begun:
                for stop in begun:
                    stop.take(char)
                begun = [stop for stop in begun if stop.known]
                complete = [stop.text for stop in begun if stop.known == len(stop.text)]
                if complete:
                    return self._found(max(complete, key=len), self._held + piece[: index + 1])
        self._begun = begun
        text = self._held + piece
        shown = len(text) - max((stop.known for stop in begun), default=0)
        self._held = text[shown:]
        return text[:shown]

    def _found(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]

    def finish(self) -> str:
        """What was held back and became no stop."""
        held, self._held = self._held, ""
        return held
