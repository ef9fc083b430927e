"""The OpenAPI 3.1 description of the front, made from the request structs themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from serinus.front.schemas import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)

__all__ = ["openapi"]

_BODIES: tuple[type[msgspec.Struct], ...] = (
    CompletionBody,
    ChatBody,
    GenerateBody,
    TokenizeBody,
    DetokenizeBody,
    AbortBody,
)
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
_POSTS: tuple[tuple[str, str, type[msgspec.Struct] | None, bool], ...] = (
    ("/v1/completions", "Continue a text (OpenAI)", CompletionBody, True),
    ("/v1/chat/completions", "Answer a chat (OpenAI)", ChatBody, True),
    ("/generate", "Continue prompts, native form", GenerateBody, True),
    ("/tokenize", "Text to token ids", TokenizeBody, False),
    ("/detokenize", "Token ids to text", DetokenizeBody, False),
    ("/abort_request", "Abort one request, or all", AbortBody, False),
    ("/flush_cache", "Empty the prefix cache", None, False),
)
_GETS: tuple[tuple[str, str, str], ...] = (
    ("/v1/models", "The models served (OpenAI)", "application/json"),
    ("/health", "200 while requests can be served", "text/plain"),
    ("/health_generate", "200 after one token was generated", "text/plain"),
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/server_info", "Who this is, how it is set up, how loaded it is", "application/json"),
    ("/get_server_info", "The same as /server_info", "application/json"),
    ("/get_model_info", "Where the model lies", "application/json"),
    ("/flush_cache", "The same as with POST", "text/plain"),
    ("/cache", "What is cached where; ?limit= nodes of the tree", "application/json"),
    ("/canary", "What the KV canary checked and found, and the latest violations", "application/json"),
    ("/openapi.json", "This description", "application/json"),
)
_PLAIN = ("/flush_cache",)


def _responses(ok: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": ok}}
    for status, text in _ERRORS.items():
        responses[status] = {"description": text, "content": error}
    return responses


@cache
def openapi(version: str) -> dict[str, Any]:
    """The description of every endpoint. Cost: some milliseconds, once."""
    _, components = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    for component in components.values():
        properties = component.get("properties", {})
        for field in [field for field, schema in properties.items() if not schema.keys() - {"default"}]:
            del properties[field]  # declared only to be refused by name
    paths: dict[str, Any] = {}
    for path, text, content in _GETS:
        ok = {content: {"schema": {"type": "string"} if content == "text/plain" else {"type": "object"}}}
        paths.setdefault(path, {})["get"] = {"summary": text, "responses": _responses(ok)}
    for path, text, body, streams in _POSTS:
        ok = {"text/plain": {"schema": {"type": "string"}}} if path in _PLAIN else {"application/json": {"schema": {}}}
        if streams:
            ok["text/event-stream"] = {"schema": {"type": "string"}}
        post: dict[str, Any] = {"summary": text, "responses": _responses(ok)}
        if body is not None:
            reference = {"$ref": f"#/components/schemas/{body.__name__}"}
            post["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths.setdefault(path, {})["post"] = post
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    card = {"summary": "One model (OpenAI)", "parameters": [name]}
    paths["/v1/models/{name}"] = {"get": {**card, "responses": _responses({"application/json": {"schema": {}}})}}
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
