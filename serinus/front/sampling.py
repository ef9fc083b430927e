"""From the fields of a request body to core.SamplingParams, and the checks that need the engine's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import BadRequest, BadSampling, PromptTooLong
from serinus.core.sampling import SamplingParams
from serinus.front.grammars import asked_grammar
from serinus.front.schemas import ChatBody, CompletionBody, NativeSampling, OpenAiBody, SamplingFields
from serinus.text import Tokenizer
from serinus.wire.messages import Ready

_T = TypeVar("_T")
Defaults = Mapping[str, Any]
"""Fields of SamplingParams for what a request does not name: Ready.sampling_defaults."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""
_NATIVE_TOKENS = 128
"""SGLang's default of max_new_tokens."""
TOP_LOGPROBS_MAX = 20
_SLICE_IDS = 1 << 16


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """The keys of JSON objects are texts."""
    for key in bias or ():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise BadSampling("logit_bias", key, "token ids as keys")
    return {int(key): value for key, value in (bias or {}).items()}


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise BadSampling(name, value, "at least 1")
    return value


def _prompt_only(params: SamplingParams) -> SamplingParams:
    """The same for no token at all: the engine makes one (Ask.prompt_only drops it), and ends for no other reason."""
    return replace(params, max_new_tokens=1, min_new_tokens=1, ignore_eos=True, stop_token_ids=(), grammar=None)


_TRANSLATED = {"max_new_tokens", "max_tokens", "min_new_tokens", "logit_bias"}
"""Parameters that have another name or type in a body, or other checks."""
_SAME_NAMES = {each.name for each in fields(SamplingParams)} & set(SamplingFields.__struct_fields__)
_AS_THEY_ARE = sorted(_SAME_NAMES - _TRANSLATED)
"""The others: a parameter that has one name and one type everywhere is copied."""


def _common(
    body: SamplingFields,
    defaults: Defaults,
    *,
    max_new_tokens: int | None,
    least_field: str,
    include_stop: bool,
) -> SamplingParams:
    """`max_new_tokens`: as asked for, or the endpoint's own default; that of `defaults` is a bound, as in vLLM.
    `least_field`: the field of the body that has min_new_tokens."""
    named = {name: getattr(body, name) for name in _AS_THEY_ARE}
    given = {**defaults, **{name: value for name, value in named.items() if value is not None}}
    asked = asked_grammar(body)
    bound = given.pop("max_new_tokens", None)
    try:
        return SamplingParams(
            max_new_tokens=min((each for each in (max_new_tokens, bound) if each is not None), default=None),
            min_new_tokens=_or(getattr(body, least_field), 0),
            logit_bias=_logit_bias(body.logit_bias),
            include_stop=include_stop,
            grammar=None if asked is None else asked.grammar,
            **given,
        )
    except BadSampling as error:
        if error.field == "min_new_tokens":
            error.rename(least_field)
        raise


def _openai(body: OpenAiBody, defaults: Defaults, max_new_tokens: int | None) -> SamplingParams:
    include_stop = bool(body.include_stop_str_in_output or body.no_stop_trim)
    return _common(body, defaults, max_new_tokens=max_new_tokens, least_field="min_tokens", include_stop=include_stop)


def from_completion(body: CompletionBody, defaults: Defaults) -> SamplingParams:
    """Parameters of /v1/completions; `defaults` for those that it does not name. Raises BadSampling."""
    if body.max_tokens == 0 and not body.echo:
        raise BadSampling("max_tokens", 0, "at least 1, or 0 together with echo")
    none = body.max_tokens == 0
    given = 1 if none else _positive("max_tokens", body.max_tokens)
    params = _openai(body, defaults, _or(given, max(_COMPLETION_TOKENS, body.min_tokens or 0)))
    params = _prompt_only(params) if none else params
    if body.logprobs is None:
        return params
    if not 0 <= body.logprobs <= TOP_LOGPROBS_MAX:
        raise BadSampling("logprobs", body.logprobs, f"between 0 and {TOP_LOGPROBS_MAX}")
    return replace(params, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)


def from_chat(body: ChatBody, defaults: Defaults) -> SamplingParams:
    """Parameters of /v1/chat/completions; `defaults` for those that it does not name. Raises BadSampling."""
    _positive("max_tokens", body.max_tokens)
    limit = _positive("max_completion_tokens", body.max_completion_tokens) or body.max_tokens
    params = _openai(body, defaults, limit)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise BadSampling("top_logprobs", body.top_logprobs, "logprobs to be true as well")
        if not 0 <= body.top_logprobs <= TOP_LOGPROBS_MAX:
            raise BadSampling("top_logprobs", body.top_logprobs, f"between 0 and {TOP_LOGPROBS_MAX}")
    return replace(params, logprobs=body.top_logprobs or 0) if body.logprobs else params


def asks_for_none(body: NativeSampling) -> bool:
    """Whether only the prompt is of interest: its log-probabilities, or that it is cached afterwards."""
    return 0 in (body.max_new_tokens, body.max_tokens if body.max_new_tokens is None else None)


