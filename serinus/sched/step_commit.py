"""The commit of a step: positions computed, tokens appended, stops found, pages published, chunks announced.

Decides which requests end; knows nothing of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serinus.core.errors import InvariantError
from serinus.core.handoff import ChunkReady
from serinus.core.plan import SeqResult, SeqWork, StepResult
from serinus.core.request import FinishReason, TokenDelta, TokenLogprobs
from serinus.sched.batch import Batch
from serinus.sched.endings import ExitReason, ending_with
from serinus.sched.open_step import OpenStep
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_queues import RequestQueues
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.stats import Outcome, Totals


class StepCommit:
    """Applies the results of steps to their requests, the oldest step first."""

    def __init__(
        self,
        vocab_size: int,
        allocator: PageAllocator,
        batch: Batch,
        outgoing: Outgoing,
        requests: RequestQueues,
        totals: Totals,
    ) -> None:
        self._vocab_size = vocab_size
        self._allocator = allocator
        self._batch = batch
        self._outgoing = outgoing
        self._requests = requests
        self._totals = totals

    def apply(self, step: OpenStep, result: StepResult, now: float, checked: Sequence[int]) -> Outcome:
        """Apply the result of one step; returns its outcome. Later chunks of its requests may be under way. `checked`:
        slots that a canary verified of each work; empty = nothing was."""
        deltas: list[TokenDelta] = []
        chunks: list[ChunkReady] = []
        slides = bool(self._allocator.window_pages)
        checked = checked or (0,) * len(step.states)
        for state, work, seq, slots in zip(step.states, step.plan.work, result.seqs, checked, strict=True):
            if state is None:
                continue
            state.step_done(work, slots)
            if state.aborting:
                if not state.under_way:
                    self._requests.end(state)
            elif state.phase is Phase.DECODE:
                if slides:
                    self._allocator.advance(state, state.computed)
                delta = self.take_token(state, seq.token, seq.logprobs, now, ends=seq.ends)
                if delta is not None:
                    deltas.append(delta)
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
        state.take_pooled(work, seq)
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
        delta = self.take_token(state, seq.token, seq.logprobs, now, ends=seq.ends)
        if delta is not None:
            deltas.append(delta)

    def _known_token(self, state: ReqState, token: int | None) -> int:
        if token is None or not 0 <= token < self._vocab_size:
            raise InvariantError(
                f"sched: request {state.rid} got token {token}, expected an id from 0 to {self._vocab_size - 1}"
            )
        return token

    def take_token(
        self, state: ReqState, found: int | None, logprobs: TokenLogprobs | None, now: float, *, ends: bool = False
    ) -> TokenDelta | None:
        """Append a token to a decoding request, and end the request where that was its last (`ends`: its grammar is
        complete). Returns what is given out
        now; None = nothing: the token left before a heal, or is not known to be right yet.

        Raises InvariantError where `found` is not an id of the vocabulary."""
        token, place = self._known_token(state, found), state.known
        if state.contradicts(token):
            return self._end_wrong(state, f"id {int(state.tokens[place])}, computed again it is {token}")
        ending = ending_with(state, token, ends=ends)
        state.append(token)
        if state.first_token is None:
            state.first_token = now
            self._totals.prompt_tokens += state.prompt_len
            for tier, count in state.cached_tokens.items():
                self._totals.cached_tokens[tier] = self._totals.cached_tokens.get(tier, 0) + count
        if place == state.left and ending is None and place > state.prompt_len and not state.confirmed:
            state.left = place + 1
            self._totals.generation_tokens += 1
            return TokenDelta(
                rid=state.request.rid, token_ids=(token,), logprobs=() if logprobs is None else (logprobs,)
            )
        if logprobs is not None and place >= state.left:
            state.kept.append(logprobs)
        return self._given_out(state, ending)

    def _given_out(self, state: ReqState, ending: ExitReason | None) -> TokenDelta | None:
        """The tokens of a request that may leave and have not; all of them where it ends."""
        left, end = state.left, state.sendable if ending is None else state.known
        if ending is not None and end < left:
            return self._end_wrong(state, f"id {int(state.tokens[end])}, computed again the answer ends before it")
        if ending is None and end <= left:
            return None
        state.left, first = end, left == state.prompt_len
        self._totals.generation_tokens += end - left
        places, state.kept = state.kept[: end - left], state.kept[end - left :]
        delta = TokenDelta(
            rid=state.rid,
            token_ids=tuple(state.tokens[left:end].tolist()),
            logprobs=tuple(places),
            prompt_logprobs=tuple(state.prompt_logprobs or ()) if first else (),
            finish=ending.finish if ending else None,
            matched_stop=ending.matched_stop if ending else None,
            usage=state.usage(ends=ending is not None) if first or ending else None,
        )
        if ending is not None:
            self._totals.finished += 1
            self._requests.end(state)
        return delta

    def _end_wrong(self, state: ReqState, what: str) -> TokenDelta:
        """End a request whose next token left before and is another one now that it is computed on sound KV."""
        at = state.known - state.prompt_len
        self._totals.wrong_streams += 1
        usage, why = state.usage(ends=True), state.heals[-1] if state.heals else "seen as it was computed again"
        self._requests.end(state)
        return TokenDelta(
            rid=state.rid, finish=FinishReason.ERROR, error_status=500, wrong_token=at, usage=usage,
            error=(
                f"KV integrity: token {at} of this answer was computed on wrong KV and left before that was found:"
                f" {what}; the {at} tokens before it are right ({why})"
            ),
        )  # fmt: skip
