"""The OpenAPI 3.1 description of the endpoints, made from their table, the structs of bodies and answers, and the
bounds that the code checks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from serinus.core.sampling import RANGES, STOP_CHARS_MAX, STOP_COUNT_MAX
from serinus.front.calls import NAME_MAX, PRIORITY_END, TIMEOUT_MAX
from serinus.front.exchange import ErrorAnswer
from serinus.front.routes import ENDPOINTS, EndpointSpec
from serinus.front.sampling import TOP_LOGPROBS_MAX

_EVENTS = "text/event-stream"
_TEMPLATE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "A field is wrong: the message names it, its value and what was expected",
    "401": "The API key is missing or wrong",
    "403": "Refused: this server asks for no key",
    "404": "The model, or the engine, is unknown",
    "413": "The body is too large",
    "429": "Too many requests",
    "500": "The request failed",
    "503": "The engine is loading, full, draining or gone",
    "504": "The request reached its deadline",
}
_GENERATES = ("429", "500", "504")
_SAME_AS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}
"""Fields that mean a parameter of another name."""
_FROM_ZERO = ("max_tokens", "max_new_tokens")
"""Fields that may be 0, for no token at all, where an endpoint has that."""


def _range(field: str) -> dict[str, float]:
    """What RANGES says of a field."""
    allowed = RANGES[_SAME_AS.get(field, field)]
    low = 0 if field in _FROM_ZERO else allowed.low
    keywords = {"exclusiveMinimum" if allowed.above else "minimum": low}
    return keywords if allowed.high is None else {**keywords, "maximum": allowed.high}


_TOP = {"minimum": 0, "maximum": TOP_LOGPROBS_MAX}
_NAME = {"maxLength": NAME_MAX}
_BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    **{field: {"integer": _range(field), "number": _range(field)} for field in (*RANGES, *_SAME_AS)},
    **{field: {"integer": _TOP} for field in ("logprobs", "top_logprobs", "top_logprobs_num")},
    "stop": {"string": {"minLength": 1, "maxLength": STOP_CHARS_MAX}, "array": {"maxItems": STOP_COUNT_MAX}},
    "stop_token_ids": {"integer": {"minimum": 0}},
    **{field: {"string": _NAME} for field in ("cache_salt", "extra_key", "rid")},
    "priority": {"integer": {"minimum": -PRIORITY_END, "maximum": PRIORITY_END - 1}},
    "timeout": {"number": {"exclusiveMinimum": 0, "maximum": TIMEOUT_MAX}},
    "thinking_token_budget": {"integer": {"minimum": 0}},
    "thinking_budget": {"integer": {"minimum": 0}},
    "messages": {"array": {"minItems": 1}},
}
"""Bounds of fields of bodies, by the type that they are of: a field may take several."""


def _bound(schema: dict[str, Any], bounds: dict[str, dict[str, Any]]) -> None:
    """Add its bounds to the schema of a field, wherever the type is one that they are of."""
    schema.update(bounds.get(schema.get("type", ""), {}))
    for part in (*schema.get("anyOf", ()), *([schema["items"]] if isinstance(schema.get("items"), dict) else ())):
        _bound(part, bounds)


def _components(specs: list[EndpointSpec], *, of_router: bool) -> dict[str, Any]:
    """Schemas of all bodies and answers, by name."""
    bodies = [spec.body for spec in specs if spec.body is not None]
    answers = [each for spec in specs for each in _answers(spec, of_router=of_router)]
    events = [spec.events for spec in specs if spec.events is not None]
    _, found = msgspec.json.schema_components([*bodies, *answers, *events, ErrorAnswer], ref_template=_TEMPLATE)
    _, taken = msgspec.json.schema_components(bodies, ref_template=_TEMPLATE)
    for name in taken:
        properties = found[name].get("properties", {})
        for field, schema in list(properties.items()):
            if not schema.keys() - {"default"}:
                del properties[field]  # declared only to be refused by name
            else:
                _bound(schema, _BOUNDS.get(field, {}))
    return found


def _answers(spec: EndpointSpec, *, of_router: bool) -> Iterator[type[msgspec.Struct]]:
    yield from (spec.router_answers if of_router and spec.router_answers else spec.answers)
    yield from spec.views.values()


def _ref(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _TEMPLATE.format(name=struct.__name__)}


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of one server-sent event with such data."""
    return {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}


