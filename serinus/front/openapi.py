"""The OpenAPI 3.1 description of the endpoints, made from their table and from the request structs."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from serinus.front.routes import ENDPOINTS, EndpointSpec

__all__ = ["openapi"]

_ERRORS = {
    "400": "A field is wrong: the message names it, its value and what was expected",
    "401": "The API key is missing or wrong",
    "404": "The model is unknown",
    "413": "The body is too large",
    "503": "The engine is loading, full, draining or gone",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def _responses(ok: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": ok}}
    for status, text in _ERRORS.items():
        responses[status] = {"description": text, "content": error}
    return responses


def _operation(spec: EndpointSpec, method: str) -> dict[str, Any]:
    schema = {"type": "string"} if spec.content == "text/plain" else {} if method == "POST" else {"type": "object"}
    ok: dict[str, Any] = {spec.content: {"schema": schema}}
    if spec.streams:
        ok["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {"summary": spec.summary, "responses": _responses(ok)}
    if "{name" in spec.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if method == "POST" and spec.body is not None:
        reference = {"$ref": f"#/components/schemas/{spec.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation


@cache
def openapi(version: str, *, of_router: bool) -> dict[str, Any]:
    """The description of every endpoint of a router, or of an engine. Cost: some milliseconds, once."""
    specs = [spec for spec in ENDPOINTS if of_router or not spec.router_only]
    bodies = [spec.body for spec in specs if spec.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for component in components.values():
        properties = component.get("properties", {})
        for field in [field for field, schema in properties.items() if not schema.keys() - {"default"}]:
            del properties[field]  # declared only to be refused by name
    paths = {
        spec.path.replace(":path", ""): {method.lower(): _operation(spec, method) for method in spec.methods}
        for spec in specs
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Serinus", "version": version, "description": "Serves large language models."},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
