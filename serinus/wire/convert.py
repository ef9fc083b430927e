"""Between the plain data of `core` and the structs that travel. One function each way, next to each other."""

from __future__ import annotations

from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs, Usage
from serinus.core.sampling import SamplingParams
from serinus.wire.messages import Generate, Sampling, TokenLp, TokenOut, UsageOut, bytes_to_ids, ids_to_bytes

__all__ = [
    "delta_from_wire",
    "delta_to_wire",
    "logprobs_from_wire",
    "logprobs_to_wire",
    "request_from_wire",
    "request_to_wire",
    "sampling_from_wire",
    "sampling_to_wire",
]


def sampling_to_wire(params: SamplingParams) -> Sampling:
    """What the engine needs of the parameters; stop texts, n and special tokens stay with the front."""
    return Sampling(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k,
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias={token: float(bias) for token, bias in params.logit_bias.items()},
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_wire(sampling: Sampling) -> SamplingParams:
    """The reverse. Raises BadSampling: both sides of a border check."""
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def request_to_wire(request: Request) -> Generate:
    """A request as the message that asks an engine for it."""
    return Generate(
        rid=request.rid,
        prompt=ids_to_bytes(request.prompt),
        sampling=sampling_to_wire(request.sampling),
        seed=request.seed,
        cache_salt=request.cache_salt,
        priority=request.priority,
        prefill_address=request.prefill_address,
    )


def request_from_wire(message: Generate, now: float) -> Request:
    """The reverse; `now` is the engine's clock at arrival. Raises BadSampling, ValueError (ids)."""
    return Request(
        rid=message.rid,
        prompt=bytes_to_ids(message.prompt),
        sampling=sampling_from_wire(message.sampling),
        seed=message.seed,
        cache_salt=message.cache_salt,
        priority=message.priority,
        prefill_address=message.prefill_address,
        arrival=now,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> TokenLp:
    """Log-probabilities of one place."""
    return TokenLp(logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs)


def logprobs_from_wire(logprobs: TokenLp) -> TokenLogprobs:
    """The reverse."""
    return TokenLogprobs(logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs)


def _usage_to_wire(usage: Usage) -> UsageOut:
    return UsageOut(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=dict(usage.cached_tokens),
        prefill_engine=usage.prefill_engine,
        handoff_tokens=usage.handoff_tokens,
        handoff_pages=usage.handoff_pages,
        handoff_bytes=usage.handoff_bytes,
        handoff_seconds=usage.handoff_seconds,
        local_reason=usage.local_reason,
        retractions=usage.retractions,
        queue_seconds=usage.queue_seconds,
        first_token_seconds=usage.first_token_seconds,
    )


def _usage_from_wire(usage: UsageOut) -> Usage:
    return Usage(**{name: getattr(usage, name) for name in UsageOut.__struct_fields__})


def delta_to_wire(delta: TokenDelta) -> TokenOut:
    """What a step brought to one request."""
    return TokenOut(
        rid=delta.rid,
        ids=delta.token_ids,
        logprobs=tuple(map(logprobs_to_wire, delta.logprobs)),
        prompt_logprobs=tuple(map(logprobs_to_wire, delta.prompt_logprobs)),
        finish=delta.finish.value if delta.finish else "",
        matched_stop=delta.matched_stop,
        error=delta.error,
        error_status=delta.error_status,
        usage=_usage_to_wire(delta.usage) if delta.usage else None,
    )


def delta_from_wire(out: TokenOut) -> TokenDelta:
    """The reverse. Raises ValueError where `finish` is no FinishReason."""
    return TokenDelta(
        rid=out.rid,
        token_ids=out.ids,
        logprobs=tuple(map(logprobs_from_wire, out.logprobs)),
        prompt_logprobs=tuple(map(logprobs_from_wire, out.prompt_logprobs)),
        finish=FinishReason(out.finish) if out.finish else None,
        matched_stop=out.matched_stop,
        error=out.error,
        error_status=out.error_status,
        usage=_usage_from_wire(out.usage) if out.usage else None,
    )
