"""What an engine records of requests that are traced: queue, prefill chunks, handoff, decode, abort, as plain data.

All times are those that turns, plans and usages have anyway. Nothing is recorded of a request without a `traceparent`,
or where the settings name no endpoint (NO_SPANS). Exports nothing: a front does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from serinus.core.plan import StepPlan
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.core.trace import SPANS_MAX, SpanRecord

About = Mapping[str, str | int | float | bool]
_KEPT: Final = 16 * SPANS_MAX
"""Requests that are traced, and records that wait for a front, at most; then the oldest go."""


@dataclass(slots=True)
class _Traced:
    traceparent: str
    arrival: float
    prompt_tokens: int
    queued: bool = False
    """Whether its span `queue` is there."""
    handoff_since: float | None = None
    """Since when a prefill engine is asked for its prompt."""


class SpanLog:
    """Spans of the requests under way in one engine."""

    def __init__(self, *, on: bool = True) -> None:
        """`on`: whether anything is recorded."""
        self._on = on
        self._traced: dict[str, _Traced] = {}
        self._records: deque[SpanRecord] = deque(maxlen=_KEPT)
        self._now = 0.0

    def turn(self, now: float) -> None:
        """A turn of the engine begins."""
        self._now = now

    def __len__(self) -> int:
        return len(self._records)

    def take(self) -> tuple[SpanRecord, ...]:
        """The oldest records that were not taken yet, as many as a message carries."""
        return tuple(self._records.popleft() for _ in range(min(len(self._records), SPANS_MAX)))

    def begin(self, request: Request) -> None:
        """A request came; it is traced where it says of what."""
        if self._on and request.traceparent:
            if len(self._traced) == _KEPT:
                del self._traced[next(iter(self._traced))]
            self._traced[request.rid] = _Traced(request.traceparent, request.arrival, len(request.prompt))

    def stepped(self, plan: StepPlan, start: float, now: float) -> None:
        """A step from `start` to `now` was committed: chunks of traced prompts in it are spans."""
        if not self._traced:
            return
        for work in plan.work:
            traced = self._traced.get(work.rid)
            if traced is not None and work.start < traced.prompt_tokens:
                if not traced.queued:
                    self._queued(traced, start)
                about = {"serinus.step": plan.step, "serinus.first": work.start, "serinus.tokens": len(work.tokens)}
                self._add(traced, "prefill", start, now, {**about, "serinus.batch": len(plan.work)})

    def answered(self, delta: TokenDelta) -> None:
        """A delta leaves: the first ends the queue of a request whose prompt came over, the last ends it."""
        traced = self._traced.get(delta.rid)
        if traced is None:
            return
        usage = delta.usage
        if not traced.queued and usage is not None and delta.token_ids:
            self._queued(traced, traced.arrival + usage.queue_seconds)
        if delta.finish is None:
            return
        if usage is not None and usage.completion_tokens:
            about = {"gen_ai.usage.output_tokens": usage.completion_tokens, "serinus.retractions": usage.retractions}
            self._add(traced, "decode", traced.arrival + usage.first_token_seconds, self._now, about)
        if delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            self.failed(delta.rid, delta.error or delta.finish.value)
        self._traced.pop(delta.rid, None)

    def failed(self, rid: str, reason: str) -> None:
        """A request ended before its time."""
        traced = self._traced.pop(rid, None)
        if traced is not None:
            if not traced.queued:
                self._queued(traced, self._now)
            if traced.handoff_since is not None:
                self._add(traced, "handoff", traced.handoff_since, self._now, {}, error=reason)
            self._add(traced, "abort", self._now, self._now, {}, error=reason)

    # ---- handoffs ---------------------------------------------------------------------------------------------------

    def asked(self, rid: str) -> None:
        """Decode: a prefill engine is asked for the prompt of a request (the first call counts)."""
        traced = self._traced.get(rid)
        if traced is not None and traced.handoff_since is None:
            traced.handoff_since = self._now

    def handed_over(
        self, rid: str, about: About, *, pieces_s: float = 0.0, verify_s: float = 0.0,
        error: str = "",
    ) -> None:  # fmt: skip
        """Decode: a handoff ended now. `pieces_s`: seconds since its first byte, `verify_s`: since its last one."""
        traced = self._traced.get(rid)
        if traced is None or traced.handoff_since is None:
            return
        since, now = traced.handoff_since, self._now
        first, last = max(since, now - pieces_s), now - verify_s
        whole = (("handoff.grant", since, first), ("handoff.pieces", first, last), ("handoff.verify", last, now))
        self._add(traced, "handoff", since, now, about, parts=() if error else whole, error=error)
        traced.handoff_since = None

    def sent(self, rid: str, pages: int, byte_count: int, *, grant_s: float, pieces_s: float) -> None:
        """Prefill: decode has everything, and the request is over here. `grant_s`: how long it waited for a grant."""
        traced = self._traced.pop(rid, None)
        if traced is not None:
            begun, now = traced.arrival, self._now
            first = max(begun, now - pieces_s)
            parts = (("handoff.grant", begun, begun + grant_s), ("handoff.pieces", first, now))
            about = {"serinus.pages": pages, "serinus.bytes": byte_count}
            self._add(traced, "handoff", begun, now, about, parts=parts)

    def _queued(self, traced: _Traced, until: float) -> None:
        traced.queued = True
        self._add(traced, "queue", traced.arrival, until, {})

    def _add(
        self, traced: _Traced, name: str, start: float, end: float, about: About, *,
        parts: tuple[tuple[str, float, float], ...] = (), error: str = "",
    ) -> None:  # fmt: skip
        self._records.append(
            SpanRecord(
                name=name, traceparent=traced.traceparent, start=start, end=end, attributes=dict(about), parts=parts,
                error=error[:1000],
            )
        )  # fmt: skip


NO_SPANS: Final = SpanLog(on=False)
"""What records nothing, of whatever request."""
