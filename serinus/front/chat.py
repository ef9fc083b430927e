"""/v1/chat/completions: OpenAI's chat, through the checkpoint's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.core.errors import BadRequest, PromptTooLong
from serinus.core.ids import new_rid
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.exchange import HttpExchange
from serinus.front.grammars import grammar_field
from serinus.front.render import ChoiceRenderer, chat_logprobs, encode
from serinus.front.sampling import check_chars, from_chat
from serinus.front.schemas import ChatBody
from serinus.front.state import Front
from serinus.text import Tokenizer, checked_messages

__all__ = ["chat_completions", "render_chat"]

_MESSAGE_CHARS = 64
"""A message costs as much as so many characters, however short it is."""


async def render_chat(
    front: Front,
    messages: Sequence[dict[str, Any]],
    *,
    tokens_max: int,
    is_context: bool = True,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: dict[str, Any] | None = None,
) -> str:
    """The text of a conversation that may have so many tokens (`is_context`: by the model's bound); a long one is
    rendered in a thread.

    Raises BadRequest, PromptTooLong (more messages than tokens, or more characters than these can have).
    """
    tokenizer = await front.tokenizer("messages")
    template = tokenizer.template
    if template is None:
        raise BadRequest("messages", "a chat", "a prompt at /v1/completions: this checkpoint has no chat template")
    if len(messages) > tokens_max:
        expected = f"at most {tokens_max}, as each is at least one token of the context"
        context = tokens_max if is_context else None
        raise PromptTooLong("messages", f"{len(messages)} messages", expected, context=context)

    def work() -> str:
        checked = checked_messages(messages)
        check_chars(
            "messages",
            sum(len(message["content"]) for message in checked),
            tokenizer,
            tokens_max,
            is_context=is_context,
        )
        return template.render(
            checked,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )

    return await front.threads.run(sum(map(_weight, messages)), work)


def _weight(message: dict[str, Any]) -> int:
    """Characters that take about as long to tokenize as this message takes to check and render."""
    content = message.get("content")
    return _MESSAGE_CHARS + (len(content) if isinstance(content, (str, list)) else 0)


async def chat_completions(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, ChatBody)
    front.check_model(body.model)
    params = from_chat(body, front.ready.sampling_defaults)
    text = await render_chat(
        front,
        body.messages,
        tokens_max=front.ready.context_length,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=body.chat_template_kwargs,
    )
    limit_field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    special = bool(body.add_special_tokens)  # templates write their own
    asks = await front.asks(
        "messages",
        [text],
        [params],
        limit_field=limit_field,
        add_special_tokens=special,
        grammar_fields=[grammar_field(body)],
    )
    request_id = body.rid or new_rid("chatcmpl")
    async with front.calling(exchange, asks, body, request_id=request_id, start=start) as call:
        renderer = _ChatRenderer(front, call, body, await front.tokenizer("messages"), start)
        await renderer.answer(exchange, streamed=bool(body.stream))


class _ChatRenderer(ChoiceRenderer):
    """Choices with a message, or in a stream with a delta to it; the first delta brings the role."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, front: Front, call: Call, body: ChatBody, tokenizer: Tokenizer, start: float) -> None:
        super().__init__(front, call, body, tokenizer, start)
        self._with_logprobs = bool(body.logprobs)

    def content(self, sequence: SequenceState) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": sequence.output.text, "refusal": None}}

    def logprobs(self, sequence: SequenceState, *, first: bool) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, *self._fresh(sequence)) if self._with_logprobs else None

    def chunk(self, event_: Event, *, first: bool) -> bytes:
        greeting = b""
        if first:
            delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            greeting = self._prefix + str(event_.sequence.index).encode() + delta + self._tail(event_.sequence)
        logprobs = self.logprobs(event_.sequence, first=first)
        if not event_.text and event_.finish is None and logprobs is None:
            return greeting
        delta = b'{"content":' + encode(event_.text) + b"}" if event_.text else b"{}"
        return greeting + self._choice(event_, b',"delta":' + delta, logprobs)
