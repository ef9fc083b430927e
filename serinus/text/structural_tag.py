"""Structural tags as rules of Lark: the form with `structures` and `triggers`, and the one with `format`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serinus.core.errors import BadRequest
from serinus.text.refusal_words import refusal_words

_SPACE = r"[\x20\x0A\x09]{1,32}"
"""Whitespace between tokens of JSON, the characters of xgrammar (vLLM, SGLang): no carriage return. More is of no use,
and a model could write it for ever."""
_DEPTH_MAX = 32
_REPEATS_MAX = 1000
_ANY = "ANY_TEXT: /(.|\\n)*/"
_TAGS = ("tags", "at_least_one", "stop_after_first")
_KEYS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "excludes", *_TAGS),
    "tags_with_separator": ("separator", *_TAGS),
}
"""Types of formats, and what each has; anything else would be a wish that no grammar follows."""


def tag_rules(text: str, special_ids: Mapping[str, int], start: str) -> str:
    """Rules of Lark of a structural tag, the first of which is `start`. `special_ids`: special tokens, which a tag may
    begin or end with. Raises BadRequest, by the name `grammar`: no JSON, or a structural tag of another form."""
    return _Tags(special_ids).rules(json_of(text, "a structural tag"), start)


def json_rule(schema: dict[str, Any] | bool) -> str:
    """A JSON Schema as the body of a rule of Lark."""
    return f"%json {schema_with_options(schema)}"


def schema_with_options(schema: dict[str, Any] | bool) -> str:
    """A JSON Schema as the library takes it: an object that has the options beside; its own come first."""
    held = schema if isinstance(schema, dict) else {"allOf": [schema]}
    own: Any = held.get("x-guidance", {})
    if not isinstance(own, dict):
        return json.dumps(held)  # the library refuses it
    options: dict[str, Any] = {} if "whitespace_flexible" in own else {"whitespace_pattern": _SPACE}
    if _has_discriminator(schema):  # the branches of its `oneOf` exclude each other, as in OpenAPI
        options["coerce_one_of"] = True
    return json.dumps({**held, "x-guidance": {**options, **own}})


def _has_discriminator(schema: Any) -> bool:
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if "discriminator" in each and "oneOf" in each:
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def json_of(text: str, what: str) -> Any:
    """What a text is the JSON of. Raises BadRequest, by the name `grammar`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRequest("grammar", text, f"{what} as valid JSON ({error})") from None
    except RecursionError:
        raise BadRequest("grammar", text, f"{what} of sane depth") from None


def literal(text: str) -> str:
    """A text in rules of Lark, where the escapes of JSON mean the same."""
    return json.dumps(text, ensure_ascii=False)


