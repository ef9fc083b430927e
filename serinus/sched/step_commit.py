"""The commit of a step: positions computed, tokens appended, stops found, pages published, chunks announced.

Decides which requests end; knows nothing of the next step.
"""

from __future__ import annotations

from dataclasses import replace

from serinus.core.errors import InvariantError
from serinus.core.handoff import ChunkReady
from serinus.core.plan import SeqResult, SeqWork, StepResult
from serinus.core.request import TokenDelta, TokenLogprobs
from serinus.sched.batch import Batch
from serinus.sched.endings import ending_of
from serinus.sched.open_step import OpenStep
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_queues import RequestQueues
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.stats import Outcome, Totals

__all__ = ["StepCommit"]


class StepCommit:
    """Applies the results of steps to their requests, the oldest step first."""

    def __init__(
        self,
        vocab_size: int,
        verify_steps: int,
        allocator: PageAllocator,
        batch: Batch,
        outgoing: Outgoing,
        requests: RequestQueues,
        totals: Totals,
    ) -> None:
        self._vocab_size, self._verify_steps = vocab_size, verify_steps
        self._allocator = allocator
        self._batch = batch
        self._outgoing = outgoing
        self._requests = requests
        self._totals = totals

    def apply(self, step: OpenStep, result: StepResult, now: float) -> Outcome:
        """Apply the result of one step; returns its outcome. Later chunks of its requests may be under way."""
        deltas: list[TokenDelta] = []
        chunks: list[ChunkReady] = []
        slides = bool(self._allocator.window_pages)
        for state, work, seq in zip(step.states, step.plan.work, result.seqs, strict=True):
            if state is None:
                continue
            state.step_done(work, self._verify_steps)
            if state.aborting:
                if not state.under_way:
                    self._requests.end(state)
            elif state.phase is Phase.DECODE:
                if slides:
                    self._allocator.advance(state, state.computed)
                deltas.append(self.take_token(state, seq.token, seq.logprobs, now))
            else:
                self._take_chunk(state, work, seq, now, deltas, chunks)
        return replace(step.outcome, deltas=tuple(deltas), chunks=tuple(chunks))

    def _take_chunk(
        self, state: ReqState, work: SeqWork, seq: SeqResult, now: float, deltas: list[TokenDelta],
        chunks: list[ChunkReady],
    ) -> None:  # fmt: skip
        state.sure = True
        if work.next_ids is not None and state.prompt_logprobs is not None:
            if len(seq.prompt_logprobs) != len(work.next_ids):
                raise InvariantError(
                    f"sched: request {state.rid} got {len(seq.prompt_logprobs)} prompt log-probabilities,"
                    f" expected {len(work.next_ids)}"
                )
            state.prompt_logprobs.extend(seq.prompt_logprobs[len(state.prompt_logprobs) - 1 - work.start :])
        self._allocator.publish(state)
        if work.sample is None:
            chunk = self._outgoing.announce(state) if state.handoff else None
            if chunk is not None:
                chunks.append(chunk)
            self._allocator.advance(state, state.computed)
            return
        self._batch.remove(state)
        if state.handoff is not None:
            self._known_token(state, seq.token)
            chunks.append(self._outgoing.finish(state, seq, now))
            return
        self._allocator.advance(state, state.computed)
        state.move(Phase.DECODE)
        self._batch.decoding.append(state)
        deltas.append(self.take_token(state, seq.token, seq.logprobs, now))

    def _known_token(self, state: ReqState, token: int | None) -> int:
        if token is None or not 0 <= token < self._vocab_size:
            raise InvariantError(
                f"sched: request {state.rid} got token {token}, expected an id from 0 to {self._vocab_size - 1}"
            )
        return token

    def take_token(self, state: ReqState, found: int | None, logprobs: TokenLogprobs | None, now: float) -> TokenDelta:
        """Append a token to a decoding request, and end the request where that was its last.

        Raises InvariantError where `found` is not an id of the vocabulary."""
        token = self._known_token(state, found)
        state.append(token)
        self._totals.generation_tokens += 1
        first = state.first_token is None
        if first:
            state.first_token = now
            self._totals.prompt_tokens += state.prompt_len
            for tier, count in state.cached_tokens.items():
                self._totals.cached_tokens[tier] = self._totals.cached_tokens.get(tier, 0) + count
        ending = ending_of(state) if token in state.stop_set or state.known >= state.limit else None
        if not first and ending is None:
            return TokenDelta(
                rid=state.request.rid, token_ids=(token,), logprobs=() if logprobs is None else (logprobs,)
            )
        delta = TokenDelta(
            rid=state.rid,
            token_ids=(token,),
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(state.prompt_logprobs or ()) if first else (),
            finish=ending.finish if ending else None,
            matched_stop=ending.matched_stop if ending else None,
            usage=state.usage(),
        )
        if ending is not None:
            self._totals.finished += 1
            self._requests.end(state)
        return delta