def limit_field(body: NativeSampling) -> str:
    """The field that bounds the answer, as the client names it; empty = it named none."""
    given = {"max_new_tokens": body.max_new_tokens, "max_tokens": body.max_tokens}
    return next((name for name, value in given.items() if value is not None), "")


def from_native(
    body: NativeSampling, defaults: Defaults, *, return_logprob: bool, top_logprobs_num: int, prompt_logprobs: bool
) -> SamplingParams:
    """Parameters of /generate; `defaults` for those that it does not name. Raises BadSampling."""
    none = asks_for_none(body)
    limit = 1 if none else _positive("max_new_tokens", body.max_new_tokens) or _positive("max_tokens", body.max_tokens)
    least = "min_tokens" if body.min_new_tokens is None else "min_new_tokens"
    if limit is None and "max_new_tokens" not in defaults:
        limit = max(_NATIVE_TOKENS, getattr(body, least) or 0)
    params = _common(body, defaults, max_new_tokens=limit, least_field=least, include_stop=bool(body.no_stop_trim))
    params = _prompt_only(params) if none else params
    if body.sampling_seed is not None:
        params = replace(params, seed=body.sampling_seed)
    if not 0 <= top_logprobs_num <= TOP_LOGPROBS_MAX:
        raise BadSampling("top_logprobs_num", top_logprobs_num, f"between 0 and {TOP_LOGPROBS_MAX}")
    if not return_logprob:
        return params
    return replace(params, logprobs=top_logprobs_num, prompt_logprobs=top_logprobs_num if prompt_logprobs else None)


def check_text(field: str, text: str, tokenizer: Tokenizer, tokens_max: int, *, is_context: bool = True) -> None:
    """Raise PromptTooLong where a text surely has more than `tokens_max` tokens (`is_context`: the model's bound).

    Cost: see Tokenizer.holds_far_more. One that passes has about twice as many at most.
    """
    check_chars(field, len(text), tokenizer, tokens_max, is_context=is_context)
    if tokenizer.holds_far_more(text, tokens_max):
        value = f"{len(text)} characters, more than {2 * tokens_max} tokens"
        raise PromptTooLong(field, value, _at_most(tokens_max), context=tokens_max if is_context else None)


def check_chars(field: str, char_count: int, tokenizer: Tokenizer, tokens_max: int, *, is_context: bool = True) -> None:
    """Raise PromptTooLong where so many characters cannot be `tokens_max` tokens, however long each."""
    most = tokens_max * tokenizer.token_chars_max
    if char_count > most:
        expected = f"{_at_most(tokens_max)}, none of which has more than {tokenizer.token_chars_max} characters"
        context = tokens_max if is_context else None
        raise PromptTooLong(field, f"{char_count} characters", expected, context=context)


def _at_most(tokens_max: int) -> str:
    return f"at most {tokens_max} tokens"


def token_row(field: str, ids: list[int], ready: Ready) -> NDArray[np.int32]:
    """Token ids as one row, checked. Raises BadRequest. Cost: 0.08 us per id; with the GIL for 5 ms at a time."""
    if not ids:
        raise BadRequest(field, ids, "at least one token")
    row = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), _SLICE_IDS):
        piece = ids[start : start + _SLICE_IDS]
        low, high = min(piece), max(piece)
        if low < 0 or high >= ready.vocab_size:
            raise BadRequest(field, low if low < 0 else high, f"token ids from 0 to {ready.vocab_size - 1}")
        row[start : start + _SLICE_IDS] = piece
    return row


def check_limits(field: str, length: int, params: SamplingParams, ready: Ready, *, limit_field: str) -> None:
    """Check a prompt of `length` tokens and what is asked for it against the engine; `field`, `limit_field`: as the
    client names them; no limit_field = it named no limit, and the answer ends where there is no more room.

    Raises BadRequest, PromptTooLong, BadSampling.
    """
    room, asked = ready.context_length - length, params.max_new_tokens
    wanted = f"{limit_field} is {asked}" if limit_field and asked is not None else "the answer needs 1"

    def counted(what: str, bound: int, flag: str) -> str:
        return f"the prompt has {length}, {wanted}, {what} holds {bound} for both ({flag}); shorten the prompt"

    context = ("the context", ready.context_length, "--context-length")
    for what in (context, ("the KV pool", ready.max_total_tokens, "--max-total-tokens")):
        if length >= (bound := what[1]):
            raise PromptTooLong(field, length, f"{_at_most(bound - 1)}: {counted(*what)}", context=bound)
    default = ready.sampling_defaults.get("max_new_tokens")  # not asked for: what there is room for is enough
    if limit_field and asked is not None and asked > room and asked != default:
        expected = f"at most {room}: {counted(*context)} or lower {limit_field}"
        raise PromptTooLong(limit_field, asked, expected, context=ready.context_length)
    if params.min_new_tokens > room:
        raise BadSampling("min_tokens", params.min_new_tokens, f"at most {room}, what the context has left")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if token_id >= ready.vocab_size:
                raise BadSampling(name, token_id, f"token ids from 0 to {ready.vocab_size - 1}")