def lark_of_ebnf(ebnf: str) -> str:
    """EBNF as rules of Lark, the first of which is `start`. Raises BadRequest, by the name `grammar`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(ebnf))
    except Exception as error:  # that parser has no error of its own for half of what it refuses
        raise BadRequest(
            "grammar", ebnf, f"EBNF, rules `name ::= ...` with a `root`: {refusal_words(str(error))}"
        ) from error


def _any_of(texts: Sequence[str]) -> str:
    """A text, or a regex of several, in rules of Lark."""
    if len(texts) == 1:
        return literal(texts[0])
    escaped = (re.escape(each).replace("\\\n", r"\n").replace("/", r"\/") for each in texts)
    return f"/{'|'.join(escaped)}/"


class _Tags:
    """One structural tag; its rules grow as its formats are read."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def rules(self, tag: Any, start: str) -> str:
        if not isinstance(tag, dict):
            raise BadRequest("grammar", tag, "a structural tag: an object")
        given = tag.get("format")
        if given is None:
            given = self._old_form(tag)
        first = self._format(given, "format", 0)
        return "\n".join([f"{start}: {first}", *self._rules, _ANY])

    def _old_form(self, tag: dict[str, Any]) -> dict[str, Any]:
        structures, triggers = tag.get("structures"), tag.get("triggers")
        if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
            raise BadRequest("grammar", tag, "a structural tag with `structures` and `triggers`, or with `format`")
        tags = []
        for index, each in enumerate(structures):
            where = f"grammar.structures[{index}]"
            if not isinstance(each, dict):
                raise BadRequest(where, each, "an object with begin, schema and end")
            schema = each.get("schema", {})
            if isinstance(schema, str):
                schema = json_of(schema, f"{where}.schema")
            content = {"type": "json_schema", "json_schema": schema}
            tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end", "")})
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags}

    def _rule(self, body: str, options: str = "", name: str = "part") -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _text(self, text: Any, where: str) -> str:
        """A text in which special tokens are these tokens."""
        if not isinstance(text, str):
            raise BadRequest(f"grammar.{where}", text, "a text")
        parts, at = [], 0
        for found in self._specials.finditer(text) if self._specials is not None else ():
            parts += [literal(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            at = found.end()
        parts += [literal(text[at:])] if at < len(text) else []
        return " ".join(parts) or '""'

    def _free(self, excludes: Any, where: str) -> str:
        """The terminal of a text that has none of these in it."""
        if excludes in (None, []):
            return "ANY_TEXT"
        if not isinstance(excludes, list) or not all(isinstance(each, str) and each for each in excludes):
            raise BadRequest(f"grammar.{where}.excludes", excludes, "texts that are not empty")
        some = " | ".join(map(literal, excludes))
        return self._rule(f"ANY_TEXT & ~(ANY_TEXT ({some}) ANY_TEXT)", name="TEXT")

    def _format(self, given: Any, where: str, depth: int) -> str:
        """The name of the rule of one format."""
        if not isinstance(given, dict) or depth > _DEPTH_MAX:
            raise BadRequest(
                f"grammar.{where}", given, f"an object with a type, at most {_DEPTH_MAX} within each other"
            )
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise BadRequest(f"grammar.{where}.type", kind, f"one of {', '.join(_KEYS)}")
        self._check_keys(given, kind, where)
        if kind == "const_string":
            return self._rule(self._text(given.get("value"), f"{where}.value"))
        if kind == "json_schema":
            return self._rule(self._schema(given, where))
        if kind == "regex":
            return self._rule(self._regex(given.get("pattern"), f"{where}.pattern"))
        if kind == "grammar":
            return self._rule(self._grammar(given.get("grammar"), f"{where}.grammar"))
        if kind == "any_text":
            return self._rule(self._free(given.get("excludes"), where))
        if kind in ("sequence", "or"):
            parts = self._each(given.get("elements"), f"{where}.elements", depth)
            return self._rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._tag(given, where, depth)
        if kind == "triggered_tags":
            return self._triggered(given, where, depth)
        if kind == "tags_with_separator":
            return self._separated(given, where, depth)
        once = self._format(given.get("content"), f"{where}.content", depth + 1)
        return self._rule(once + (self._times(given, where) or {"optional": "?", "star": "*", "plus": "+"}[kind]))

    def _check_keys(self, given: Mapping[str, Any], kind: str, where: str) -> None:
        for key, value in given.items():
            if key not in ("type", *_KEYS[kind]) and value is not None:
                expected = f"nothing: a {kind} has {', '.join(_KEYS[kind])}"
                raise BadRequest(f"grammar.{where}.{key}", value, expected)

    def _times(self, given: Mapping[str, Any], where: str) -> str:
        """How often a `repeat` may come; empty = it is none."""
        if given["type"] != "repeat":
            return ""
        least, most = given.get("min"), given.get("max")
        if type(least) is not int or not 0 <= least <= _REPEATS_MAX:
            raise BadRequest(f"grammar.{where}.min", least, f"an integer from 0 to {_REPEATS_MAX}")
        if type(most) is not int or (most != -1 and not max(1, least) <= most <= _REPEATS_MAX):
            raise BadRequest(f"grammar.{where}.max", most, f"-1 (no bound), or an integer from min to {_REPEATS_MAX}")
        return f"{{{least},{'' if most == -1 else most}}}"

    def _each(self, given: Any, where: str, depth: int) -> list[str]:
        if not isinstance(given, list) or not given:
            raise BadRequest(f"grammar.{where}", given, "a list, at least one of them")
        return [self._format(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(given)]

    def _schema(self, given: Mapping[str, Any], where: str) -> str:
        schema, style = given.get("json_schema"), given.get("style")
        if style not in (None, "json"):
            raise BadRequest(f"grammar.{where}.style", style, "json or nothing (tool_choice writes other forms)")
        if not isinstance(schema, (dict, bool)):
            raise BadRequest(f"grammar.{where}.json_schema", schema, "a JSON Schema")
        return json_rule(schema)

    def _regex(self, pattern: Any, where: str) -> str:
        import llguidance

        if not isinstance(pattern, str) or not pattern:
            raise BadRequest(f"grammar.{where}", pattern, "a regex")
        return f"/{llguidance.regex_to_lark(pattern)}/"

    def _grammar(self, ebnf: Any, where: str) -> str:
        if not isinstance(ebnf, str) or not ebnf:
            raise BadRequest(f"grammar.{where}", ebnf, "rules of EBNF")
        return f"%lark {{\n{lark_of_ebnf(ebnf)}\n}}"

    def _tag(self, given: Any, where: str, depth: int, trigger: str = "") -> str:
        """`begin` (behind the trigger, which has been written), the content, one of the ends."""
        if not isinstance(given, dict):
            raise BadRequest(f"grammar.{where}", given, "a tag: begin, content and end")
        self._check_keys(given, "tag", where)
        begin, content, end = given.get("begin"), given.get("content"), given.get("end", "")
        if not isinstance(begin, str) or not begin.startswith(trigger):
            raise BadRequest(f"grammar.{where}.begin", begin, f"a text that begins with a trigger ({trigger!r})")
        ends = end if isinstance(end, list) and end else [end]
        head = self._text(begin[len(trigger) :], where)
        tails = [self._text(each, f"{where}.end") for each in ends]
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends) and "<[" not in "".join(tails):
            self._check_keys(content, "any_text", f"{where}.content")
            free = self._free(content.get("excludes"), f"{where}.content")
            return self._rule(f"{head} {self._rule(free, f'[suffix={_any_of(ends)}]')}")
        return self._rule(f"{head} {self._format(content, f'{where}.content', depth + 1)} ({' | '.join(tails)})")

    def _triggered(self, given: dict[str, Any], where: str, depth: int) -> str:
        """Free text up to a trigger, one of its tags, and so on; where there must be one, the first begins at once."""
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
        free = self._free(given.get("excludes"), where)
        first, calls = [], []
        for trigger, some in bodies.items():
            text, body = self._text(trigger, f"{where}.triggers"), self._rule(" | ".join(some))
            before = f"{free} {text}" if "<[" in text else self._rule(f"{free} {text}", "[lazy]")
            first.append(f"{text} {body}")
            calls.append(f"{before} {body}")
        call = self._rule(" | ".join(calls))
        least, once = bool(given.get("at_least_one")), bool(given.get("stop_after_first"))
        if least:
            begun = self._rule(" | ".join(first))
            return begun if once else self._rule(f"{begun} {call}* {free}")
        return self._rule(f"{call} | {free}" if once else f"{call}* {free}")

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
