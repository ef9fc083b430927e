"""From a Grammar to the text that `llguidance` compiles: JSON schemas as they are, all else as rules of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar

_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between tokens of JSON: more is of no use, and a model could write it for ever."""
_OPTIONS: Any = {"whitespace_pattern": _SPACE}
_DEPTH_MAX = 32
_ANY = r"(.|\n)*"


def library_source(grammar: Grammar, special_ids: Mapping[str, int]) -> str:
    """What the library reads. `special_ids`: special tokens, which a structural tag may begin or end with.

    Raises BadRequest, by the name `grammar`: it is no JSON, no EBNF, or a structural tag of another form.
    """
    import llguidance

    matcher, kind, text = llguidance.LLMatcher, grammar.kind, grammar.text
    if kind == "json_object":
        return str(matcher.grammar_from_json_schema('{"type":"object"}', _OPTIONS))
    if kind == "json_schema":
        schema = _json(text, "a JSON Schema")
        if not isinstance(schema, (dict, bool)):
            raise BadRequest("grammar", schema, "a JSON Schema: an object, true or false")
        options = None if isinstance(schema, dict) and "x-guidance" in schema else _OPTIONS
        if options is not None and '"discriminator"' in text:  # its branches exclude each other, as in OpenAPI
            options = {**options, "coerce_one_of": True}
        return str(matcher.grammar_from_json_schema(_as_object(text, schema), options))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "lark":
        return str(matcher.grammar_from_lark(text))
    if kind == "ebnf":
        return str(matcher.grammar_from_lark(_lark(text)))
    if kind == "choice":
        return str(matcher.grammar_from_lark(f"start: {' | '.join(_literal(each) for each in _choices(text))}"))
    return str(matcher.grammar_from_lark("%llguidance {}\n" + tag_rules(text, special_ids, "start")))


def tag_rules(text: str, special_ids: Mapping[str, int], start: str) -> str:
    """Rules of Lark of a structural tag, the first of which is `start`. Raises BadRequest, as above."""
    return _Tags(special_ids).rules(_json(text, "a structural tag"), start)


def _as_object(text: str, schema: Any) -> str:
    """The library takes no schema that is `true` or `false` alone."""
    return text if isinstance(schema, dict) else json.dumps({"allOf": [schema]})


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequest("grammar", text, f"{what} as valid JSON ({error})") from None
    except RecursionError:
        raise BadRequest("grammar", text, f"{what} of sane depth") from None


def _choices(text: str) -> list[str]:
    choices = _json(text, "a list of texts")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise BadRequest("grammar", choices, "a list of texts that are not empty, at least one")
    return choices


def _lark(ebnf: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(ebnf))
    except Exception as error:  # that parser has no error of its own for half of what it refuses
        raise BadRequest("grammar", ebnf, f"EBNF, rules `name ::= ...` with a `root` ({error})") from error


def _literal(text: str) -> str:
    """A text in rules of Lark, where the escapes of JSON mean the same."""
    return json.dumps(text, ensure_ascii=False)


