"""OpenAI's own package against real engines: parsed answers, helpers for streams, tools in every family's form; tool
calls by the Berkeley leaderboard's categories: one function, several, calls side by side, none that fits, results sent
back.

One engine alone, prefill and decode apart, slices and stages, each for all of it. The model is random, so a grammar
makes the calls: how well a trained model chooses among functions is not tested here. In `make proof`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from serinus.models.small_checkpoints import make_toy
from serinus.testing.scripted_front import TOOL_TEMPLATE
from serinus.testing.servers import Server

pytestmark = pytest.mark.proof
UP = ("up", "--prefill", "1", "--decode", "1")
CLUSTERS = {
    "hermes": ("serve",),
    "llama3_json": UP,
    "mistral": ("serve", "--tp-size", "2"),
    "deepseek": ("serve", "--pp-size", "2"),
    "glm45": UP,
    "qwen3_coder": ("up", "--prefill-pp-size", "2", "--decode-tp-size", "2"),
    "openai": ("serve",),
}
"""By the form of calls that the engines are told; each form in one of them."""
COMPACT = {"whitespace_flexible": False}  # a random model would write much of it
AREA = {
    "x-guidance": COMPACT,
    "type": "object",
    "properties": {"base": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["cm²", "m²"]}},
    "required": ["base", "unit"],
    "additionalProperties": False,
}
NEWS = {
    "x-guidance": COMPACT,
    "type": "object",
    "properties": {"topic": {"enum": ["a, b", 'the "new" one', "c"]}},
    "required": ["topic"],
    "additionalProperties": False,
}
SCHEMAS = {"area": AREA, "news": NEWS}
SEEDS = range(4)
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
ABOUT: dict[str, Any] = {"model": "toy", "seed": 3}
Talk = tuple[openai.OpenAI, str]
"""A client, and the form of calls of its engines."""


class Kind(Enum):
    HOUSE = "house"
    BOAT = "boat"


class Room(BaseModel):
    """It has an end, and so have answers of this form, whatever is sampled."""

    kind: Kind
    seats: int = Field(ge=1, le=9)
    tags: list[Kind] = Field(max_length=3)


@pytest.fixture(scope="module", params=CLUSTERS)
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    folder = tmp_path_factory.mktemp("sdk")
    checkpoint = make_toy(folder / "toy", vocab=640, context=2048, layers=2, kv_heads=2)
    Path(folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    first, *rest = CLUSTERS[request.param]
    words = (
        first, str(checkpoint), *rest, "--chat-template", str(folder / "tools.jinja"), "--max-total-tokens", "16384",
        "--served-model-name", "toy", "--tool-call-parser", request.param,
    )  # fmt: skip
    about: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    with Server(*words) as server, openai.OpenAI(base_url=f"{server.url}/v1", **about) as made:
        yield made, request.param


@pytest.fixture
def client(talk: Talk) -> openai.OpenAI:
    return talk[0]


def test_parsed_answers_are_objects(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(messages=MESSAGES, response_format=Room, max_tokens=900, **ABOUT)
    assert isinstance(chat.choices[0].message.parsed, Room)
    more: dict[str, Any] = {"extra_body": {"seed": 3}}
    answer = client.responses.parse(model="toy", input="hello", text_format=Room, max_output_tokens=900, **more)
    assert isinstance(answer.output_parsed, Room)


def test_streams_end_with_the_same_objects(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=MESSAGES, response_format=Room, max_tokens=900, **ABOUT) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        chat = stream.get_final_completion()
    assert isinstance(chat.choices[0].message.parsed, Room)
    assert "".join(pieces) == chat.choices[0].message.content
    more: dict[str, Any] = {"extra_body": {"seed": 3}}
    with client.responses.stream(
        model="toy", input="hello", text_format=Room, max_output_tokens=900, **more
    ) as responses:
        texts = [event.delta for event in responses if event.type == "response.output_text.delta"]
        answer = responses.get_final_response()
    assert isinstance(answer.output_parsed, Room)
    assert "".join(texts) == answer.output_text


def test_calls_are_parsed_in_the_form_of_the_family(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Room, name="book")]
    about: dict[str, Any] = {**ABOUT, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    chat = client.chat.completions.parse(messages=MESSAGES, max_tokens=900, **about).choices[0]
    assert chat.finish_reason == "tool_calls"
    assert chat.message.tool_calls is not None
    call = chat.message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Room)
    with client.chat.completions.stream(messages=MESSAGES, max_tokens=900, **about) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert json.loads(streamed[0].function.arguments) == json.loads(call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    said: Any = chat.message.model_dump(mode="json", exclude_none=True, include={"role", "content", "tool_calls"})
    last = client.chat.completions.create(messages=[*MESSAGES, said, result], max_tokens=9, model="toy", tools=tools)
    assert last.choices[0].finish_reason in ("length", "stop")


def tools(*names: str) -> Any:
    """Functions in OpenAI's form."""
    return [
        {"type": "function", "function": {"name": name, "description": f"Gives {name}", "parameters": SCHEMAS[name]}}
        for name in names
    ]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call, which fit its schema."""
    found = [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls or ()]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    return found


def ask(talk: Talk, seed: int, messages: list[Any] = MESSAGES, **about: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The answer and its calls. Streamed it is the same, but for a call that was cut: its beginning has left."""
    about = {"model": "toy", "messages": messages, "seed": seed, "max_tokens": 600, "temperature": 2, **about}
    choice: Any = talk[0].chat.completions.create(**about).choices[0]
    calls = calls_of(choice)
    try:
        with talk[0].chat.completions.stream(**about) as stream:
            streamed: Any = stream.get_final_completion().choices[0]
    except openai.LengthFinishReasonError as error:  # what it raises for an answer that was cut
        streamed = error.completion.choices[0]
    begun = streamed.message.tool_calls or []
    if choice.finish_reason == "length" and len(begun) > len(calls):
        with pytest.raises(json.JSONDecodeError):
            json.loads(begun.pop().function.arguments)
    assert (calls_of(streamed), streamed.finish_reason) == (calls, choice.finish_reason)
    return choice, calls


