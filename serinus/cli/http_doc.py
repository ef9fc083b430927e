"""docs/HTTP.md, made from the OpenAPI description. `serinus doctor --http-doc` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_HEAD = """# HTTP

The endpoints of an engine and of a router, with the fields of their bodies. A misspelled field is refused with what was
probably meant; one that only other servers know is ignored, and the answer's header `x-serinus-ignored` names it. Every
answer carries `x-request-id`. The complete description, with all answers, is at `/openapi.json` of a running server.

This page is made by `serinus doctor --http-doc > docs/HTTP.md`; a test compares it with the code.
"""


_KEYS = {"none": "-", "user": "API key", "admin": "admin key"}
"""Which key an endpoint asks for, where one is set."""
_LONG = 1e15


def http_markdown() -> str:
    """The text of docs/HTTP.md."""
    from serinus.front.openapi import openapi
    from serinus.front.routes import ENDPOINTS

    engine, router = (openapi("", of_router=of_router) for of_router in (False, True))
    lines = [_HEAD, "## Endpoints", ""]
    lines += ["| endpoint | what it does | of | key, where one is set | body |", "|---|---|---|---|---|"]
    keys = {spec.path.replace(":path", ""): spec.keys for spec in ENDPOINTS}
    paths = {**router["paths"], **engine["paths"]}
    bodies: dict[str, list[str]] = {}
    for path, methods in paths.items():
        for method, call in methods.items():
            of = [name for name, each in (("engine", engine), ("router", router)) if path in each["paths"]]
            body = _body(call)
            shown = f"[{body}](#{body.lower()})" if body else ""
            key = _KEYS[keys[path]]
            lines.append(f"| `{method.upper()} {path}` | {call['summary']} | {', '.join(of)} | {key} | {shown} |")
            bodies.setdefault(body, []).append(f"`{path}`")
    schemas = {**router["components"]["schemas"], **engine["components"]["schemas"]}
    for name, users in bodies.items():
        if name:
            lines += ["", f"## {name}", "", f"The body of {' and '.join(users)}.", "", *_fields(schemas[name])]
    return "\n".join([*lines, ""])


def _body(call: dict[str, Any]) -> str:
    """Name of the schema of its body; empty = it has none."""
    content = call.get("requestBody", {}).get("content", {}).get("application/json", {})
    return str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield from ("| field | type | default |", "|---|---|---|")
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else _default(field.get("default"))
        yield f"| `{name}` | {_type(field)} | {default} |"


def _default(value: Any) -> str:
    return "" if value in (None, "", [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: dict[str, Any]) -> str:
    """A schema in words: integer from 1 to 20, text or list of text, `low` or `high`."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "$ref" in field:
        return "object"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"] if value is not None)
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type", "anything")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    words = {"string": "text", "boolean": "true or false", "object": "object"}.get(kind, str(kind))
    low = field.get("minimum")
    words += f" from {low:g}" if low is not None else ""
    words += f" above {field['exclusiveMinimum']:g}" if "exclusiveMinimum" in field else ""
    high = field.get("maximum", _LONG)
    return words + (f" to {high:g}" if high < _LONG else "")
