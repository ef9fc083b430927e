"""Tools and reasoning in chats over HTTP: what the model is shown, and what of its answer is a call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import openai
import pytest

from serinus.core.grammar import Grammar
from serinus.testing.running_front import RunningFront, front_settings
from serinus.testing.scripted_front import TOOL_TEMPLATE, Script, scripted_front
from serinus.text import GrammarVocabulary, Tokenizer
from serinus.text.grammar_source import library_source
from serinus.wire.messages import Generate

CLOSED = {"role": "assistant", "content": "<think>hm</think>"}
USER = {"role": "user", "content": "hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = """Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""
BROKEN = 'Well: <tool_call>{"name": "now", "arguments": {oops}}</tool_call>'


@pytest.fixture(scope="module")
def scripted(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    with scripted_front(byte_folder, f"ipc://{tmp_path_factory.mktemp('tools')}/engine") as both:
        yield both


def ask(scripted: tuple[RunningFront, Script], says: str, **body: Any) -> dict[str, Any]:
    """The only choice of an answer."""
    front, script = scripted
    script.text = says
    response = front.post("/v1/chat/completions", {"messages": [USER], **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(scripted: tuple[RunningFront, Script], says: str, **body: Any) -> list[dict[str, Any]]:
    front, script = scripted
    script.text = says
    return [event["choices"][0] for event in front.events("/v1/chat/completions", {"messages": [USER], **body})]


def prompt_of(front: RunningFront, tokenizer: Tokenizer) -> str:
    message = front.engine.of(Generate)[-1]
    assert isinstance(message, Generate)
    return tokenizer.decode(message.request.prompt.tolist(), skip_special_tokens=False)


def refused(scripted: tuple[RunningFront, Script], **body: Any) -> tuple[str, str]:
    response = scripted[0].post("/v1/chat/completions", {"messages": [USER], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_calls_come_with_ids_and_the_reason_says_so(scripted: tuple[RunningFront, Script]) -> None:
    choice = ask(scripted, CALLS, tools=[WEATHER, NOW])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look."
    assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
        ("function", {"name": "get_weather", "arguments": '{"city": "Rome"}'}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)


def test_a_stream_has_each_call_begun_by_its_name_then_pieces_of_its_arguments(
    scripted: tuple[RunningFront, Script],
) -> None:
    choices = streamed(scripted, CALLS, tools=[WEATHER, NOW])
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    pieces = [call["function"]["arguments"] for call in calls if "id" not in call and call["index"] == 0]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"city": "Rome"}'
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Let me look."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_a_broken_call_is_content_and_the_answer_ends_with_stop(scripted: tuple[RunningFront, Script]) -> None:
    choice = ask(scripted, BROKEN, tools=[NOW])
    assert (choice["message"]["content"], choice["finish_reason"]) == (BROKEN, "stop")
    assert "tool_calls" not in choice["message"]
    unknown = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    choices = streamed(scripted, unknown, tools=[NOW])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == unknown
    assert choices[-1]["finish_reason"] == "stop"


def test_tools_that_may_not_be_called_are_not_shown(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    choice = ask(scripted, CALLS, tools=[WEATHER, NOW], tool_choice="none")
    assert prompt_of(scripted[0], tokenizer) == "<|user|>hello<eos><|assistant|>"
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


def test_without_parallel_calls_only_the_first_is_one(scripted: tuple[RunningFront, Script]) -> None:
    choice = ask(scripted, CALLS, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    choices = streamed(scripted, CALLS, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert {call["index"] for choice in choices for call in choice["delta"].get("tool_calls", [])} == {0}


def test_a_broken_call_does_not_count_as_the_first(scripted: tuple[RunningFront, Script]) -> None:
    choice = ask(scripted, f"{BROKEN}\n{CALLS}", tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"].startswith(BROKEN)
    assert choice["finish_reason"] == "tool_calls"
    choices = streamed(scripted, f"{BROKEN}\n{CALLS}", tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert {call["index"] for choice in choices for call in choice["delta"].get("tool_calls", [])} == {0}


def test_a_call_cut_by_the_limit_is_no_call(scripted: tuple[RunningFront, Script]) -> None:
    choice = ask(scripted, CALLS, tools=[WEATHER, NOW], max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('Let me look.\n<tool_call>\n{"name": "get_weather"')


def test_the_model_is_shown_tools_calls_and_what_they_gave(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"tz": "é"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    choice = ask(scripted, "Noon.", messages=messages, tools=[NOW])
    assert choice["message"] == {"role": "assistant", "content": "Noon.", "refusal": None}
    assert prompt_of(scripted[0], tokenizer) == (
        f"<|tool|>{json.dumps(NOW)}<|user|>hello<eos><|assistant|>"
        '<tool_call>{"name": "now", "arguments": {"tz": "é"}}</tool_call><eos><|tool|>(call_1)12:00<eos><|assistant|>'
    )


def test_thoughts_are_apart_from_the_content(scripted: tuple[RunningFront, Script]) -> None:
    text = "<think>\nhm, hm\n</think>\n\nYes."
    message = ask(scripted, text)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm, hm")
    deltas = [choice["delta"] for choice in streamed(scripted, text)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    message = ask(scripted, text, include_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert ask(scripted, text, separate_reasoning=False)["message"]["content"] == text


def test_a_template_that_opens_the_thoughts_is_noticed(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    text = f"hm\n</think>\n\n{CALLS}"
    choice = ask(scripted, text, tools=[WEATHER, NOW], chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(scripted[0], tokenizer).endswith("<|assistant|><think>\n")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Let me look.")
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": ["now"]}, "tools[0]"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
         "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}, {"role": "assistant", "tool_calls": ["x"]}]},
         "messages[1].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "tool", "tool_call_id": 3, "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_refused_by_field(
    scripted: tuple[RunningFront, Script], change: dict[str, Any], field: str
) -> None:
    assert refused(scripted, **change)[0] == field


def test_the_clients_own_helper_reads_a_stream_of_calls(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    script.text = CALLS
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model="canary",
        messages=[{"role": "user", "content": "x"}],
        tools=[WEATHER, NOW],  # type: ignore[list-item]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("get_weather", '{"city": "Rome"}'), ("now", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    assert len(final.choices[0].message.tool_calls) == 2


@pytest.fixture(scope="module")
def thinker(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFront, Script]]:
    """A model whose marks of thoughts are special tokens."""
    folder = shutil.copytree(byte_folder, tmp_path_factory.mktemp("thinker") / "special")
    described = json.loads((folder / "tokenizer.json").read_text())
    mark = next(token for token in described["added_tokens"] if token["content"] == "<think>")
    mark["special"] = True
    end = {**mark, "id": max(token["id"] for token in described["added_tokens"]) + 1, "content": "</think>"}
    described["added_tokens"].append(end)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with scripted_front(folder, f"ipc://{folder}/engine") as both:
        yield both


def grammar_of(front: RunningFront) -> Grammar | None:
    message = front.engine.of(Generate)[-1]
    assert isinstance(message, Generate)
    return message.request.sampling.grammar


def takes(script: Script, grammar: Grammar | None, text: str) -> str:
    """How much of a text a grammar allows."""
    assert grammar is not None
    vocabulary = GrammarVocabulary(script.tokenizer, width=script.tokenizer.vocab_size, eos_ids=(script.end,))
    source = library_source(grammar, script.tokenizer.special_texts)
    matcher = llguidance.LLMatcher(vocabulary._library, source, log_level=0)
    ids = script.tokenizer.encode(text, add_special_tokens=False)
    count = matcher.try_consume_tokens(ids)
    return script.tokenizer.decode(ids[:count], skip_special_tokens=False)


def test_marks_that_are_special_tokens_are_seen(thinker: tuple[RunningFront, Script]) -> None:
    message = ask(thinker, "<think>hm</think>Yes.")["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")
    assert grammar_of(thinker[0]) is None


@pytest.mark.parametrize("is_open", [False, True])
def test_the_tokens_of_thoughts_are_counted(thinker: tuple[RunningFront, Script], is_open: bool) -> None:
    front, script = thinker
    begin, more = "" if is_open else "<think>", {"chat_template_kwargs": {"enable_thinking": is_open}}
    for says, count in ((f"{begin}four</think>Yes.", 4), (f"{begin}cut", 4), ("Yes" + "</think>" * is_open, 3)):
        script.text = says
        expected = {"reasoning_tokens": count if "think" in says or is_open else 0}
        body = {"messages": [USER], **more}
        usage = front.post("/v1/chat/completions", body).json()["usage"]
        assert usage["completion_tokens_details"] == expected
        last = front.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})[-1]
        assert last["usage"] == {**usage, "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
        answer = front.post("/v1/responses", {"input": "hello", **more}).json()
        assert answer["usage"]["output_tokens_details"] == expected
    hidden = front.post("/v1/chat/completions", {"messages": [USER], "separate_reasoning": False}).json()
    assert "completion_tokens_details" not in hidden["usage"]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_budget_of_thoughts_forces_their_end(thinker: tuple[RunningFront, Script], is_open: bool) -> None:
    front, script = thinker
    begin = "" if is_open else "<think>"
    body = {"thinking_token_budget": 3, "chat_template_kwargs": {"enable_thinking": is_open}}
    message = ask(thinker, f"{begin}hm</think>Yes.", **body)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")
    grammar = grammar_of(front)
    assert takes(script, grammar, f"{begin}xyz</think>Yes, <tool_call>") == f"{begin}xyz</think>Yes, <tool_call>"
    assert takes(script, grammar, f"{begin}xyzq</think>Yes.") == f"{begin}xyz"
    if not is_open:
        assert takes(script, grammar, "Plain words, as many as there are.") == "Plain words, as many as there are."
    ask(thinker, f"{begin}</think>Yes.", thinking_budget=0, chat_template_kwargs={"enable_thinking": is_open})
    assert takes(script, grammar_of(front), f"{begin}x") == begin
    assert refused(thinker, thinking_token_budget=-1)[0] == "thinking_token_budget"


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "n"),
        ({"json_schema": '{"enum": ["yes"]}'}, '"yes"', '"n'),
        ({"regex": "[0-9]{3}/"}, "123/", "a"),
        ({"guided_choice": ["yes", "no"]}, "yes", "yet"),
        ({"ebnf": 'root ::= "a" n\nn ::= [0-9]'}, "a1", "b"),
        ({"guided_grammar": "%llguidance {}\nstart: A\nA: /[xy]+/"}, "xyx", "z"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "ok"}}}, "ok", "x"),
    ],
)
def test_any_grammar_holds_behind_the_thoughts(
    thinker: tuple[RunningFront, Script], asked: dict[str, Any], good: str, bad: str, is_open: bool
) -> None:
    front, script = thinker
    begin, more = "" if is_open else "<think>", {"chat_template_kwargs": {"enable_thinking": is_open}}
    message = ask(thinker, f"{begin}hm</think>\n{good}", **asked, **more)["message"]
    assert (message["content"], message["reasoning_content"]) == (good, "hm")
    grammar = grammar_of(front)
    assert takes(script, grammar, f"{begin}hm</think>\n{good}") == f"{begin}hm</think>\n{good}"
    assert takes(script, grammar, f"{begin}hm</think>{bad}") == f"{begin}hm</think>{bad[:-1]}"
    if not is_open:
        assert takes(script, grammar, good) == good
        assert takes(script, grammar, bad) == bad[:-1]
    ask(thinker, f"{begin}h</think>{good}", **asked, **more, thinking_budget=1)
    assert takes(script, grammar_of(front), f"{begin}hm") == f"{begin}h"


def test_thoughts_that_are_not_told_apart_or_are_over_are_none(thinker: tuple[RunningFront, Script]) -> None:
    front, script = thinker
    for more in ({"separate_reasoning": False}, {"messages": [USER, CLOSED], "continue_final_message": True}):
        ask(thinker, "123", **{"regex": "[0-9]{3}", "add_generation_prompt": False, **more})
        assert takes(script, grammar_of(front), "<think>") == ""
        assert takes(script, grammar_of(front), "123") == "123"


def test_thoughts_that_the_last_message_has_begun_go_on(thinker: tuple[RunningFront, Script]) -> None:
    front, script = thinker
    begun = {"role": "assistant", "content": [{"type": "text", "text": "<think>\nI begin"}]}
    body = {"messages": [USER, begun], "continue_final_message": True, "regex": "[0-9]{3}"}
    message = ask(thinker, " and end</think>\n123", **body)["message"]
    assert (message["reasoning_content"], message["content"]) == (" and end", "123")
    assert takes(script, grammar_of(front), " and end</think>\n123") == " and end</think>\n123"
    deltas = [choice["delta"] for choice in streamed(thinker, " and end</think>\n123", **body)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == " and end"
    ask(thinker, "123", **{**body, "messages": [USER, {"role": "assistant", "content": "<think>hm</think>It is"}]})
    assert takes(script, grammar_of(front), "<think>") == ""


def test_a_grammar_that_is_wrong_behind_thoughts_is_refused_by_its_field(thinker: tuple[RunningFront, Script]) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    field, said = refused(thinker, structural_tag={"format": {"type": "yaml"}}, **more)
    assert (field, "one of const_string" in said) == ("structural_tag.format.type", True)
    assert refused(thinker, guided_choice=["a", ""], **more)[0] == "guided_choice"
    assert refused(thinker, ebnf="root := x", **more)[0] == "ebnf"


def test_a_model_without_marks_as_tokens_has_no_budget(scripted: tuple[RunningFront, Script]) -> None:
    field, said = refused(scripted, thinking_budget=5)
    assert field == "thinking_budget"
    assert "two tokens" in said


NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FORCED = f'{NOW_CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Rome"}}}}\n</tool_call>'


def test_required_calls_are_enforced_by_a_grammar(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    for stream in (False, True):
        if stream:
            choices = streamed(scripted, FORCED, tools=[WEATHER, NOW], tool_choice="required")
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls", []) if "id" in call]
            assert choices[-1]["finish_reason"] == "tool_calls"
        else:
            choice = ask(scripted, FORCED, tools=[WEATHER, NOW], tool_choice="required")
            calls = choice["message"]["tool_calls"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
            assert json.loads(calls[1]["function"]["arguments"]) == {"city": "Rome"}
        assert [call["function"]["name"] for call in calls] == ["now", "get_weather"]
    grammar = grammar_of(front)
    assert takes(script, grammar, FORCED) == FORCED
    assert takes(script, grammar, "Rome") == ""
    assert takes(script, grammar, "<tool_call>{") == "<tool_call>"
    assert takes(script, grammar, FORCED.replace("now", "fly")).endswith('"name": "')


def test_a_named_function_is_called_once(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    one = NOW_CALL
    named = {"type": "function", "function": {"name": "now"}}
    choice = ask(scripted, one, tools=[WEATHER, NOW], tool_choice=named)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert takes(script, grammar_of(front), one) == one
    assert takes(script, grammar_of(front), FORCED) == NOW_CALL
    assert takes(script, grammar_of(front), one.replace("now", "get")).endswith('"name": "')


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_of_the_tools_that_are_shown_some_may_be_called(
    scripted: tuple[RunningFront, Script], tokenizer: Tokenizer
) -> None:
    front, script = scripted
    tools = [WEATHER, NOW]
    choice = ask(scripted, NOW_CALL, tools=tools, tool_choice=allowed("required", "now"))
    assert "get_weather" in prompt_of(front, tokenizer)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert takes(script, grammar_of(front), NOW_CALL.replace("now", "get")).endswith('"name": "')
    other = FORCED.partition("\n<tool_call>")[2]
    choice = ask(scripted, f"<tool_call>{other}", tools=tools, tool_choice=allowed("auto", "now"))
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"<tool_call>{other}", "stop")
    front.post("/v1/responses", {
        "input": "x", "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
    })  # fmt: skip
    assert takes(script, grammar_of(front), NOW_CALL) == NOW_CALL
    for wrong, field in (
        (allowed("some", "now"), ""), (allowed("auto"), ".tools"), (allowed("auto", "fly"), ".tools[0].function.name"),
    ):  # fmt: skip
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": wrong}
        error = front.post("/v1/chat/completions", body).json()["error"]
        assert error["param"] == f"tool_choice.allowed_tools{field}"


def test_thoughts_that_the_template_opens_come_before_required_calls(thinker: tuple[RunningFront, Script]) -> None:
    front, script = thinker
    body = {"tools": [WEATHER, NOW], "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}
    choice = ask(thinker, f"hm</think>\n{FORCED}", **body)
    assert choice["message"]["reasoning_content"] == "hm"
    assert len(choice["message"]["tool_calls"]) == 2
    assert takes(script, grammar_of(front), f"hm</think>\n{FORCED}") == f"hm</think>\n{FORCED}"
    assert takes(script, grammar_of(front), "hm</think>Rome") == "hm</think>"


def test_schemas_of_parameters_keep_what_they_refer_to(scripted: tuple[RunningFront, Script]) -> None:
    front, script = scripted
    inner = {"type": "object", "properties": {"at": {"$ref": "#/$defs/At"}}, "required": ["at"],
             "$defs": {"At": {"enum": ["noon"]}}}  # fmt: skip
    tool = {"type": "function", "function": {"name": "meet", "parameters": inner}}
    good = '<tool_call>\n{"name": "meet", "arguments": {"at": "noon"}}\n</tool_call>'
    ask(scripted, good, tools=[NOW, tool], tool_choice="required")
    assert takes(script, grammar_of(front), good) == good
    assert takes(script, grammar_of(front), good.replace("noon", "one")).endswith('"at": "')


def test_a_checkpoint_with_a_template_for_tools_shows_them(byte_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_folder, tmp_path / "named")
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with scripted_front(folder, f"ipc://{tmp_path}/engine", front_settings()) as (front, script):
        assert len(ask((front, script), CALLS, tools=[WEATHER, NOW])["message"]["tool_calls"]) == 2
        assert prompt_of(front, script.tokenizer).startswith("<|tool|>")
        assert ask((front, script), CALLS)["message"]["content"] == CALLS
        assert prompt_of(front, script.tokenizer) == "hello"
