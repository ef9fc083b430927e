"""Calls that must be made: the grammar writes them in the form of each family, and the family's parser reads them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.text import (
    AnswerStyle,
    GrammarFailed,
    GrammarVocabulary,
    Tokenizer,
    WholeAnswer,
    answer_of,
    answer_style,
    forced_tag,
    parts_of,
)

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "now": {},
}
ARGUMENTS = '{"city": "Rome", "unit": "C", "days": 2}'
FORMS = {
    "hermes": ("hermes", "", '<tool_call>\n{"name": "get_weather", "arguments": @}\n</tool_call>\n'
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    "llama": ("llama3_json", "", '{"name": "get_weather", "parameters": @}; {"name": "now", "parameters": {}}'),
    "mistral": ("mistral", "", '[TOOL_CALLS][{"name": "get_weather", "arguments": @}, '
                '{"name": "now", "arguments": {}}]'),
    "mistral, v11": ("mistral", "[ARGS]", "[TOOL_CALLS]get_weather[ARGS]@[TOOL_CALLS]now[ARGS]{}"),
    "deepseek": ("deepseek", "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>@"
                 "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek, v3": ("deepseek", "```json", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                     "get_weather\n```json\n@\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                     "now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "glm": ("glm45", "", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
            "</tool_call>\n<tool_call>now\n</tool_call>"),
    "coder": ("qwen3_coder", "", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
              "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
              "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "harmony": ("openai", "", "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>@"),
    "unknown": ("none", "", '[{"name": "get_weather", "parameters": @}, {"name": "now", "parameters": {}}]'),
}  # fmt: skip
"""Parser, what the chat template says, and calls of both functions as the family writes them (harmony: of one)."""


def style_of(form: str) -> tuple[AnswerStyle, str]:
    parser, template, text = FORMS[form]
    return answer_style(template, tool_call_parser=parser, reasoning_parser="none"), text.replace("@", ARGUMENTS)


def read(style: AnswerStyle, text: str, tools: dict[str, dict[str, Any]]) -> WholeAnswer:
    parser = style.parser(prompt="", tools=tools, reasoning=False, forced=True)
    assert parser is not None
    return answer_of(parts_of([*(delta for char in text for delta in parser.feed(char)), *parser.end()]))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, width=tokenizer.vocab_size)


def grammar_of(style: AnswerStyle, tools: dict[str, dict[str, Any]], calls_max: int | None = None) -> Grammar:
    return Grammar.of("structural_tag", forced_tag(style.call_form(tools), tools, calls_max=calls_max))


def taken(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, grammar: Grammar, text: str) -> tuple[str, bool]:
    """As much of the text as the grammar takes, and whether the answer may end there."""
    state = vocabulary.begin(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    done: list[int] = []
    for token in ids:
        try:
            state.follow((token,))
        except GrammarFailed:
            return tokenizer.decode(done, skip_special_tokens=False), False
        done.append(token)
    may_end = vocabulary.allow([state], np.zeros((1, (vocabulary.width + 31) // 32), np.int32)) == [True]
    return tokenizer.decode(done, skip_special_tokens=False), may_end


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_a_family_is_written_and_read(
    form: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    style, text = style_of(form)
    grammar = grammar_of(style, TOOLS)
    assert taken(vocabulary, tokenizer, grammar, text) == (text, True)
    answer = read(style, text, TOOLS)
    assert answer.content == ""
    assert [call.name for call in answer.calls] == (["get_weather"] if form == "harmony" else ["get_weather", "now"])
    assert json.loads(answer.calls[0].arguments) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_else_is_written(form: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    style, text = style_of(form)
    grammar = grammar_of(style, TOOLS)
    assert taken(vocabulary, tokenizer, grammar, "Hello")[0] in ("", "[")
    for wrong in (text.replace("get_weather", "fly"), text.replace("days", "dais")):
        got, may_end = taken(vocabulary, tokenizer, grammar, wrong)
        assert len(got) < len(wrong), wrong
        assert not may_end
    assert not taken(vocabulary, tokenizer, grammar, text[: len(text) // 3])[1]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "harmony"])
def test_a_named_function_is_written_once(form: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    style, text = style_of(form)
    got, _ = taken(vocabulary, tokenizer, grammar_of(style, TOOLS, calls_max=1), text)
    assert [call.name for call in read(style, got, TOOLS).calls] == ["get_weather"]


RANDOM: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "class": {"enum": ["first", "second"], "type": "string"},
            "seats": {"type": "integer", "minimum": 1, "maximum": 40},
            "meal": {"type": "boolean"},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "maxItems": 2},
        },
        "required": ["seats", "class"],
        "additionalProperties": False,
        "$defs": {"Stop": {"enum": ["Rome", 'the "Hague"', 3]}},
    },
    "cancel": {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_a_random_model_writes_is_read_and_valid(
    form: str, vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    style, _ = style_of(form)
    grammar, rng, read_count = grammar_of(style, RANDOM), random.Random(5), 0
    for _ in range(12):
        state, ids, words = vocabulary.begin(grammar), [], np.zeros((1, (vocabulary.width + 31) // 32), np.int32)
        while len(ids) < 1500:
            may_end = vocabulary.allow([state], words) == [True]
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not len(allowed) or (may_end and rng.random() < 0.5):
                break
            ids.append(int(rng.choice(allowed)))
            state.follow(ids[-1:])
        if not may_end:
            continue
        answer = read(style, tokenizer.decode(ids, skip_special_tokens=False), RANDOM)
        assert answer.content == ""
        assert answer.calls
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), RANDOM[call.name])
            read_count += 1
    assert read_count >= 8


def test_arguments_that_are_no_plain_properties_are_written_as_json() -> None:
    style = answer_style("", tool_call_parser="glm45")
    assert style.call_form(TOOLS).pair is not None
    assert style.call_form({"f": {"anyOf": [{"type": "object"}]}}).pair is None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": "x"}, "properties must be an object"),
        ({"required": 5}, "Expected array for 'required'"),
        ({"required": [["city"]]}, "Expected string for 'required' item"),
        ({"properties": {"city": {"type": "string", "enum": 5}}}, "enum must be an array"),
        ({"properties": {"city": {"type": "string", "enum": "xy"}}}, "enum must be an array"),
    ],
)
@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_parameters_that_are_no_schema_are_refused_in_words(
    form: str, schema: dict[str, Any], said: str, vocabulary: GrammarVocabulary
) -> None:
    written = answer_style("", tool_call_parser=form).call_form({"f": schema})
    with pytest.raises(BadRequest, match=said):
        vocabulary.compile(Grammar.of("structural_tag", forced_tag(written, {"f": schema}, calls_max=None)))
