"""Requests of many megabytes: refused before the work, or worked on beside the event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.core.clock import WallClock
from serinus.core.errors import BadRequest
from serinus.front import EngineClient, state
from serinus.front.conversation import render_chat
from serinus.front.exchange import HttpExchange
from serinus.front.parse import parse_body
from serinus.front.schemas import ChatBody, CompletionBody, GenerateBody
from serinus.front.state import Front
from serinus.testing.running_front import RunningFront, front_settings
from serinus.text import ChatTemplate, Tokenizer


def front_of(folder: Path) -> Front:
    """A front whose engine never comes."""
    return Front(front_settings(model_path=str(folder)), EngineClient("ipc:///nowhere"), WallClock())


def threads_of(folder: Path, call: tuple[type, str], work: Callable[[Front], Awaitable[Any]]) -> set[bool]:
    """Whether calls of this method ran in the event loop's own thread."""
    method, here = getattr(*call), threading.get_ident()
    seen: set[bool] = set()

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.add(threading.get_ident() == here)
        return method(*args, **kwargs)

    async def run() -> None:
        front = front_of(folder)
        await front.tokenizer("text")
        await work(front)
        front.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*call, noted)
        asyncio.run(run())
    return seen


@pytest.mark.parametrize(
    ("texts", "here"), [(["hello"], True), (["hello the abc " * 2000], False), (["hello the abc " * 100] * 50, False)]
)
def test_much_text_is_tokenized_aside(byte_folder: Path, texts: list[str], here: bool) -> None:
    encode = (Tokenizer, "encode")
    assert threads_of(byte_folder, encode, lambda front: front.encode("text", texts, tokens_max=1 << 20)) == {here}


@pytest.mark.parametrize(("count", "here"), [(3, True), (1000, False)])
def test_a_long_chat_is_rendered_aside(byte_folder: Path, count: int, here: bool) -> None:
    messages, render = [{"role": "user", "content": "hello"}] * count, (ChatTemplate, "render")
    assert threads_of(byte_folder, render, lambda front: render_chat(front, messages, tokens_max=1 << 20)) == {here}


@pytest.mark.parametrize(("count", "here"), [(3, True), (50_000, False)])
def test_a_long_body_is_parsed_aside(byte_folder: Path, count: int, here: bool) -> None:
    raw = json.dumps({"prompt": [7] * count}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw}

    exchange = HttpExchange({"path": "/", "headers": []}, receive, None, body_bytes_max=1 << 20)  # type: ignore[arg-type]
    parse = (state, "parse_body")
    assert threads_of(byte_folder, parse, lambda front: front.read(exchange, CompletionBody)) == {here}


def refused(front: RunningFront, path: str, raw: bytes) -> str:
    """The message that a body is refused with."""
    response = front.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert front.http.get("/health").status_code == 200
    message: str = response.json()["error"]["message"]
    return message


LONG = "hello world, this is a text. " * 1_000_000
"""A text of 29 megabytes, all ASCII."""


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt: got '29000000 characters', expected at most 256 tokens"),
        ("/generate", {"text": ["x", LONG]}, "text: got '29000000 characters'"),
        ("/tokenize", {"prompt": LONG}, "prompt: got '29000000 characters', expected at most 524288 tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}]},
            "messages: got '29000000 characters', expected at most 256 tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * 300},
            "messages: got '300 messages', expected at most 256",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, said: str
) -> None:
    short: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **kw: short.append(text) or encode(self, text, **kw))
    assert said in refused(front, path, json.dumps(body).encode())
    assert short in ([], ["x"])


@pytest.mark.parametrize(
    ("raw", "body_type", "said"),
    [
        (
            b'{"messages": [' + b",".join([b'{"role":"user","content":"a"}'] * 950_000) + b"]}",
            ChatBody,
            "65536 objects",
        ),
        (b'{"prompt": [' + b"7," * 10_000_000, CompletionBody, "1048576 values"),
        (b'{"input_ids": ' + b"[" * 2_000_000, GenerateBody, "1048576 values"),
        (b'{"prompt": "\\\\", "stop": [' + b'"\\"",' * 2_000_000, CompletionBody, "1048576 values"),
    ],
)
def test_bodies_of_too_many_values_are_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch, raw: bytes, body_type: Any, said: str
) -> None:
    monkeypatch.setattr("serinus.front.parse._decoder", None)
    with pytest.raises(BadRequest, match=f"more than {said}"):
        parse_body(raw, body_type)


def test_text_full_of_brackets_and_commas_is_no_list() -> None:
    text = '{[,"\\' * 300_000
    assert parse_body(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == text


@settings(max_examples=30)
@given(st.recursive(st.text('a"\\,[{', max_size=4), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_values_are_counted_whatever_the_strings_hold(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(count, value.values()))
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    raw = json.dumps({"other": value, "prompt": "x"}).encode()
    raw += b" " * (1 << 18)  # only long bodies are counted
    assert parse_body(raw, CompletionBody, values_max=2 * count(value) + 4).prompt == "x"
    with pytest.raises(BadRequest, match="values"):
        parse_body(raw, CompletionBody, values_max=(count(value) - 1) // 2)


def test_a_byte_that_is_no_utf8_is_found_beyond_the_first_piece() -> None:
    text = "é" * 400_000
    raw = b'{"prompt": "' + text.encode() + b'"}'
    assert parse_body(raw, CompletionBody).prompt == text
    with pytest.raises(BadRequest, match="at byte 800012"):
        parse_body(raw[:-2] + b'\xff"}', CompletionBody)
