"""Parsers of answers: however a text is cut into pieces, the result is that of the whole, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.core.errors import ConfigError
from serinus.text import AnswerDelta, AnswerParser, AnswerStyle, DeltaKind, answer_of, answer_style, parts_of

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
    },
    "now": {},
}
STYLES = ("hermes", "llama3_json", "mistral", "deepseek", "glm45", "qwen3_coder", "openai")
WEATHER = {"city": 'São "Paulo" {1}', "days": 2, "opts": {"a": [1, None], "b": "}]</x>"}}
ARGS = json.dumps(WEATHER, ensure_ascii=False)

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>São "Paulo" {1}</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
<arg_key>opts</arg_key>
<arg_value>{"a": [1, null], "b": "}]</x>"}</arg_value>
</tool_call>
<tool_call>now</tool_call>"""
CODER = """<tool_call>
<function=get_weather>
<parameter=city>
São "Paulo" {1}
</parameter>
<parameter=days>
2
</parameter>
<parameter=opts>
{"a": [1, null], "b": "}]</x>"}
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
HARMONY = (
    "<|channel|>analysis<|message|>hm, <b><|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGS}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}"
)
GOOD: list[tuple[str, str, str]] = [
    ("hermes", f'Let me look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n'
     '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\n', "Let me look."),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGS)}}}</tool_call><tool_call>\n'
     '{"name": "now"}\n</tool_ca', ""),
    ("llama3_json", f'{{"type": "function", "name": "get_weather", "parameters": {ARGS}}}; '
     '{"name":"now","parameters":null}', ""),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}\n'
     '{"name": "now", "parameters": {}}', ""),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}, '
     '{"name": "now", "arguments": {}}]', ""),
    ("mistral", f"Let me look.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]now[CALL_ID]ab12[ARGS]{{}}",
     "Let me look."),
    ("deepseek", DEEPSEEK.format(f"function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```",
     "function<｜tool▁sep｜>now\n```json\n{}\n```"), ""),
    ("deepseek", "Let me look." + DEEPSEEK.format(f"get_weather<｜tool▁sep｜>{ARGS}", "now<｜tool▁sep｜>{}"),
     "Let me look."),
    ("glm45", "Let me look.\n" + GLM, "Let me look."),
    ("qwen3_coder", CODER, ""),
    ("qwen3_coder", "Let me look.\n\n" + CODER.replace("<tool_call>\n", ""), "Let me look."),
    ("qwen3_coder", CODER.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), ""),
    ("openai", HARMONY, "Let me look."),
]  # fmt: skip
BROKEN = [
    ("hermes", '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>get_weather</tool_call> and <tool_call'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", 'see <tool_call>{"name": "now", "arguments": {"a": "cut o'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}} </tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [-1e999]}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "\\ud800"}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>' + '{"' + "x" * 20000),
    ("llama3_json", '{"city": "Rome", "days": [1, 2]}'),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]fly{}"),
    ("mistral", "[TOOL_CALLS] now"),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": [1}"),
    ("glm45", "<tool_call>fly\n<arg_key>a</arg_key></tool_call>"),
    ("glm45", "<tool_call>now\n<arg_key>a</arg_key><arg_value>cut"),
    ("qwen3_coder", "<tool_call>x<function=fly></function></tool_call>"),
    ("qwen3_coder", "see <function=fly>\n</function>\n</tool_call> and <function= or <function"),
    ("openai", "just a text < of no channel"),
    ("openai", " to=functions.now, a text of no channel"),
    ("openai", "<|channel|>commentary to=browser.search<|message|>cats"),
    ("openai", "<|channel|>" + "x" * 3000),
]  # fmt: skip


def run(parser: AnswerParser, pieces: Iterable[str]) -> list[AnswerDelta]:
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.end()


def joined(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Neighbours of one kind made one."""
    out: list[AnswerDelta] = []
    for delta in deltas:
        assert delta.text or delta.kind is DeltaKind.CALL_END, delta
        flows = delta.kind in (DeltaKind.CONTENT, DeltaKind.REASONING, DeltaKind.ARGUMENTS)
        if out and flows and out[-1].kind is delta.kind and out[-1].index == delta.index:
            out[-1] = AnswerDelta(delta.kind, out[-1].text + delta.text, delta.index)
        else:
            out.append(delta)
    return out


