"""JSON that is one line for every reader: Python's `str.splitlines`, and so `iter_lines` of httpx, ends a line at
U+0085, U+2028 and U+2029, too, which JSON allows within a string."""

from __future__ import annotations


def one_line(json: bytes) -> bytes:
    """The same value, with these characters written as escapes. `json`: UTF-8, without line breaks between its values.
    Cost: next to none where all is ASCII."""
    if json.isascii():
        return json
    for end in "\u0085\u2028\u2029":
        json = json.replace(end.encode(), b"\\u%04x" % ord(end))
    return json
