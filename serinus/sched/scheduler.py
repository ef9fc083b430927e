"""The scheduler: decides each step. `plan` says who computes what on which pages, `commit` takes the result in.

Torch-free, clock-free (`now` is an argument), one thread. Up to `depth` plans are under way; they run and are committed
in order, so a page that was freed may be handed out at once: whoever used it does so in an earlier plan.

The rules live next door: roster.py (who is where), agenda.py (the next step) and intake.py (what came of one),
queues.py (order), admission.py (room), batch.py (the batch), seats.py (rows and pages), endings.py (when it ends),
incoming.py and outgoing.py (the two sides of a handoff).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from serinus.cache import PrefixCache
from serinus.core.errors import BadRequest, CapacityError, InvariantError
from serinus.core.handoff import HandoffSpec, Reservation
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs
from serinus.sched.admission import Admission
from serinus.sched.agenda import Agenda
from serinus.sched.batch import Batch
from serinus.sched.checks import check_result, check_scheduler
from serinus.sched.endings import check_handoff, check_request, stop_ids_of, token_limit
from serinus.sched.incoming import Incoming
from serinus.sched.intake import Intake
from serinus.sched.open_step import OpenStep
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_row import OwnPages
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.roster import Roster
from serinus.sched.seats import Seats
from serinus.sched.settings import SchedSettings
from serinus.sched.stats import Outcome, SchedStats, Totals, sched_stats

__all__ = ["Scheduler"]


class Scheduler:
    """All requests of one engine, from `add` to the delta (or chunk) that ends them."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache) -> None:
        self.settings = settings
        self._seats = seats = Seats(settings, cache)
        self._batch = batch = Batch(seats, settings.depth)
        admission = Admission(settings, seats, batch)
        self._incoming = Incoming(settings, seats, batch, admission)
        self._outgoing = Outgoing(seats)
        self._roster = Roster(seats, batch, self._incoming, self._outgoing)
        self._totals = Totals()
        self._agenda = Agenda(settings, seats, batch, admission, self._incoming, self._roster, self._totals)
        self._intake = Intake(settings.vocab_size, seats, batch, self._outgoing, self._roster, self._totals)
        self._states, self._waiting = self._roster.states, self._roster.waiting
        self._open: deque[OpenStep] = deque()
        self._journal: list[tuple[str, str]] | None = [] if settings.journal else None
        self._arrivals = 0
        self.in_flight = 0
        """Copies and storage operations that had not ended at the last plan: an idle loop should plan again soon."""
        pool_tokens = self._seats.pages_total * settings.page_size
        if settings.max_total_tokens is not None:
            pool_tokens = min(pool_tokens, settings.max_total_tokens)
        self._pool_tokens = pool_tokens

    # Requests

    @property
    def idle(self) -> bool:
        """No request in any state, those whose pages a peer still reads included, and no plan under way."""
        return not self._states and not self._open

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
            journal=self._journal,
        )
        if handoff is not None:
            self._outgoing.start(state, handoff)
        self._roster.enter(state)
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
        `handoff_drained` or `handoff_ended`. While steps with it are under way, they stay until the commit of
        the last of them.
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
        if state.under_way:
            state.doomed = True
        elif state.phase is Phase.INFLIGHT:
            state.doomed = True
            self._roster.release_inflight(state)
        else:
            self._roster.end(state)
        if state.handoff is not None:
            return None
        error = "" if finish is FinishReason.STOP else reason
        return TokenDelta(rid=rid, finish=finish, error=error, error_status=499, usage=usage)

    def abort_all(self, reason: str) -> tuple[TokenDelta, ...]:
        """End every request; the last deltas of those that have one."""
        deltas = (self.abort(rid, reason) for rid in list(self._states))
        return tuple(delta for delta in deltas if delta is not None)

    # The step

    @property
    def under_way(self) -> int:
        """Plans that are not committed."""
        return len(self._open)

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step: page growth (retracting the youngest where there is no room), one token for each
        decoding request (of its share, at a depth of more than 1), prompt chunks up to the budget, oldest first, then
        newcomers. None = nothing can run now: idle, or everybody waits for pages in transit or for plans under way.

        Every plan that is returned must be run after those before it, and committed. Its arrays are as they are for as
        long as it is under way. Raises InvariantError where `depth` plans are.
        """
        if len(self._open) >= self.settings.depth:
            raise InvariantError(
                f"sched: step {self._open[0].plan.step} is not committed, expected that before another plan"
                f" (depth {self.settings.depth})"
            )
        if self._seats.tiered:
            self.in_flight = self._seats.poll()
            self._begin_again()
        step = self._agenda.next_step(now)
        if step is None:
            return None
        self._open.append(step)
        return step.plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> Outcome:
        """Take in what the oldest step under way found: tokens appended, stops found, pages published, chunks
        announced. The loads it waited for are settled first.

        Raises InvariantError where plan or result is not that of the oldest one.
        """
        check_result(self._open[0].plan if self._open else None, plan, result)
        loading = bool(self._seats.open_loads)
        if loading:
            self._seats.settle(self._open[0].loads)
            self._begin_again()
        outcome = self._intake.take(self._open.popleft(), result, now)
        if loading:
            self._begin_again()
        return outcome

    def _begin_again(self) -> None:
        """Whose KV never came from the host begins once more: what steps under way compute on it is nobody's."""
        for state in self._roster.begin_again(self._seats.take_failed()):
            for step in self._open:
                step.forget(state)

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
        return tuple(self._incoming.reserve(now, self._agenda.blocked_seq, self._roster.go_local))

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
        self._begin_again()
        return self._intake.take_token(state, token, logprobs, now)

    def recompute(self, rid: str, reason: str) -> bool:
        """The prompt is computed here after all: reserved pages go back, the request waits at the place of its age.

        False = it is neither waiting for pages nor in transfer: nothing changes.
        """
        state = self._states.get(rid)
        if state is None or state.phase not in (Phase.PREALLOC, Phase.TRANSFER):
            return False
        self._totals.recomputed += 1
        self._roster.go_local(state, reason)
        return True

    # Prefill side of a handoff

    def chunk_drained(self, rid: str, spans: tuple[PageSpan, ...]) -> bool:
        """A chunk announced for `rid` was read: drop its hold. False = no such chunk is held: nothing changes."""
        state = self._states.get(rid)
        if state is None or not self._outgoing.chunk_drained(state, spans):
            return False
        if state.phase is Phase.INFLIGHT and state.doomed:
            self._roster.release_inflight(state)
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
            self._roster.release_inflight(state)
        else:
            self.abort(rid, "handoff ended")
        return True

    # How things stand

    def stats(self) -> SchedStats:
        """Gauges and a copy of the counters. Cost: O(waiting)."""
        return sched_stats(
            self._totals, self._seats.cache, running=len(self._batch), queued=len(self._waiting),
            retracted=sum(state.retracted for state in self._waiting), inflight=len(self._outgoing.inflight),
            prealloc=len(self._incoming.prealloc), transfer=len(self._batch.transfer), in_flight=self.in_flight,
        )  # fmt: skip

    def take_moves(self) -> tuple[tuple[str, str], ...]:
        """Who changed queue since the last call, in order: (rid, queue), by the names of QUEUE_OF; "" = it is gone.

        Raises InvariantError where the settings keep no journal. Cost: the changes.
        """
        if self._journal is None:
            raise InvariantError("sched: changes of queue are not written down, expected settings with journal = True")
        moves = tuple(self._journal)
        self._journal.clear()
        return moves

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
            inflight=self._outgoing.inflight, seats=self._seats, settings=self.settings, steps=self._open,
        )  # fmt: skip
