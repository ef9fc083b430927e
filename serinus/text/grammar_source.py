"""From a Grammar to the text that `llguidance` compiles: JSON schemas as they are, all else as rules of Lark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.text.structural_tag import json_of, json_rule, lark_of_ebnf, literal, schema_with_options, tag_rules


def library_source(grammar: Grammar, special_ids: Mapping[str, int]) -> str:
    """What the library reads. `special_ids`: special tokens, which a structural tag may begin or end with.

    Raises BadRequest, by the name `grammar`: it is no JSON, no EBNF, or a structural tag of another form.
    """
    import llguidance

    matcher, kind, text = llguidance.LLMatcher, grammar.kind, grammar.text
    if kind == "json_object":
        return str(matcher.grammar_from_json_schema(schema_with_options({"type": "object"})))
    if kind == "json_schema":
        return str(matcher.grammar_from_json_schema(schema_with_options(_schema(text))))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "lark":
        return str(matcher.grammar_from_lark(text))
    if kind == "ebnf":
        return str(matcher.grammar_from_lark(lark_of_ebnf(text)))
    if kind == "choice":
        return str(matcher.grammar_from_lark(f"start: {_alternatives(text)}"))
    return str(matcher.grammar_from_lark("%llguidance {}\n" + tag_rules(text, special_ids, "start")))


def grammar_rules(grammar: Grammar, special_ids: Mapping[str, int], start: str) -> str:
    """The same as rules of Lark, the first of which is `start`: to stand in a larger grammar. Raises as above."""
    import llguidance

    kind, text = grammar.kind, grammar.text
    if kind == "structural_tag":
        return tag_rules(text, special_ids, start)
    if kind == "json_object":
        body = json_rule({"type": "object"})
    elif kind == "json_schema":
        body = json_rule(_schema(text))
    elif kind == "regex":
        body = f"/{llguidance.regex_to_lark(text)}/"
    elif kind == "choice":
        body = _alternatives(text)
    else:
        body = f"%lark {{\n{lark_of_ebnf(text) if kind == 'ebnf' else text}\n}}"
    return f"{start}: {body}"


def _schema(text: str) -> dict[str, Any] | bool:
    schema = json_of(text, "a JSON Schema")
    if not isinstance(schema, (dict, bool)):
        raise BadRequest("grammar", schema, "a JSON Schema: an object, true or false")
    return schema


def _alternatives(text: str) -> str:
    choices = json_of(text, "a list of texts")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise BadRequest("grammar", choices, "a list of texts that are not empty, at least one")
    return " | ".join(map(literal, dict.fromkeys(choices)))
