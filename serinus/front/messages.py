"""/v1/messages: Anthropic's form of chats, translated to OpenAI's and back."""

from __future__ import annotations

from typing import Any

import msgspec

from serinus.core.errors import BadRequest
from serinus.front.agent_answers import TokenCount
from serinus.front.agent_schemas import MessagesBody
from serinus.front.blocks import Block, BlockRenderer, chat_body, fresh_id, named_event
from serinus.front.conversation import Conversation, prepare
from serinus.front.exchange import HttpExchange
from serinus.front.parse import fields_as
from serinus.front.response_items import text_field
from serinus.front.schemas import ChatBody, JsonSchemaFormat, ResponseFormat
from serinus.front.state import Front
from serinus.text import DeltaKind

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FIELDS = {
    r"^response_format(\.json_schema)?": "output_config.format",
    r"^thinking_token_budget": "thinking.budget_tokens",
    r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"^(tools\[\d+\]|tool_choice)\.function\b": r"\1",
    r"^stop\b": "stop_sequences",
    r"^continue_final_message$": "messages",
}
"""Fields of chats that have other names here."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, MessagesBody)
    if body.max_tokens is None:
        raise BadRequest("max_tokens", None, "a number of tokens: Anthropic's messages must have it")
    chat = await _prepared(front, body)
    request_id = body.rid or fresh_id("msg")
    async with front.calling(exchange, chat.asks, chat.body, request_id=request_id, start=start) as call:
        renderer = _MessageRenderer(front, call, chat, await front.tokenizer("messages"))
        await renderer.answer(exchange, streamed=bool(body.stream))


async def count_tokens(front: Front, exchange: HttpExchange) -> None:
    """Answer how many tokens the prompt of a request has. Raises what `messages` does."""
    chat = await _prepared(front, await front.read(exchange, MessagesBody))
    await exchange.json(TokenCount(input_tokens=len(chat.asks[0].prompt)))


async def _prepared(front: Front, body: MessagesBody) -> Conversation:
    """Raises what `prepare` does, by the names of this endpoint."""
    with fields_as(_FIELDS):
        return await prepare(front, _chat(body), limit_field="max_tokens")


def _chat(body: MessagesBody) -> ChatBody:
    """The chat that is asked for. Raises BadRequest."""
    kwargs = dict(body.chat_template_kwargs or {})
    thinking = body.thinking or {}
    if thinking:
        if thinking.get("type") not in ("enabled", "adaptive", "disabled"):
            raise BadRequest("thinking.type", thinking.get("type"), "enabled, adaptive or disabled")
        if type(thinking.get("budget_tokens", 0)) is not int:
            raise BadRequest("thinking.budget_tokens", thinking["budget_tokens"], "a number of tokens")
        kwargs.setdefault("enable_thinking", thinking["type"] != "disabled")
    chat = [] if body.system is None else [{"role": "system", "content": _plain("system", body.system)}]
    where = ""
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        chat += _messages_of(where, message)
    if chat and chat[-1] == {"role": "assistant", "content": ""}:
        chat.pop()  # the beginning of an answer, empty
    goes_on = bool(chat) and _is_prefill(where, chat[-1])
    choice = body.tool_choice or {}
    return chat_body(
        body,
        messages=chat,
        continue_final_message=goes_on,
        separate_reasoning=not goes_on,  # thoughts come before a text, none behind its beginning
        stop=body.stop_sequences if body.stop_sequences is not None else body.stop,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())],
        tool_choice=_choice(choice) if choice else None,
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        chat_template_kwargs=kwargs,
        include_reasoning=body.include_reasoning,
        thinking_token_budget=thinking.get("budget_tokens"),
        **_output(body),
    )


def _output(body: MessagesBody) -> dict[str, Any]:
    """`output_config` in the form of chats. Raises BadRequest."""
    config = body.output_config or {}
    effort, given = config.get("effort"), config.get("format")
    if effort is not None and not isinstance(effort, str):
        raise BadRequest("output_config.effort", effort, "a text: low, medium, high...")
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if given is None:
        return found
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise BadRequest("output_config.format", given, "an object with type 'json_schema' and schema")
    found["response_format"] = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given["schema"]))
    return found


def _choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise BadRequest("tool_choice.type", kind, "auto, any, tool or none")
    return _CHOICES[kind]


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{where}.type", tool.get("type"), "custom or nothing (this server runs no tools of its own)")
    about = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**about, "parameters": tool.get("input_schema")}}


def _plain(where: str, content: Any) -> str:
    """The text of a content that is a text or blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(where, content, "a text, or a list of blocks")
    return "".join(_block_text(f"{where}[{index}]", block) for index, block in enumerate(content))


