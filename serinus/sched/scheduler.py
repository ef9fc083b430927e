"""The scheduler: decides each step. `plan` says who computes what on which pages, `commit` takes the result in.

Torch-free, clock-free (`now` is an argument), one thread. At most one plan is under way. The rules live next door:
queues.py (order), admission.py (room), batch.py (the batch), seats.py (rows and pages), endings.py (when it ends),
incoming.py and outgoing.py (the two sides of a handoff).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from serinus.cache import Lease, PrefixCache
from serinus.core.errors import BadRequest, CapacityError, InvariantError
from serinus.core.handoff import ChunkReady, HandoffSpec, Reservation
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import SeqResult, SeqWork, StepPlan, StepResult
from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs
from serinus.sched.admission import Admission
from serinus.sched.batch import Batch
from serinus.sched.checks import check_result, check_scheduler
from serinus.sched.endings import check_handoff, check_request, ending_of, stop_ids_of, token_limit
from serinus.sched.incoming import Incoming
from serinus.sched.loads import begin_again
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_row import OwnPages
from serinus.sched.queues import ReqQueue, admission_order
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats
from serinus.sched.settings import SchedSettings
from serinus.sched.stats import Outcome, SchedStats, Totals, beyond, sched_stats

__all__ = ["Scheduler"]


class Scheduler:
    """All requests of one engine, from `add` to the delta (or chunk) that ends them."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache) -> None:
        self.settings = settings
        self._seats = Seats(settings, cache)
        self._batch = Batch(self._seats)
        self._admission = Admission(settings, self._seats, self._batch)
        self._incoming = Incoming(settings, self._seats, self._batch, self._admission)
        self._outgoing = Outgoing(self._seats)
        self._waiting = ReqQueue()
        self._blocked: ReqState | None = None
        self._states: dict[str, ReqState] = {}
        self._totals = Totals()
        self._arrivals = 0
        self._step = 0
        self._plan: StepPlan | None = None
        self._planned: list[ReqState] = []
        self._outcome = Outcome()
        self.in_flight = 0
        """Copies and storage operations that had not ended at the last plan: an idle loop should plan again soon."""
        pool_tokens = self._seats.pages_total * settings.page_size
        if settings.max_total_tokens is not None:
            pool_tokens = min(pool_tokens, settings.max_total_tokens)
        self._pool_tokens = pool_tokens

    # Requests

    @property
    def idle(self) -> bool:
        """No request in any state, those whose pages a peer still reads included."""
        return not self._states

    def __contains__(self, rid: object) -> bool:
        return rid in self._states

    def add(self, request: Request, *, remote: bool = False, handoff: HandoffSpec | None = None) -> None:
        """Take a request: to be computed here, remotely (decode side), or for a decode engine (prefill side).

        A remote one that wants prompt log-probabilities is computed here: they do not travel.
        Raises BadRequest (id in use, ids outside the vocabulary, bad `held`), PromptTooLong (it could never be
        served), CapacityError (max_queued_requests wait already).
        """
        assert not (remote and handoff), "sched: a request is remote or has a handoff, not both"
        if request.rid in self._states:
            raise BadRequest("rid", request.rid, "an id that no request of this engine has now")
        check_request(request, self.settings, self._pool_tokens)
        if handoff is not None:
            check_handoff(handoff, request, self.settings.page_size)
        queued = len(self._waiting) + len(self._incoming.prealloc)
        if queued >= self.settings.max_queued_requests:
            raise CapacityError(
                f"sched: {queued} requests wait already, expected less than"
                f" max_queued_requests = {self.settings.max_queued_requests}"
            )
        local_reason = ""
        if remote and request.sampling.prompt_logprobs is not None:
            remote, local_reason = False, "prompt_logprobs"
        self._arrivals += 1
        state = ReqState(
            request=request,
            page_size=self.settings.page_size,
            slides=self._seats.window is not None,
            seq=self._arrivals,
            limit=token_limit(request, self.settings, self._pool_tokens),
            stop_ids=stop_ids_of(request, self.settings),
            handoff=handoff,
            remote=remote,
            phase=Phase.PREALLOC if remote else Phase.WAITING,
            local_reason=local_reason,
        )
        if handoff is not None:
            self._outgoing.start(state, handoff)
        self._states[request.rid] = state
        (self._incoming.prealloc if remote else self._waiting).push(state)
        self._totals.requests += 1
        if self.settings.prefetch_policy != "none":
            self._seats.prefetch(state)

    def abort(
        self, rid: str, reason: str, finish: FinishReason = FinishReason.ABORT, *, condemned: bool = False
    ) -> TokenDelta | None:
        """End a request in whatever state it is; its last delta. None = unknown, or asked for by a peer.

        `finish` is what it counts as: STOP where a stop text was found in its answer, ERROR where that cannot be sent.
        `condemned`: its KV is not to be trusted, nothing more of it is published.
        Its pages are free at once, except those that a transfer still reads: they stay held until `chunk_drained`,
        `handoff_drained` or `handoff_ended`. While a step with it is under way, they stay until its commit.
        """
        state = self._states.get(rid)
        if state is None:
            return None
        state.condemned |= condemned
        if state.doomed:
            return None
        self._totals.aborted += finish is FinishReason.ABORT
        self._totals.finished += finish is FinishReason.STOP
        usage = state.usage()
        if state.running and any(state is planned for planned in self._planned):
            state.doomed = True
        elif state.phase is Phase.INFLIGHT:
            state.doomed = True
            self._release_inflight(state)
        else:
            self._end(state)
        if state.handoff is not None:
            return None
        error = "" if finish is FinishReason.STOP else reason
        return TokenDelta(rid=rid, finish=finish, error=error, error_status=499, usage=usage)

    def abort_all(self, reason: str) -> tuple[TokenDelta, ...]:
        """End every request; the last deltas of those that have one."""
        deltas = (self.abort(rid, reason) for rid in list(self._states))
        return tuple(delta for delta in deltas if delta is not None)

    # The step

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step: page growth (retracting the youngest where there is no room), one token for each
        decoding request, prompt chunks up to the budget, oldest first, then newcomers. None = nothing can run now:
        idle, or everybody waits for pages in transit. Every plan that is returned must be committed before the next.
        """
        if self._plan is not None:
            raise InvariantError(f"sched: step {self._plan.step} is not committed, expected that before another plan")
        self._poll()
        retracted = self._batch.grow()
        for state in retracted:
            self._waiting.push(state)
        self._blocked = min(retracted, key=lambda state: state.seq, default=None)
        self._totals.retracted += len(retracted)
        work = self._batch.decode_work()
        planned = list(self._batch.decoding)
        decode_count = len(work)
        budget = self.settings.chunked_prefill_size
        left = 1 << 62 if budget == -1 else budget
        for state in self._batch.prefilling:
            chunk = self._batch.chunk_work(state, left) if left > 0 else None
            if chunk is None:
                left = 0
                break
            work.append(chunk)
            planned.append(state)
            left -= len(chunk.tokens)
        new_count, found = 0, Counter[str]()
        if left > 0 and self._waiting:
            for state, chunk in self._admit(left, now):
                work.append(chunk)
                planned.append(state)
                new_count += 1
                found.update(state.found)
        if not work:
            return None
        self._step += 1
        self._planned = planned
        computed = sum(len(w.tokens) for w in work[decode_count:])
        self._outcome = Outcome(
            prompt_tokens=computed,
            decode_tokens=decode_count,
            new_requests=new_count,
            cached_tokens=found.total(),
            cached_by_tier=found,
            retracted=len(retracted),
        )
        self._totals.computed_tokens += computed + decode_count
        self._plan = StepPlan(step=self._step, work=tuple(work), table_writes=self._seats.take_writes())
        return self._plan

    def _admit(self, budget: int, now: float) -> list[tuple[ReqState, SeqWork]]:
        """Bring in waiting requests, in the policy's order, until budget, rows or pages are used up."""
        admitted: list[tuple[ReqState, SeqWork]] = []
        seats_left = self.settings.max_running_requests - self._batch.seats_taken
        if seats_left <= 0:
            return admitted
        older_seq = self._incoming.blocked_seq
        passed: list[ReqState] = []
        for state in admission_order(self._waiting, self.settings, self._seats.cached, 2 * seats_left):
            if len(admitted) == seats_left or budget < min(self.settings.page_size, state.known):
                break
            if self._admission.has_twin(state) or self._admission.awaits_storage(state, now):
                continue
            if (older_seq is not None and older_seq < state.seq) or not self._admission.place(state):
                self._blocked = state
                break
            chunk = self._seat(state, budget, now)
            budget -= len(chunk.tokens)
            admitted.append((state, chunk))
            passed.append(state)
        if self.settings.schedule_policy == "lpm" and passed:
            youngest = max(state.seq for state in passed)
            for state in self._waiting.first(self.settings.lpm_scan_requests):
                state.skips += state.seq < youngest
        return admitted

    def _seat(self, state: ReqState, budget: int, now: float) -> SeqWork:
        """Let a placed request run."""
        self._waiting.remove(state)
        state.move(Phase.PREFILL)
        self._seats.sit(state)
        self._batch.prefilling.append(state)
        state.retracted = False
        if state.started is None:
            state.started = now
            state.cached_tokens = beyond(state.found, state.handoff.held if state.handoff is not None else 0)
        chunk = self._batch.chunk_work(state, budget)
        assert chunk is not None, f"sched: request {state.rid} has no chunk of {budget} tokens from {state.computed}"
        return chunk

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> Outcome:
        """Take in what a step found: tokens appended, stops found, pages published, chunks announced.

        Raises InvariantError where plan or result is not the one under way.
        """
        check_result(self._plan, plan, result)
        if self._seats.open_loads:
            self._take_failed(self._seats.settle())
        planned, outcome = self._planned, self._outcome
        self._plan, self._planned = None, []
        deltas: list[TokenDelta] = []
        chunks: list[ChunkReady] = []
        slides = self._seats.window is not None
        for state, work, seq in zip(planned, plan.work, result.seqs, strict=True):
            phase = state.phase
            if phase is not Phase.DECODE and phase is not Phase.PREFILL:
                continue  # what it computed on never came from the host
            state.computed = work.start + len(work.tokens)
            if state.doomed:
                self._end(state)
            elif phase is Phase.DECODE:
                if slides:
                    self._seats.advance(state, state.computed)
                deltas.append(self._take_token(state, seq.token, seq.logprobs, now))
            else:
                self._commit_chunk(state, work, seq, now, deltas, chunks)
        return replace(outcome, deltas=tuple(deltas), chunks=tuple(chunks))

    def _poll(self) -> None:
        """Copies and storage operations that have ended; the only other place is `commit`, where loads were read."""
        if not self._seats.tiered:
            return
        news = self._seats.poll()
        self.in_flight = news.in_flight
        self._take_failed(news.failed_loads)

    def _take_failed(self, leases: tuple[Lease, ...]) -> None:
        """The KV of these leases never came from the host: their requests begin once more."""
        for state in begin_again(leases, self._states.values(), self._batch, self._incoming, self._seats):
            self._waiting.push(state)
            if state.doomed:
                self._end(state)

    def _commit_chunk(
        self, state: ReqState, work: SeqWork, seq: SeqResult, now: float, deltas: list[TokenDelta],
        chunks: list[ChunkReady],
    ) -> None:  # fmt: skip
        if work.next_ids is not None and state.prompt_logprobs is not None:
            if len(seq.prompt_logprobs) != len(work.next_ids):
                raise InvariantError(
                    f"sched: request {state.rid} got {len(seq.prompt_logprobs)} prompt log-probabilities,"
                    f" expected {len(work.next_ids)}"
                )
            state.prompt_logprobs.extend(seq.prompt_logprobs[len(state.prompt_logprobs) - 1 - work.start :])
        self._seats.publish(state)
        if work.sample is None:
            chunk = self._outgoing.announce(state) if state.handoff else None
            if chunk is not None:
                chunks.append(chunk)
            self._seats.advance(state, state.computed)
            return
        self._batch.remove(state)
        if state.handoff is not None:
            self._known_token(state, seq.token)
            chunks.append(self._outgoing.finish(state, seq, now))
            return
        self._seats.advance(state, state.computed)
        state.move(Phase.DECODE)
        self._batch.decoding.append(state)
        deltas.append(self._take_token(state, seq.token, seq.logprobs, now))

    def _known_token(self, state: ReqState, token: int | None) -> int:
        if token is None or not 0 <= token < self.settings.vocab_size:
            raise InvariantError(
                f"sched: request {state.rid} got token {token}, expected an id from 0 to {self.settings.vocab_size - 1}"
            )
        return token

    def _take_token(self, state: ReqState, found: int | None, logprobs: TokenLogprobs | None, now: float) -> TokenDelta:
        """A decoding request has one more token; end it where that was its last."""
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
            self._end(state)
        return delta

    def _end(self, state: ReqState) -> None:
        """Out of its queue, everything given back; held pages alone keep it known until they are drained."""
        self._seats.forget_prefetch(state)
        if state.running:
            self._batch.remove(state)
            self._seats.leave(state)
        elif state.phase is Phase.WAITING:
            self._waiting.remove(state)
        else:
            self._incoming.withdraw(state)
        if state.holds:
            state.move(Phase.INFLIGHT)
            state.doomed = True
            self._outgoing.inflight[state.rid] = state
            return
        state.move(Phase.ENDED)
        del self._states[state.rid]

    # Decode side of a handoff

    def is_remote(self, rid: str) -> bool:
        """Whether its prompt is still wanted from a prefill engine: it waits for pages, or they are granted."""
        state = self._states.get(rid)
        return state is not None and state.phase in (Phase.PREALLOC, Phase.TRANSFER)

    def quarantine(self, spans: Sequence[PageSpan]) -> None:
        """A peer may still write these pages of a request that is about to end or to be computed here: nobody gets
        them before `quarantine_over`. Called before the `abort` or `recompute`."""
        self._seats.quarantine(spans)

    def quarantine_over(self, spans: Sequence[PageSpan]) -> None:
        """No peer writes them any more."""
        self._seats.quarantine_over(spans)

    def take_reservations(self, now: float) -> tuple[Reservation, ...]:
        """Pages for remote requests, oldest first, as far as there is room; their own cached prefix is locked.

        To be called before every plan while remote requests wait: one that found no room keeps younger ones out.
        """
        blocked = self._blocked
        blocked_seq = blocked.seq if blocked is not None and blocked.phase is Phase.WAITING else None
        return tuple(self._incoming.reserve(now, blocked_seq, self._go_local))

    def landed(
        self, rid: str, token: int, logprobs: TokenLogprobs | None, now: float, *, prefill_engine: str = "",
        handoff_bytes: int = 0, handoff_seconds: float = 0.0, cached_tokens: Mapping[str, int] | None = None,
    ) -> TokenDelta | None:  # fmt: skip
        """The reserved pages are filled and verified: publish them, let the request decode, hand out its first token.

        `cached_tokens`: what the prefill engine found in its own cache; added to this engine's. None = the request
        is not in transfer (aborted, recomputed): nothing changes.
        """
        state = self._batch.transfer.get(rid)
        if state is None:
            return None
        state.prefill_engine = prefill_engine
        state.handoff_bytes = handoff_bytes
        state.handoff_seconds = handoff_seconds
        for tier, count in (cached_tokens or {}).items():
            state.cached_tokens[tier] = state.cached_tokens.get(tier, 0) + count
        self._incoming.take_over(state)
        return self._take_token(state, token, logprobs, now)

    def recompute(self, rid: str, reason: str) -> bool:
        """The prompt is computed here after all: reserved pages go back, the request waits at the place of its age.

        False = it is neither waiting for pages nor in transfer: nothing changes.
        """
        state = self._states.get(rid)
        if state is None or state.phase not in (Phase.PREALLOC, Phase.TRANSFER):
            return False
        self._totals.recomputed += 1
        self._go_local(state, reason)
        return True

    def _go_local(self, state: ReqState, reason: str) -> None:
        self._incoming.withdraw(state)
        state.move(Phase.WAITING)
        state.remote = False
        state.local_reason = reason
        state.started = None
        self._waiting.push(state)

    # Prefill side of a handoff

    def chunk_drained(self, rid: str, spans: tuple[PageSpan, ...]) -> bool:
        """A chunk announced for `rid` was read: drop its hold. False = no such chunk is held: nothing changes."""
        state = self._states.get(rid)
        if state is None or not self._outgoing.chunk_drained(state, spans):
            return False
        if state.phase is Phase.INFLIGHT and state.doomed:
            self._release_inflight(state)
        return True

    def handoff_drained(self, rid: str) -> bool:
        """Decode has everything: the request ends here. False = it is not in flight: nothing changes."""
        return rid in self._outgoing.inflight and self.handoff_ended(rid)

    def handoff_ended(self, rid: str) -> bool:
        """The handoff is over, however it ended, and nobody reads its pages any more: drop all holds; end the request
        in whatever state it is. False = unknown: nothing changes."""
        state = self._states.get(rid)
        if state is None or state.handoff is None:
            return False
        self._outgoing.drop_holds(state)
        if state.phase is Phase.INFLIGHT:
            if not state.doomed:
                self._totals.finished += 1
            state.doomed = True
            self._release_inflight(state)
        else:
            self.abort(rid, "handoff ended")
        return True

    def _release_inflight(self, state: ReqState) -> None:
        """Give the lease of a request in flight back; forget it when its last hold is gone."""
        self._seats.leave(state)
        if state.holds:
            return
        del self._outgoing.inflight[state.rid]
        state.move(Phase.ENDED)
        del self._states[state.rid]

    def stats(self) -> SchedStats:
        """Gauges and a copy of the counters. Cost: O(waiting)."""
        return sched_stats(
            self._totals, self._seats.cache, running=len(self._batch), queued=len(self._waiting),
            retracted=sum(state.retracted for state in self._waiting), inflight=len(self._outgoing.inflight),
            prealloc=len(self._incoming.prealloc), transfer=len(self._batch.transfer), in_flight=self.in_flight,
        )  # fmt: skip

    def users_of(self, part: Part, page: int) -> tuple[str, ...]:
        """Requests whose rows name a device page now, whoever owns it. Cost: all pages of all requests."""
        rows = ((state.rid, state.full if part is Part.FULL else state.swa) for state in self._states.values())
        return tuple(rid for rid, row in rows if row is not None and page in row.named())

    def pages_of(self, rid: str) -> OwnPages | None:
        """A request's tokens and pages; None = unknown."""
        return self._states[rid].own_pages() if rid in self._states else None

    def sanity_check(self) -> None:
        """Queues, rows, pages and the ledger agree. Raises InvariantError. Cost: O(pages), not for every step."""
        check_scheduler(
            states=self._states, waiting=self._waiting, batch=self._batch, prealloc=self._incoming.prealloc,
            inflight=self._outgoing.inflight, seats=self._seats, settings=self.settings,
        )  # fmt: skip
