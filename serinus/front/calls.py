"""One HTTP request's sequences on their way through the engine: prompts and parameters in, events out.

The same for every endpoint: `completions.py`, `chat.py` and `native.py` only differ in how they render the events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import BadRequest, RateLimited, RequestError
from serinus.core.request import FinishReason, Request, Share, TokenDelta, TokenLogprobs, Usage
from serinus.core.rng import choice_seed
from serinus.core.sampling import SamplingParams
from serinus.front.client import DeltaQueue, EngineClient
from serinus.front.exchange import ClientGone
from serinus.front.metrics import FrontMetrics
from serinus.text import OutputProcessor, Tokenizer

_KINDS = {503: "overloaded_error", 504: "timeout_error"}
NAME_MAX = 256
PRIORITY_END = 1 << 31
_TAIL_TOKENS = 16
"""Tokens of a prompt that a detokenizer may look at: the last ones."""
TIMEOUT_MAX = 1e6


class RequestFailed(RequestError):
    """The engine could not serve a request; it said why and with which status."""

    def __init__(self, message: str, status: int, wrong_token: int | None = None) -> None:
        """`wrong_token`: index in the answer of the first token that was shown and is wrong."""
        super().__init__(message)
        self.status = status
        if wrong_token is not None:
            self.code, self.field = "kv_integrity", f"output[{wrong_token}]"
        if status == RateLimited.status:
            limited = RateLimited(message)
            self.kind, self.code, self.headers = limited.kind, limited.code, limited.headers
        if status >= 500:
            self.kind = _KINDS.get(status, "internal_server_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt and what is asked for it; `sampling.n` sequences come of it."""

    prompt: NDArray[np.int32]
    """Token ids, checked against the engine's limits."""
    text: str | None
    """The prompt's text, where it came as text."""
    sampling: SamplingParams
    """How to continue it."""
    rid: str = ""
    """Id the client chose; empty = none."""
    prompt_only: bool = False
    """Nothing is to be generated: the engine makes one token, which is dropped."""


