"""/v1/chat/completions, through the official client and by hand."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serinus.testing.fake_engine import fake_continue
from serinus.testing.running_front import RunningFront
from serinus.text import Tokenizer
from serinus.wire.messages import Generate

VOCAB = 267
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def client(front: RunningFront) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def last_prompt(front: RunningFront, tokenizer: Tokenizer) -> str:
    message = front.engine.of(Generate)[-1]
    assert isinstance(message, Generate)
    return tokenizer.decode(message.request.prompt.tolist(), skip_special_tokens=False)


def answer(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return tokenizer.decode(fake_continue(ids, count, vocab_size=VOCAB))


def test_a_chat_goes_through_the_template(front: RunningFront, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(
        model="canary",
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
        max_completion_tokens=7,
        temperature=0,
    )
    prompt = "<|system|>Be short.<eos><|user|>hello<eos><|assistant|>"
    assert last_prompt(front, tokenizer) == prompt
    assert done.choices[0].message.content == answer(tokenizer, prompt, 7)
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 7


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="canary", messages=[{"role": "user", "content": "x"}])
    assert done.usage is not None
    assert done.usage.total_tokens == 256


def test_a_chat_streams(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    stream = client.chat.completions.create(
        model="canary",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == answer(tokenizer, "<|user|>hello<eos><|assistant|>", 20)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_parts_of_type_text_are_joined(front: RunningFront, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    assert last_prompt(front, tokenizer) == "<|user|>ab<eos><|assistant|>"


def test_a_developer_is_a_system_and_a_silent_assistant_is_empty(front: RunningFront, tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "d"}, {"role": "assistant", "content": None}, USER]
    front.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert last_prompt(front, tokenizer) == "<|system|>d<eos><|assistant|><eos><|user|>hello<eos><|assistant|>"


def test_the_last_message_can_be_continued(front: RunningFront, tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert front.post("/v1/chat/completions", body).status_code == 200
    assert last_prompt(front, tokenizer) == "<|user|>hello<eos><|assistant|>It is"


def test_several_answers_come_as_choices(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="canary", messages=[{"role": "user", "content": "x"}], max_tokens=9, n=3, seed=1
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in done.choices}) == 3


def test_logprobs_show_tokens_and_their_bytes(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(
        model="canary", messages=[{"role": "user", "content": "x"}], max_tokens=5, logprobs=True, top_logprobs=2
    )
    shown = done.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert len(shown.content) == 5
    assert {entry.logprob for entry in shown.content} == {-0.5}
    assert all(len(entry.top_logprobs) == 2 for entry in shown.content)
    assert all(bytes(entry.bytes or []).decode(errors="replace") == entry.token for entry in shown.content)


def test_streamed_logprobs_are_complete(front: RunningFront) -> None:
    body = {"messages": [USER], "max_tokens": 12, "logprobs": True}
    events = front.events("/v1/chat/completions", body)
    places = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"] is not None]
    assert sum(len(place["content"]) for place in places) == 12


def test_a_streamed_answer_shows_its_role_once_per_choice(front: RunningFront) -> None:
    events = front.events("/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "n": 2})
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": "hello"}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 999}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_a_wrong_chat_is_refused_by_field(front: RunningFront, change: dict[str, Any], field: str) -> None:
    response = front.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "harmless",
    [{"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"store": True}, {"user": "me"}],
)
def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(front: RunningFront, harmless: dict[str, Any]) -> None:
    assert front.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **harmless}).status_code == 200
