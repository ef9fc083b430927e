"""/generate: the native endpoint, in the form SGLang's users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from serinus.core.errors import BadRequest
from serinus.core.ids import new_rid
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.front.calls import Call, Event, SequenceState
from serinus.front.exchange import HttpExchange, error_of
from serinus.front.grammars import grammar_field
from serinus.front.render import event, meta_info, stream
from serinus.front.sampling import asks_for_none, from_native, limit_field
from serinus.front.schemas import GenerateBody, NativeSampling, refuse_unsupported
from serinus.front.state import Front, Prompt
from serinus.text import Tokenizer

_T = TypeVar("_T")
_KEEP_ALIVE = b"\n\n"
"""Blank lines, no comment: clients made for SGLang take every other line for JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogprobRequest:
    """What one prompt of the batch asks to see besides its text."""

    logprobs: bool
    """Log-probabilities of the answer."""
    prompt_from: int
    """First prompt position whose log-probability is shown; -1 = none."""
    top: int
    """How many of the likeliest at each place."""


async def generate(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, GenerateBody)
    front.check_model(body.model)
    field, prompts, single = _prompts(body)
    count = len(prompts)
    front.check_count(field, count)
    samplings = _spread("sampling_params", body.sampling_params, count, NativeSampling())
    rids = _spread("rid", body.rid, count, "") if isinstance(body.rid, list) or count == 1 else [""] * count
    given = body.rid if isinstance(body.rid, str) and count > 1 else rids[0] if single else ""
    request_id = given or new_rid("gen")
    wanted = _logprob_requests(body, count)
    params: list[SamplingParams] = []
    for sampling, want in zip(samplings, wanted, strict=True):
        refuse_unsupported(sampling)
        params.append(
            from_native(
                sampling,
                front.ready.sampling_defaults,
                return_logprob=want.logprobs,
                top_logprobs_num=want.top,
                prompt_logprobs=want.prompt_from >= 0,
            )
        )
    grammar_fields = [f"sampling_params.{grammar_field(each)}" for each in samplings]
    asks = await front.asks(
        field, prompts, params, limit_fields=list(map(limit_field, samplings)), rids=rids,
        grammar_fields=grammar_fields,
    )  # fmt: skip
    asks = [replace(ask, prompt_only=asks_for_none(each)) for ask, each in zip(asks, samplings, strict=True)]
    for ask, want in zip(asks, wanted, strict=True):
        if want.prompt_from > len(ask.prompt):
            raise BadRequest("logprob_start_len", want.prompt_from, f"at most {len(ask.prompt)}, the prompt's length")
    async with front.calling(exchange, asks, body, request_id=request_id, start=start, fail_alone=True) as call:
        single = single and len(call.sequences) == 1
        renderer = _NativeRenderer(front, call, wanted, body, await front.tokenizer_or_none(), start, single)
        if body.stream:
            await renderer.stream(exchange)
        else:
            await call.run()
            answers = [renderer.answer(sequence) for sequence in call.sequences]
            await exchange.json(answers[0] if single else answers)


def _prompts(body: GenerateBody) -> tuple[str, list[Prompt], bool]:
    """The field they came in, the prompts, and whether it was a single one."""
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("text", body.text, "either text or input_ids, one of them")
    if body.text is not None:
        if isinstance(body.text, str):
            return "text", [body.text], True
        if not body.text:
            raise BadRequest("text", [], "at least one text")
        return "text", list(body.text), False
    ids = body.input_ids or []
    flat = [item for item in ids if isinstance(item, int)]
    lists: list[Prompt] = [item for item in ids if isinstance(item, list)]
    if not ids or (flat and lists):
        raise BadRequest("input_ids", ids, "token ids, or lists of token ids, at least one")
    return ("input_ids", lists, False) if lists else ("input_ids", [flat], True)


