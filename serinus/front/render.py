"""Renders answers as JSON: what several endpoints share (usage, log-probabilities, meta_info, SSE framing)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from serinus.core.json_line import one_line
from serinus.core.request import FinishReason, TokenLogprobs
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.exchange import HttpExchange
from serinus.front.schemas import OpenAiBody
from serinus.front.state import Front
from serinus.text import Tokenizer
from serinus.wire.messages import Ready

_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment of server-sent events: clients pass over it, proxies see that the connection lives."""
_ENCODER = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """JSON of one line for every reader."""
    return one_line(_ENCODER.encode(value))


def event(value: Any) -> bytes:
    """A value as one server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


async def stream(
    call: Call,
    exchange: HttpExchange,
    rendered: Callable[[Sequence[Event]], bytes],
    last: Callable[[], bytes] | None = None,
    *,
    keep_alive_s: float,
    comment: bytes = KEEP_ALIVE,
    done: bytes = _DONE,
) -> None:
    """Answer with server-sent events: what `rendered` makes of the news, what `last` says if anything, `done`.

    The stream opens with the first news, so that what is refused before it gets a status of its own; or with the first
    `comment`, where there is no news for `keep_alive_s`.
    """
    left = b""

    def shown(events: Sequence[Event]) -> bool:
        """Whether nothing is left to be written."""
        nonlocal left
        left += rendered(events)
        if left and exchange.pushed(left):
            left = b""
        return not left

    news = call.events(shown)
    left = rendered(await exchange.kept_alive(anext(news), keep_alive_s, comment))
    if not exchange.started:
        await exchange.open_stream()
    if left:
        await exchange.push(left)
        left = b""
    async for events in news:
        if not shown(events):
            await exchange.push(left)
            left = b""
    await exchange.end((b"" if last is None else last()) + done)


class ChoiceRenderer(ABC):
    """How the answers to one request of OpenAI's look; a subclass says what is in a choice."""

    whole_object: ClassVar[str]
    """OpenAI's name of the whole answer."""
    chunk_object: ClassVar[str]
    """...and of one event of a stream."""

    def __init__(self, front: Front, call: Call, body: OpenAiBody, tokenizer: Tokenizer | None, start: float) -> None:
        self._front = front
        self._call = call
        self._tokenizer = tokenizer
        self._start = start
        self._with_meta = bool(body.return_meta_info)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._usage_each = self._with_usage and bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._whole_head = {
            "id": call.request_id,
            "object": self.whole_object,
            "created": int(front.clock.unix()),
            "model": front.settings.model_name,
            "system_fingerprint": front.fingerprint,
        }
        self._chunk_head = {**self._whole_head, "object": self.chunk_object}
        self._prefix = b"data: " + encode(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._shown = [0] * len(call.sequences)
        """Tokens whose log-probabilities were shown, per answer."""
        self._begun: set[int] = set()
        """Answers of which the beginning was sent: the role of a chat, the prompt of an echo."""

    @abstractmethod
    def content(self, sequence: SequenceState) -> dict[str, Any]:
        """What a choice of the whole answer has besides its log-probabilities and its end."""

    def finish_reason(self, sequence: SequenceState, finish: FinishReason) -> str:
        """What OpenAI calls the end of this answer."""
        return finish.value

    @abstractmethod
    def logprobs(self, sequence: SequenceState, *, first: bool) -> dict[str, Any] | None:
        """Of everything not shown yet; `first`: nothing was."""

    @abstractmethod
    def chunk(self, event_: Event, *, first: bool) -> bytes:
        """The events for one piece of news."""

    def _meta(self, sequence: SequenceState) -> dict[str, Any]:
        return meta_info(sequence, self._front.ready, self._front.clock.now() - self._start)

    def _fresh(self, sequence: SequenceState) -> tuple[list[int], list[TokenLogprobs]]:
        """Tokens whose log-probabilities were not shown yet; from now on they were."""
        ids, done = sequence.output.token_ids, self._shown[sequence.index]
        self._shown[sequence.index] = len(ids)
        return ids[done:], sequence.logprobs[done:]

    def _choice(self, event_: Event, content: bytes, logprobs: dict[str, Any] | None) -> bytes:
        """OpenAI's event for news of one answer; by hand, as most of it never changes. `content`: with its key."""
        if event_.finish is None and logprobs is None:
            start, tail = self._prefix + str(event_.sequence.index).encode(), self._tail(event_.sequence)
            return b'%b%b,"logprobs":null,"finish_reason":null}]%b' % (start, content, tail)
        finish = b"null"
        if event_.finish:
            finish = b'"' + self.finish_reason(event_.sequence, event_.finish).encode() + b'"'
        with_meta = self._with_meta and event_.finish is not None
        receipt = None if event_.finish is None or (usage := event_.sequence.usage) is None else usage.kv_integrity
        return b"".join(
            (
                self._prefix,
                str(event_.sequence.index).encode(),
                content,
                b',"logprobs":',
                encode(logprobs),
                b',"finish_reason":',
                finish,
                b',"meta_info":' + encode(self._meta(event_.sequence)) if with_meta else b"",
                b"" if receipt is None else b',"kv_integrity":' + encode(receipt),
                b"}]",
                self._tail(event_.sequence),
            )
        )

    def _tail(self, sequence: SequenceState) -> bytes:
        """What follows the choices of a chunk."""
        if not self._usage_each:
            return b',"usage":null}\n\n' if self._with_usage else b"}\n\n"
        prompt, completion = len(sequence.ask.prompt), len(sequence.output.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return b',"usage":' + encode(usage) + b"}\n\n"

    def _chunks(self, events: Sequence[Event]) -> bytes:
        chunks: list[bytes] = []
        for event_ in events:
            index = event_.sequence.index
            chunks.append(self.chunk(event_, first=index not in self._begun))
            self._begun.add(index)
        return b"".join(chunks)

    async def answer(self, exchange: HttpExchange, *, streamed: bool) -> None:
        """Answer the request, as its sequences grow or when all have ended."""
        if streamed:
            last = self._usage_chunk if self._with_usage else None
            await stream(self._call, exchange, self._chunks, last, keep_alive_s=self._front.settings.keep_alive_s)
            return
        await self._call.run()
        choices: list[dict[str, Any]] = []
        for sequence in self._call.sequences:
            choice = {
                "index": sequence.index,
                **self.content(sequence),
                "logprobs": self.logprobs(sequence, first=True),
                "finish_reason": self.finish_reason(sequence, sequence.finish) if sequence.finish else None,
            }
            if self._with_meta:
                choice["meta_info"] = self._meta(sequence)
            choices.append(choice)
        await exchange.json({**self._whole_head, "choices": choices, "usage": self._usage()})

    def _usage_chunk(self) -> bytes:
        return event({**self._chunk_head, "choices": [], "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        thoughts = self.thought_tokens()
        details = {} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}
        return {**_usage_of(self._call), **details}

    def thought_tokens(self) -> int | None:
        """Tokens of all answers that were thoughts; None = thoughts are not told apart."""
        return None


def _usage_of(call: Call) -> dict[str, Any]:
    """Token counts of a call, as OpenAI's usage object; with a canary also the receipts of its answers: one, or a list
    in the order of the answers."""
    prompt, completion = call.prompt_tokens, call.completion_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
    receipts = [each.usage.kv_integrity if each.usage is not None else None for each in call.sequences]
    if any(receipts):
        usage["kv_integrity"] = receipts[0] if len(receipts) == 1 else receipts
    return usage


def finish_info(sequence: SequenceState) -> dict[str, Any] | None:
    """SGLang's finish_reason object; None while the answer grows."""
    reason = sequence.finish
    if reason is None:
        return None
    if reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(sequence.output.token_ids)}
    if reason is FinishReason.ABORT:
        return {"type": "abort", "message": sequence.error or "aborted", "status_code": None, "err_type": None}
    return {"type": reason.value, "matched": sequence.output.matched}


def meta_info(sequence: SequenceState, ready: Ready, e2e_latency: float) -> dict[str, Any]:
    """SGLang's meta_info, and where each part of the request ran."""
    usage = sequence.usage
    prefill = (usage.prefill_engine if usage is not None else "") or ready.engine
    info: dict[str, Any] = {
        "id": sequence.rid,
        "prompt_tokens": len(sequence.ask.prompt),
        "completion_tokens": len(sequence.output.token_ids),
        "cached_tokens": sum(sequence.cached_tokens.values()),
        "cached_tokens_details": dict(sequence.cached_tokens),
        "finish_reason": finish_info(sequence),
        "e2e_latency": e2e_latency,
        "prefill_engine": prefill,
        "decode_engine": ready.engine,
    }
    if usage is not None:
        info["handoff_tokens"] = usage.handoff_tokens
        info["handoff_backend"] = usage.handoff_backend
        info["handoff_pages"] = usage.handoff_pages
        info["handoff_bytes"] = usage.handoff_bytes
        info["handoff_seconds"] = usage.handoff_seconds
        info["local_reason"] = usage.local_reason
        info["retractions"] = usage.retractions
        info["queue_seconds"] = usage.queue_seconds
        info["first_token_seconds"] = usage.first_token_seconds
        if usage.kv_integrity is not None:
            info["kv_integrity"] = usage.kv_integrity
    return info


def _token(tokenizer: Tokenizer | None, token_id: int) -> str:
    return tokenizer.token_text(token_id) if tokenizer is not None else f"token_id:{token_id}"


def chat_logprobs(tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs object of a chat choice for these tokens."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = tokenizer.token_raw(token_id) if tokenizer is not None else b""
        return {"token": _token(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for token_id, place in zip(ids, logprobs, strict=False):
        top = [entry(i, lp) for i, lp in zip(place.top_ids, place.top_logprobs, strict=False)]
        content.append({**entry(token_id, place.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI shows -9999 for what cannot happen."""
    if logprob is None:
        return None
    return logprob if logprob > -9999.0 else -9999.0


def completion_logprobs(
    tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, Any]:
    """The logprobs object of a completion choice for these tokens; `offsets`: where each begins in the text."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float | None] | None] = []
    for token_id, place in zip(ids, logprobs, strict=False):
        name, logprob = _name(tokenizer, token_id), _finite(place.logprob)
        tokens.append(name)
        chosen.append(logprob)
        if logprob is None:
            top.append(None)
            continue
        best: dict[str, float | None] = {}
        for i, lp in zip(place.top_ids, place.top_logprobs, strict=False):
            best.setdefault(_name(tokenizer, i), _finite(lp))
        top.append({**best, name: logprob})
    shown = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}
    return {**shown, "text_offset": list(offsets[: len(tokens)])}


def _name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token in completions, which show no bytes beside it: one that is no text is named by them, as OpenAI does."""
    text = _token(tokenizer, token_id)
    if tokenizer is None or "\ufffd" not in text:
        return text
    raw = tokenizer.token_raw(token_id)
    return text if raw == text.encode() else "bytes:" + raw.decode("ascii", errors="backslashreplace")
