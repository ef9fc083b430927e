"""/v1/responses and /v1/messages: what agents send and see, on the way that chats go."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from serinus.core.grammar import Grammar
from serinus.front import RouterSettings, create_router_app
from serinus.front.app import error_handlers
from serinus.testing.running_front import RunningFront, serving
from serinus.testing.scripted_front import Script, scripted_front
from serinus.text import Tokenizer
from serinus.wire.messages import Generate

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
ANTHROPIC_WEATHER = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
SAYS = """<think>
hm
</think>

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>"""


@pytest.fixture(scope="module")
def scripted(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    with scripted_front(byte_folder, f"ipc://{tmp_path_factory.mktemp('agents')}/engine") as both:
        yield both


@pytest.fixture
def breaking(scripted: tuple[RunningFront, Script]) -> Iterator[tuple[RunningFront, threading.Event]]:
    """A front whose engine gives each prompt with a tilde up behind its second token, which comes once this is set."""
    (front, script), seen = scripted, threading.Event()
    script.text = "Long words"

    def token(prompt: Sequence[int], seed: int, place: int, vocab_size: int) -> int:
        if place == 1 and set(tilde) & set(prompt):
            assert seen.wait(60)
            front.engine.convicts = tilde
        return script.token(prompt, seed, place, vocab_size)

    tilde = tuple(script.tokenizer.encode("~", add_special_tokens=False))
    front.engine.token, front.engine.convicts = token, ()
    yield front, seen
    front.engine.token, front.engine.convicts = script.token, ()


@pytest.fixture
def client(scripted: tuple[RunningFront, Script]) -> openai.OpenAI:
    scripted[1].text = SAYS
    return openai.OpenAI(base_url=f"{scripted[0].url}/v1", api_key="none", max_retries=0)


def prompt_of(front: RunningFront, tokenizer: Tokenizer) -> str:
    message = front.engine.of(Generate)[-1]
    assert isinstance(message, Generate)
    return tokenizer.decode(message.request.prompt.tolist(), skip_special_tokens=False)


def events(front: RunningFront, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Data of a stream: each event is named by its type, and [DONE] is not among them."""
    text = front.post(path, {**body, "stream": True}).text
    found = []
    for each in text.strip().split("\n\n"):
        name, data = each.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


# ---- responses --------------------------------------------------------------------------------------------------


def test_a_response_has_thoughts_a_message_and_calls_as_items(client: openai.OpenAI) -> None:
    done = client.responses.create(model="canary", input="hello", tools=[WEATHER])  # type: ignore[list-item]
    assert (done.status, done.object, done.store) == ("completed", "response", False)
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
    assert done.output_text == "Let me look."
    thoughts, _, call = done.output
    assert thoughts.type == "reasoning"
    assert thoughts.content is not None
    assert thoughts.content[0].text == "hm"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("get_weather", '{"city": "Rome"}', "completed")
    assert call.call_id.startswith("call_")
    assert done.usage is not None
    assert done.usage.output_tokens_details.reasoning_tokens == 2
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_the_events_of_a_response_come_in_openais_order(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = SAYS
    found = events(front, "/v1/responses", {"input": "hello", "tools": [WEATHER]})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert list(dict.fromkeys(zip(kinds, [event.get("output_index") for event in found], strict=True))) == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.done", 0),
        ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1), ("output_text.done", 1),
        ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.done", 2),
        ("output_item.done", 2), ("completed", None),
    ]  # fmt: skip
    final = found[-1]["response"]
    assert final["output"] == [event["item"] for event in found if event["type"].endswith("output_item.done")]
    assert found[0]["response"]["output"] == []
    pieces = [event["delta"] for event in found if event["type"].endswith("arguments.delta")]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"city": "Rome"}'


def test_the_clients_own_helper_follows_a_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="canary", input="hello", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert said == final.output_text == "Let me look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_the_items_of_a_conversation_are_its_messages(
    scripted: tuple[RunningFront, Script], client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    first = client.responses.create(model="canary", input="hello", tools=[WEATHER])  # type: ignore[list-item]
    call = first.output[2]
    assert call.type == "function_call"
    scripted[1].text = "Sunny."
    items: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    done = client.responses.create(model="canary", instructions="Be kind.", input=items)
    assert done.output_text == "Sunny."
    assert prompt_of(scripted[0], tokenizer) == (
        "<|system|>Be kind.\n\nBe short.<eos><|user|>hello<eos><|assistant|>Let me look."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><eos>'
        f"<|tool|>({call.call_id})sun<eos><|assistant|>"
    )


