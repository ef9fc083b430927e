"""From the bytes of an answer to its tokens and times. Runs after the clock has stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from serinus.cli.bench.dataset import Prompt
from serinus.cli.bench.transport import RequestTrace


@dataclass(slots=True, kw_only=True)
class BenchAnswer:
    """One request as its client saw it."""

    prompt_tokens: int
    """As the server counted, else as the dataset did."""
    output_tokens: int = 0
    """As the server counted, else one per event."""
    text: str = ""
    """Text of the whole answer."""
    sent: float = 0.0
    """When it was asked."""
    latency: float = 0.0
    """Seconds from asking to the last byte."""
    first: float = 0.0
    """Seconds to the first token; without streaming, the latency."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens; tokens that came together share their gap."""
    cached: dict[str, int] = field(default_factory=dict)
    """Cached prompt tokens by tier."""
    error: str = ""
    """Why it failed; empty where it did not."""

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first."""
        return (self.latency - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True)
class _Event:
    time: float
    tokens: int


def read_answer(prompt: Prompt, result: RequestTrace, *, native: bool) -> BenchAnswer:
    """Understand what came back for one prompt. Whatever is wrong with it is in `error`."""
    answer = BenchAnswer(prompt_tokens=prompt.token_count, sent=result.sent, latency=result.ended - result.sent)
    if result.failure:
        answer.error = result.failure
        return answer
    if result.status != 200:
        answer.error = f"HTTP {result.status}: {result.body[:300].decode(errors='replace')}"
        return answer
    events: list[_Event] = []
    try:
        for time, data in _events(result):
            before = answer.output_tokens
            fresh = (_native if native else _openai)(answer, data)
            if fresh:
                events.append(_Event(time, max(1, answer.output_tokens - before)))
            if answer.error:
                return answer
    except (msgspec.DecodeError, KeyError, TypeError, IndexError) as error:
        answer.error = f"an answer that cannot be read: {type(error).__name__} {error}"
        return answer
    _times(answer, events, result.sent)
    return answer


def _times(answer: BenchAnswer, events: list[_Event], sent: float) -> None:
    if not events:
        answer.error = "an answer without tokens"
        return
    answer.first = events[0].time - sent
    for before, event in pairwise(events):
        answer.gaps += [(event.time - before.time) / event.tokens] * event.tokens
    answer.latency = max(answer.latency, events[-1].time - sent)
    if not answer.output_tokens:
        answer.output_tokens = sum(event.tokens for event in events)


def _events(result: RequestTrace) -> Iterator[tuple[float, Any]]:
    """Time and JSON of each event; a plain JSON answer is one event."""
    rest, body = b"", result.body
    if body and not body.lstrip().startswith((b"data:", b":")):
        yield result.arrivals[-1].time, msgspec.json.decode(body)
        return
    for arrival in result.arrivals:
        *whole, rest = (rest + arrival.data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data:").strip()
            if event.startswith(b"data:") and data != b"[DONE]":
                yield arrival.time, msgspec.json.decode(data)


def _native(answer: BenchAnswer, data: Mapping[str, Any]) -> bool:
    """Take in one event of /generate (its text is the whole text so far); whether it brought tokens."""
    if "error" in data:
        answer.error = str(data["error"])
        return False
    meta = data["meta_info"]
    count = int(meta["completion_tokens"])
    fresh = count > answer.output_tokens
    answer.output_tokens = count
    answer.text = data.get("text") or answer.text
    answer.prompt_tokens = int(meta.get("prompt_tokens", answer.prompt_tokens))
    details = meta.get("cached_tokens_details")
    answer.cached = dict(details) if isinstance(details, dict) else {"device": int(meta.get("cached_tokens") or 0)}
    return fresh


def _openai(answer: BenchAnswer, data: Mapping[str, Any]) -> bool:
    """Take in one OpenAI event (or whole answer); whether it brought tokens."""
    if "error" in data:
        answer.error = str(data["error"])
        return False
    usage = data.get("usage")
    if usage:
        answer.output_tokens = int(usage["completion_tokens"])
        answer.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = {"device": int(details.get("cached_tokens") or 0)}
    choices = data.get("choices") or []
    if not choices:
        return False
    choice = choices[0]
    part = choice.get("delta") or choice.get("message") or choice
    piece = part.get("content") or part.get("text") or ""
    answer.text += piece
    # An unfinished character has no text yet, but its token came: an event that neither ends nor opens counts.
    opening = "role" in part and not piece and "delta" in choice
    return bool(piece) or (not opening and choice.get("finish_reason") is None)
