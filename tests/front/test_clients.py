"""A call, its result and the answer, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serinus.testing.running_front import RunningFront
from serinus.testing.scripted_front import Script, scripted_front

pytestmark = pytest.mark.proof

CALL = '<think>hm</think>So:\n<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def scripted(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    with scripted_front(byte_folder, f"ipc://{tmp_path_factory.mktemp('clients')}/engine") as both:
        yield both


def test_the_openai_client_goes_a_round(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    script.text = CALL
    said = client.chat.completions.create(model="canary", messages=messages, tools=tools).choices[0].message
    assert said.tool_calls is not None
    call = said.tool_calls[0]
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    script.text = "Sunny."
    done = client.chat.completions.create(model="canary", messages=messages, tools=tools).choices[0]
    assert (done.message.content, done.finish_reason) == ("Sunny.", "stop")


def test_the_openai_client_goes_a_round_of_responses(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    items: list[Any] = [{"role": "user", "content": "hello"}]
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    script.text = CALL
    first = client.responses.create(model="canary", input=items, tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    script.text = "Sunny."
    with client.responses.stream(model="canary", input=items, tools=tools) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == "Sunny."
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
