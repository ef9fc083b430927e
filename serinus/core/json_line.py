"""JSON that is one line for every reader: Python's `str.splitlines`, and so `iter_lines` of httpx, ends a line at
U+0085, U+2028 and U+2029, too, which JSON allows within a string."""

from __future__ import annotations

import re
from typing import Final

_LINE_ENDS: Final = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")  # in UTF-8


def one_line(json: bytes) -> bytes:
    """The same value, with these characters written as escapes. `json`: UTF-8, without line breaks between its values.
    Cost: next to none where all is ASCII."""
    return json if json.isascii() else _LINE_ENDS.sub(_escaped, json)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())
