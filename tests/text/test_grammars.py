"""Grammars over a vocabulary: which texts they take, and what is said of those that cannot be compiled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from serinus.core.errors import BadRequest
from serinus.core.grammar import GRAMMAR_NAMES, Grammar, GrammarKind
from serinus.testing.small_tokenizers import make_byte_tokenizer, make_piece_tokenizer
from serinus.text import GrammarCompiler, GrammarFailed, GrammarVocabulary, Tokenizer, load_tokenizer
from serinus.text.grammar_source import library_source

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, width=280)


def taken(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, grammar: Grammar, text: str) -> str:
    """How far a text goes, and how it stands there: `+` may end, `.` is complete."""
    state, words_RW = vocabulary.begin(grammar), np.zeros((1, 9), np.int32)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for at, token in enumerate(ids):
        vocabulary.allow([state], words_RW)
        if not (int(words_RW[0, token >> 5]) >> (token & 31)) & 1:
            return tokenizer.decode(ids[:at], skip_special_tokens=False) + "|"
        state.follow([token])
    return text + ("+" if vocabulary.allow([state], words_RW) == [True] else "") + ("." if state.complete else "")


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("json_object", "", ['{"a": [1, {}]}+.', "{|", "|"]),
        ("json_schema", {"type": "integer", "minimum": 5}, ["7+", "|"]),
        ("json_schema", True, ['"x"+.', "[1]+."]),
        ("json_schema", {"enum": ["a", 3]}, ['"a"+.', "3+."]),
        ("regex", "a+b?", ["aa+", "aab+.", "|"]),
        ("choice", ["yes", 'n"o', "yesterday"], ["yes+", 'n"o+.', "yesterday+.", "yest"]),
        ("ebnf", 'root ::= "a" rest\nrest ::= [0-9]+ | "b"', ["a12+", "ab+.", "a|"]),
        ("lark", 'start: "a" /[xy]/', ["ax+.", "a|"]),
    ],
)
def test_a_grammar_takes_its_texts(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, kind: Any, value: Any, texts: list[str]
) -> None:
    follow = {"{|": "{x", "|": "zz", "a|": "az"}
    for expected in texts:
        text = follow.get(expected, expected.rstrip("+."))
        assert taken(vocabulary, tokenizer, Grammar.of(kind, value), text) == expected


TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
CALLS = {"type": "tag", "begin": "<pad>a", "content": INTEGER, "end": ";"}
CONST = {"type": "const_string", "value": "n="}
ANY = {"type": "tag", "begin": "T", "content": {"type": "any_text"}, "end": "#"}


def triggered(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<pad>", "T"], "tags": [CALLS, ANY], **more}}


def separated(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "tags_with_separator", "separator": ",", "tags": [CALLS, ANY], **more}}


@pytest.mark.parametrize(
    ("tag", "text", "expected"),
    [
        (TAG, "hi <f=a>12</f> and <f=b>true</f> x", "hi <f=a>12</f> and <f=b>true</f> x+"),
        (TAG, "hi <f=a>x", "hi <f=a>|"),
        (TAG, "hi <f=c>", "hi <f=|"),
        (TAG, "a < b", "a < b+"),
        (triggered(), "", "+"),
        (triggered(), "k <pad>a1; Tx#y", "k <pad>a1; Tx#y+"),
        (triggered(at_least_one=True), "k", "|"),
        (triggered(at_least_one=True), "<pad>a1;k Tx#", "<pad>a1;k Tx#+"),
        (triggered(stop_after_first=True), "k <pad>a1;", "k <pad>a1;+."),
        (triggered(stop_after_first=True), "k", "k+"),
        (triggered(stop_after_first=True, at_least_one=True), "k", "|"),
        (triggered(stop_after_first=True, at_least_one=True), "Tx#", "Tx#+."),
        (triggered(excludes=["no"]), "n <pad>a1; o n", "n <pad>a1; o n+"),
        (triggered(excludes=["no"]), "no", "n|"),
        (triggered(excludes=["no"]), "Tno#no", "Tno#n|"),
        (separated(), "<pad>a1;,Tx y#,<pad>a2;", "<pad>a1;,Tx y#,<pad>a2;+"),
        (separated(at_least_one=True), "", ""),
        (separated(at_least_one=True), "x", "|"),
        (separated(stop_after_first=True), "<pad>a1;", "<pad>a1;+."),
        (
            {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, INTEGER]}},
            "n=5",
            "n=5+",
        ),
        ({"format": {"type": "or", "elements": [{"type": "regex", "pattern": "[ab]{2}"}, INTEGER]}}, "ab", "ab+."),
        ({"format": {"type": "grammar", "grammar": 'root ::= "a" n\nn ::= [0-9]'}}, "a1", "a1+."),
        ({"format": {"type": "any_text", "excludes": ["no", "/"]}}, "now", "n|"),
        ({"format": {"type": "any_text", "excludes": ["no", "/"]}}, "a/", "a|"),
        ({"format": {**ANY, "end": ["#", "\n</t>"]}}, "Ta<b\n</t>", "Ta<b\n</t>+."),
        ({"format": {**ANY, "end": ["#", "\n</t>"]}}, "Ta#", "Ta#+."),
        ({"format": {**ANY, "content": {"type": "any_text", "excludes": ["no"]}}}, "Tno", "Tn|"),
        ({"format": {**CALLS, "end": [";", "."]}}, "<pad>a1.", "<pad>a1.+."),
        ({"format": {"type": "optional", "content": CONST}}, "", "+"),
        ({"format": {"type": "optional", "content": CONST}}, "n=", "n=+."),
        ({"format": {"type": "plus", "content": CONST}}, "", ""),
        ({"format": {"type": "plus", "content": CONST}}, "n=n=", "n=n=+"),
        ({"format": {"type": "star", "content": CONST}}, "n=n=x", "n=n=|"),
        ({"format": {"type": "repeat", "min": 1, "max": 2, "content": CONST}}, "n=n=", "n=n=+."),
        ({"format": {"type": "repeat", "min": 2, "max": -1, "content": CONST}}, "n=", "n="),
        ({**TAG, "structures": [{"begin": "<f=a>", "schema": '{"const": 7}', "end": ""}]}, "<f=a>8", "<f=a>|"),
    ],
)
def test_a_structural_tag_takes_its_texts(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, tag: Any, text: str, expected: str
) -> None:
    assert taken(vocabulary, tokenizer, Grammar.of("structural_tag", tag), text) == expected


@pytest.mark.parametrize(
    ("kind", "value", "field", "said"),
    [
        ("json_schema", {"properties": {"a/b": {"not": {}}}}, "grammar", "#/properties/a~1b/not"),
        ("json_schema", {"items": {"type": "objekt"}}, "grammar", "#/items/type"),
        ("json_schema", {"properties": {"not": {"pattern": "(["}}}, "grammar", "#/properties/not/pattern"),
        ("json_schema", {"anyOf": [{}, {"$ref": "#/x"}]}, "grammar", "#/anyOf/1/$ref"),
        ("json_schema", {"format": "zip"}, "grammar", "the format 'zip' cannot be enforced"),
        ("json_schema", {"required": 5}, "grammar", "#/required"),
        ("json_schema", {"items": {"multipleOf": 999983}}, "grammar", "'#/items/multipleOf', expected a JSON Schema"),
        ("json_schema", {"multipleOf": 1 << 30}, "grammar", "50000 states"),
        ("json_schema", {"allOf": [{"multipleOf": n} for n in (0.7, 11, 13, 17, 19, 23)]}, "grammar", "at most, these"),
        ("lark", r'start: %json {"multiple\u004ff": 999983}', "grammar", "50000 states"),
        ("lark", 'start: %json {"multipleOf": 1e3, "allOf": [{"multipleOf" : 999.983}]}', "grammar", "50000 states"),
        ("json_schema", False, "grammar", "schema is false"),
        ("json_schema", "[1", "grammar", "valid JSON"),
        ("json_schema", "5", "grammar", "an object, true or false"),
        ("regex", "a(?=b)", "grammar", "look-around"),
        ("ebnf", 'root ::= "a" foo', "grammar", "the rule 'foo' is not defined"),
        ("ebnf", "root := x", "grammar", "rules `name ::= ...`"),
        ("lark", "start: foo", "grammar", "the rule 'foo' is not defined"),
        ("choice", ["a", 1], "grammar", "a list of texts"),
        ("structural_tag", {"structures": []}, "grammar", "with `structures` and `triggers`"),
        ("structural_tag", {**TAG, "triggers": ["x"]}, "grammar.format.tags[0].begin", "begins with one of ['x']"),
        ("structural_tag", {"format": {"type": "yaml"}}, "grammar.format.type", "one of const_string"),
        ("structural_tag", {"format": {"type": ["any_text"]}}, "grammar.format.type", "one of const_string"),
        ("structural_tag", {"format": {**CONST, "values": []}}, "grammar.format.values", "a const_string has value"),
        ("structural_tag", {"format": {**ANY, "stop": "x"}}, "grammar.format.stop", "nothing: a tag has begin"),
        ("structural_tag", {"format": {**INTEGER, "style": "qwen_xml"}}, "grammar.format.style", "json or nothing"),
        ("structural_tag", {"format": {"type": "any_text", "excludes": [""]}}, "grammar.format.excludes", "not empty"),
        (
            "structural_tag",
            {"format": {"type": "repeat", "min": 3, "max": 2, "content": CONST}},
            "grammar.format.max",
            "-1",
        ),
        ("structural_tag", {"format": {"type": "grammar", "grammar": "root := x"}}, "grammar", "rules `name ::= ...`"),
        ("structural_tag", {"format": {"type": "or", "elements": []}}, "grammar.format.elements", "at least one"),
        (
            "structural_tag",
            {"format": {"type": "json_schema", "json_schema": {"not": {}}}},
            "grammar",
            'enforced: "not"',
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(
    vocabulary: GrammarVocabulary, kind: Any, value: Any, field: str, said: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        vocabulary.begin(Grammar.of(kind, value))
    assert refused.value.field == field
    assert said in str(refused.value)


@pytest.mark.parametrize("numbers", [(365,), (0.01, 100_000), (1024,), (7, 11, 13, 17), (9973, 9973.0)])
def test_multiples_that_take_few_states_are_enforced(vocabulary: GrammarVocabulary, numbers: tuple[float, ...]) -> None:
    properties = {f"p{place}": {"type": "number", "multipleOf": number} for place, number in enumerate(numbers)}
    vocabulary.begin(Grammar.of("json_schema", {"properties": properties}))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"not": {}}', "a JSON Schema that can be enforced: "),
        ("regex", "a(?=b)", "a regular expression that can be enforced: "),
        ("lark", "start: x", "a Lark grammar that can be enforced: "),
    ],
)
def test_a_refusal_names_the_kind_in_words(vocabulary: GrammarVocabulary, kind: Any, text: str, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        vocabulary.begin(Grammar(kind, text))
    assert refused.value.expected.startswith(said)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "a(b", "can be enforced: unclosed group (character 2 of the expression, '(b')"),
        ("regex", r"\b", r"can be enforced: look-around and word boundaries (\b) are not supported"),
        ("lark", "start: x\nx: y", "can be enforced: line 2: the rule 'y' is not defined"),
        ("lark", "start x", "can be enforced: line 1: 'x' stands where ':' was expected"),
        ("lark", "start: /[z-a]/", "line 1: invalid character class range, the start must be <= the end (character 2"),
        ("lark", 'start: "a', "line 1: a text or an expression has no end, or a character"),
        ("ebnf", 'root ::= "a"\nfoo bar', "with a `root`: line 2: ::= was expected at 'bar'"),
        ("ebnf", 'root ::= ("a" | ', "line 1: ')' was expected where the rules end"),
        ("ebnf", 'r ::= "a"', "the rule `root` is missing"),
        ("json_schema", '{"type": "num"}', "'num' is no type, expected string, number"),
        ("json_schema", '{"pattern": "a(b"}', "unclosed group (character 2 of the expression, '(b')"),
        ("json_schema", '{"$ref": "#"}', "a JSON Schema that can be enforced: no text fits it"),
        ("lark", "start: a\na: a", "a Lark grammar that can be enforced: no text fits it"),
        ("json_schema", '{"minItems": 3, "maxItems": 1, "type": "array"}', "no value can satisfy it: minItems (3) is"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where_without_the_words_of_the_library(
    vocabulary: GrammarVocabulary, kind: Any, text: str, said: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        vocabulary.begin(Grammar(kind, text))
    assert said in str(refused.value)
    assert not re.search(r"at \d+\(|\^|parse error|Expected|\d \| ", refused.value.expected)


def test_every_kind_has_a_name() -> None:
    assert list(GRAMMAR_NAMES) == list(get_args(GrammarKind))


def test_json_has_the_whitespace_of_other_servers(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Space, line feed and tab, as xgrammar has it; no carriage return, also where a schema has other options."""
    options = '{"type": "object", "x-guidance": {"coerce_one_of": true}}'
    for grammar in (Grammar("json_object"), Grammar("json_schema", options)):
        assert taken(vocabulary, tokenizer, grammar, "{ \n\t}") == "{ \n\t}+."
        assert taken(vocabulary, tokenizer, grammar, "{\r}") == "{|"
        assert taken(vocabulary, tokenizer, grammar, "{" + " " * 50 + "}") == "{" + " " * 32 + "|"


