"""Which blocks answers of /v1/messages and /v1/responses have, streamed and not, and what they go on behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serinus.testing.running_front import RunningFront, front_settings
from serinus.testing.scripted_front import TOOL_TEMPLATE, Script, scripted_front
from serinus.text import Tokenizer
from tests.front.test_agents import ANTHROPIC_WEATHER, WEATHER, events, prompt_of

ROME, PARIS = {"city": "Rome"}, {"city": "Paris"}
CALL_ROME, CALL_PARIS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(each)}}}\n</tool_call>' for each in (ROME, PARIS)
)
NO_CALL = "<tool_call>no call</tool_call>"


@pytest.fixture(scope="module")
def scripted(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    with scripted_front(byte_folder, f"ipc://{tmp_path_factory.mktemp('blocks')}/engine") as both:
        yield both


def blocks_of_message(front: RunningFront, *, streamed: bool) -> list[Any]:
    """Texts, and arguments of calls."""
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "x"}], "tools": [ANTHROPIC_WEATHER]}
    if not streamed:
        return [each.get("text", each.get("input")) for each in front.post("/v1/messages", body).json()["content"]]
    blocks: list[Any] = []
    for event in events(front, "/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append("")
        elif event["type"] == "content_block_delta":
            blocks[-1] += event["delta"].get("text", event["delta"].get("partial_json"))
    return [json.loads(text) if text.startswith("{") else text for text in blocks]


def blocks_of_response(front: RunningFront, *, streamed: bool) -> list[Any]:
    """Texts, and arguments of calls."""
    body = {"input": "x", "tools": [WEATHER]}
    if streamed:
        response = events(front, "/v1/responses", body)[-1]["response"]
    else:
        response = front.post("/v1/responses", body).json()
    return [
        json.loads(item["arguments"]) if item["type"] == "function_call" else item["content"][0]["text"]
        for item in response["output"]
    ]


@pytest.mark.parametrize("blocks_of", [blocks_of_message, blocks_of_response])
@pytest.mark.parametrize(
    ("says", "blocks"),
    [
        (f"Look.\n{CALL_ROME}\nDone.", ["Look.", ROME, "\nDone."]),
        (f"{CALL_ROME}\n{CALL_PARIS}", [ROME, PARIS]),
        (f"A {CALL_ROME} B {CALL_PARIS} C {NO_CALL} D", ["A", ROME, " B", PARIS, f" C {NO_CALL} D"]),
        ("", [""]),
    ],
)
def test_a_whole_answer_has_the_blocks_of_its_stream(
    scripted: tuple[RunningFront, Script], blocks_of: Any, says: str, blocks: list[Any]
) -> None:
    front, script = scripted
    script.text = says
    assert [blocks_of(front, streamed=streamed) for streamed in (False, True)] == [blocks, blocks]


PREFILL = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "So: "}, {"type": "text", "text": ' {"a": '}]},
    ],
}


def test_an_answer_goes_on_behind_what_the_assistant_has_begun(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    front, script = scripted
    script.text = "1}"
    prompt = '<|user|>x<eos><|assistant|>So:  {"a": '
    assert front.post("/v1/messages", PREFILL).json()["content"] == [{"type": "text", "text": "1}"}]
    assert prompt_of(front, tokenizer) == prompt
    deltas = [event["delta"].get("text", "") for event in events(front, "/v1/messages", PREFILL) if "delta" in event]
    assert ("".join(deltas), prompt_of(front, tokenizer)) == ("1}", prompt)
    count = front.post("/v1/messages/count_tokens", PREFILL).json()["input_tokens"]
    assert count == len(tokenizer.encode(prompt, add_special_tokens=False))


def test_what_goes_on_behind_a_text_is_no_thought_of_a_model_that_always_thinks(
    byte_folder: Path, tmp_path: Path
) -> None:
    settings = front_settings(chat_template=TOOL_TEMPLATE, reasoning_parser="deepseek_r1")
    with scripted_front(byte_folder, f"ipc://{tmp_path}/engine", settings) as (front, script):
        script.text = "1}"
        assert front.post("/v1/messages", PREFILL).json()["content"] == [{"type": "text", "text": "1}"}]


def test_an_empty_last_message_of_the_assistant_begins_an_answer(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    front, script = scripted
    script.text = "1}"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    message = front.post("/v1/messages", {"max_tokens": 9, "messages": messages}).json()
    assert (message["content"], prompt_of(front, tokenizer)) == (
        [{"type": "text", "text": "1}"}],
        "<|user|>x<eos><|assistant|>",
    )


@pytest.mark.parametrize(
    ("content", "field", "said"),
    [
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], "messages[1].content",
         "text that the answer goes on behind"),
        ([{"type": "text", "text": "Look."}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
         "messages[1]", "tool_result"),
    ],
)  # fmt: skip
def test_a_last_message_of_the_assistant_without_an_end_to_go_on_behind_is_refused(
    scripted: tuple[RunningFront, Script], content: Any, field: str, said: str
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    response = scripted[0].post("/v1/messages", {"max_tokens": 9, "system": "Be short.", "messages": messages})
    error = response.json()["error"]
    assert (response.status_code, error["param"], said in error["message"]) == (400, field, True), response.text


def test_a_whole_message_without_parallel_calls_has_the_first_good_one_in_its_place(
    scripted: tuple[RunningFront, Script],
) -> None:
    front, script = scripted
    script.text = f"A {NO_CALL} B {CALL_ROME} C {CALL_PARIS} D"
    body = {
        "max_tokens": 500, "messages": [{"role": "user", "content": "x"}], "tools": [ANTHROPIC_WEATHER],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }  # fmt: skip
    message = front.post("/v1/messages", body).json()
    found = [each.get("text", each.get("input")) for each in message["content"]]
    assert (found, message["stop_reason"]) == ([f"A {NO_CALL} B", ROME, " C D"], "tool_use")
