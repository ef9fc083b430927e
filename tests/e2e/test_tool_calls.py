"""Calls that a grammar enforces, over HTTP, on real engines: one alone, and prefill and decode behind a router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serinus.models.small_checkpoints import make_toy
from serinus.testing.scripted_front import TOOL_TEMPLATE
from serinus.testing.servers import Server

pytestmark = pytest.mark.proof

SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},  # a call then ends within the limit, whatever is sampled
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("command", [("serve",), ("up", "--prefill", "1", "--decode", "1")])
def test_a_model_that_knows_no_tools_calls_one_where_it_must(command: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = make_toy(tmp_path / "toy", vocab=640, context=1024, layers=2, kv_heads=2)
    (tmp_path / "tools.jinja").write_text(TOOL_TEMPLATE)
    first, *rest = command
    words = (
        first,
        str(checkpoint),
        *rest,
        "--chat-template",
        str(tmp_path / "tools.jinja"),
        "--max-total-tokens",
        "8192",
    )
    with Server(*words) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        about: dict[str, Any] = {"model": str(checkpoint), "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 300}
        for seed in range(4):
            choice = client.chat.completions.create(messages=messages, seed=seed, **about).choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None
            call: Any = choice.message.tool_calls[0]
            _check(call.function.name, call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        with client.chat.completions.stream(messages=[*messages, choice.message, result], **about) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls is not None
        _check(final.message.tool_calls[0].function.name, final.message.tool_calls[0].function.arguments)
        body = {"input": "x", "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}
        answer = httpx.post(
            f"{server.url}/v1/responses", json={**body, "parallel_tool_calls": False}, timeout=60
        ).json()
        _check(answer["output"][0]["name"], answer["output"][0]["arguments"])


def _check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert name == "get_weather"
    assert value.keys() == {"city", "days"}
    assert value["city"] in ("Rome", "Oslo")
    assert 1 <= value["days"] <= 9
