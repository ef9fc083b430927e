"""Where in a JSON Schema the keyword stands that a message speaks of. Knows no library but the form of its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["where_in"]

_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_QUOTED = re.compile(r'"([^"]+)"')
_WORDS = (
    (re.compile(r"Invalid type: (.+)$"), "type", True),
    (re.compile(r"Unknown format: (.+)$"), "format", True),
    (re.compile(r"Pointer '(.+)' does not exist"), "$ref", False),
    (re.compile(r"regex parse error|invalid regex|look-?around"), "pattern", False),
    (re.compile(r"type must be a string"), "type", False),
    (re.compile(r"for '([A-Za-z$]+)'"), "", False),
)
"""What a message looks like, the keyword that it is about, and whether it shows the keyword's value."""


def where_in(schema: str, message: str) -> str:
    """`#/properties/a/not` and the like, the first place that fits; empty = the message names no keyword."""
    found = _UNKNOWN_KEYS.search(message)
    names, value = (_QUOTED.findall(found[1]), None) if found else _named(message)
    if not names:
        return ""
    for path, key, held in _walk(json.loads(schema), "#"):
        if key in names and (value is None or held == value):
            return f"{path}/{key}"
    return ""


def _named(message: str) -> tuple[list[str], str | None]:
    for pattern, keyword, shows in _WORDS:
        found = pattern.search(message)
        if found:
            return [keyword or found[1]], found[1] if shows else None
    return [], None


def _walk(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Each keyword with its path and value. Names of properties are no keywords."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from _walk(each, f"{path}/{index}")
    if not isinstance(schema, dict):
        return
    for key, held in schema.items():
        yield path, key, held
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(held, dict):
            for name, each in held.items():
                yield from _walk(each, f"{path}/{key}/{_escaped(name)}")
        elif key not in ("enum", "const", "default", "examples"):
            yield from _walk(held, f"{path}/{key}")


def _escaped(name: str) -> str:
    """A step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
