"""OpenAI's own package against real engines: parsed answers, helpers for streams, tools in every family's form.

One engine alone, prefill and decode apart, slices and stages. In `make proof`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

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


class Kind(Enum):
    HOUSE = "house"
    BOAT = "boat"


class Room(BaseModel):
    """It has an end, and so have answers of this form, whatever is sampled."""

    kind: Kind
    seats: int = Field(ge=1, le=9)
    tags: list[Kind] = Field(max_length=3)


@pytest.fixture(scope="module", params=CLUSTERS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("sdk")
    checkpoint = make_toy(folder / "toy", vocab=640, context=2048, layers=2, kv_heads=2)
    Path(folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    first, *rest = CLUSTERS[request.param]
    words = (
        first, str(checkpoint), *rest, "--chat-template", str(folder / "tools.jinja"), "--max-total-tokens", "8192",
        "--served-model-name", "toy", "--tool-call-parser", request.param,
    )  # fmt: skip
    about: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    with Server(*words) as server, openai.OpenAI(base_url=f"{server.url}/v1", **about) as made:
        yield made


MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
ABOUT: dict[str, Any] = {"model": "toy", "seed": 3}


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


def test_none_is_called_where_none_may_be(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Room, name="book")]
    about: dict[str, Any] = {**ABOUT, "tools": tools, "max_tokens": 24}
    for choice in ("none", "auto"):  # a random model writes no call
        answer = client.chat.completions.create(messages=MESSAGES, tool_choice=choice, **about)
        assert answer.choices[0].message.tool_calls is None
