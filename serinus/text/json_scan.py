"""Finds where one JSON value ends in a stream of pieces, looking at each character once. Does not check the value."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,}\]]")


class JsonScan:
    """One value, from its first character on (no space before it)."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "_started")

    def __init__(self) -> None:
        self._started = self._in_string = self._escaped = self._scalar = False
        self._depth = 0

    def feed(self, text: str, at: int = 0) -> int:
        """The place behind the value's end in text[at:]; -1 where it goes on. The end of a number (or true, null...) is
        seen by what follows."""
        if not self._started and at < len(text):
            self._started = True
            self._scalar = text[at] not in '"{['
        if self._scalar:
            found = _AFTER_SCALAR.search(text, at)
            return -1 if found is None else found.start()
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while True:
            found = (_IN_STRING if self._in_string else _IN_CONTAINER).search(text, at)
            if found is None:
                return -1
            at, char = found.end(), found.group()
            if char == "\\":
                if at == len(text):
                    self._escaped = True
                    return -1
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
            if not self._in_string and self._depth <= 0:
                return at