def test_whitespace_between_tokens_of_json_has_an_end(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    for grammar, most in (
        (Grammar("json_object"), 32),
        (Grammar("json_schema", '{"x-guidance": {"whitespace_flexible": false}}'), 0),
    ):
        found = taken(vocabulary, tokenizer, grammar, "{" + " " * 50 + "}")
        assert found == "{" + " " * most + "|"


def forced(vocabulary: GrammarVocabulary, grammar: Grammar) -> list[int]:
    """An answer of the first token that may come, each time."""
    state, words_RW = vocabulary.begin(grammar), np.zeros((1, 9), np.int32)
    while vocabulary.allow([state], words_RW) == [False]:
        state.follow([int(np.flatnonzero(np.unpackbits(words_RW.view(np.uint8), bitorder="little"))[0])])
    return state.tokens.tolist()


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("regex", "<think>a{3}</think>", "<think>aaa</think>"),
        ("regex", "<eos>", "<eos>"), ("choice", ["<pad>"], "<pad>"),
        ("json_schema", {"const": "日<pad>"}, '"日<pad>"'),
        ("structural_tag", {"format": {**CALLS, "content": {"type": "const_string", "value": "<think>"}}},
         "<pad>a<think>;"),
    ],
)  # fmt: skip
def test_text_that_is_forced_may_read_as_a_special_token(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, kind: Any, value: Any, text: str
) -> None:
    ids = forced(vocabulary, Grammar.of(kind, value))
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    named = [token for token in ids if token in tokenizer.added_texts.values()]
    assert named == ([tokenizer.added_texts["<pad>"]] if kind == "structural_tag" else [])


