"""Where in a JSON Schema the keyword stands that a message speaks of. Knows no library but the form of its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_QUOTED = re.compile(r'"([^"]+)"')
_REFERENCES = ("$ref", "$dynamicRef", "$schema")
_Fits = Callable[[Any, "re.Match[str]"], bool]


def _any(held: Any, found: re.Match[str]) -> bool:
    return True


def _shown(held: Any, found: re.Match[str]) -> bool:
    return bool(held == found[1])


def _same_document(held: Any, found: re.Match[str]) -> bool:
    """A reference may be relative to an `$id`: its last step names the document."""
    return isinstance(held, str) and held.partition("#")[0].rpartition("/")[2] == found[1].rpartition("/")[2]


def _has_false(held: Any, found: re.Match[str]) -> bool:
    return held is False or (isinstance(held, list) and False in held)


_WORDS: tuple[tuple[re.Pattern[str], tuple[str, ...], _Fits], ...] = (
    (re.compile(r"Invalid type: (.+)$"), ("type",), _shown),
    (re.compile(r"Unknown format: (.+)$"), ("format",), _shown),
    (re.compile(r"Unknown format"), ("$ref",), _any),  # it stands in another document
    (re.compile(r"(Pointer|Anchor) '(.+)' does not exist"), ("$ref", "$dynamicRef"), _any),
    (re.compile(r"Resource '(.+?)' is not present"), _REFERENCES, _same_document),
    (re.compile(r"patternProperty regexes"), ("patternProperties",), _any),
    (re.compile(r"oneOf constraints"), ("oneOf",), _any),
    (re.compile(r"schema is false"), ("allOf", "anyOf", "oneOf", "$defs", "$ref"), _has_false),
    (re.compile(r"schema is false while processing"), ("$ref",), _any),
    (re.compile(r"regex parse error|invalid regex|look-?around"), ("pattern",), _any),
    (re.compile(r"type must be a string"), ("type",), _any),
)
"""What a message looks like, the keywords that it may be about, and whether it is about one with this value."""
_NAMED = re.compile(r"for '([A-Za-z$]+)'")


def where_in(schema: str, message: str) -> str:
    """`#/properties/a/not` and the like, the first place that fits; empty = the message names no keyword."""
    given = json.loads(schema)
    unknown = _UNKNOWN_KEYS.search(message)
    if unknown is not None:  # in the schema, or in a document that it refers to
        keys = tuple(_QUOTED.findall(unknown[1]))
        return _place(given, keys, unknown) or _place(given, _REFERENCES[:2], unknown)
    for pattern, names, fits in _WORDS:
        found = pattern.search(message)
        if found is not None and (place := _place(given, names, found, fits)):
            return place
    named = _NAMED.search(message)
    return "" if named is None else _place(given, (named[1],), named)


def _place(schema: Any, names: tuple[str, ...], found: re.Match[str], fits: _Fits = _any) -> str:
    """The first keyword of one of these names with a value that fits."""
    places = (f"{path}/{key}" for path, key, held in _walk(schema, "#") if key in names and fits(held, found))
    return next(places, "")


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
