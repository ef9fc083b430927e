"""Which types of JSON a schema allows a value, as far as its keywords say. Takes schemas that nothing has checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_ANY = frozenset[str]().union(*_TYPES.values())


def types_of(value: Any) -> frozenset[str]:
    """The types that a value has which was read from JSON."""
    return _TYPES[type(value)]


def types_allowed(schema: Any, root: Any) -> frozenset[str]:
    """The types that `type` names, or else those of the values in `enum` and `const`, or else those that `$ref`,
    `anyOf`, `oneOf` and `allOf` allow, taken together. A schema that says nothing of this allows all.

    `root`: the document that a `$ref` leads into. Cost: linear in the two: no schema is looked at twice.
    """
    allowed = frozenset[str]()
    left, seen = [schema], set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        named = _named(each) if isinstance(each, Mapping) else frozenset[str]()
        parts = _parts(each, root) if isinstance(each, Mapping) and not named else []
        left += parts
        allowed |= named if named or parts else _ANY
    return allowed


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("type")
    if isinstance(names, str):
        return frozenset({names})
    if isinstance(names, list):
        return frozenset(name for name in names if isinstance(name, str))
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema["const"]] if "const" in schema else []
    return frozenset[str]().union(*map(types_of, values))


def _parts(schema: Mapping[str, Any], root: Any) -> list[Any]:
    lists = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    parts = [part for each in lists if isinstance(each, list) for part in each]
    return [*parts, _target(schema["$ref"], root)] if "$ref" in schema else parts


def _target(reference: Any, root: Any) -> Any:
    """What `#/...` leads to; None = nothing, or into another document."""
    first, *steps = str(reference).split("/")
    place = root if first == "#" else None
    for step in steps:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