def test_a_special_token_that_a_pattern_escapes_is_seen_in_it(tmp_path: Path) -> None:
    file = make_byte_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<think>", "<|x|>"), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(forced(GrammarVocabulary(tokenizer, width=280), Grammar("regex", r"<\|x\|>a"))) == "<|x|>a"


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("choice", [f"c{number}" for number in range(2500)], "c2499+."),
        ("json_schema", {"properties": {f"p{number}": {"type": "integer"} for number in range(600)}}, '{"p7": 1}+.'),
    ],
)
def test_a_grammar_may_have_many_branches(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, kind: Any, value: Any, text: str
) -> None:
    assert taken(vocabulary, tokenizer, Grammar.of(kind, value), text.rstrip("+.")) == text


def test_a_choice_that_is_given_twice_is_one() -> None:
    twice, once = (library_source(Grammar.of("choice", each), {}) for each in (["a", "b", "a"], ["a", "b"]))
    assert twice == once


def test_a_tokenizer_that_the_library_reads_wrongly_is_not_used(tmp_path: Any) -> None:
    tokenizer = load_tokenizer(str(make_piece_tokenizer(tmp_path)))
    with pytest.raises(BadRequest, match="this tokenizer cannot be used with grammars"):
        GrammarVocabulary(tokenizer, width=300)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(["), ("regex", "a(?=b)"), ("regex", "(a|b)*a(a|b){20}"), ("regex", "(a{1,900}){1,900}"),
        ("ebnf", 'root ::= "a" | b'), ("ebnf", 'root ::= [a-z]+ "b"'), ("lark", 'start: "a" | <eos>'),
        ("lark", 'start: <[262]> "x"'), ("lark", "start: <[5]>"), ("lark", 'start: <[99999]> "x"'),
        ("lark", 'start: <nothing> "x"'), ("lark", 'start: <think> "x"'), ("lark", 'start: "a'), ("lark", "start: x"),
        ("choice", '["a", "ü"]'), ("json_object", ""), ("json_schema", '{"$ref": "#"}'),
        ("structural_tag", '{"format": {"type": "tag", "begin": "<eos>", "content": {"type": "any_text"}, "end": ""}}'),
        ("structural_tag", '{"format": {"type": "tag", "begin": "<think>", "content": {"type": "x"}, "end": "x"}}'),
    ],
)  # fmt: skip
def test_a_compiler_without_the_vocabulary_takes_and_refuses_the_same(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, kind: Any, text: str
) -> None:
    said = []
    for compiler in (vocabulary, GrammarCompiler(tokenizer, width=280)):
        try:
            compiler.compile(Grammar(kind, text))
            said.append("")
        except BadRequest as error:
            said.append(str(error).partition("following special tokens")[0])
    assert said[0] == said[1]


