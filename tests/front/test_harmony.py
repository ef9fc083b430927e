"""A chat with gpt-oss over HTTP: its template says that its answers are channels, and no flag has to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serinus.testing.running_front import RunningFront, front_settings
from serinus.testing.scripted_front import Script, scripted_front
from tests.front.test_tools import USER, WEATHER, ask, prompt_of, streamed

TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for message in messages %}{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}"
    "<|call|>{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss's own, as far as these tests go."""
THOUGHT = "<|channel|>analysis<|message|>It wants Rome.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
Scripted = tuple[RunningFront, Script]


@pytest.fixture(scope="module")
def scripted(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    settings = front_settings(chat_template=TEMPLATE)
    with scripted_front(byte_folder, f"ipc://{tmp_path_factory.mktemp('harmony')}/engine", settings) as both:
        yield both


def test_thoughts_and_answer_are_told_apart(scripted: Scripted) -> None:
    says = f"{THOUGHT}<|channel|>final<|message|>It is sunny."
    choice = ask(scripted, says)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("It wants Rome.", "It is sunny.")
    assert choice["finish_reason"] == "stop"
    deltas = [choice["delta"] for choice in streamed(scripted, says)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "It wants Rome."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is sunny."


def test_a_call_comes_back_as_the_template_shows_it_with_the_thought_before_it(scripted: Scripted) -> None:
    choice = ask(scripted, f"{THOUGHT}{CALL}", tools=[WEATHER])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "It wants Rome."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    ]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    ask(scripted, "<|channel|>final<|message|>Sunny.", messages=[USER, message, result], tools=[WEATHER])
    assert prompt_of(scripted[0], scripted[1].tokenizer).endswith(
        "<|channel|>analysis<|message|>It wants Rome.<|end|><|start|>assistant to=functions.get_weather"
        '<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        "<|start|>tool<|message|>sunny<|end|><|start|>assistant"
    )


def test_a_call_whose_recipient_comes_first_is_one(scripted: Scripted) -> None:
    says = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    message = ask(scripted, says, tools=[WEATHER])["message"]
    assert (message["content"], [call["function"]["name"] for call in message["tool_calls"]]) == (None, ["get_weather"])
    deltas = [choice["delta"] for choice in streamed(scripted, says, tools=[WEATHER])]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_the_effort_reaches_the_template(scripted: Scripted, body: dict[str, object], said: str) -> None:
    ask(scripted, "<|channel|>final<|message|>Yes.", **body)
    assert f"Reasoning: {said}<|end|>" in prompt_of(scripted[0], scripted[1].tokenizer)
