"""/v1/completions: OpenAI's text completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.ids import new_rid
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.exchange import HttpExchange
from serinus.front.render import choice_chunk, completion_logprobs, encode, meta_info, stream, usage_of
from serinus.front.sampling import from_completion
from serinus.front.schemas import CompletionBody
from serinus.front.state import Front, prompts_of
from serinus.text import Tokenizer

__all__ = ["completions"]


async def completions(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, CompletionBody)
    front.check_model(body.model)
    params = from_completion(body)
    if body.echo and front.settings.skip_tokenizer_init:
        raise BadRequest("echo", True, "nothing: this server runs without a tokenizer")
    prompts = prompts_of("prompt", body.prompt)
    if len(prompts) * params.n > front.settings.n_max:
        raise BadRequest(
            "n", params.n, f"at most {front.settings.n_max} sequences in all, n times {len(prompts)} prompts"
        )
    special = body.add_special_tokens is not False
    encoded = await front.encode("prompt", prompts, add_special_tokens=special)
    asks = [
        await front.ask("prompt", prompt, params, limit_field="max_tokens", ids=ids)
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]
    request_id = body.rid or new_rid("cmpl")
    async with front.calling(
        exchange, asks, request_id=request_id, start=start, cache_salt=body.cache_salt, priority=body.priority
    ) as call:
        renderer = _CompletionRenderer(front, call, body, await front.tokenizer_or_none(), start)
        if body.stream:
            await renderer.stream(exchange)
        else:
            await call.run()
            await exchange.json(renderer.whole())


class _CompletionRenderer:
    """How one request's answers look."""

    def __init__(
        self, front: Front, call: Call, body: CompletionBody, tokenizer: Tokenizer | None, start: float
    ) -> None:
        self._front = front
        self._call = call
        self._tokenizer = tokenizer
        self._start = start
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._meta = bool(body.return_meta_info)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._tail = b',"usage":null}\n\n' if self._usage else b"}\n\n"
        self._head = {
            "id": call.request_id,
            "object": "text_completion",
            "created": int(front.clock.unix()),
            "model": front.settings.model_name,
        }
        self._prefix = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._shown = [0] * len(call.sequences)
        """Tokens whose log-probabilities were shown, per answer."""
        self._offsets = [0] * len(call.sequences)
        self._echoed: set[int] = set()
        """Answers whose prompt was shown."""

    def _prompt_text(self, sequence: SequenceState) -> str:
        if sequence.ask.text is not None:
            return sequence.ask.text
        assert self._tokenizer is not None, "front: echo without a tokenizer"
        return self._tokenizer.decode(sequence.ask.prompt)

    def _logprobs_of(self, sequence: SequenceState, *, with_prompt: bool) -> dict[str, Any] | None:
        """Of everything not shown yet."""
        if not self._logprobs:
            return None
        index = sequence.index
        done = self._shown[index]
        ids, places = sequence.output.token_ids[done:], sequence.logprobs[done:]
        self._shown[index] = len(sequence.output.token_ids)
        if with_prompt:
            ids = [*sequence.ask.prompt, *ids]
            places = [*sequence.prompt_logprobs, *places]
        shown, self._offsets[index] = completion_logprobs(self._tokenizer, ids, places, self._offsets[index])
        return shown

    def _meta_of(self, sequence: SequenceState) -> dict[str, Any]:
        return meta_info(sequence, self._front.ready, self._front.clock.now() - self._start)

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for sequence in self._call.sequences:
            text = sequence.output.text
            if self._echo:
                text = self._prompt_text(sequence) + text
            choice: dict[str, Any] = {
                "index": sequence.index,
                "text": text,
                "logprobs": self._logprobs_of(sequence, with_prompt=self._echo),
                "finish_reason": sequence.finish.value if sequence.finish else None,
            }
            if self._meta:
                choice["meta_info"] = self._meta_of(sequence)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage_of(self._call)}

    def _chunk(self, event_: Event) -> bytes:
        sequence = event_.sequence
        text = event_.text
        first = self._echo and sequence.index not in self._echoed
        if first:
            self._echoed.add(sequence.index)
            text = self._prompt_text(sequence) + text
        logprobs = self._logprobs_of(sequence, with_prompt=first)
        if not text and event_.finish is None and logprobs is None:
            return b""
        meta = self._meta_of(sequence) if self._meta and event_.finish else None
        return choice_chunk(
            event_, self._prefix, b',"text":' + encode(text), logprobs=logprobs, meta=meta, tail=self._tail
        )

    def _chunks(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._chunk, events))

    async def stream(self, exchange: HttpExchange) -> None:
        await stream(self._call, exchange, self._chunks, self._head if self._usage else None)