def _block_text(where: str, block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise BadRequest(where, block, "an object with type 'text' and text (this server reads text only)")
    return str(block["text"])


def _messages_of(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """One of Anthropic's messages: results of tools are messages of their own, before the text. Raises BadRequest."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role", role, "user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": _plain(f"{where}.content", content)}]
    results: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": role, "content": ""}
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            shown = _plain(f"{at}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": text_field(at, block, "tool_use_id"), "content": shown})
        elif kind == "tool_use" and role == "assistant":
            given = block.get("input") or {}
            if not isinstance(given, dict):
                raise BadRequest(f"{at}.input", given, "an object")
            function = {"name": text_field(at, block, "name"), "arguments": msgspec.json.encode(given).decode()}
            call = {"id": text_field(at, block, "id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and role == "assistant":
            said["reasoning_content"] = said.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            said["content"] += _block_text(at, block)
    is_empty = len(said) == 2 and not said["content"] and results
    return results if is_empty else [*results, said]


def _is_prefill(where: str, last: dict[str, Any]) -> bool:
    """Whether the answer goes on behind the last message of a chat. Raises BadRequest: it is the assistant's, and there
    is nothing to go on behind."""
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise BadRequest(where, "a last message with tool_use", "a message of the user behind it, with its tool_result")
    if not last["content"]:
        raise BadRequest(f"{where}.content", "", "text that the answer goes on behind, as the assistant comes last")
    return True


class _MessageRenderer(BlockRenderer):
    """Blocks of content, and the events of their growth."""

    def begin(self) -> bytes:
        message = self._message(None, [])
        message["usage"]["output_tokens"] = 0
        return named_event("message_start", {"message": message}) + _PING

    def opened(self, block: Block) -> bytes:
        return named_event("content_block_start", {"index": block.place, "content_block": _content_block(block, {})})

    def grew(self, block: Block, text: str) -> bytes:
        if block.kind is DeltaKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind is DeltaKind.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return named_event("content_block_delta", {"index": block.place, "delta": delta})

    def closed(self, block: Block) -> bytes:
        return named_event("content_block_stop", {"index": block.place})

    def finished(self, reason: str) -> bytes:
        stop_reason, matched = self._stop(reason)
        delta = {"stop_reason": stop_reason, "stop_sequence": matched}
        return named_event("message_delta", {"delta": delta, "usage": self._usage()}) + named_event("message_stop", {})

    def failed(self, error: dict[str, Any]) -> bytes:
        return named_event("error", {"error": error})

    def whole(self, reason: str) -> dict[str, Any]:
        blocks = [
            _content_block(block, msgspec.json.decode(block.text) if block.kind is DeltaKind.CALL else {})
            for block in self.blocks
        ]
        return self._message(reason, blocks)

    def _stop(self, reason: str) -> tuple[str, str | None]:
        """Why it ended, and the stop text that it ended with."""
        matched = self.sequence.output.matched
        if reason == "stop" and isinstance(matched, str):
            return "stop_sequence", matched
        return _REASONS[reason], None

    def _message(self, reason: str | None, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        stop_reason, matched = (None, None) if reason is None else self._stop(reason)
        return {
            "id": self.call.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.front.settings.model_name,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": matched,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        cached = self.call.cached_tokens
        return {
            "input_tokens": self.call.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.call.completion_tokens,
        }


def _content_block(block: Block, value: Any) -> dict[str, Any]:
    """`value`: the arguments of a call, as an object."""
    if block.kind is DeltaKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": value}
    if block.kind is DeltaKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
