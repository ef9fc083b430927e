"""/v1/chat/completions: OpenAI's chat, through the checkpoint's own chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serinus.core.ids import new_rid
from serinus.core.request import FinishReason
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.conversation import AnswerReader, Conversation, prepare
from serinus.front.exchange import HttpExchange
from serinus.front.render import ChoiceRenderer, chat_logprobs, encode
from serinus.front.schemas import ChatBody
from serinus.front.state import Front
from serinus.text import AnswerDelta, DeltaKind, Tokenizer


async def chat_completions(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, ChatBody)
    limit_field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    chat = await prepare(front, body, limit_field=limit_field)
    request_id = body.rid or new_rid("chatcmpl")
    async with front.calling(exchange, chat.asks, body, request_id=request_id, start=start) as call:
        renderer = _ChatRenderer(front, call, chat, await front.tokenizer("messages"), start)
        await renderer.answer(exchange, streamed=bool(body.stream))


class _ChatRenderer(ChoiceRenderer):
    """Choices with a message, or in a stream with a delta to it; the first delta brings the role."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, front: Front, call: Call, chat: Conversation, tokenizer: Tokenizer, start: float) -> None:
        super().__init__(front, call, chat.body, tokenizer, start)
        self._with_logprobs = bool(chat.body.logprobs)
        self._readers = [chat.reader(sequence) for sequence in call.sequences]
        self._thinks = chat.thinks and chat.style.reads_thoughts

    def content(self, sequence: SequenceState) -> dict[str, Any]:
        reader, text = self._readers[sequence.index], sequence.output.text
        if reader is None:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        answer = reader.whole(text)
        empty = answer.calls or answer.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if empty else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                _call_json(reader.call_id(call.index), call.name, call.arguments) for call in answer.calls
            ]
        return {"message": message}

    def finish_reason(self, sequence: SequenceState, finish: FinishReason) -> str:
        reader = self._readers[sequence.index]
        return finish.value if reader is None else reader.finish(finish)

    def thought_tokens(self) -> int | None:
        if not self._thinks:
            return None
        assert self._tokenizer is not None, "front: a chat was answered without a tokenizer"
        pairs = zip(self._readers, self._call.sequences, strict=True)
        return sum(
            0 if reader is None else reader.thought_tokens(sequence.output.token_ids, self._tokenizer)
            for reader, sequence in pairs
        )

    def logprobs(self, sequence: SequenceState, *, first: bool) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, *self._fresh(sequence)) if self._with_logprobs else None

    def chunk(self, event_: Event, *, first: bool) -> bytes:
        greeting = b""
        if first:
            delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            greeting = self._prefix + str(event_.sequence.index).encode() + delta + self._tail(event_.sequence)
        logprobs = self.logprobs(event_.sequence, first=first)
        reader = self._readers[event_.sequence.index]
        if reader is None:
            delta = b'{"content":' + encode(event_.text) + b"}" if event_.text else b"{}"
        else:
            parts = [part for each in reader.feed(event_) if (part := _delta_json(reader, each))]
            delta = parts.pop() if parts else b"{}"
            going = replace(event_, finish=None) if parts else event_
            greeting += b"".join(self._choice(going, b',"delta":' + part, None) for part in parts)
        if delta == b"{}" and event_.finish is None and logprobs is None:
            return greeting
        return greeting + self._choice(event_, b',"delta":' + delta, logprobs)


def _call_json(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta_json(reader: AnswerReader, delta: AnswerDelta) -> bytes:
    """OpenAI's form of one delta; empty = it has none."""
    if delta.kind is DeltaKind.CONTENT:
        return b'{"content":' + encode(delta.text) + b"}"
    if delta.kind is DeltaKind.REASONING:
        return b'{"reasoning_content":' + encode(delta.text) + b"}"
    if delta.kind is DeltaKind.CALL:
        call = {"index": delta.index, **_call_json(reader.call_id(delta.index), delta.text, "")}
        return encode({"tool_calls": [call]})
    if delta.kind is DeltaKind.ARGUMENTS:
        return encode({"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]})
    return b""