def asked(talk: Talk, **about: Any) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """The answers of all SEEDS, made side by side."""
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        return list(pool.map(lambda seed: ask(talk, seed, **about), SEEDS))


def test_one_function_is_called(talk: Talk) -> None:
    named: Any = {"type": "function", "function": {"name": "area"}}
    for choice in ("required", named):
        answer, calls = ask(talk, 1, tools=tools("area"), tool_choice=choice, parallel_tool_calls=False)
        assert [name for name, _ in calls] == ["area"]
        assert answer.finish_reason == "tool_calls"


def test_one_of_several_functions_is_called(talk: Talk) -> None:
    about = {"tools": tools("area", "news"), "parallel_tool_calls": False}
    for name in SCHEMAS:
        named: Any = {"type": "function", "function": {"name": name}}
        assert [each for each, _ in ask(talk, 1, tool_choice=named, **about)[1]] == [name]
    for _, calls in asked(talk, tool_choice="required", **about):
        assert [name in SCHEMAS for name, _ in calls] == [True]


@pytest.mark.parametrize("names", [("area",), ("area", "news")])
def test_calls_stand_side_by_side(talk: Talk, names: tuple[str, ...]) -> None:
    rounds = asked(talk, tools=tools(*names), tool_choice="required")
    assert all(calls for _, calls in rounds)
    assert {name for _, calls in rounds for name, _ in calls} <= set(names)
    if talk[1] != "openai":  # gpt-oss writes one call in an answer
        assert max(len(calls) for _, calls in rounds) > 1
    answer, calls = rounds[0]
    ids = [each.id for each in answer.message.tool_calls]
    assert len(set(ids)) == len(calls)
    said = answer.message.model_dump(mode="json", exclude_none=True, include={"role", "content", "tool_calls"})
    results = [{"role": "tool", "tool_call_id": each, "content": "42"} for each in ids]
    again, more = ask(talk, 7, [*MESSAGES, said, *results], tools=tools(*names), tool_choice="required")
    assert more
    assert again.finish_reason in ("tool_calls", "length")


def test_a_call_that_is_cut_is_no_call(talk: Talk) -> None:
    for tokens in (8, 20, 40, 80):
        assert ask(talk, 3, tools=tools("area", "news"), tool_choice="required", max_tokens=tokens)[0].finish_reason


def test_none_is_called_where_none_fits(talk: Talk) -> None:
    for choice in ("none", "auto"):  # a random model writes no call
        answer, calls = ask(talk, 2, tools=tools("area", "news"), tool_choice=choice, max_tokens=24)
        assert (calls, answer.finish_reason) == ([], "length")
