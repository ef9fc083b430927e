"""/v1/responses: OpenAI's form of chats for agents, without a memory of its own (nothing is stored)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from serinus.core.errors import BadRequest
from serinus.core.type_lock import TYPE_LOCK
from serinus.front.agent_schemas import ResponsesBody
from serinus.front.blocks import Block, BlockRenderer, chat_body, fresh_id, named_event
from serinus.front.calls import Call
from serinus.front.conversation import Conversation, prepare
from serinus.front.exchange import HttpExchange, flat_error
from serinus.front.parse import check_known, fields_as
from serinus.front.response_items import messages_of
from serinus.front.schemas import ChatBody, JsonSchemaFormat, ResponseFormat
from serinus.front.state import Front
from serinus.text import DeltaKind, Tokenizer

_FIELDS = {
    r"^response_format(\.json_schema)?": "text.format",
    r"^max_completion_tokens": "max_output_tokens",
    r"^(tools\[\d+\]|tool_choice)\.function\b": r"\1",
}
"""Fields of chats that have other names here."""


async def responses(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, ResponsesBody)
    _refuse_memory(body)
    with fields_as(_FIELDS):
        chat = await prepare(front, _chat(body), limit_field="max_output_tokens", field="input")
    request_id = body.rid or fresh_id("resp")
    async with front.calling(exchange, chat.asks, chat.body, request_id=request_id, start=start) as call:
        renderer = _ResponseRenderer(front, call, chat, await front.tokenizer("input"), body)
        await renderer.answer(exchange, streamed=bool(body.stream))


def _refuse_memory(body: ResponsesBody) -> None:
    """Raises BadRequest for what needs a store of answers."""
    if body.store:
        raise BadRequest("store", True, "false or nothing: this server keeps no answers")
    if body.previous_response_id:
        expected = "nothing: this server keeps no answers; send the items of the conversation in input"
        raise BadRequest("previous_response_id", body.previous_response_id, expected)
    if body.background:
        raise BadRequest("background", True, "false or nothing: an answer that is not waited for would have to be kept")
    if body.truncation not in (None, "disabled"):
        raise BadRequest("truncation", body.truncation, "disabled or nothing: no items are left out")
    for each in body.include or ():
        if each == "message.output_text.logprobs":
            raise BadRequest("include", each, "nothing of that kind (log-probabilities: /v1/chat/completions)")


def _chat(body: ResponsesBody) -> ChatBody:
    """The chat that is asked for. Raises BadRequest."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise BadRequest("reasoning.effort", effort, "a text: none, minimal, low, medium, high...")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise BadRequest("max_output_tokens", body.max_output_tokens, "at least 1")
    return chat_body(
        body,
        messages=messages_of(body.instructions, body.input),
        max_completion_tokens=body.max_output_tokens,
        tools=[_nested(tool) for tool in body.tools or ()],
        tool_choice=_choice(body.tool_choice) if isinstance(body.tool_choice, dict) else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort,
        include_reasoning=body.include_reasoning,
        response_format=_response_format(body.text) or body.response_format,
    )


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """`tool_choice` in the form of chats."""
    if choice.get("type") != "allowed_tools" or "allowed_tools" in choice:
        return _nested(choice)
    tools = choice.get("tools")
    nested = [_nested(tool) if isinstance(tool, dict) else tool for tool in tools] if isinstance(tools, list) else tools
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A function in the form of chats, where it has a level more."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response_format(text: Mapping[str, Any] | None) -> ResponseFormat | None:
    """`text.format` in the form of chats. Raises BadRequest."""
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest("text.format", given, "an object with type text, json_object or json_schema")
    flat = given.get("type") == "json_schema"
    inner = {key: value for key, value in given.items() if key != "type"} if flat else given
    check_known(inner, JsonSchemaFormat if flat else ResponseFormat, "text.format")
    nested = {"type": "json_schema", "json_schema": inner} if flat else given
    try:
        with TYPE_LOCK:
            return msgspec.convert(nested, ResponseFormat)
    except msgspec.ValidationError as err:
        raise BadRequest(
            "text.format", given, f"type text, json_object or json_schema with name and schema ({err})"
        ) from err


