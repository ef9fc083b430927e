"""Tool calls by the Berkeley leaderboard's categories through real engines over HTTP: one function, several, calls side
by side, none that fits; streamed and not, results sent back; one engine alone, and prefill and decode apart.

The model is random, so a grammar makes the calls, in the form of each family. How well a trained model chooses among
functions is not tested here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from serinus.models.small_checkpoints import make_toy
from serinus.testing.scripted_front import TOOL_TEMPLATE
from serinus.testing.servers import Server

pytestmark = pytest.mark.proof
ALONE, APART = ("serve",), ("up", "--prefill", "1", "--decode", "1")
CLUSTERS = [
    ("hermes", ALONE), ("hermes", APART), ("llama3_json", ALONE), ("mistral", APART), ("deepseek", ALONE),
    ("glm45", APART), ("qwen3_coder", ALONE), ("openai", APART),
]  # fmt: skip
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
Client = tuple[openai.OpenAI, str]


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda each: f"{each[0]}-{each[1][0]}")
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("rounds")
    checkpoint = make_toy(folder / "toy", vocab=640, context=2048, layers=2, kv_heads=2)
    Path(folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    form, (first, *rest) = request.param
    words = (
        first, str(checkpoint), *rest, "--chat-template", str(folder / "tools.jinja"), "--max-total-tokens", "16384",
        "--served-model-name", "toy", "--tool-call-parser", form,
    )  # fmt: skip
    about: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    with Server(*words) as server, openai.OpenAI(base_url=f"{server.url}/v1", **about) as made:
        yield made, form


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


def ask(client: Client, seed: int, messages: list[Any] = MESSAGES, **about: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The answer and its calls. Streamed it is the same, but for a call that was cut: its beginning has left."""
    about = {"model": "toy", "messages": messages, "seed": seed, "max_tokens": 600, "temperature": 2, **about}
    choice: Any = client[0].chat.completions.create(**about).choices[0]
    calls = calls_of(choice)
    try:
        with client[0].chat.completions.stream(**about) as stream:
            streamed: Any = stream.get_final_completion().choices[0]
    except openai.LengthFinishReasonError as error:  # what it raises for an answer that was cut
        streamed = error.completion.choices[0]
    begun = streamed.message.tool_calls or []
    if choice.finish_reason == "length" and len(begun) > len(calls):
        with pytest.raises(json.JSONDecodeError):
            json.loads(begun.pop().function.arguments)
    assert (calls_of(streamed), streamed.finish_reason) == (calls, choice.finish_reason)
    return choice, calls


def test_one_function_is_called(client: Client) -> None:
    named: Any = {"type": "function", "function": {"name": "area"}}
    for choice in ("required", named):
        answer, calls = ask(client, 1, tools=tools("area"), tool_choice=choice, parallel_tool_calls=False)
        assert [name for name, _ in calls] == ["area"]
        assert answer.finish_reason == "tool_calls"


def test_one_of_several_functions_is_called(client: Client) -> None:
    about = {"tools": tools("area", "news"), "parallel_tool_calls": False}
    for name in SCHEMAS:
        named: Any = {"type": "function", "function": {"name": name}}
        assert [each for each, _ in ask(client, 1, tool_choice=named, **about)[1]] == [name]
    for seed in SEEDS:
        assert [name in SCHEMAS for name, _ in ask(client, seed, tool_choice="required", **about)[1]] == [True]


@pytest.mark.parametrize("names", [("area",), ("area", "news")])
def test_calls_stand_side_by_side(client: Client, names: tuple[str, ...]) -> None:
    rounds = [ask(client, seed, tools=tools(*names), tool_choice="required") for seed in SEEDS]
    assert all(calls for _, calls in rounds)
    assert {name for _, calls in rounds for name, _ in calls} <= set(names)
    if client[1] != "openai":  # gpt-oss writes one call in an answer
        assert max(len(calls) for _, calls in rounds) > 1
    answer, calls = rounds[0]
    ids = [each.id for each in answer.message.tool_calls]
    assert len(set(ids)) == len(calls)
    said = answer.message.model_dump(mode="json", exclude_none=True, include={"role", "content", "tool_calls"})
    results = [{"role": "tool", "tool_call_id": each, "content": "42"} for each in ids]
    again, more = ask(client, 7, [*MESSAGES, said, *results], tools=tools(*names), tool_choice="required")
    assert more
    assert again.finish_reason in ("tool_calls", "length")


def test_a_call_that_is_cut_is_no_call(client: Client) -> None:
    for tokens in (8, 20, 40, 80):
        assert ask(client, 3, tools=tools("area", "news"), tool_choice="required", max_tokens=tokens)[0].finish_reason


def test_none_is_called_where_none_fits(client: Client) -> None:
    for choice in ("none", "auto"):  # a random model writes no call
        answer, calls = ask(client, 2, tools=tools("area", "news"), tool_choice=choice, max_tokens=24)
        assert (calls, answer.finish_reason) == ([], "length")
