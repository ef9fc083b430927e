"""Finds stop texts in a stream of pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopTexts"]


class StopTexts:
    """Finds the first stop text to be complete in a stream of pieces, holding back whatever may become one.

    The result does not depend on how the text was cut into pieces: the stop that is complete first wins, and of two
    that end together the longer one.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop that was found; afterwards `feed` must not be called."""

    def feed(self, piece: str) -> str:
        """Text that is safe to show. Sets `matched` where a stop text is complete."""
        assert self.matched is None, f"text: text after the stop {self.matched!r}: {piece!r}"
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def finish(self) -> str:
        """What was held back and became no stop."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
