"""The scheduler: decides each step. `plan` assigns tokens and pages to requests, `commit` takes the result in.

Torch-free, clock-free (`now` is an argument), one thread. Up to `depth` plans are under way; they run and are committed
in order, so a freed page may be allocated again at once: its last user reads it in an earlier plan.

The rules: request_queues.py (which request is where), step_planner.py (the next step), step_commit.py (its result),
queues.py (order), admission.py (room), storage_asks.py (when files are read), batch.py (the batch), page_allocator.py
(rows and pages), endings.py (when a request ends), incoming.py and outgoing.py (the two sides of a handoff), healing.py
(wrong KV).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PrefixCache
from serinus.core.errors import BadRequest, InvariantError, TooLate
from serinus.core.handoff import HandoffSpec, Reservation
from serinus.core.parts import OwnPages, PageSpan, Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs
from serinus.core.stamps import ChainHashes
from serinus.sched.admission import Admission
from serinus.sched.batch import Batch
from serinus.sched.checks import check_result, check_scheduler
from serinus.sched.endings import check_handoff, check_request, deadline_of, ending_with, stop_ids_of, token_limit
from serinus.sched.handoff_choice import Paces, PrefillPace
from serinus.sched.healing import Heals
from serinus.sched.incoming import Incoming
from serinus.sched.open_step import OpenStep
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import place_of
from serinus.sched.request_queues import RequestQueues
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings
from serinus.sched.shares import FairShares
from serinus.sched.stats import Outcome, SchedStats, Totals, sched_stats
from serinus.sched.step_commit import StepCommit
from serinus.sched.step_pace import StepPace
from serinus.sched.step_planner import StepPlanner
from serinus.sched.storage_asks import StorageAsks


class Scheduler:
    """All requests of one engine, from `add` to the delta (or chunk) that ends them."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache, chain_hashes: ChainHashes | None = None) -> None:
        """`chain_hashes`: work says by chain hashes whose KV it reads, for a canary; None = there is none."""
        self.settings = settings
        self._chain_hashes = chain_hashes
        self._allocator = allocator = PageAllocator(settings, cache)
        self._batch = batch = Batch(allocator, settings.depth, verifies=settings.heals or settings.raises)
        self._admission = admission = Admission(settings, allocator, batch)
        shares = FairShares()
        self.incoming = Incoming(settings, allocator, batch, admission, shares)
        """For prompts that prefill engines compute: what was decided of them, and pages that peers may write."""
        self._outgoing = Outgoing(allocator)
        self._requests = RequestQueues(allocator, batch, self.incoming, self._outgoing, shares)
        self._storage_asks = StorageAsks(allocator, self._requests.waiting, self.incoming.prealloc)
        self._totals = Totals()
        self._pace = StepPace(
            step_s_max=settings.step_s_max, tokens_max=settings.chunked_prefill_size, page_size=settings.page_size
        )
        self._planner = StepPlanner(
            settings, allocator, batch, admission, self.incoming, self._requests, self._totals, self._pace
        )
        self._step_commit = StepCommit(
            settings.vocab_size, allocator, batch, self._outgoing, self._requests, self._totals
        )
        self._states, self._waiting = self._requests.states, self._requests.waiting
        self.requests = self._states.values()
        """All requests, in any state, oldest first; to be read."""
        windows = allocator.windows.items()
        self._verify_windows = {part: window for part, window in windows if part in settings.verify_parts}
        self._open: deque[OpenStep] = deque()
        self.heals = Heals(settings, allocator, self.incoming, self._requests, self._open)
        """For requests that read wrong KV."""
        self._committed_at = 0.0
        self._arrivals = 0
        self.in_flight = 0
        """Copies and storage operations that had not ended at the last plan: an idle loop should plan again soon."""
        pool_tokens = self._allocator.pages_total * settings.page_size
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

    def add(
        self, request: Request, *, remote: bool = False, handoff: HandoffSpec | None = None, local_reason: str = ""
    ) -> None:
        """Take a request: its prompt is computed here (`local_reason`: why, in a decode engine), by a prefill engine
        (`remote`), or here for a decode engine (`handoff`).

        A remote request that wants log-probabilities or pooled states of its prompt is computed here: a handoff does
        not carry them.
        Raises BadRequest (id in use, ids outside the vocabulary, bad `held`), PromptTooLong (it could never be
        served), CapacityError (max_queued_requests wait already), RateLimited (too many of its API key do),
        TooLate (its prompt cannot be computed before its deadline).
        """
        assert not (remote and handoff), "sched: a request is remote or has a handoff, not both"
        if request.rid in self._states:
            raise BadRequest("rid", request.rid, "an id that no request of this engine has now")
        self.check(request)
        if handoff is not None:
            check_handoff(handoff, request, self.settings.page_size)
        self._requests.check_room(request, self.settings)
        deadline = deadline_of(request, self.settings)
        if remote and (reason := request.sampling.stays_home):
            remote, local_reason = False, reason
        # an id that is computed again can be compared with the one that left; a log-probability cannot
        leaves_early = request.stream and not self.settings.confirms_streams and request.sampling.logprobs is None
        self._arrivals += 1
        state = ReqState(
            request=request,
            page_size=self.settings.page_size,
            windows=self._allocator.windows,
            seq=place_of(request, self._arrivals, deadline, self.settings),
            deadline=deadline,
            limit=token_limit(request, self.settings, self._pool_tokens),
            stop_ids=stop_ids_of(request, self.settings),
            handoff=handoff,
            remote=remote,
            chain_hashes=self._chain_hashes,
            phase=Phase.PREALLOC if remote else Phase.WAITING,
            local_reason=local_reason,
            turn_size=self.settings.turn_size or self.settings.page_size,
            verify_steps=self.settings.verify_steps,
            verify_windows=self._verify_windows,
            confirmed=self.settings.heals and not leaves_early,
        )
        if not remote and self._planner.is_late(state, request.arrival):
            raise TooLate(
                f"sched: the prompt has {len(request.prompt)} tokens, which takes longer than the"
                f" {deadline - request.arrival:g} s that its timeout (or --request-timeout) leaves"
            )
        if handoff is not None:
            self._outgoing.start(state, handoff)
        self._requests.enter(state)
        self._totals.requests += 1
        if self.settings.prefetch_policy != "none":
            self._storage_asks.enter(state, request.arrival)

    def check(self, request: Request) -> None:
        """Raise what `add` would raise for this request by itself: BadRequest, PromptTooLong."""
        check_request(request, self.settings, self._pool_tokens)

    def deadline_of(self, request: Request) -> float:
        """Clock at which a request must have ended; inf = there is no such time."""
        return deadline_of(request, self.settings)

    def abort(
        self, rid: str, reason: str, finish: FinishReason = FinishReason.ABORT, *, untrusted: bool = False,
        kept: int | None = None,
    ) -> TokenDelta | None:  # fmt: skip
        """End a request in any state; returns its last delta. None = it is unknown, aborted already, or a peer's.

        `finish` is its finish reason: STOP where a stop text was found in its answer, ERROR where the answer cannot be
        sent. `untrusted`: its KV may be wrong, nothing more of it is published. `kept`:
        tokens of its answer, where those behind them do not count.
        Its pages are free at once, except those that a transfer still reads: they stay held until `chunk_drained`,
        `handoff_drained` or `handoff_ended`. While steps with the request are under way, its pages stay allocated until
        the commit of the last of them.
        """
        state = self._states.get(rid)
        if state is None:
            return None
        state.untrusted |= untrusted
        if state.aborting:
            return None
        self._totals.aborted += finish is FinishReason.ABORT
        self._totals.finished += finish is FinishReason.STOP
        usage = state.usage(ends=True, kept=kept)
        if state.under_way:
            state.aborting = True
        elif state.phase is Phase.INFLIGHT:
            state.aborting = True
            self._requests.release_inflight(state)
        else:
            self._requests.end(state)
        if state.handoff is not None:
            return None
        error = "" if finish is FinishReason.STOP else reason
        return TokenDelta(rid=rid, finish=finish, error=error, error_status=499, usage=usage)

    def abort_all(self, reason: str) -> tuple[TokenDelta, ...]:
        """End every request; the last deltas of those that have one."""
        deltas = (self.abort(rid, reason) for rid in list(self._states))
        return tuple(delta for delta in deltas if delta is not None)

    def take_unverified(self) -> dict[str, OwnPages]:
        """Requests that would have been retracted by the latest plan, had all of their KV been verified: the tokens
        that it is of, and their pages. `vouch` or `heals.heal` is to be called for each, before the next plan."""
        unverified, self._batch.unverified = self._batch.unverified, {}
        return {rid: each.own_pages(each.computed) for rid, each in unverified.items()}

    # The step

    @property
    def under_way(self) -> int:
        """Plans that are not committed."""
        return len(self._open)

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step: page growth (retracting the youngest where there is no room), one token for each
        decoding request (of its share, at a depth of more than 1), prompt chunks up to the budget, oldest first, then
        newcomers; a long prompt leaves half of the budget to shorter ones. The budget is `chunked_prefill_size`, or
        less to keep `step_s_max` at the rate of the last steps. None = nothing can run now: there is no request, or all
        wait for pages in transit or for plans under way.

        Plans must be run in the order in which they were returned, and each must be committed. The arrays of a plan do
        not change while it is under way. Raises InvariantError where `depth` plans are under way.
        """
        if len(self._open) >= self.settings.depth:
            raise InvariantError(
                f"sched: step {self._open[0].plan.step} is not committed, expected that before another plan"
                f" (depth {self.settings.depth})"
            )
        if self._allocator.tiered:
            self.in_flight = self._allocator.poll()
            self._begin_again()
            self._storage_asks.turn(now)
        step = self._planner.next_step(now)
        if step is None:
            return None
        self._open.append(step)
        return step.plan

    def take_late(self) -> list[str]:
        """Requests whose turn came in the latest plans, too late for their deadline: they are to be ended."""
        return self._planner.take_late()

    def settle(self) -> None:
        """The oldest step under way has run: settle the loads that it waited for. Requests whose KV never came begin
        again, and what the step found or computed for them is dropped. To be called before its findings are
        judged; a `commit` does it too."""
        if self._open and self._allocator.open_loads:
            self._allocator.settle(self._open[0].loads)
            self._begin_again()

    def dropped(self) -> frozenset[str]:
        """Requests that began again since the oldest step under way was planned."""
        if not self._open:
            return frozenset()
        step = self._open[0]
        return frozenset(work.rid for work, state in zip(step.plan.work, step.states, strict=True) if state is None)

    def unloaded(self) -> frozenset[str]:
        """Those of them whose KV never came from the host."""
        return frozenset(self._open[0].unloaded) if self._open else frozenset()

    def commit(self, plan: StepPlan, result: StepResult, now: float, checked: Sequence[int] = ()) -> Outcome:
        """Take in the result of the oldest step under way: append tokens, find stops, publish pages, announce chunks.
        The loads that the step waited for are settled first. `checked`: slots that a canary verified of each work;
        empty = nothing was.

        Raises InvariantError where `plan` or `result` is not that of the oldest step.
        """
        check_result(self._open[0].plan if self._open else None, plan, result)
        loading = bool(self._allocator.open_loads)
        self.settle()
        step = self._open.popleft()
        self._note_time(step, now)
        outcome = self._step_commit.apply(step, result, now, checked)
        if loading:
            self._begin_again()
        return outcome

    def ending(self, result: StepResult) -> dict[str, OwnPages]:
        """Requests that this result of the oldest step under way ends, but whose KV it does not verify as a whole: what
        is to be verified of each before its last token leaves, the KV that this step wrote included. A token that is
        another one than was given out before a heal ends its request too: which of the two is wrong is known then."""
        verify_steps, step = self.settings.verify_steps, self._open[0]
        rows: dict[str, OwnPages] = {}
        if verify_steps <= 1:
            return rows
        for state, work, seq in zip(step.states, step.plan.work, result.seqs, strict=True):
            if state is None or state.aborting or work.whole or seq.token is None:
                continue
            if ending_with(state, seq.token, ends=seq.ends) or state.contradicts(seq.token):
                rows[state.rid] = state.own_pages(work.start + len(work.tokens))
        return rows

    def stopping(self, rid: str) -> dict[str, OwnPages]:
        """A front found a stop text in what a request gave out: what is to be verified of it before it ends with that.
        Where some of it is being computed again after a heal, it ends by itself when that is done; see `halts`."""
        state = self._states.get(rid)
        if state is None or not state.running or state.verified == state.computed or self.halts(rid):
            return {}
        return {rid: state.own_pages(state.computed)}

    def halt(self, rid: str) -> None:
        """A request gives out no more than it has: it ends by itself as soon as all of that is known to be right."""
        state = self._states[rid]
        state.limit = min(state.limit, max(state.left, state.known))

    def halts(self, rid: str) -> bool:
        """Whether tokens that it gave out are to be computed again."""
        state = self._states.get(rid)
        return state is not None and not state.aborting and state.left > state.known

    def vouch(self, rows: Mapping[str, OwnPages], slots: Mapping[str, int]) -> None:
        """These requests were verified by themselves, as far as these tokens reach, so many slots of each, and are
        sound."""
        for state in (self._states[rid] for rid in rows if rid in self._states):
            state.vouch(len(rows[state.rid].tokens), slots.get(state.rid, 0))

    def _note_time(self, step: OpenStep, now: float) -> None:
        """What the step took: since it was planned or, with several under way, since the one before it ended."""
        begun, self._committed_at = max(step.planned_at, self._committed_at), now
        outcome = step.outcome
        self._pace.took(now - begun, prompt_tokens=outcome.prompt_tokens, decodes=bool(outcome.decode_tokens))

    def _begin_again(self) -> None:
        """Requests whose KV could not be loaded from the host start again: steps under way drop their results."""
        for state in self._requests.begin_again(self._allocator.take_failed()):
            for step in self._open:
                step.forget(state, unloaded=True)

    # Decode side of a handoff

    def is_remote(self, rid: str) -> bool:
        """Whether the request still needs its prompt from a prefill engine: it waits for pages, or has reserved pages
        that are not filled."""
        state = self._states.get(rid)
        return state is not None and state.phase in (Phase.PREALLOC, Phase.TRANSFER)

    def take_reservations(
        self, now: float, there: Mapping[str, PrefillPace] | None = None, still: frozenset[str] = frozenset()
    ) -> tuple[Reservation, ...]:
        """Reserve pages for remote requests, oldest first, as far as there is room; their cached prefix is locked.

        To be called before every plan while remote requests wait: the planner admits no request that comes behind a
        remote one without room or without a row. `there`: paces of prefill engines, by address. `still`: those that
        stand still.
        """
        self._admission.still = still
        paces = Paces(here=self._planner.prefill_pace, there=dict(there or {}))
        return tuple(self.incoming.reserve(now, self._planner.blocked, self._requests.go_local, paces))

    def prefill_pace(self) -> PrefillPace:
        """How soon a prompt that comes now is computed here."""
        return self._planner.prefill_pace()

    def landed(
        self, rid: str, token: int, logprobs: TokenLogprobs | None, now: float, *, prefill_engine: str = "",
        handoff_backend: str = "", handoff_bytes: int = 0, handoff_seconds: float = 0.0,
        cached_tokens: Mapping[str, int] | None = None, ends: bool = False, slots_checked: int = 0,
    ) -> TokenDelta | None:  # fmt: skip
        """The reserved pages are filled and verified: publish them, let the request decode, hand out its first token.

        `cached_tokens`: tokens that the prefill engine found in its own cache; added to this engine's. `ends`: the
        answer is complete with its first token. `slots_checked`: of a canary's check of these pages. Returns None
        where the request is not in transfer (aborted, recomputed): nothing changes.
        """
        state = self._batch.transfer.get(rid)
        if state is None:
            return None
        state.prefill_engine = prefill_engine
        state.handoff_backend = handoff_backend
        state.handoff_bytes = handoff_bytes
        state.handoff_seconds = handoff_seconds
        for tier, count in (cached_tokens or {}).items():
            state.cached_tokens[tier] = state.cached_tokens.get(tier, 0) + count
        self.incoming.take_over(state, self._totals, slots_checked)
        self._begin_again()
        if state.known > state.prompt_len:  # asked for again: this token is known to be right already
            return None
        return self._step_commit.take_token(state, token, logprobs, now, ends=ends)

    def recompute(self, rid: str, reason: str) -> bool:
        """Compute the prompt here after all: the reserved pages are freed, and the request enters the local queue at
        the position of its age.

        False = the request neither waits for pages nor is in transfer: nothing changes.
        """
        state = self._states.get(rid)
        if state is None or state.phase not in (Phase.PREALLOC, Phase.TRANSFER):
            return False
        self._totals.recomputed += 1
        self._requests.go_local(state, reason)
        return True

    # Prefill side of a handoff

    def chunk_drained(self, rid: str, spans: tuple[PageSpan, ...]) -> bool:
        """A chunk announced for `rid` was read: drop its hold. False = no such chunk is held: nothing changes."""
        state = self._states.get(rid)
        if state is None or not self._outgoing.chunk_drained(state, spans):
            return False
        if state.phase is Phase.INFLIGHT and state.aborting:
            self._requests.release_inflight(state)
        return True

    def handoff_drained(self, rid: str) -> bool:
        """The decode engine has all pages: the request ends here. False = it is not in flight: nothing changes."""
        return rid in self._outgoing.inflight and self.handoff_ended(rid)

    def handoff_ended(self, rid: str) -> bool:
        """The handoff has ended, in success or failure, and its pages are not read any more: drop all holds, and end
        the request in any state. False = the request is unknown: nothing changes."""
        state = self._states.get(rid)
        if state is None or state.handoff is None:
            return False
        self._outgoing.drop_holds(state)
        if state.phase is Phase.INFLIGHT:
            if not state.aborting:
                self._totals.finished += 1
            state.aborting = True
            self._requests.release_inflight(state)
        else:
            self.abort(rid, "handoff ended")
        return True

    def waiting_beyond(self, tokens: int) -> list[str]:
        """Requests without pages that cannot run in a pool of so many tokens."""
        waiting = (*self._waiting, *self.incoming.prealloc)
        return [state.rid for state in waiting if state.known >= tokens]

    # Statistics and checks

    @property
    def is_blocked(self) -> bool:
        """Whether a request that waits found no room at its last try. Others wait for files, or were not tried yet."""
        return self._planner.blocked is not None or self.incoming.blocked is not None

    @property
    def running_count(self) -> int:
        """Requests in the batch: prefilling or decoding."""
        return len(self._batch)

    @property
    def waiting_count(self) -> int:
        """Requests waiting to be computed here."""
        return len(self._waiting)

    @property
    def totals(self) -> Totals:
        """The counters as they grow; to be read."""
        return self._totals

    def stats(self) -> SchedStats:
        """Gauges and a copy of the counters. Cost: O(waiting)."""
        return sched_stats(
            self._totals, self._allocator.cache, running=len(self._batch), queued=len(self._waiting),
            retracted=sum(state.retracted for state in self._waiting), inflight=len(self._outgoing.inflight),
            prealloc=len(self.incoming.prealloc), transfer=len(self._batch.transfer), in_flight=self.in_flight,
        )  # fmt: skip

    def users_of(self, part: Part, pages: int | NDArray[np.int32]) -> tuple[str, ...]:
        """Requests whose rows name a device page (or one of some) now, its owner or not. Cost: all pages of all
        requests."""
        rows = [(state.rid, row.named()) for state in self._states.values() for row in state.rows if row.part is part]
        if isinstance(pages, int):
            return tuple(rid for rid, named in rows if (named == pages).any())
        return tuple(rid for rid, named in rows if np.isin(named, pages).any())

    def rows_of(self, rids: Iterable[str]) -> dict[Part, NDArray[np.int32]]:
        """The device pages that rows of these requests name, by part; unknown ones have none. Cost: their pages."""
        named: dict[Part, list[NDArray[np.int32]]] = {}
        for state in (self._states[rid] for rid in rids if rid in self._states):
            for row in state.rows:
                named.setdefault(row.part, []).append(row.named())
        return {part: np.concatenate(pages) for part, pages in named.items()}

    def client_of(self, rid: str) -> str:
        """What the client calls a request: prompts of decode engines are called by their handoff here."""
        state = self._states.get(rid)
        return rid if state is None or state.handoff is None else state.handoff.rid or rid

    def prompt_pages(self, rid: str) -> OwnPages | None:
        """A request's prompt and its pages, as a handoff fills them; None = unknown."""
        state = self._states.get(rid)
        return None if state is None else state.own_pages(state.prompt_len)

    def computed_pages(self, rid: str) -> OwnPages | None:
        """Its tokens as far as their KV is computed by steps that were committed, and its pages; None = unknown."""
        state = self._states.get(rid)
        return None if state is None else state.own_pages(state.computed)

    def sanity_check(self) -> None:
        """Queues, rows, pages and the ledger agree. Raises InvariantError. Cost: O(pages), not for every step."""
        check_scheduler(
            states=self._states, waiting=self._waiting, batch=self._batch, prealloc=self.incoming.prealloc,
            inflight=self._outgoing.inflight, allocator=self._allocator, settings=self.settings, steps=self._open,
        )  # fmt: skip
