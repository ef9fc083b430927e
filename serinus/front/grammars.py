"""From the fields of a body that ask for structured output, under the names of OpenAI, vLLM and SGLang, to a Grammar.

Says nothing of whether a grammar compiles: `Front.asks` checks that with the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar, GrammarKind
from serinus.front.schemas import OpenAiBody, ResponseFormat, SamplingFields, StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGrammar:
    """The grammar that a body asks for."""

    field: str
    """Where it stands there."""
    grammar: Grammar


_Json = dict[str, Any]
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords of JSON Schema that hold schemas by name."""
_VALUES = ("enum", "const", "default", "examples")
"""...and those that hold values, which may look like schemas."""
_Found = Iterator[tuple[str, Any, Callable[[], Grammar]]]


def asked_grammar(body: SamplingFields) -> AskedGrammar | None:
    """The grammar of a body; None = the answer may be any text. Raises BadRequest: there are two, or one is wrong.

    Cost: the JSON of the schema is written once.
    """
    chosen: tuple[str, Callable[[], Grammar]] | None = None
    for field, value, made in _all(body):
        if chosen is not None:
            raise BadRequest(field, value, f"nothing beside {chosen[0]}: an answer has one grammar")
        chosen = field, made
    return None if chosen is None else AskedGrammar(field=chosen[0], grammar=chosen[1]())


def grammar_field(body: SamplingFields) -> str:
    """The field that asks for the grammar of a body; `grammar` where there is none."""
    return next((field for field, _, _ in _all(body)), "grammar")


def _all(body: SamplingFields) -> _Found:
    if isinstance(body, OpenAiBody):
        yield from _of_format(body.response_format)
        yield from _of_outputs(body.structured_outputs)
        space = {"whitespace_pattern": body.guided_whitespace_pattern}
        yield from _given("guided_json", body.guided_json, lambda f, v: schema_grammar(f, v, space))
        yield from _given("guided_regex", body.guided_regex, _plain("regex"))
        yield from _given("guided_choice", body.guided_choice, _choice)
        yield from _given("guided_grammar", body.guided_grammar, _rules)
    yield from _given("json_schema", body.json_schema, schema_grammar)
    yield from _given("regex", body.regex, _plain("regex"))
    yield from _given("ebnf", body.ebnf, _plain("ebnf"))
    yield from _given("structural_tag", body.structural_tag, _tag)


def _given(field: str, value: Any, made: Callable[[str, Any], Grammar]) -> _Found:
    if value is not None:
        yield field, value, lambda: made(field, value)


def _of_format(given: ResponseFormat | None) -> _Found:
    if given is None or given.type == "text":
        return
    name = "response_format"
    if given.type == "json_object":
        yield name, given.type, lambda: Grammar("json_object")
    elif given.type == "json_schema":
        schema = given.json_schema.schema if given.json_schema is not None else None
        field = f"{name}.json_schema.schema"
        if schema is None:
            raise BadRequest(field, None, "a JSON Schema: this field is required")
        yield field, schema, lambda: schema_grammar(field, schema)
    elif given.type == "structural_tag":
        parts = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
        tag = {"type": given.type, **{key: part for key, part in parts.items() if part is not None}}
        yield name, tag, lambda: _tag(name, tag)
    else:
        raise BadRequest(f"{name}.type", given.type, "text, json_object, json_schema or structural_tag")


def _of_outputs(given: StructuredOutputs | None) -> _Found:
    if given is None:
        return
    name = "structured_outputs"
    options = {
        "whitespace_flexible": False if given.disable_any_whitespace else None,
        "whitespace_pattern": given.whitespace_pattern,
    }
    closed = bool(given.disable_additional_properties)
    yield from _given(f"{name}.json", given.json, lambda f, v: schema_grammar(f, v, options, closed=closed))
    if given.json_object:
        yield from _given(f"{name}.json_object", {"type": "object"}, lambda f, v: schema_grammar(f, v, options))
    yield from _given(f"{name}.regex", given.regex, _plain("regex"))
    yield from _given(f"{name}.choice", given.choice, _choice)
    yield from _given(f"{name}.grammar", given.grammar, _rules)
    yield from _given(f"{name}.structural_tag", given.structural_tag, _tag)


def _plain(kind: GrammarKind) -> Callable[[str, Any], Grammar]:
    def made(field: str, text: str) -> Grammar:
        return _grammar(field, kind, text)

    return made


def _grammar(field: str, kind: GrammarKind, value: Any) -> Grammar:
    try:
        return Grammar.of(kind, value)
    except BadRequest as error:
        raise BadRequest(field, error.value, error.expected) from None


def _object(field: str, value: Any) -> Any:
    """What a text is the JSON of. Raises BadRequest, which says where the text is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRequest(field, value, f"valid JSON ({error})") from None
    except RecursionError:
        raise BadRequest(field, value, "JSON of sane depth") from None


def schema_grammar(field: str, value: Any, options: _Json | None = None, *, closed: bool = False) -> Grammar:
    """A JSON Schema as a grammar. `options`: those of the library that are not None; `closed`: no additional properties
    where the schema does not speak of them. Raises BadRequest."""
    schema = _object(field, value)
    if not isinstance(schema, (dict, bool)):
        raise BadRequest(field, value, "a JSON Schema: an object, true or false")
    if closed:
        _close(schema)
    given = {name: option for name, option in (options or {}).items() if option is not None}
    if given:
        schema = {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "x-guidance": given}
    return _grammar(field, "json_schema", schema)


def _close(schema: Any) -> None:
    """Say of each object whose schema lists properties, and no more, that it has no others; in place, however deep."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            if isinstance(each.get("properties"), dict):
                each.setdefault("additionalProperties", False)
            for key, held in each.items():
                if key in _BY_NAME and isinstance(held, dict):
                    left += held.values()  # its keys are names, whatever they read
                elif key not in _VALUES:
                    left.append(held)


def _choice(field: str, texts: list[str]) -> Grammar:
    if not texts or not all(texts):
        raise BadRequest(field, texts, "texts that are not empty, at least one")
    return _grammar(field, "choice", texts)


def _rules(field: str, text: str) -> Grammar:
    return _grammar(field, "ebnf" if "::=" in text else "lark", text)


def _tag(field: str, value: Any) -> Grammar:
    tag = _object(field, value)
    if not isinstance(tag, dict):
        raise BadRequest(field, value, "a structural tag: an object with `structures` and `triggers`")
    return _grammar(field, "structural_tag", tag)