def _spread(field: str, value: _T | list[_T] | None, count: int, default: _T) -> list[_T]:
    """One value per prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        expected = f"one value, or a list of {count}, as many as there are prompts"
        raise BadRequest(field, f"a list of {len(value)}", expected)
    return value


def _logprob_requests(body: GenerateBody, count: int) -> list[_LogprobRequest]:
    logprobs = _spread("return_logprob", body.return_logprob, count, False)
    starts = _spread("logprob_start_len", body.logprob_start_len, count, -1)
    tops = _spread("top_logprobs_num", body.top_logprobs_num, count, 0)
    for start in starts:
        if start < -1:
            raise BadRequest("logprob_start_len", start, "-1 (none of the prompt) or a position from 0 on")
    return [
        _LogprobRequest(logprobs=given, prompt_from=start if given else -1, top=top)
        for given, start, top in zip(logprobs, starts, tops, strict=True)
    ]


class _NativeRenderer:
    """How one request's answers look."""

    def __init__(
        self,
        front: Front,
        call: Call,
        wanted: Sequence[_LogprobRequest],
        body: GenerateBody,
        tokenizer: Tokenizer | None,
        start: float,
        single: bool,
    ) -> None:
        self._front = front
        self._call = call
        self._tokenizer = tokenizer
        self._start = start
        self._single = single
        self._texts = bool(body.return_text_in_logprobs)
        pairs = zip(call.asks, wanted, strict=True)
        self._wanted = [want for ask, want in pairs for _ in range(ask.sampling.n)]

    def answer(self, sequence: SequenceState) -> dict[str, Any]:
        """The answer so far, whole; of a sequence that failed the error, as it would be alone, and its id."""
        if sequence.failure is not None:
            _, body = error_of(sequence.failure)
            return {**msgspec.json.decode(body), "meta_info": {"id": sequence.rid}}
        info = meta_info(sequence, self._front.ready, self._front.clock.now() - self._start)
        want = self._wanted[sequence.index]
        if want.logprobs:
            self._add_logprobs(info, sequence, want)
        return {"text": sequence.output.text, "output_ids": list(sequence.output.token_ids), "meta_info": info}

    def _add_logprobs(self, info: dict[str, Any], sequence: SequenceState, want: _LogprobRequest) -> None:
        first = want.prompt_from
        prompt = sequence.ask.prompt[first:].tolist() if first >= 0 else []
        prompt_places = sequence.prompt_logprobs[first:] if first >= 0 else []
        ids = sequence.output.token_ids
        info["input_token_logprobs"] = self._chosen(prompt, prompt_places)
        info["output_token_logprobs"] = self._chosen(ids, sequence.logprobs)
        if want.top:
            info["input_top_logprobs"] = self._likeliest(prompt_places)
            info["output_top_logprobs"] = self._likeliest(sequence.logprobs)

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._texts and self._tokenizer is not None else None

    def _chosen(self, ids: Sequence[int], places: Sequence[TokenLogprobs]) -> list[Any]:
        return [[place.logprob, token_id, self._text(token_id)] for token_id, place in zip(ids, places, strict=False)]

    def _likeliest(self, places: Sequence[TokenLogprobs]) -> list[Any]:
        return [
            [[lp, i, self._text(i)] for i, lp in zip(place.top_ids, place.top_logprobs, strict=False)]
            if place.logprob is not None
            else None
            for place in places
        ]

    async def stream(self, exchange: HttpExchange) -> None:
        """Every event carries the whole answer so far, as SGLang's do."""
        keep_alive_s = self._front.settings.keep_alive_s
        await stream(self._call, exchange, self._latest, keep_alive_s=keep_alive_s, comment=_KEEP_ALIVE)

    def _latest(self, events: Sequence[Event]) -> bytes:
        chunks: list[bytes] = []
        for sequence in {item.sequence.index: item.sequence for item in events}.values():
            shown = self.answer(sequence)
            if not self._single:
                shown["index"] = sequence.index
            chunks.append(event(shown))
        return b"".join(chunks)
