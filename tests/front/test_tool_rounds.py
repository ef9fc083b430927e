"""Tool calls as the Berkeley leaderboard has them (one function, several, calls side by side, none that fits), in what
the models of each family write: streamed and not, with the results sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serinus.testing.running_front import RunningFront, front_settings
from serinus.testing.scripted_front import TOOL_TEMPLATE, Script, scripted_front
from serinus.testing.small_tokenizers import make_byte_tokenizer

FAMILIES = ("hermes", "llama3_json", "mistral", "deepseek", "glm45", "qwen3_coder", "openai")
AREA = {"type": "object", "properties": {"base": {"type": "integer"}, "unit": {"type": "string"}}, "required": ["base"]}
NEWS = {"type": "object", "properties": {"topic": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Gives {name}", "parameters": schema}}
    for name, schema in (("area", AREA), ("news", NEWS))
]
CATEGORIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "simple": [("area", {"base": 10, "unit": "cm²"})],
    "multiple": [("news", {"topic": 'the "new" one'})],
    "parallel": [("area", {"base": 1}), ("area", {"base": 2})],
    "parallel multiple": [("area", {"base": 1}), ("news", {"topic": "a, b"})],
    "irrelevance": [],
}


def call_text(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model of the family writes."""
    told = [(name, json.dumps(arguments, ensure_ascii=False), arguments) for name, arguments in calls]
    if not told:
        return "<|channel|>final<|message|>None fits." if family == "openai" else "None fits."
    if family == "hermes":
        each = [f'<tool_call>\n{{"name": "{n}", "arguments": {raw}}}\n</tool_call>' for n, raw, _ in told]
        return "\n".join(each)
    if family == "llama3_json":
        return "; ".join(f'{{"name": "{n}", "parameters": {raw}}}' for n, raw, _ in told)
    if family == "mistral":
        return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {raw}}}' for n, raw, _ in told) + "]"
    if family == "deepseek":
        each = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{raw}<｜tool▁call▁end｜>" for n, raw, _ in told]
        return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"
    if family == "openai":
        head = "<|channel|>commentary to=functions."
        each = [f"{head}{n} <|constrain|>json<|message|>{raw}" for n, raw, _ in told]
        return "<|call|><|start|>assistant".join(each)
    key, value, after = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    begin, end = "<tool_call>{}\n", "</tool_call>"
    if family == "qwen3_coder":
        key, value, after = "<parameter=", ">\n", "\n</parameter>\n"
        begin, end = "<tool_call>\n<function={}>\n", "</function>\n</tool_call>"
    return "\n".join(
        begin.format(n) + "".join(f"{key}{k}{value}{v}{after}" for k, v in arguments.items()) + end
        for n, _, arguments in told
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("rounds")
    settings = front_settings(chat_template=TOOL_TEMPLATE, tool_call_parser=request.param)
    with scripted_front(make_byte_tokenizer(folder / "byte"), f"ipc://{folder}/engine", settings) as (front, script):
        yield request.param, front, script


def asked(front: RunningFront, messages: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    """The message of the answer and its finish_reason; a stream put together as clients do."""
    body = {"messages": messages, "tools": TOOLS, "stream": stream, "max_tokens": 600}
    answer = front.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        choice = answer.json()["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    built: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": {}}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        built["finish_reason"] = choice["finish_reason"]
        built["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            call = built["tool_calls"].setdefault(part["index"], {**part, "function": {"name": "", "arguments": ""}})
            for name, text in part["function"].items():
                call["function"][name] += text
    built["tool_calls"] = list(built["tool_calls"].values())
    return built


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("category", CATEGORIES)
def test_a_round_trip(family: tuple[str, RunningFront, Script], category: str, stream: bool) -> None:
    name, front, script = family
    expected = CATEGORIES[category]
    script.text = call_text(name, expected)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How large?"}]
    first = asked(front, messages, stream=stream)
    calls = first.get("tool_calls") or []
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == expected
    assert first["finish_reason"] == ("tool_calls" if expected else "stop")
    assert (first["content"] or "") == ("" if expected else "None fits.")
    assert len({call["id"] for call in calls}) == len(calls)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "50"} for call in calls]
    said = {key: first[key] for key in ("role", "content", "tool_calls") if first.get(key)}
    script.text = call_text(name, [])
    last = asked(front, [*messages, {"content": "", **said}, *results], stream=stream)
    assert (last["content"], last["finish_reason"]) == ("None fits.", "stop")