def _data(struct: type[msgspec.Struct], *, done: bool) -> dict[str, Any]:
    """What an event of an answer's stream has."""
    said = _one_of([_ref(struct), _ref(ErrorAnswer)])
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
    if done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return data


def _content(spec: EndpointSpec, method: str, *, of_router: bool) -> dict[str, Any]:
    """What stands in an answer, by content type."""
    answers = spec.router_answers if of_router and spec.router_answers else spec.answers
    if method in spec.views:
        answers = (spec.views[method],)
    if not answers:
        text = {"type": "string"}
        return {kind: {"schema": _event(text) if kind == _EVENTS else text} for kind in spec.text}
    schema = _one_of([_ref(each) for each in answers])
    if spec.listed:
        schema = _one_of([_ref(answers[0]), {"type": "array", "items": schema}])
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if spec.events is not None:
        content[_EVENTS] = {"schema": _event(_data(spec.events, done=spec.says_done))}
    return content


def _responses(spec: EndpointSpec, method: str, *, of_router: bool) -> dict[str, Any]:
    statuses = ["503"]
    has_fields = method == "POST" or spec.query or "{name" in spec.path
    statuses += ["400", "404", "413"] if has_fields else []
    statuses += ["401"] if spec.keys != "none" else []
    statuses += ["403"] if spec.router_only else []
    statuses += _GENERATES if spec.events is not None or spec.path == "/health_generate" else []
    error = {"application/json": {"schema": _ref(ErrorAnswer)}}
    wrong = {status: {"description": _ERRORS[status], "content": error} for status in sorted(set(statuses))}
    if of_router and method == "POST" and spec.router_answers:  # what each engine says, where some refuse
        told = _one_of([_ref(ErrorAnswer), *map(_ref, spec.router_answers)])
        wrong["400"] = {"description": _ERRORS["400"], "content": {"application/json": {"schema": told}}}
    if not spec.answers and spec.body is not None:  # all that it does is to refuse
        return wrong
    done = str(spec.changed if method != "GET" else 200)
    return {done: {"description": "Done", "content": _content(spec, method, of_router=of_router)}, **wrong}


_QUERY = {int: {"type": "integer", "minimum": 1}, str: {"type": "string"}, bool: {"type": "boolean"}}


def _operation(spec: EndpointSpec, method: str, *, of_router: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": spec.summary,
        "responses": _responses(spec, method, of_router=of_router),
        "security": [] if spec.keys == "none" else [{}, {"key": []}],
    }
    parameters: list[dict[str, Any]] = []
    if "{name" in spec.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if method == spec.query_of:
        parameters += [{"name": name, "in": "query", "schema": _QUERY[kind]} for name, kind in spec.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if method == "POST" and spec.body is not None:
        content = {"application/json": {"schema": _ref(spec.body)}}
        operation["requestBody"] = {"required": not spec.body_optional, "content": content}
    return operation


@cache
def openapi(version: str, *, of_router: bool) -> dict[str, Any]:
    """The description of every endpoint of a router, or of an engine. Cost: some milliseconds, once."""
    specs = [spec for spec in ENDPOINTS if of_router or not spec.router_only]
    paths = {
        spec.path.replace(":path", ""): {
            method.lower(): _operation(spec, method, of_router=of_router) for method in spec.methods
        }
        for spec in specs
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Serinus", "version": version, "description": "Serves large language models."},
        "paths": paths,
        "components": {
            "schemas": _components(specs, of_router=of_router),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