def test_a_response_that_the_limit_ends_is_incomplete(
    scripted: tuple[RunningFront, Script], client: openai.OpenAI
) -> None:
    scripted[1].text = "a long answer"
    done = client.responses.create(model="canary", input="x", max_output_tokens=3)
    assert done.status == "incomplete"
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    found = events(scripted[0], "/v1/responses", {"input": "x", "max_output_tokens": 3})
    assert found[-1]["type"] == "response.incomplete"
    assert [found[-2]["item"]] == found[-1]["response"]["output"]
    assert found[-2]["item"]["status"] == "incomplete"


def broken(both: tuple[RunningFront, threading.Event], path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Data of a stream that breaks when its first text has come."""
    front, seen = both
    found = []
    seen.clear()
    with front.http.stream("POST", path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if found[-1]["type"].endswith("delta"):
                    seen.set()
    return found


def test_a_response_that_breaks_midway_has_failed(breaking: tuple[RunningFront, threading.Event]) -> None:
    found = broken(breaking, "/v1/responses", {"input": "~"})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    error, failed = found[-2], found[-1]["response"]
    assert (error["code"], error["param"]) == ("internal_server_error", None)
    assert error["message"] == error["error"]["message"] == failed["error"]["message"]
    assert "convicted" in error["message"]
    assert (failed["status"], failed["error"]["code"], failed["usage"]) == ("failed", "server_error", None)
    assert failed["output"][0]["status"] == "incomplete"
    client = openai.OpenAI(base_url=f"{breaking[0].url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="convicted"):
        list(client.responses.create(model="canary", input="~", stream=True))


def test_a_message_that_breaks_midway_ends_with_anthropics_error(
    breaking: tuple[RunningFront, threading.Event],
) -> None:
    front, _ = breaking
    body = {"messages": [{"role": "user", "content": "~"}], "max_tokens": 9}
    last = broken(breaking, "/v1/messages", body)[-1]
    assert (last["type"], "convicted" in last["error"]["message"]) == ("error", True)
    whole = front.post("/v1/messages", body)
    assert (whole.status_code, whole.json()["type"]) == (500, "error")
    refused = front.post("/v1/messages", {"messages": []}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")
    assert "type" not in front.post("/v1/responses", {"input": ""}).json()


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"store": True}, "store", "keeps no answers"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items"),
        ({"background": True}, "background", "not waited for"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice.name", "get_weather"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "got 'a b'"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "got 'yaml'"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "num"}}}}, "text.format.schema",
         "#/type"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "a text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0].arguments",
         "got '[]', expected the JSON of an object"),
        ({"n": 2}, "n", "one answer"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "at most"),
        ({"text": {"format": 3}}, "text.format", "json_schema"),
        ({"model": "other"}, "model", "expected 'canary'"),
    ],
)  # fmt: skip
def test_a_wrong_response_is_refused_in_words(
    scripted: tuple[RunningFront, Script], change: dict[str, Any], field: str | None, said: str
) -> None:
    response = scripted[0].post("/v1/responses", {"input": "x", **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if field == "model" else 400, field), response.text
    assert said in error["message"]


def test_there_are_no_embeddings(scripted: tuple[RunningFront, Script]) -> None:
    response = scripted[0].post("/v1/embeddings", {"model": "canary", "input": ["a", "b"]})
    assert response.status_code == 400
    assert "'canary', expected an embedding model" in response.json()["error"]["message"]


# ---- messages ---------------------------------------------------------------------------------------------------


def test_a_message_has_thoughts_text_and_tool_use_as_blocks(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    front, script = scripted
    script.text = SAYS.removeprefix("<think>\n")
    body = {
        "model": "canary", "max_tokens": 500, "system": [{"type": "text", "text": "Be short."}],
        "messages": [{"role": "user", "content": "hello"}], "tools": [ANTHROPIC_WEATHER],
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    message = front.post("/v1/messages", body).json()
    assert prompt_of(front, tokenizer).endswith("<|system|>Be short.<eos><|user|>hello<eos><|assistant|><think>\n")
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    thoughts, text, call = message["content"]
    assert thoughts == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "Let me look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Rome"})
    usage = message["usage"]
    assert usage["output_tokens"] > 20
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
        tokenizer.encode(prompt_of(front, tokenizer), add_special_tokens=False)
    )


@pytest.mark.parametrize(("number", "block"), [("1e308", "tool_use"), ("1e999", "text")])
def test_arguments_with_a_number_beyond_a_double_are_text(
    scripted: tuple[RunningFront, Script], number: str, block: str
) -> None:
    front, script = scripted
    script.text = f'<tool_call>{{"name": "get_weather", "arguments": {{"days": {number}}}}}</tool_call>'
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "x"}], "tools": [ANTHROPIC_WEATHER]}
    response = front.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    (only,) = response.json()["content"]
    assert only["type"] == block
    assert only.get("text", script.text) == script.text


def test_the_events_of_a_message_come_in_anthropics_order(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = SAYS
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "x"}], "tools": [ANTHROPIC_WEATHER]}
    found = events(front, "/v1/messages", body)
    shape = [(event["type"], event.get("index")) for event in found]
    block = ("content_block_start", "content_block_delta", "content_block_stop")
    assert list(dict.fromkeys(shape)) == [
        ("message_start", None), ("ping", None), *((kind, index) for index in range(3) for kind in block),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    pieces = [
        event["delta"]["partial_json"] for event in found if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 20


def test_results_of_tools_go_back_to_the_model(scripted: tuple[RunningFront, Script], tokenizer: Tokenizer) -> None:
    front, script = scripted
    script.text = "Sunny. STOP and more"
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}]},
    ]  # fmt: skip
    body = {"max_tokens": 50, "messages": messages, "stop_sequences": ["STOP"]}
    message = front.post("/v1/messages", body).json()
    assert message["content"] == [{"type": "text", "text": "Sunny. "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    assert prompt_of(front, tokenizer) == (
        "<|user|>hello<eos><|assistant|>So:"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
        "<eos><|tool|>(toolu_1)sun<eos><|assistant|>"
    )


def test_the_tokens_of_a_message_are_counted_as_it_would_be_asked(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = "x"
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [ANTHROPIC_WEATHER], "system": "Be short."}
    count = front.post("/v1/messages/count_tokens", body).json()
    asked = front.post("/v1/messages", {**body, "max_tokens": 5}).json()["usage"]
    assert count == {"input_tokens": asked["input_tokens"] + asked["cache_read_input_tokens"]}
    wrong = front.post("/v1/messages/count_tokens", {**body, "tools": [{"type": "bash_20250124", "name": "bash"}]})
    assert wrong.json()["error"]["param"] == "tools[0].type"


def test_a_message_is_held_to_the_schema_of_its_output_config(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = "{}"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
    }  # fmt: skip
    response = front.post("/v1/messages", body)
    assert response.json()["content"] == [{"type": "text", "text": "{}"}]
    asked = front.engine.of(Generate)[-1]
    assert isinstance(asked, Generate)
    assert asked.request.sampling.grammar == Grammar.of("json_schema", schema)


def used(change: dict[str, Any]) -> dict[str, Any]:
    """A conversation with a call that is wrong."""
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}, **change}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]
    return {"system": "Be short.", "messages": said}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (used({"id": 5}), "messages[1].content[0].id"),
        (used({"name": None}), "messages[1].content[0].name"),
        (used({"input": "x"}), "messages[1].content[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5, "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [ANTHROPIC_WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [ANTHROPIC_WEATHER], "tool_choice": {"type": ["a"]}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "2000"}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"tools": [{**ANTHROPIC_WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**ANTHROPIC_WEATHER, "input_schema": 5}]}, "tools[0].input_schema"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "num"}}}},
         "output_config.format.schema"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_by_field(
    scripted: tuple[RunningFront, Script], change: dict[str, Any], field: str
) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **change}
    response = scripted[0].post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", "error"), ("/v1/responses", None)])
def test_errors_of_no_handler_have_the_form_of_their_endpoint(
    scripted: tuple[RunningFront, Script], path: str, kind: str | None
) -> None:
    answer = scripted[0].http.get(path)
    assert (answer.status_code, answer.json().get("type")) == (405, kind)
    request = Request({"type": "http", "path": path, "headers": []})
    bug = asyncio.run(error_handlers()[Exception](request, KeyError("x")))
    said = json.loads(bytes(bug.body))
    assert (bug.status_code, said.get("type"), "KeyError" in said["error"]["message"]) == (500, kind, True)


# ---- the router -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_come_through_the_router_as_from_the_engine(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = SAYS
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "hello", "tools": [WEATHER]},
        "/v1/messages": {
            "max_tokens": 500,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [ANTHROPIC_WEATHER],
        },
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        },
    }
    app = create_router_app(RouterSettings(decode_urls=(front.url,), poll_s_max=20.0))
    with serving(app) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as router:
        while router.get("/health").status_code != 200:
            router.get("/server_info")
        for path, body in bodies.items():
            for stream in (False, True):
                through, direct = (
                    _without_ids(each.post(path, json={**body, "stream": stream}).text) for each in (router, front.http)
                )
                assert through == direct
                assert "get_weather" in through
        assert router.post("/v1/embeddings", json={"input": "x"}).status_code == 400


def _without_ids(text: str) -> str:
    """Pieces of a stream come cut as it happens; ids and times differ."""
    text = re.sub(r'"(id|item_id|call_id)":"\w+?[-_][0-9a-f]{24}"', r'"\1":""', text)
    text = re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)
    return re.sub(r'"(cached_tokens|input_tokens|cache_read_input_tokens)":\d+', r'"\1":0', text)
