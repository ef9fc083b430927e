"""Grammar: what an answer must look like, as plain data. Knows no library: `text` compiles it, `runner` obeys it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from serinus.core.bounds import is_unicode
from serinus.core.errors import BadSampling

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "lark", "choice", "structural_tag"]
GRAMMAR_CHARS_MAX = 1 << 18
"""Characters of a grammar at most."""
GRAMMAR_NAMES: Mapping[GrammarKind, str] = {
    "json_object": "a JSON object",
    "json_schema": "a JSON Schema",
    "regex": "a regular expression",
    "ebnf": "an EBNF grammar",
    "lark": "a Lark grammar",
    "choice": "a list of choices",
    "structural_tag": "a structural tag",
}
"""What each kind is called in a sentence."""
_KINDS: tuple[str, ...] = get_args(GrammarKind)
_AS_JSON = ("json_schema", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language that an answer is from. Raises BadSampling: an unknown kind, or a text that cannot be one."""

    kind: GrammarKind
    """How `text` is to be read."""
    text: Annotated[str, Meta(max_length=GRAMMAR_CHARS_MAX)] = ""
    """json_object: nothing; json_schema: the schema, as JSON; regex: one that the whole answer matches; ebnf: rules
    `name ::= ...`, the first symbol is `root`; lark: rules of Lark, the first symbol is `start`; choice: a JSON list of
    texts; structural_tag: the JSON object that SGLang and vLLM take."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise BadSampling("grammar", self.kind, f"a kind, one of {', '.join(_KINDS)}")
        if not isinstance(self.text, str):
            raise BadSampling("grammar", self.text, "a text (Grammar.of takes a schema as an object)")
        if len(self.text) > GRAMMAR_CHARS_MAX:
            raise BadSampling("grammar", f"{len(self.text)} characters", f"at most {GRAMMAR_CHARS_MAX}")
        if not is_unicode(self.text):
            raise BadSampling("grammar", self.text, "a text that is valid Unicode")
        if not self.text and self.kind != "json_object":
            raise BadSampling("grammar", self.text, f"the text of {GRAMMAR_NAMES[self.kind]}")

    @classmethod
    def of(cls, kind: GrammarKind, value: Any = "") -> Grammar:
        """One from a text, or from the object that the text would be the JSON of: a schema, a list of choices, a
        structural tag. Raises BadSampling."""
        if kind in _AS_JSON and not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise BadSampling("grammar", value, f"what JSON can say ({error})") from None
        return cls(kind, value)