def parser_of(
    name: str, prompt: str = "", *, tools: bool = True, reasoning: str = "none", said: str = ""
) -> AnswerParser:
    style = answer_style("", tool_call_parser=name, reasoning_parser="openai" if name == "openai" else reasoning)
    parser = style.parser(prompt=prompt, tools=TOOLS if tools else None, reasoning=True, said=said)
    assert parser is not None
    return parser


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(("name", "text", "content"), GOOD)
def test_each_family_of_calls_is_read_from_the_whole_and_from_single_characters(
    name: str, text: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(parts_of(run(parser_of(name), pieces)))
        assert [call.name for call in answer.calls] == ["get_weather", "now"]
        assert [json.loads(call.arguments) for call in answer.calls] == [WEATHER, {}]
        assert answer.content == content
        assert answer.reasoning == ("hm, <b>" if name == "openai" else "")


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_call_is_text_as_it_was_written(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(parts_of(run(parser_of(name), pieces)))
        assert not answer.calls
        assert answer.content == text


def test_a_good_call_behind_a_broken_one_is_found() -> None:
    text = 'a <tool_call><tool_call>{"name": "fly"} <tool_call>{"name": "now"}</tool_call> b'
    for pieces in ([text], list(text)):
        answer = answer_of(parts_of(run(parser_of("hermes"), pieces)))
        assert [call.name for call in answer.calls] == ["now"]
        assert answer.content == 'a <tool_call><tool_call>{"name": "fly"} b'


PAIRS = {
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>",
}
"""A call with a value that is written bare."""


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("city", ["\n# Rome\n\n", "\n", "", " 5\n"])
def test_a_text_keeps_the_line_feeds_around_it(name: str, city: str) -> None:
    (call,) = answer_of(parts_of(run(parser_of(name), [PAIRS[name].format(city)]))).calls
    assert json.loads(call.arguments) == {"city": city}


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
LOOP = {"$ref": "#/$defs/Loop"}
DEFS = {
    "Size": {"type": "string", "enum": ["1", "2"]},
    "Size/~": {"enum": ["1", None]},
    "Loop": {"anyOf": [LOOP, LOOP]},
}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (NULLABLE, "90210", "90210"),
        (NULLABLE, "true", "true"),
        (NULLABLE, '["a"]', '["a"]'),
        (NULLABLE, "null", None),
        (NULLABLE, '"Rome"', "Rome"),
        ({"type": "string"}, '"Rome"', '"Rome"'),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5.0", "5.0"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"$ref": "#/$defs/Size", "default": "1"}, "2", "2"),
        ({"allOf": [{"$ref": "#/$defs/Size"}]}, "2", "2"),
        ({"anyOf": [{"$ref": "#/$defs/Size~1~0"}, {"type": "boolean"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Size~1~0"}, {"type": "boolean"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Size~1~0"}, {"type": "boolean"}]}, "true", True),
        ({"const": "1"}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "many", "many"),
        ({"anyOf": [{"type": "string"}, {}]}, "5", 5),
        ({"description": "A size"}, "5", 5),
        (LOOP, "5", 5),
        ({"anyOf": [LOOP, {"type": "string"}]}, "5", "5"),
        ({"$ref": "#/$defs/None"}, "5", 5),
        ({"$ref": "other.json#/$defs/Size"}, "5", 5),
        ({"type": [{}], "anyOf": "string", "enum": 5, "$ref": 5}, "5", 5),
        (True, "5", 5),
    ],
)
def test_a_bare_value_is_what_its_schema_allows(schema: Any, written: str, value: Any) -> None:
    tools = {"get_weather": {"properties": {"city": schema}, "$defs": DEFS}}
    for name, text in PAIRS.items():
        parser = answer_style("", tool_call_parser=name).parser(prompt="", tools=tools, reasoning=False)
        assert parser is not None
        (call,) = answer_of(parts_of(run(parser, [text.format(written)]))).calls
        assert repr(json.loads(call.arguments)) == repr({"city": value}), name


def test_a_call_goes_on_with_the_header_that_the_prompt_has_begun() -> None:
    text = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGS}<|call|>"
    for pieces in ([text], list(text)):
        answer = answer_of(parts_of(run(parser_of("openai", "<|start|>assistant"), pieces)))
        assert [(call.name, call.arguments) for call in answer.calls] == [("get_weather", ARGS)]
        assert answer.content == ""


def test_arguments_flow_as_they_are_written() -> None:
    parser = parser_of("hermes")
    first = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"ci')
    assert first == [AnswerDelta(DeltaKind.CALL, "get_weather"), AnswerDelta(DeltaKind.ARGUMENTS, '{"ci')]
    assert parser.feed('ty": ') == [AnswerDelta(DeltaKind.ARGUMENTS, 'ty": ')]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "function", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>",
    "<function=now>", "<function=", "<parameter=a>", "</parameter>", "</function>", "<|python_tag|>", "<|channel|>",
    "analysis", " to=functions.now", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<think>", "</think>", "</thi",
    '{"name": "now", "arguments": {}}', '{"name": "now"', ', "parameters": ', '{"a": "b\\', '"', "}", "{", "[", "]",
    ",",
    ";", ":", "now", "fly", " ", "\n", "é", "x", "\\", "1", '"name"', '"arguments": ',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.sampled_from([text for _, text, _ in GOOD])


