"""Calls that an answer must be, as a structural tag: in the form that the model's family writes them in, with arguments
that follow the schemas of the functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serinus.text.tool_formats import CallForm

_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")
"""Keywords by which the arguments of a function are more than its properties."""


def forced_tag(form: CallForm, schemas: Mapping[str, Mapping[str, Any]], *, calls_max: int | None) -> dict[str, Any]:
    """The tag of an answer that is calls of these functions, one at least; `schemas`: of their parameters.

    Where arguments are pairs, a value of type string is written bare: it follows `enum` and `const`, and of the other
    keywords none. Properties come in the order of the schema, those that are not declared never.
    """
    tags = [
        {
            "begin": f"{form.before_name}{name}{form.before_arguments}",
            "content": _json(schema or {"type": "object"}) if form.pair is None else _pairs(schema, form.pair),
            "end": form.after,
        }
        for name, schema in schemas.items()
    ]
    calls = {
        "type": "tags_with_separator", "tags": tags, "separator": form.between, "at_least_one": True,
        "stop_after_first": calls_max == 1 or form.single,
    }  # fmt: skip
    return {"type": "structural_tag", "format": _sequence([_text(form.begin), calls, _text(form.end)])}


def reads_pairs(schema: Mapping[str, Any]) -> bool:
    """Whether the arguments of a function can be written as pairs; those of a schema that is none cannot, and the
    library says what is wrong with it."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if any(key in schema for key in _ALONE) or not (isinstance(properties, dict) and isinstance(required, list)):
        return False
    return all(isinstance(key, str) for key in required) and all(map(_has_values, properties.values()))


def _has_values(schema: Any) -> bool:
    """Whether `enum`, where a property has it, is a list."""
    return not isinstance(schema, dict) or isinstance(schema.get("enum") or [], list)


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _sequence(elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [each for each in elements if each != _text("")] or [_text("")]}


def _pairs(schema: Mapping[str, Any], pair: tuple[str, str, str]) -> dict[str, Any]:
    """Arguments as keys and values between marks."""
    before_key, before_value, after = pair
    required = schema.get("required") or ()
    declared = schema.get("properties") or {}
    ordered = {**declared, **{key: True for key in required if key not in declared}}
    beside = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    elements = []
    for key, value in ordered.items():
        written = {
            "type": "tag",
            "begin": f"{before_key}{key}{before_value}",
            "content": _value(value, beside),
            "end": after,
        }
        elements.append(written if key in required else {"type": "or", "elements": [written, _text("")]})
    return _sequence(elements)


def _value(schema: Any, beside: Mapping[str, Any]) -> dict[str, Any]:
    """One value: JSON, or a text without quotes where the schema says that it is one."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return _json({**schema, **beside} if isinstance(schema, dict) else schema)
    known = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    if known:
        return {"type": "or", "elements": [_text(str(each)) for each in known]}
    return {"type": "any_text"}
