"""Prefill side of a handoff: announce pages as they are computed, and hold them until the transfer has read them.

Publish -> hold -> snapshot -> enqueue -> drain -> drop the hold. Page ids are read only after the chunk was published
(they are canonical then). The hold belongs to the transfer and outlives the request.
"""

from __future__ import annotations

import numpy as np

from serinus.core.handoff import ChunkReady, HandoffSpec
from serinus.core.parts import PageSpan
from serinus.core.plan import SeqResult
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import Phase, ReqState

_TRANSFER = "transfer"
"""Name of the holds on pages that a transfer reads."""


class Outgoing:
    """Requests whose prompt is computed for a decode engine."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.inflight: dict[str, ReqState] = {}
        """Requests that have ended here, but whose pages are still being read."""

    def start(self, state: ReqState, handoff: HandoffSpec) -> None:
        """Begin a handoff: pages that the decode engine holds already are never announced."""
        state.sent_pages = handoff.held // self._allocator.page_size

    def announce(self, state: ReqState) -> ChunkReady | None:
        """A chunk of the full pages that were verified since the last chunk; None if there are none."""
        spans = self._snapshot(state, state.verified // self._allocator.page_size)
        if spans is None:
            return None
        return self._chunk(state, spans)

    def finish(self, state: ReqState, seq: SeqResult, now: float) -> ChunkReady:
        """The last chunk of a computed prompt: the rest of its pages (a partly filled one too) and its first token.

        The request gives back its row and waits in `inflight`, its pages held, until the transfer has drained.
        """
        spans = self._snapshot(state, self._allocator.pages_for(state.prompt_len))
        assert spans is not None, f"sched: the last chunk of {state.rid} has no page, expected at least the last one"
        self._allocator.give_row(state)
        state.move(Phase.INFLIGHT)
        self.inflight[state.rid] = state
        return self._chunk(state, spans, seq, now)

    def chunk_drained(self, state: ReqState, spans: tuple[PageSpan, ...]) -> bool:
        """One chunk was read: drop its hold. False = it is not held any more (a repeated event changes nothing)."""
        for index, held in enumerate(state.holds):
            if np.array_equal(held[0].pages, spans[0].pages):
                self._allocator.unhold(_TRANSFER, held)
                del state.holds[index]
                return True
        return False

    def drop_holds(self, state: ReqState) -> None:
        """No chunk of the request is read any more: drop all its holds."""
        for held in state.holds:
            self._allocator.unhold(_TRANSFER, held)
        state.holds.clear()

    def _snapshot(self, state: ReqState, page_end: int) -> tuple[PageSpan, ...] | None:
        start = state.sent_pages
        if page_end <= start:
            return None
        spans = self._allocator.spans(state, start, page_end)
        self._allocator.hold(_TRANSFER, spans)
        state.holds.append(spans)
        state.sent_pages = page_end
        return spans

    def _chunk(
        self, state: ReqState, spans: tuple[PageSpan, ...], seq: SeqResult | None = None, now: float = 0.0
    ) -> ChunkReady:
        assert state.handoff is not None, f"sched: request {state.rid} has no handoff, expected one"
        if seq is None:
            return ChunkReady(rid=state.rid, xid=state.handoff.xid, spans=spans)
        started = state.started if state.started is not None else now
        return ChunkReady(
            rid=state.rid,
            xid=state.handoff.xid,
            spans=spans,
            last=True,
            token=seq.token,
            logprobs=seq.logprobs,
            ends=seq.ends,
            cached_tokens=dict(state.cached_tokens),
            queue_seconds=started - state.request.arrival,
            compute_seconds=now - started,
        )