@settings(max_examples=250)
@given(
    text=TEXTS, places=st.lists(st.integers(0, 400), max_size=12), name=st.sampled_from((*STYLES, "forced")),
    thinks=st.sampled_from(("none", "qwen3", "deepseek_r1")), is_open=st.booleans(),
)  # fmt: skip
def test_any_split_of_any_text_gives_the_result_of_the_whole(
    text: str, places: list[int], name: str, thinks: str, is_open: bool
) -> None:
    prompt = "<think>\n" if is_open else ""
    thinks = "none" if name == "forced" else thinks

    def fresh() -> AnswerParser:
        if name == "forced":
            parser = AnswerStyle().parser(prompt="", tools=TOOLS, reasoning=True, forced=True)
            assert parser is not None
            return parser
        return parser_of(name, prompt, reasoning=thinks)

    whole = joined(run(fresh(), [text]))
    assert joined(run(fresh(), cut(text, places))) == whole
    assert joined(run(fresh(), text)) == whole
    if name != "openai":
        said = "".join(d.text for d in whole if d.kind in (DeltaKind.CONTENT, DeltaKind.CALL_END, DeltaKind.REASONING))
        thought = any(d.kind is DeltaKind.REASONING for d in whole)
        assert [c for c in said if not c.isspace()] == letters(text, thinks, is_open, thought)


def letters(text: str, thinks: str, is_open: bool, thought: bool) -> list[str]:
    """What must be said: all but space and the marks of the thoughts at the beginning."""
    text = text.lstrip()
    opened = thinks != "none" and text.startswith("<think>")
    inside = thinks != "none" and (opened or is_open or thinks == "deepseek_r1")
    text = text.removeprefix("<think>") if opened else text
    text = text.replace("</think>", "", 1) if inside else text
    assert thought == (inside and bool(text.strip())) or not thought
    return [char for char in text if not char.isspace()]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "<|assistant|>", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("qwen3", "<|assistant|><think>\n", "hm\n\nso</think>Yes.", "hm\n\nso", "Yes."),
        ("qwen3", "<|assistant|><think>\n\n</think>\n\n", " Yes.", "", " Yes."),
        ("qwen3", "", "Yes, <think> is a mark.</think>", "", "Yes, <think> is a mark.</think>"),
        ("qwen3", "", "<think>cut of", "cut of", ""),
        ("deepseek_r1", "<|assistant|>", "hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "<|assistant|><think>\n", "<think>hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "<|assistant|></think>", "Yes.", "", "Yes."),
        ("mistral", "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ],
)
def test_thoughts_are_split_from_the_answer(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(parts_of(run(parser_of("none", prompt, tools=False, reasoning=name), pieces)))
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "said", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>\nI begin", " and end\n</think>\n\nYes.", " and end", "Yes."),
        ("qwen3", "\n<think>\n", " I begin</think>Yes.", "I begin", "Yes."),
        ("qwen3", "<think>I begin", ", cut", ", cut", ""),
        ("qwen3", "<think>hm</think>\nIt", " is <think>.", "", " is <think>."),
        ("qwen3", "The mark <think> opens", " thoughts, </think> ends them.", "", " thoughts, </think> ends them."),
        ("deepseek_r1", "I begin", " and end</think>Yes.", " and end", "Yes."),
        ("deepseek_r1", "<think>hm</think>\nIt", " is.", "", " is."),
        ("mistral", "[THINK]I begin", " and end[/THINK]Yes.", " and end", "Yes."),
    ],
)
def test_thoughts_go_on_where_the_last_message_has_left_them(
    name: str, said: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        parser = parser_of("none", f"What is <think>?<|assistant|>{said}", tools=False, reasoning=name, said=said)
        answer = answer_of(parts_of(run(parser, pieces)))
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("<think> <tool_call> <function=", "qwen3_coder", "qwen3"),
        ("<tool_call> <arg_key> <think>", "glm45", "qwen3"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>", "deepseek", "qwen3"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json", None),
        ("<|user|>", None, None),
    ],
)
def test_the_template_shows_which_parser_fits(template: str, tools: str | None, reasoning: str | None) -> None:
    style = answer_style(template)
    assert (style.tools and style.tools.name, style.reasoning and style.reasoning.name) == (tools, reasoning)
    assert not style.harmony_tools
    assert answer_style("<|channel|>").harmony_tools
    assert not answer_style(template, tool_call_parser="none").reads_tools


def test_marks_are_those_of_what_is_read() -> None:
    style = answer_style("[TOOL_CALLS] <think>")
    assert style.marks(tools=False, reasoning=True) == {"<think>", "</think>"}
    assert "[TOOL_CALLS]" in style.marks(tools=True, reasoning=False)
    assert "<|message|>" in answer_style("<|channel|>").marks(tools=False, reasoning=True)


def test_an_unknown_parser_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermse', expected one of auto, none, deepseek"):
        answer_style("", tool_call_parser="hermse")
    with pytest.raises(ConfigError, match="reasoning_parser is 'x'"):
        answer_style("", reasoning_parser="x")