class SequenceState:
    """One answer as it grows."""

    __slots__ = (
        "ask",
        "closing",
        "error",
        "failure",
        "first_at",
        "index",
        "last_at",
        "logprobs",
        "output",
        "prompt_logprobs",
        "rid",
        "usage",
    )

    def __init__(self, index: int, rid: str, ask: Ask, output: OutputProcessor) -> None:
        self.index = index
        """Place among the answers of its HTTP request."""
        self.rid = rid
        self.ask = ask
        self.output = output
        self.logprobs: list[TokenLogprobs] = []
        """One per token of the answer, where asked for."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """One per token of the prompt, where asked for."""
        self.usage: Usage | None = None
        """What it cost, as the engine said last."""
        self.error = ""
        """Why it was aborted."""
        self.closing: Event | None = None
        """Its last event, while the engine's receipt for it is awaited."""
        self.failure: RequestFailed | None = None
        """Why it has no answer, in a call whose sequences fail alone."""
        self.first_at = 0.0
        self.last_at = 0.0

    @property
    def cached_tokens(self) -> Mapping[str, int]:
        """Prompt tokens found cached, by tier."""
        return self.usage.cached_tokens if self.usage is not None else {}

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended, once it did."""
        return self.output.finish


@dataclass(slots=True, kw_only=True)
class Event:
    """What one delta brought to one answer. Not frozen for its cost alone: one a token; nothing changes one."""

    sequence: SequenceState
    """The answer that grew."""
    text: str
    """New text (may be empty)."""
    token_count: int
    """How many tokens it brought."""
    finish: FinishReason | None
    """Set in its last event."""


class Call:
    """The sequences of one HTTP request, submitted together and read through one queue."""

    __slots__ = (
        "_client", "_clock", "_fail_alone", "_metrics", "_open", "_start", "asks", "queue", "request_id", "sequences",
    )  # fmt: skip

    def __init__(
        self,
        asks: Sequence[Ask],
        *,
        request_id: str,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        metrics: FrontMetrics,
        clock: Clock,
        start: float,
        fail_alone: bool = False,
    ) -> None:
        """`fail_alone`: one of several sequences that fails has a `failure`, and the others are answered; else it fails
        the call."""
        self.request_id = request_id
        self._fail_alone = fail_alone
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._start = start
        self.asks = tuple(asks)
        self.sequences: list[SequenceState] = []
        """The answers: those to the first prompt, then those to the next."""
        count = sum(ask.sampling.n for ask in asks)
        for ask in asks:
            for choice in range(ask.sampling.n):
                index = len(self.sequences)
                base = ask.rid or (request_id if count == 1 else f"{request_id}-{index}")
                rid = base if not (ask.rid and ask.sampling.n > 1) else f"{base}-{choice}"
                if len(rid) > NAME_MAX or not rid.isprintable() or client.has(rid):
                    raise BadRequest("rid", rid, f"an id of at most {NAME_MAX} printable characters, not in use")
                output = OutputProcessor(tokenizer, ask.sampling, ask.prompt[-_TAIL_TOKENS:].tolist())
                self.sequences.append(SequenceState(index, rid, ask, output))
        self._open = {sequence.rid: sequence for sequence in self.sequences}
        if len(self._open) != count:
            raise BadRequest("rid", [s.rid for s in self.sequences], "different ids")
        self.queue: DeltaQueue | None = None

    def submit(
        self, *, seeds: Sequence[int], cache_salt: str = "", priority: int = 0, share: Share,
        prefill_address: str = "", traceparent: str = "", timeout: float | None = None, streamed: bool = False,
    ) -> DeltaQueue:  # fmt: skip
        """Send the sequences to the engine; `seeds`: one per prompt; `streamed`: the client sees tokens as they come.
        Raises EngineDown, CapacityError."""
        if len(cache_salt) > NAME_MAX:
            raise BadRequest("cache_salt", cache_salt, f"at most {NAME_MAX} characters")
        if not -PRIORITY_END <= priority < PRIORITY_END:
            raise BadRequest("priority", priority, "an integer of 32 bits, smaller = served sooner")
        if timeout is not None and not 0 < timeout <= TIMEOUT_MAX:
            raise BadRequest("timeout", timeout, f"seconds, more than 0 and at most {TIMEOUT_MAX:.0f}")
        if len(prefill_address) > NAME_MAX:
            raise BadRequest("prefill_address", prefill_address, f"at most {NAME_MAX} characters")
        choices = [
            (ask.prompt, sampling, choice_seed(seed, choice))
            for ask, seed in zip(self.asks, seeds, strict=True)
            for sampling in [replace(ask.sampling, n=1, stop=())]
            for choice in range(ask.sampling.n)
        ]
        requests = [
            Request(
                rid=sequence.rid,
                prompt=prompt,
                sampling=sampling,
                seed=seed,
                cache_salt=cache_salt,
                priority=priority,
                share=share,
                prefill_address=prefill_address,
                timeout_s=timeout or 0.0,
                traceparent=traceparent,
                stream=streamed,
            )
            for sequence, (prompt, sampling, seed) in zip(self.sequences, choices, strict=True)
        ]
        self.queue = self._client.submit(requests)
        return self.queue

    async def events(self, shown: Callable[[list[Event]], bool] | None = None) -> AsyncIterator[list[Event]]:
        """Everything that has come since the last look, until all sequences have ended.

        `shown`: is given events that come while this waits, all but the first; where it returns False an empty list is
        the next, for its caller to wait in.
        Raises RequestFailed (one failed, or all of those that fail alone), EngineDown, ClientGone, and what `shown`
        does. Whatever the end, nothing is left behind.
        """
        assert self.queue is not None, "front: events of a call that was not submitted"
        queue = self.queue
        failed: list[Event] = []
        has_answer = False

        def at_once(deltas: list[TokenDelta]) -> bool:
            events = self._news(deltas)
            return (not events or (shown is not None and shown(events))) and bool(self._open)

        try:
            while self._open:
                deltas = await queue.take(at_once if has_answer and shown is not None else None)
                if queue.gone:
                    raise ClientGone(f"front: the client of {self.request_id} hung up")
                events = self._news(deltas)
                has_answer = has_answer or any(event.sequence.failure is None for event in events)
                if not has_answer:
                    failed += events
                elif events or not deltas:
                    yield [*failed, *events]
                    failed.clear()
            if failed and failed[0].sequence.failure is not None:
                raise failed[0].sequence.failure
        finally:
            queue.close()

    def _news(self, deltas: Sequence[TokenDelta]) -> list[Event]:
        now = self._clock.now()
        return [event for delta in deltas if (event := self._take(delta, now)) is not None]

    async def run(self) -> None:
        """Read until the end; the answers are in `sequences`. Raises what `events` does, and where all have failed."""
        async for _ in self.events():
            pass
        failures = [sequence.failure for sequence in self.sequences]
        if failures[0] is not None and all(failures):  # each after a token, which a stream would have shown
            raise failures[0]

    def _take(self, delta: TokenDelta, now: float) -> Event | None:
        sequence = self._open.get(delta.rid)
        if sequence is None:
            return None
        if delta.finish is FinishReason.ERROR:
            said = delta.error or "engine: the request failed"
            if delta.error_status >= 500:  # there is more of it in the logs, under this id
                said = f"{said}; request {delta.rid}"
            sequence.failure = RequestFailed(said, delta.error_status, delta.wrong_token)
            if not self._fail_alone:
                raise sequence.failure
            del self._open[delta.rid]
            return Event(sequence=sequence, text="", token_count=0, finish=delta.finish)
        if delta.prompt_logprobs:
            sequence.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.usage is not None:
            sequence.usage = delta.usage
        if delta.error:
            sequence.error = delta.error
        if sequence.closing is not None:
            if delta.finish is None:
                return None  # tokens behind the stop text
            del self._open[delta.rid]
            return sequence.closing
        token_ids = () if sequence.ask.prompt_only else delta.token_ids
        piece = sequence.output.feed(token_ids, delta.finish, delta.matched_stop)
        if delta.logprobs:
            sequence.logprobs.extend(delta.logprobs[: piece.token_count])
        if piece.token_count:
            self._time(sequence, now, piece.token_count)
        event = Event(sequence=sequence, text=piece.text, token_count=piece.token_count, finish=piece.finish)
        if piece.finish is None:
            return event
        count = len(sequence.output.token_ids)
        self._metrics.finished(now - self._start, now - sequence.first_at, count)
        if piece.stopped_here and delta.finish is None and self._client.gives_receipts:
            sequence.closing = event
            self._client.complete(delta.rid, count)
            return None
        del self._open[delta.rid]
        if piece.stopped_here:
            self._client.end(delta.rid, "a stop text was found", matched_stop=True)
        return event

    def _time(self, sequence: SequenceState, now: float, token_count: int) -> None:
        if sequence.first_at:
            self._metrics.next_tokens(now - sequence.last_at, token_count)
        else:
            sequence.first_at = now
            self._metrics.first_token(now - self._start)
        sequence.last_at = now

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once however many answers it has."""
        return sum(len(ask.prompt) for ask in self.asks)

    @property
    def completion_tokens(self) -> int:
        """Of all answers so far."""
        return sum(len(sequence.output.token_ids) for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found cached: of each prompt, as its first answer found them."""
        first: dict[int, SequenceState] = {}
        for sequence in self.sequences:
            first.setdefault(id(sequence.ask), sequence)
        return sum(sum(sequence.cached_tokens.values()) for sequence in first.values())
