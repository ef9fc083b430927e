"""/v1/completions: OpenAI's text completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serinus.core.errors import BadRequest
from serinus.core.ids import new_rid
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.exchange import HttpExchange
from serinus.front.grammars import grammar_field
from serinus.front.render import ChoiceRenderer, completion_logprobs, encode
from serinus.front.sampling import from_completion
from serinus.front.schemas import CompletionBody
from serinus.front.state import Front, prompts_of
from serinus.text import Detokenizer, Tokenizer


async def completions(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, CompletionBody)
    front.check_model(body.model)
    params = from_completion(body, front.ready.sampling_defaults)
    if body.echo and front.settings.model.skip_tokenizer_init:
        raise BadRequest("echo", True, "nothing: this server runs without a tokenizer")
    prompts = prompts_of("prompt", body.prompt)
    front.check_count("prompt" if params.n == 1 else "n", len(prompts) * params.n)
    special = body.add_special_tokens is not False
    asks = await front.asks(
        "prompt",
        prompts,
        [params] * len(prompts),
        limit_fields=["" if body.max_tokens is None else "max_tokens"] * len(prompts),
        add_special_tokens=special,
        grammar_fields=[grammar_field(body)] * len(prompts),
    )
    if body.max_tokens == 0:
        asks = [replace(ask, prompt_only=True) for ask in asks]
    request_id = body.rid or new_rid("cmpl")
    async with front.calling(exchange, asks, body, request_id=request_id, start=start) as call:
        renderer = _CompletionRenderer(front, call, body, await front.tokenizer_or_none(), start)
        await renderer.answer(exchange, streamed=bool(body.stream))


class _CompletionRenderer(ChoiceRenderer):
    """Choices with a text, which begins with the prompt where that is to be echoed."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, front: Front, call: Call, body: CompletionBody, tokenizer: Tokenizer | None, start: float
    ) -> None:
        super().__init__(front, call, body, tokenizer, start)
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None
        self._offsets: dict[int, _Offsets] = {}
        """Of the answers that have begun, by index."""

    def _prompt_text(self, sequence: SequenceState) -> str:
        if sequence.ask.text is not None:
            return sequence.ask.text
        assert self._tokenizer is not None, "front: echo without a tokenizer"
        return self._tokenizer.decode(sequence.ask.prompt.tolist())

    def content(self, sequence: SequenceState) -> dict[str, Any]:
        return {"text": (self._prompt_text(sequence) if self._echo else "") + sequence.output.text}

    def logprobs(self, sequence: SequenceState, *, first: bool) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        ids, places = self._fresh(sequence)
        if not first:
            return completion_logprobs(self._tokenizer, ids, places, self._offsets[sequence.index].of(ids))
        prompt, text = sequence.ask.prompt.tolist(), self._prompt_text(sequence) if self._echo else ""
        skips = sequence.ask.sampling.skip_special_tokens
        grown = self._offsets[sequence.index] = _Offsets(self._tokenizer, len(text), skips, prompt)
        offsets = grown.of(ids)
        if self._echo:
            ids, places = [*prompt, *ids], [*sequence.prompt_logprobs, *places]
            offsets = [*self._prompt_offsets(sequence, prompt), *offsets]
        return completion_logprobs(self._tokenizer, ids, places, offsets)

    def _prompt_offsets(self, sequence: SequenceState, prompt: list[int]) -> list[int]:
        """Special tokens are in a text where they were written there; those that the tokenizer added around it are
        not."""
        assert self._tokenizer is not None, "front: echo without a tokenizer"
        text = sequence.ask.text
        if text is None:
            return _Offsets(self._tokenizer, 0, skips=True).of(prompt)
        written = self._tokenizer.encode(text, add_special_tokens=False)
        added = len(prompt) - len(written)
        before = next((at for at in range(added + 1) if prompt[at : at + len(written)] == written), 0)
        offsets = _Offsets(self._tokenizer, 0, skips=False).of(written)
        return [*[0] * before, *offsets, *[len(text)] * (added - before)]

    def chunk(self, event_: Event, *, first: bool) -> bytes:
        text = event_.text
        if first and self._echo:
            text = self._prompt_text(event_.sequence) + text
        logprobs = self.logprobs(event_.sequence, first=first)
        if not text and event_.finish is None and logprobs is None:
            return b""
        return self._choice(event_, b',"text":' + encode(text), logprobs)


class _Offsets:
    """Where tokens begin in their text: each at the end of what those before it have completed."""

    def __init__(self, tokenizer: Tokenizer | None, start: int, skips: bool, prompt: Sequence[int] = ()) -> None:
        """`skips`: special tokens are not in the text; `prompt`: the tokens before. Without a tokenizer there is no
        text."""
        self._end = start
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skips, prompt=prompt)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the next tokens."""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.feed((token_id,)))
        return offsets
