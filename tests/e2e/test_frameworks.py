"""LangChain, litellm and Anthropic's package against real engines: one alone, and prefill and decode apart.

In `make proof`, which installs them (extra `clients`). The model is random: what must come is enforced by grammar.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from serinus.models.small_checkpoints import make_toy
from serinus.testing.scripted_front import TOOL_TEMPLATE
from serinus.testing.servers import Server

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore")]  # of the packages' own models
CLUSTERS = {"alone": ("serve",), "apart": ("up", "--prefill", "1", "--decode", "1")}


class Kind(Enum):
    HOUSE = "house"
    BOAT = "boat"


class Room(BaseModel, extra="forbid"):  # so that an answer has an end, whatever the seed
    """What a room must have to be booked."""

    kind: Kind
    seats: int = Field(ge=1, le=9)
    tags: list[Kind] = Field(max_length=3)


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The packages keep connections for the life of a process: they end here, where what they warn of is ignored, and
    not in some test behind these."""
    yield
    utils = sys.modules.get("langchain_openai.chat_models._client_utils")
    for kept in () if utils is None else (utils._cached_sync_httpx_client, utils._cached_async_httpx_client):
        kept.cache_clear()
    if "litellm" in sys.modules:
        sys.modules["litellm"].in_memory_llm_clients_cache.flush_cache()
    gc.collect()


@pytest.fixture(scope="module", params=CLUSTERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("frameworks")
    checkpoint = make_toy(folder / "toy", vocab=640, context=2048, layers=2, kv_heads=2)
    Path(folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    first, *rest = CLUSTERS[request.param]
    words = (
        first, str(checkpoint), *rest, "--chat-template", str(folder / "tools.jinja"), "--max-total-tokens", "8192",
        "--served-model-name", "toy", "--tool-call-parser", "hermes",
    )  # fmt: skip
    with Server(*words) as started:
        yield started


def langchain(server: Server, **more: Any) -> Any:
    """A chat model of LangChain that talks to this server."""
    from langchain_openai import ChatOpenAI

    about: dict[str, Any] = {"model": "toy", "max_retries": 0, "seed": 3, "max_tokens": 900, "timeout": 120, **more}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", **about)


def test_langchain_binds_tools_and_sends_what_they_gave(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain(server).bind_tools([Room], tool_choice="any", parallel_tool_calls=False)
    first = bound.invoke([HumanMessage("hello")])
    assert [call["name"] for call in first.tool_calls] == ["Room"]
    Room.model_validate(first.tool_calls[0]["args"])
    streamed = None
    for chunk in bound.stream([HumanMessage("hello")]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [call["args"] for call in streamed.tool_calls] == [first.tool_calls[0]["args"]]
    messages = [HumanMessage("hello"), first, ToolMessage("booked", tool_call_id=first.tool_calls[0]["id"])]
    last = langchain(server, max_tokens=8).bind_tools([Room]).invoke(messages)
    assert last.response_metadata["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures_its_output(server: Server, method: Any) -> None:
    structured = langchain(server).with_structured_output(Room, method=method)
    answer = structured.invoke("hello, in JSON")
    assert isinstance(answer, Room)
    *_, last = structured.stream("hello, in JSON")
    assert last == answer


def test_langchain_knows_a_prompt_that_is_too_long(server: Server) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        langchain(server).invoke("hello " * 3000)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, which then asks no other machine for its prices."""
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as package

    return package


def where(server: Server) -> dict[str, Any]:
    """What litellm is told of this server."""
    return {"model": "openai/toy", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}


SCHEMA = Room.model_json_schema()
FUNCTION: dict[str, Any] = {"name": "book", "description": "Book a room", "parameters": SCHEMA}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def test_litellm_calls_tools_and_structures_answers(server: Server, litellm: Any) -> None:
    about = {
        **where(server), "messages": MESSAGES, "seed": 3, "max_tokens": 900,
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
    }  # fmt: skip
    choice = litellm.completion(parallel_tool_calls=False, **about).choices[0]
    assert choice.finish_reason == "tool_calls"
    Room.model_validate_json(choice.message.tool_calls[0].function.arguments)
    chunks = list(litellm.completion(parallel_tool_calls=False, stream=True, **about))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    assert json.loads(built.tool_calls[0].function.arguments) == json.loads(
        choice.message.tool_calls[0].function.arguments
    )
    plain = {name: about[name] for name in about if not name.startswith("tool")}
    Room.model_validate_json(litellm.completion(response_format=Room, **plain).choices[0].message.content)


def test_litellm_speaks_responses(server: Server, litellm: Any) -> None:
    about = {**where(server), "max_output_tokens": 900, "tools": [{"type": "function", **FUNCTION}]}
    done = litellm.responses(input="hello", tool_choice="required", parallel_tool_calls=False, **about)
    calls = [item for item in done.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["book"]
    Room.model_validate_json(calls[0].arguments)
    events = list(litellm.responses(input="hello", stream=True, **{**about, "max_output_tokens": 8}))
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_litellm_knows_a_prompt_that_is_too_long(server: Server, litellm: Any) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "hello " * 3000}], **where(server))


def test_the_anthropic_client_goes_a_round(server: Server) -> None:
    import anthropic

    tool: Any = {"name": "book", "description": "Book a room", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    about: dict[str, Any] = {"model": "toy", "max_tokens": 900, "tools": [tool]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        with client.messages.stream(messages=messages, tool_choice=choice, **about) as stream:
            first = stream.get_final_message()
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert call.type == "tool_use"
        Room.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "booked"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=messages, **{**about, "max_tokens": 8})
        assert last.stop_reason in ("max_tokens", "end_turn")
