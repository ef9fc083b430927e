"""SamplingParams: what a request asks of the sampler, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from serinus.core.bounds import TopIds
from serinus.core.errors import BadSampling
from serinus.core.grammar import Grammar

_N_MAX = 128
_WORD_MAX = (1 << 63) - 1
_ID_MAX = (1 << 31) - 1
_LOGPROBS_MAX = 64
STOP_COUNT_MAX = 64
STOP_CHARS_MAX = 1024
_STOP_IDS_MAX = 1024
_BIASES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be."""

    low: float
    """The lowest that it may be."""
    high: float | None = None
    """The highest value; None = any number from `low` on."""
    above: bool = False
    """`low` itself is outside."""


RANGES: Mapping[str, Range] = {
    "max_new_tokens": Range(1),
    "min_new_tokens": Range(0),
    "temperature": Range(0.0, 1e4),
    "top_p": Range(0.0, 1.0, above=True),
    "top_k": Range(-1, _WORD_MAX),
    "min_p": Range(0.0, 1.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "presence_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 10.0, above=True),
    "seed": Range(-(1 << 63), _WORD_MAX),
    "n": Range(1, _N_MAX),
    "logprobs": Range(0, _LOGPROBS_MAX),
    "prompt_logprobs": Range(0, _LOGPROBS_MAX),
}
"""Of the parameters that are numbers: what SamplingParams checks, and what the server's description says."""

POOLINGS = ("last", "mean", "cls")
"""Hidden states of a prompt that are given out: of its last token, the mean of all, of its first token."""


def _number(name: str, value: Any, low: float, high: float, expected: str, *, low_open: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise BadSampling(name, value, f"a finite number, {expected}")
    if value > high or value < low or (low_open and value == low):
        raise BadSampling(name, value, expected)


def _whole(name: str, value: Any, low: int, high: int | None, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadSampling(name, value, f"an integer, {expected}")
    if value < low or (high is not None and value > high):
        raise BadSampling(name, value, expected)


def _number_in(name: str, value: Any, expected: str) -> None:
    """...of RANGES; one without a high end is no number of this kind."""
    allowed = RANGES[name]
    assert allowed.high is not None, f"core: {name} has no highest value"
    _number(name, value, allowed.low, allowed.high, expected, low_open=allowed.above)


def _whole_in(name: str, value: Any, expected: str) -> None:
    allowed = RANGES[name]
    _whole(name, value, int(allowed.low), None if allowed.high is None else int(allowed.high), expected)


def _items(name: str, value: Any, count_max: int, what: str) -> tuple[Any, ...]:
    """The items of a list; a single text is a list of one, None an empty one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)):
        raise BadSampling(name, value, f"a list of {what}")
    if len(value) > count_max:
        raise BadSampling(name, len(value), f"at most {count_max} {what}")
    return tuple(value)


def _check_bias(bias: Any) -> None:
    """Cost: 0.1 us for each token id, where all is well."""
    if not isinstance(bias, Mapping):
        raise BadSampling("logit_bias", bias, "a table of token ids and biases")
    if not bias:
        return
    if len(bias) > _BIASES_MAX:
        raise BadSampling("logit_bias", len(bias), f"at most {_BIASES_MAX} tokens")
    values = bias.values()
    if set(map(type, bias)) == {int} and set(map(type, values)) <= {int, float}:
        inside = 0 <= min(bias) <= max(bias) <= _ID_MAX and -100.0 <= min(values) <= max(values) <= 100.0
        if inside and all(map(math.isfinite, values)):
            return
    for token_id, value in bias.items():
        _whole("logit_bias", token_id, 0, _ID_MAX, "token ids as keys")
        _number("logit_bias", value, -100.0, 100.0, "a bias between -100 and 100")


class TokenBias(dict[int, float]):
    """A bias for each of some token ids, which the sampler reads in every step as two arrays. Never changed."""

    __slots__ = ("ids", "values_of_ids")

    def __init__(self, biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        """Cost: one sort of the ids, where parameters are made."""
        super().__init__(biases)
        ids, values = np.fromiter(self, np.int32, len(self)), np.fromiter(self.values(), np.float32, len(self))
        order = ids.argsort()
        self.ids: NDArray[np.int32] = ids[order]
        """The ids in rising order."""
        self.values_of_ids: NDArray[np.float32] = values[order]
        """The bias of each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Names follow SGLang; `max_tokens` (OpenAI, vLLM) is taken as another name of `max_new_tokens`.
    Raises BadSampling naming the field, its value and what was expected.
    """

    max_new_tokens: int | None = None
    """Tokens to generate at most; None = as many as the context holds."""
    min_new_tokens: int = 0
    """No end-of-sequence and no stop token before this many tokens."""
    temperature: float = 1.0
    """0 = greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum (nucleus)."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 = all (0 is taken for it)."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was generated."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens seen in prompt or output."""
    seed: int | None = None
    """Same seed, same prompt: same tokens, whatever else is in the batch. None = the engine draws one."""
    logit_bias: Annotated[Mapping[int, float], Meta(max_length=_BIASES_MAX)] = field(default_factory=dict)
    """Added to the logits of these token ids, at most 65,536."""
    stop: Annotated[tuple[Annotated[str, Meta(max_length=STOP_CHARS_MAX)], ...], Meta(max_length=STOP_COUNT_MAX)] = ()
    """Texts that end the answer (at most 64, each of at most 1,024 characters); they are not part of it. A single text,
    a list or None may be given."""
    stop_token_ids: TopIds = ()
    """Token ids that end the answer, besides the model's own; at most 1,024. A list or None may be given."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    include_stop: bool = False
    """Keep the matched stop text in the answer (SGLang: no_stop_trim)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    n: int = 1
    """Number of answers per prompt."""
    logprobs: int | None = None
    """None = no log-probabilities; k = those of the chosen tokens and of the k likeliest at each place."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens (from the second one on)."""
    hidden_state: bool = False
    """With the log-probabilities of each chosen token, the hidden state that it was chosen from (embeddings)."""
    pooling: str = "last"
    """What that state is (POOLINGS): "mean" and "cls" are of the prompt, so the first token alone has one, and none of
    the prompt is taken from a cache or a prefill engine."""
    grammar: Grammar | None = None
    """What the answer must look like: end-of-sequence is chosen only where it is complete (docs/STRUCTURED.md)."""
    max_tokens: int | None = None
    """Another name of max_new_tokens where parameters are made; None afterwards."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            object.__setattr__(self, "max_new_tokens", self.max_tokens)
            object.__setattr__(self, "max_tokens", None)
        object.__setattr__(self, "stop", _items("stop", self.stop, STOP_COUNT_MAX, "texts"))
        ids = _items("stop_token_ids", self.stop_token_ids, _STOP_IDS_MAX, "ids")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if self.max_new_tokens is not None:
            _whole_in("max_new_tokens", self.max_new_tokens, "at least 1")
        _whole_in("min_new_tokens", self.min_new_tokens, "at least 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            expected = f"at most {self.max_new_tokens}, the most there may be"
            raise BadSampling("min_new_tokens", self.min_new_tokens, expected)
        _number_in("temperature", self.temperature, "0 (greedy) to 10,000")
        _number_in("top_p", self.top_p, "above 0, at most 1")
        _whole_in("top_k", self.top_k, "-1 or 0 (all) or at least 1, a 64-bit integer")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        _number_in("min_p", self.min_p, "between 0 and 1")
        _number_in("frequency_penalty", self.frequency_penalty, "between -2 and 2")
        _number_in("presence_penalty", self.presence_penalty, "between -2 and 2")
        _number_in("repetition_penalty", self.repetition_penalty, "above 0, at most 10")
        if self.hidden_state and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.pooling not in POOLINGS:
            raise BadSampling("pooling", self.pooling, " or ".join(POOLINGS))
        if self.pooling != "last" and not self.hidden_state:
            raise BadSampling("pooling", self.pooling, "last where hidden_state is not asked for")
        if self.seed is not None:
            _whole_in("seed", self.seed, "a 64-bit integer")
        _check_bias(self.logit_bias)
        if self.logit_bias and not isinstance(self.logit_bias, TokenBias):
            object.__setattr__(self, "logit_bias", TokenBias(self.logit_bias))
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARS_MAX:
                raise BadSampling("stop", text, f"a text that is not empty, of at most {STOP_CHARS_MAX} characters")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, None, "token ids, at least 0")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BadSampling("grammar", self.grammar, "a serinus.Grammar")
        _whole_in("n", self.n, f"between 1 and {_N_MAX}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole_in(name, value, f"between 0 and {_LOGPROBS_MAX}")

    @property
    def bias(self) -> TokenBias | None:
        """`logit_bias` as the sampler reads it, where there is any."""
        return self.logit_bias if isinstance(self.logit_bias, TokenBias) else None

    @property
    def stays_home(self) -> str:
        """Why no prefill engine can compute its prompt: what it wants of each prompt token is not handed over. Empty =
        one can."""
        if self.pooling != "last":
            return "pooling"
        return "" if self.prompt_logprobs is None else "prompt_logprobs"

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the sampler must know what was generated (or prompted) so far."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def looks_back(self) -> bool:
        """Whether how a token is chosen hangs on the tokens before it."""
        return self.penalised or self.grammar is not None
