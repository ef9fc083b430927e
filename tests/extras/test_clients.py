"""Calls, their results and answers through the packages of the optional group `clients`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from serinus.testing.running_front import RunningFront
from serinus.testing.scripted_front import Script, scripted_front
from serinus.testing.small_tokenizers import make_byte_tokenizer
from serinus.wire.messages import Generate

CALL = '<think>hm</think>So:\n<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    folder = tmp_path_factory.mktemp("clients")
    with scripted_front(make_byte_tokenizer(folder / "byte"), f"ipc://{folder}/engine") as both:
        yield both


def test_the_anthropic_client_goes_a_round(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    client = anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0)
    about: dict[str, Any] = {"model": "canary", "max_tokens": 500}
    about["tools"] = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    script.text = CALL
    with client.messages.stream(messages=messages, **about) as stream:
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    call = first.content[2]
    assert call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    script.text = "Sunny."
    done = client.messages.create(messages=messages, **about)
    assert (done.content[0].text, done.stop_reason) == ("Sunny.", "end_turn")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(messages=messages, model="canary", max_tokens=9000)


def test_langchain_binds_tools(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    model = ChatOpenAI(base_url=f"{front.url}/v1", api_key="none", model="canary", max_retries=0)
    bound = model.bind_tools([{"type": "function", "function": FUNCTION}])
    script.text = CALL
    first = bound.invoke([HumanMessage("hello")])
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Rome"})]
    streamed = None
    for chunk in bound.stream([HumanMessage("hello")]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [call["args"] for call in streamed.tool_calls] == [{"city": "Rome"}]
    script.text = "Sunny."
    messages = [HumanMessage("hello"), first, ToolMessage("sun", tool_call_id=first.tool_calls[0]["id"])]
    assert bound.invoke(messages).content == "Sunny."


class Weather(BaseModel):
    """The weather of a city"""

    city: str
    days: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of its own models
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structures_its_output(scripted: tuple[RunningFront, Script], method: Any) -> None:
    front, script = scripted
    model = ChatOpenAI(base_url=f"{front.url}/v1", api_key="none", model="canary", max_retries=0)
    script.text = '{"city": "Rome", "days": 2}'
    if method == "function_calling":
        script.text = f'<tool_call>\n{{"name": "Weather", "arguments": {script.text}}}\n</tool_call>'
    structured = model.with_structured_output(Weather, method=method)
    assert structured.invoke("hello, in JSON") == Weather(city="Rome", days=2)
    *_, last = structured.stream("hello, in JSON")
    assert last == Weather(city="Rome", days=2)
    assert all(message.request.sampling.grammar is not None for message in front.engine.of(Generate)[-2:])


@pytest.mark.filterwarnings("ignore")  # of its own models
def test_litellm_passes_tools_and_responses(
    scripted: tuple[RunningFront, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    front, script = scripted
    where = {"model": "openai/canary", "api_base": f"{front.url}/v1", "api_key": "none", "num_retries": 0}
    script.text = CALL
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": "hello"}]
    choice = litellm.completion(messages=messages, tools=tools, **where).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    assert choice.message.reasoning_content == "hm"
    done = litellm.responses(input="hello", tools=[{"type": "function", **FUNCTION}], **where)
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