def test_as_many_grammars_are_kept_as_are_wanted_lately(vocabulary: GrammarVocabulary) -> None:
    for number in range(80):
        vocabulary.begin(Grammar.of("choice", [str(number)]))
    assert len(vocabulary._compiled) == 64


def test_a_state_refuses_a_token_that_it_does_not_allow(vocabulary: GrammarVocabulary) -> None:
    state = vocabulary.begin(Grammar("regex", "ab"))
    with pytest.raises(GrammarFailed, match="token 98 at place 0"):
        state.follow([98])
    assert list(state.tokens) == []


def test_the_page_lists_the_keywords_that_are_refused(vocabulary: GrammarVocabulary) -> None:
    page = (Path(__file__).parents[2] / "docs" / "STRUCTURED.md").read_text(encoding="utf-8").replace("\n", " ")
    listed = page.partition("these are refused:")[2].partition("; formats other")[0]
    refused = [name.strip(" `") for name in listed.split(",")]
    assert len(refused) == 16
    values = {"uniqueItems": True, "minContains": 1, "maxContains": 1, "$dynamicRef": "#a", "$recursiveRef": "#"}
    for name in refused:
        with pytest.raises(BadRequest, match=re.escape(f"#/{name}")):
            vocabulary.begin(Grammar.of("json_schema", {name: values.get(name, {})}))
    formats = page.partition("formats other than ")[2].partition("; references")[0]
    for name in re.split(r", | and ", formats):
        vocabulary.begin(Grammar.of("json_schema", {"type": "string", "format": name.strip()}))


def test_tagged_unions_of_pydantic_are_taken(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    branches = [{"properties": {"t": {"const": name}}, "required": ["t"]} for name in ("a", "b")]
    tagged = Grammar.of("json_schema", {"oneOf": branches, "discriminator": {"propertyName": "t"}})
    assert taken(vocabulary, tokenizer, tagged, '{"t": "b"}') == '{"t": "b"}+.'
    with pytest.raises(BadRequest, match="oneOf constraints are not supported"):
        vocabulary.begin(Grammar.of("json_schema", {"oneOf": branches}))