class _Tags:
    """A structural tag as rules: the form with `structures` and `triggers`, and the one with `format`."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def rules(self, tag: Any, start: str = "start") -> str:
        if not isinstance(tag, dict):
            raise BadRequest("grammar", tag, "a structural tag: an object")
        given = tag.get("format")
        if given is None:
            given = self._old_form(tag)
        first = self._format(given, "format", 0)
        return "\n".join([f"{start}: {first}", *self._rules, f"ANY_TEXT: /{_ANY}/"])

    def _old_form(self, tag: dict[str, Any]) -> dict[str, Any]:
        structures, triggers = tag.get("structures"), tag.get("triggers")
        if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
            raise BadRequest("grammar", tag, "a structural tag with `structures` and `triggers`, or with `format`")
        tags = []
        for index, each in enumerate(structures):
            if not isinstance(each, dict):
                raise BadRequest(f"grammar.structures[{index}]", each, "an object with begin, schema and end")
            content = {"type": "json_schema", "json_schema": each.get("schema", {})}
            tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end", "")})
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags}

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _text(self, text: Any, where: str) -> str:
        """A text in which special tokens are these tokens."""
        if not isinstance(text, str):
            raise BadRequest(f"grammar.{where}", text, "a text")
        parts, at = [], 0
        for found in self._specials.finditer(text) if self._specials is not None else ():
            parts += [_literal(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            at = found.end()
        parts += [_literal(text[at:])] if at < len(text) else []
        return " ".join(parts) or '""'

    def _format(self, given: Any, where: str, depth: int) -> str:
        """The name of the rule of one format."""
        if not isinstance(given, dict) or depth > _DEPTH_MAX:
            raise BadRequest(
                f"grammar.{where}", given, f"an object with a type, at most {_DEPTH_MAX} within each other"
            )
        kind = given.get("type")
        if kind == "const_string":
            return self._rule(self._text(given.get("value"), f"{where}.value"))
        if kind == "json_schema":
            return self._rule(self._schema(given.get("json_schema"), f"{where}.json_schema"))
        if kind == "regex":
            return self._rule(self._regex(given.get("pattern"), f"{where}.pattern"))
        if kind == "any_text":
            return self._rule("ANY_TEXT")
        if kind in ("sequence", "or"):
            parts = self._each(given.get("elements"), f"{where}.elements", depth)
            return self._rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._tag(given, where, depth)
        if kind == "triggered_tags":
            return self._triggered(given, where, depth)
        if kind == "tags_with_separator":
            return self._separated(given, where, depth)
        known = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"
        raise BadRequest(f"grammar.{where}.type", kind, f"one of {known}")

    def _each(self, given: Any, where: str, depth: int) -> list[str]:
        if not isinstance(given, list) or not given:
            raise BadRequest(f"grammar.{where}", given, "a list, at least one of them")
        return [self._format(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(given)]

    def _schema(self, schema: Any, where: str) -> str:
        if not isinstance(schema, (dict, bool)):
            raise BadRequest(f"grammar.{where}", schema, "a JSON Schema")
        given = schema if isinstance(schema, dict) else {"allOf": [schema]}
        return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _SPACE}, **given})}"

    def _regex(self, pattern: Any, where: str) -> str:
        import llguidance

        if not isinstance(pattern, str) or not pattern:
            raise BadRequest(f"grammar.{where}", pattern, "a regex")
        return f"/{llguidance.regex_to_lark(pattern)}/"

    def _tag(self, given: Any, where: str, depth: int, trigger: str = "") -> str:
        """`begin` (behind the trigger, which has been written), the content, `end`."""
        if not isinstance(given, dict):
            raise BadRequest(f"grammar.{where}", given, "a tag: begin, content and end")
        begin, content, end = given.get("begin"), given.get("content"), given.get("end", "")
        if not isinstance(begin, str) or not begin.startswith(trigger):
            raise BadRequest(f"grammar.{where}.begin", begin, f"a text that begins with a trigger ({trigger!r})")
        head, tail = self._text(begin[len(trigger) :], where), self._text(end, f"{where}.end")
        if isinstance(content, dict) and content.get("type") == "any_text" and end and "<[" not in tail:
            return self._rule(f"{head} {self._rule('ANY_TEXT', f'[suffix={_literal(end)}]')}")
        return self._rule(f"{head} {self._format(content, f'{where}.content', depth + 1)} {tail}")

    def _triggered(self, given: dict[str, Any], where: str, depth: int) -> str:
        """Free text up to a trigger, one of its tags, and so on."""
        tags, triggers = given.get("tags"), given.get("triggers")
        if not (isinstance(tags, list) and isinstance(triggers, list) and tags and triggers and all(triggers)):
            raise BadRequest(f"grammar.{where}", given, "tags and triggers, at least one of each, none empty")
        bodies: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            begin = tag.get("begin") if isinstance(tag, dict) else None
            trigger = next((t for t in triggers if isinstance(t, str) and str(begin).startswith(t)), None)
            if trigger is None:
                field = f"grammar.{where}.tags[{index}].begin"
                raise BadRequest(field, begin, f"a text that begins with one of {triggers}")
            bodies.setdefault(trigger, []).append(self._tag(tag, f"{where}.tags[{index}]", depth, trigger))
        calls = []
        for trigger, some in bodies.items():
            text = self._text(trigger, f"{where}.triggers")
            free = f"ANY_TEXT {text}" if "<[" in text else self._rule(f"ANY_TEXT {text}", "[lazy]")
            calls.append(f"{free} ({' | '.join(some)})")
        call = self._rule(" | ".join(calls))
        least, once = bool(given.get("at_least_one")), bool(given.get("stop_after_first"))
        if once:
            return call if least else self._rule(f"{call} | ANY_TEXT")
        return self._rule(f"{call}{'+' if least else '*'} ANY_TEXT")

    def _separated(self, given: dict[str, Any], where: str, depth: int) -> str:
        """Tags with a separator between them, and nothing else."""
        tags = given.get("tags")
        if not isinstance(tags, list) or not tags:
            raise BadRequest(f"grammar.{where}.tags", tags, "a list of tags, at least one")
        bodies = [self._tag(tag, f"{where}.tags[{index}]", depth) for index, tag in enumerate(tags)]
        one = self._rule(" | ".join(bodies))
        more = f"({self._text(given.get('separator', ''), f'{where}.separator')} {one})*"
        body = one if given.get("stop_after_first") else f"{one} {more}"
        return self._rule(body if given.get("at_least_one") else f"({body})?")
