"""Structured output at the front: what a field of OpenAI, vLLM or SGLang becomes, and what the engine never sees."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from serinus.core.clock import WallClock
from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.core.sampling import SamplingParams
from serinus.front.grammar_check import GrammarCheck
from serinus.front.grammars import asked_grammar
from serinus.front.metrics import FrontMetrics
from serinus.front.schemas import ChatBody, NativeSampling, StructuredOutputs
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.text import GrammarVocabulary, Tokenizer
from serinus.wire.messages import Ready

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
READY = Ready(
    engine="e", incarnation=1, role="unified", vocab_size=267, context_length=64, max_total_tokens=64, page_size=4
)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            Grammar("json_schema", TEXT),
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
         Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"any_text"}}')),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": TEXT}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "ü"]}, Grammar("choice", '["a","ü"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json": {"properties": {"a": {}}}, "disable_additional_properties": True}},
         Grammar("json_schema", '{"properties":{"a":{}},"additionalProperties":false}')),
        ({"structured_outputs": {"json": True, "disable_any_whitespace": True}},
         Grammar("json_schema", '{"allOf":[true],"x-guidance":{"whitespace_flexible":false}}')),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
         Grammar("json_schema", '{"type":"object","x-guidance":{"whitespace_pattern":" ?"}}')),
        ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
        ({"regex": "a"}, Grammar("regex", "a")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structural_tag": '{"format": {}}'}, Grammar("structural_tag", '{"format":{}}')),
        ({}, None),
    ],
)  # fmt: skip
def test_each_servers_fields_mean_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    import msgspec

    body = msgspec.convert({"messages": [], **fields}, ChatBody)
    asked = asked_grammar(body)
    assert (asked and asked.grammar) == grammar


def test_no_additional_properties_holds_in_all_schemas_whatever_their_names_and_their_depth() -> None:
    inner = {"properties": {"a": {}}}
    of_values = {"default": {"properties": {}}, "enum": [{"properties": {}}]}
    schema = {"properties": {"enum": inner, "properties": inner}, "anyOf": [{"$defs": {"const": inner}}], **of_values}
    closed = {**inner, "additionalProperties": False}
    expected = {
        "properties": {"enum": closed, "properties": closed},
        "anyOf": [{"$defs": {"const": closed}}],
        **of_values,
        "additionalProperties": False,
    }
    assert json.loads(closed_text(schema)) == expected
    deep = '{"properties":{"a":' * 400 + "{}" + "}}" * 400
    assert closed_text(deep).count('"additionalProperties":false') == 400


def closed_text(schema: Any) -> str:
    """The grammar of a schema with disable_additional_properties."""
    outputs = StructuredOutputs(json=schema, disable_additional_properties=True)
    asked = asked_grammar(ChatBody(messages=[], structured_outputs=outputs))
    assert asked is not None
    return asked.grammar.text


def test_native_parameters_have_a_grammar_too() -> None:
    asked = asked_grammar(NativeSampling(regex="a"))
    assert asked is not None
    assert (asked.field, asked.grammar) == ("regex", Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/chat/completions",
         {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format.json_schema.schema", "#/properties/a/not"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
         "response_format.json_schema.schema", "no text fits it"),
        ("/v1/completions", {"guided_regex": "(["}, "guided_regex", "unclosed character class"),
        ("/v1/completions", {"structured_outputs": {"structural_tag": {"format": {"type": "or", "elements": []}}}},
         "structured_outputs.structural_tag.format.elements", "at least one"),
        ("/generate", {"sampling_params": {"json_schema": '{"type": "x"}'}}, "sampling_params.json_schema", "#/type"),
    ],
)  # fmt: skip
def test_a_grammar_that_does_not_compile_is_refused_by_field_and_place(
    front: RunningFront, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    prompt = prompt or ({"text": "x"} if path == "/generate" else {"prompt": "x"})
    response = front.post(path, {**prompt, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert said in response.json()["error"]["message"]


def test_a_grammar_reaches_the_engine(front: RunningFront) -> None:
    body = {"prompt": "x", "max_tokens": 2, "guided_choice": ["yes", "no"], "n": 2}
    assert front.post("/v1/completions", body).status_code == 200
    assert front.post("/v1/completions", body).status_code == 200
    shown = front.http.get("/metrics").text
    assert re.search(r"^serinus:num_grammar_cache_hit_total{.*} [1-9]", shown, re.MULTILINE), (
        "compiled once, then known"
    )
    assert front.post("/v1/completions", {"prompt": "x", "guided_regex": "("}).status_code == 400
    assert re.search(r"^serinus:num_grammar_aborted_total{.*} [1-9]", front.http.get("/metrics").text, re.MULTILINE)


def test_a_front_checks_grammars_without_reading_the_vocabulary(
    byte_folder: Path, new_endpoint: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the library reads a whole vocabulary, for which all streams would stand still")

    monkeypatch.setattr(GrammarVocabulary, "_read", read)
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        for regex, status in (("a+", 200), ("([", 400)):
            answer = front.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "regex": regex})
            assert answer.status_code == status, answer.text


def test_a_server_without_a_tokenizer_says_so(new_endpoint: Callable[[], str], byte_folder: Path) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, context_length=64)
    with running_front(front_settings(model_path=str(byte_folder), skip_tokenizer_init=True), engine) as bare:
        response = bare.post("/generate", {"input_ids": [1], "sampling_params": {"regex": "a"}})
        assert response.status_code == 400
        assert "runs without a tokenizer" in response.json()["error"]["message"]


def test_a_grammar_that_takes_too_long_is_refused_and_the_loop_goes_on(tokenizer: Tokenizer) -> None:
    slow = threading.Event()

    class Slow:
        """A compiler whose grammars never compile."""

        def compile(self, grammar: Grammar) -> None:
            slow.wait(20)

        def knows(self, grammar: Grammar) -> bool:
            return False

    async def story() -> None:
        async def given() -> Tokenizer:
            return tokenizer

        metrics = FrontMetrics(engine="e", role="unified")
        check = GrammarCheck(given, metrics, WallClock(), compile_s_max=0.05)
        params = [SamplingParams(grammar=Grammar("regex", "a"))]
        await check.check(params, ["regex"], READY)
        compiler: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        compiler.set_result(Slow())
        check._compiler = cast(Any, compiler)
        with pytest.raises(BadRequest, match=r"regex: got 'b', expected a regex that compiles in 0\.05 s"):
            await check.check([SamplingParams(grammar=Grammar("regex", "b"))], ["regex"], READY)
        slow.set()
        check.stop()
        shown = re.findall(
            r"^serinus:(num_grammar\w*|grammar_\w+_count){.*} (\S+)$", metrics.exposition(), re.MULTILINE
        )
        assert {name: float(value) for name, value in shown} == {
            "num_grammar_total": 2, "num_grammar_cache_hit_total": 0, "num_grammar_aborted_total": 0,
            "num_grammar_timeout_total": 1, "grammar_compilation_time_seconds_count": 1,
        }  # fmt: skip

    asyncio.run(story())


def test_a_server_without_grammars_refuses_them_in_words(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary", grammar_backend="none")
    with running_front(settings, FakeEngine(endpoint=new_endpoint())) as front:
        answer = front.http.post("/v1/completions", json={"prompt": "x", "regex": "a+"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "regex"
        assert "--grammar-backend none" in answer.json()["error"]["message"]
        assert front.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