class _ResponseRenderer(BlockRenderer):
    """Items of output, and the events of their growth, numbered."""

    def __init__(self, front: Front, call: Call, chat: Conversation, tokenizer: Tokenizer, body: ResponsesBody) -> None:
        super().__init__(front, call, chat, tokenizer)
        self._body = body
        self._created = int(front.clock.unix())
        self._count = 0

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._count += 1
        return named_event(f"response.{name}", {"sequence_number": self._count - 1, **fields})

    def begin(self) -> bytes:
        going = self._response("in_progress", [])
        return self._event("created", response=going) + self._event("in_progress", response=going)

    def opened(self, block: Block) -> bytes:
        added = self._event("output_item.added", output_index=block.place, item=_item(block, "in_progress"))
        if block.kind is DeltaKind.CALL:
            return added
        return added + self._event("content_part.added", **_place(block), part=_part(block))

    def grew(self, block: Block, text: str) -> bytes:
        if block.kind is DeltaKind.CALL:
            where = {"item_id": block.item_id, "output_index": block.place}
            return self._event("function_call_arguments.delta", **where, delta=text)
        if block.kind is DeltaKind.REASONING:
            return self._event("reasoning_text.delta", **_place(block), delta=text)
        return self._event("output_text.delta", **_place(block), delta=text, logprobs=[])

    def closed(self, block: Block) -> bytes:
        if block.kind is DeltaKind.CALL:
            where = {"item_id": block.item_id, "output_index": block.place, "name": block.name}
            done = self._event("function_call_arguments.done", **where, arguments=block.text)
        elif block.kind is DeltaKind.REASONING:
            done = self._event("reasoning_text.done", **_place(block), text=block.text)
        else:
            done = self._event("output_text.done", **_place(block), text=block.text, logprobs=[])
        if block.kind is not DeltaKind.CALL:
            done += self._event("content_part.done", **_place(block), part=_part(block))
        return done + self._event(
            "output_item.done", output_index=block.place, item=_item(block, "incomplete" if self.cut else "completed")
        )

    def failed(self, error: dict[str, Any]) -> bytes:
        self._count += 1
        told = named_event("error", {"sequence_number": self._count - 1, **flat_error(error)})
        items = [_item(block, "incomplete" if block is self.blocks[-1] else "completed") for block in self.blocks]
        response = self._response("failed", items, {"code": "server_error", "message": error["message"]})
        return told + self._event("failed", response=response)

    def finished(self, reason: str) -> bytes:
        return self._event("incomplete" if reason == "length" else "completed", response=self.whole(reason))

    def whole(self, reason: str) -> dict[str, Any]:
        status = "incomplete" if reason == "length" else "completed"
        items = [_item(block, "completed") for block in self.blocks]
        if reason == "length" and items:
            items[-1]["status"] = "incomplete"
        return self._response(status, items)

    def _response(
        self, status: str, items: list[dict[str, Any]], error: dict[str, str] | None = None
    ) -> dict[str, Any]:
        body, sampling = self._body, self.sequence.ask.sampling
        return {
            "id": self.call.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.front.settings.model_name,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": False,
            "temperature": sampling.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if status in ("in_progress", "failed") else self._usage(),
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.call.prompt_tokens, self.call.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.call.cached_tokens},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + completion,
        }


def _place(block: Block) -> dict[str, Any]:
    return {"item_id": block.item_id, "output_index": block.place, "content_index": 0}


def _part(block: Block) -> dict[str, Any]:
    if block.kind is DeltaKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    parts = [] if status == "in_progress" else [_part(block)]
    if block.kind is DeltaKind.CALL:
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"id": block.item_id, "type": "function_call", "status": status, **call}
    if block.kind is DeltaKind.REASONING:
        return {"id": block.item_id, "type": "reasoning", "status": status, "summary": [], "content": parts}
    return {"id": block.item_id, "type": "message", "status": status, "role": "assistant", "content": parts}
