"""The next step: page growth, decodes, chunks of prefilling requests, then newcomers, within one token budget.

Decides which requests get work; knows nothing of the results of earlier steps, nor how many of them are under way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from serinus.core.handoff import beyond
from serinus.core.plan import SeqWork, StepPlan, WorkAhead
from serinus.sched.admission import Admission
from serinus.sched.batch import NONE_BARRED, Batch
from serinus.sched.handoff_choice import PrefillPace
from serinus.sched.incoming import Incoming
from serinus.sched.lookahead import Lookahead
from serinus.sched.open_step import OpenStep
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import admission_order
from serinus.sched.request_queues import RequestQueues
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings
from serinus.sched.stats import Outcome, Totals
from serinus.sched.step_pace import StepPace

_ENDLESS = 1 << 62
_LOOK_REQUESTS = 16
"""Of those that wait, so many are looked at for one that is shorter than what runs."""
_AHEAD_REQUESTS = 64
"""...and so many for how long the line is; the others count as long as these."""
_PROMPT_TOKENS = 2048
"""A token takes what it does in a prompt of so many, or in one step where that has fewer."""


class StepPlanner:
    """Writes one plan after the other."""

    def __init__(
        self,
        settings: SchedSettings,
        allocator: PageAllocator,
        batch: Batch,
        admission: Admission,
        incoming: Incoming,
        requests: RequestQueues,
        totals: Totals,
        pace: StepPace,
    ) -> None:
        self._settings = settings
        self._allocator = allocator
        self._batch = batch
        self._admission = admission
        self._incoming = incoming
        self._requests = requests
        self._totals = totals
        self._pace = pace
        self._lookahead = Lookahead(settings, allocator, batch)
        self._blocked: ReqState | None = None
        self._rowless: ReqState | None = None
        """The first that waits, where all rows were taken in the last plan."""
        self._late: dict[str, None] = {}
        self._step = 0

    @property
    def blocked(self) -> ReqState | None:
        """The request that found no room, or no row, in the last plan: remote ones that come behind it must not
        overtake it."""
        blocked = self._blocked or self._rowless
        return blocked if blocked is not None and blocked.phase is Phase.WAITING else None

    def take_late(self) -> list[str]:
        """Requests whose turn has come since the last call too late for their deadline: they are to be ended."""
        late, self._late = list(self._late), {}
        return late

    def prefill_pace(self) -> PrefillPace:
        """How soon a prompt that comes now is computed here. Cost: a look at some of the requests that wait."""
        waiting, decodes = self._requests.waiting, bool(self._batch.decoding)
        first = waiting.first(_AHEAD_REQUESTS)
        ahead = sum(state.known - state.planned for state in (*self._batch.prefilling, *first))
        ahead = ahead * len(waiting) // len(first) if len(first) < len(waiting) else ahead
        step = min(self._pace.budget(decodes=decodes), _PROMPT_TOKENS)
        return PrefillPace(
            queue_s=self._pace.seconds(ahead, decodes=decodes),
            token_s=self._pace.seconds(step, decodes=decodes) / step,
        )

    def is_late(self, state: ReqState, now: float) -> bool:
        """Whether its prompt cannot be computed before its deadline, not even at once and as fast as any ever was.
        Cost: a comparison; with a deadline one cache probe."""
        if state.deadline == math.inf:
            return False
        return now + self._pace.seconds_least(state.known - self._allocator.cached(state)) > state.deadline

    def next_step(self, now: float) -> OpenStep | None:
        """Decide it; None = nothing can run now."""
        if following := self._lookahead.take():
            return self._follow(following, now)
        if not len(self._batch) and not self._requests.waiting:
            self._blocked = None
            return None
        last, self._rowless = self._gives_way(), None
        given_way = [last] if last is not None and self._batch.retract(last) else []
        growth = self._batch.grow()
        growth.gone += given_way
        self._requests.wait(growth.gone)
        self._blocked = min(growth.gone, key=lambda state: state.seq, default=None)
        self._totals.retracted += len(growth.gone)
        states = list(growth.decoding)
        work = [self._batch.token_work(state, state.known) for state in states]
        budget = self._pace.budget(decodes=bool(work))
        self._add_prompts(work, states, budget, now, barred_seq=growth.barred_seq)
        if not work:
            return None
        return self._open_step(
            work, states, now, loads=frozenset(self._allocator.open_loads), retracted=len(growth.gone),
            goes_on=not growth.bars, is_blocked=self.blocked is not None,
        )  # fmt: skip

    def _follow(self, following: Sequence[tuple[int, ReqState, SeqWork]], now: float) -> OpenStep:
        """The step that the one before it said would follow: its forward pass may have begun, and waits for no load
        that has begun since. Whatever else wants work is in the step behind it."""
        states, work = [state for _, state, _ in following], [work for _, _, work in following]
        takes = np.array([number for number, _, _ in following], np.int64)
        return self._open_step(work, states, now, takes=takes)

    def _open_step(
        self, work: Sequence[SeqWork], states: Sequence[ReqState], now: float, *,
        loads: frozenset[int] = frozenset(), retracted: int = 0, takes: NDArray[np.int64] | None = None,
        goes_on: bool = True, is_blocked: bool = False,
    ) -> OpenStep:  # fmt: skip
        """The step of this work, and what goes on behind it, where it `goes_on`."""
        self._step += 1
        outcome = replace(self._begin(work, states), retracted=retracted)
        ahead = self._work_ahead(states, now, is_blocked=is_blocked) if goes_on else None
        writes = self._allocator.take_writes()
        return OpenStep(
            plan=StepPlan(step=self._step, work=tuple(work), table_writes=writes, ahead=ahead, takes=takes),
            states=list(states),
            loads=loads,
            planned_at=now,
            outcome=outcome,
        )

    def _begin(self, work: Sequence[SeqWork], states: Sequence[ReqState]) -> Outcome:
        """Work is under way from now on: what is known of its outcome."""
        shares = self._requests.shares
        prompt_tokens, decode_tokens, new_requests, found = 0, 0, 0, Counter[str]()
        for state, each in zip(states, work, strict=True):
            count = len(each.tokens)
            state.planned = each.start + count
            if shares.divided:
                shares.charge(state.request.share, count)
            if state.phase is Phase.DECODE:
                decode_tokens += count
                state.is_new = False
                continue
            prompt_tokens += count
            if state.is_fresh:
                state.is_fresh = False
                new_requests += 1
                found.update(state.found)
        self._totals.computed_tokens += prompt_tokens + decode_tokens
        return Outcome(
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            new_requests=new_requests,
            cached_tokens=found.total(),
            cached_by_tier=found,
        )

    def _work_ahead(self, states: Sequence[ReqState], now: float, *, is_blocked: bool = False) -> WorkAhead | None:
        """What goes on behind a step of these; None also where a request that waits may run in the next one, unless
        prompts fill that. `is_blocked`: the first that waits was seen to lack its pages."""
        if not self._lookahead.on or self._gives_way() is not None:
            return None
        tokens = self._lookahead.tokens(states)
        if tokens is None:
            return None
        follows, work = list(tokens), list(tokens.values())
        going = [states[number] for number in follows]
        may_come = bool(self._requests.waiting) and not (is_blocked or self._rows_are_taken)
        has_prompts = may_come or any(state.wants_chunk for state in self._batch.prefilling)
        if has_prompts and not self._prompts_ahead(work, going, now, is_blocked=is_blocked):
            return None
        return self._lookahead.make(follows, going, work)

    def _prompts_ahead(self, work: list[SeqWork], states: list[ReqState], now: float, *, is_blocked: bool) -> bool:
        """Add chunks to the tokens of work ahead. False = they are not to be computed ahead: they cannot be, or another
        request, that waits or comes meanwhile, could be in that step. So no request waits longer for them than it would
        if the step were planned when it begins; but for those whose prompt has fewer tokens than a page.

        Those that wait are admitted now, where whatever comes is behind them. Where the step does not get full all the
        same, they keep their pages, and the next plan has work for them."""
        wanting = [state for state in self._batch.prefilling if state.wants_chunk]
        can = all(state.plain for state in states) and all(state.computes_ahead for state in wanting)
        if not can or self._batch.transfer:
            return False
        is_last = self._settings.schedule_policy == "fcfs" and not self._requests.shares.divided
        admits = is_last and not (is_blocked or self._rows_are_taken)
        first, budget = len(work), self._pace.budget(decodes=bool(work))
        self._add_prompts(work, states, budget, now, admits=admits, ahead=True)
        if budget - sum(len(each.tokens) for each in work[first:]) >= self._settings.page_size:
            return False
        return is_blocked or self._rows_are_taken or not self._has_room(states[first:], budget, is_last=is_last)

    def _has_room(self, states: Sequence[ReqState], budget: int, *, is_last: bool) -> bool:
        """Whether a request of one token that comes now would get work in the step that these fill: they leave half of
        their share to a shorter one. `is_last`: it comes behind those that wait, too."""
        page, waiting = self._settings.page_size, self._requests.waiting
        needs = [state.known - state.planned for state in states]
        behind = waiting.in_turn(_LOOK_REQUESTS) if is_last else ()
        left = budget
        for needed in chain(
            needs,
            (each.known - self._allocator.cached(each) for each in behind if not self._admission.has_twin(each)),
        ):
            share = self._share(needed, left, 0)
            left -= needed if needed <= share else share // page * page
            if left < page:
                return False
        return True

    @property
    def _rows_are_taken(self) -> bool:
        return self._batch.rows_needed >= self._settings.max_running_requests

    def _gives_way(self) -> ReqState | None:
        """Under the policy `priority`: the last of the running requests of an API key, where the first of its that
        waits is more important and lacks its pages, or its row. One in a step: the next plan sees whether that is
        enough. One that waits for what has aged past it takes nothing from that."""
        if self._settings.schedule_policy != "priority" or not self._requests.waiting:
            return None
        (first,) = self._requests.waiting.in_turn(1)
        last = self._batch.last_of(first.request.share.name)
        if last is None or first.request.priority >= last.request.priority or first.seq > last.seq:
            return None
        has_rows = not self._rows_are_taken
        if first is not self._blocked and (has_rows or first.prefetching or self._admission.has_twin(first)):
            return None
        return last

    def _add_prompts(
        self, work: list[SeqWork], states: list[ReqState], budget: int, now: float, *, barred_seq: int = NONE_BARRED,
        admits: bool = True, ahead: bool = False,
    ) -> None:  # fmt: skip
        """Add chunks of prefilling requests and, where it `admits` some, of newcomers, up to so many tokens."""
        first = len(work)
        left = self._add_chunks(work, states, barred_seq, budget)
        if left > 0 and admits and self._requests.waiting:
            for state, chunk in self._admit(left, now, ahead=ahead):
                work.append(chunk)
                states.append(state)
                left -= len(chunk.tokens)
        self._hand_out_rest(work, states, first, left)

    def _add_chunks(self, work: list[SeqWork], states: list[ReqState], barred_seq: int, budget: int) -> int:
        """Chunks of prefilling requests, in the order of their arrival; returns the budget left for newcomers."""
        wanting = [state for state in self._batch.prefilling if state.wants_chunk and state.seq <= barred_seq]
        left = budget
        for state, shorter in zip(wanting, _shortest_behind(wanting, self._shortest_waiting()), strict=True):
            share = self._share(state.known - state.planned, left, shorter)
            chunk = self._batch.chunk_work(state, share) if left > 0 else None
            if chunk is None:
                return 0
            work.append(chunk)
            states.append(state)
            left -= len(chunk.tokens)
        return left

    def _shortest_waiting(self) -> int:
        """Tokens of the shortest of the oldest waiting requests, as far as there are rows for them."""
        if self._rows_are_taken:
            return _ENDLESS
        return min((state.known for state in self._requests.waiting.in_turn(_LOOK_REQUESTS)), default=_ENDLESS)

    def _share(self, needs: int, left: int, shortest: int) -> int:
        """What a request that needs so many tokens may take of the budget that is left: half of it, where it needs more
        than that and a shorter one stands behind it (`shortest`: tokens of the shortest), which would else wait for
        all of it."""
        divided = 2 * needs > left and shortest < needs
        return min(max(left // 2, self._settings.page_size), left) if divided else left

    def _hand_out_rest(self, work: list[SeqWork], states: Sequence[ReqState], first: int, left: int) -> None:
        """Give what shorter requests left of the budget to those that had left it to them, the oldest first; theirs
        are `work[first:]`."""
        for at, state in enumerate(states[first:], first):
            if left < self._settings.page_size:
                return
            had = work[at]
            if had.start + len(had.tokens) == state.known:
                continue
            chunk = self._batch.chunk_work(state, len(had.tokens) + left)
            assert chunk is not None, f"sched: request {state.rid} had a chunk of {len(had.tokens)} tokens, now none"
            work[at] = chunk
            left -= len(chunk.tokens) - len(had.tokens)

    def _admit(self, budget: int, now: float, *, ahead: bool = False) -> list[tuple[ReqState, SeqWork]]:
        """Bring in waiting requests, in the policy's order, until budget, rows or pages are used up; or, `ahead` of the
        result of a plan, until one is to wait for that."""
        admitted: list[tuple[ReqState, SeqWork]] = []
        rows_left = self._settings.max_running_requests - self._batch.rows_needed
        waiting, blocked = self._requests.waiting, self._incoming.blocked
        if rows_left <= 0:
            (self._rowless,) = waiting.in_turn(1)
            return admitted
        passed, awaits_storage = list[ReqState](), False
        order = admission_order(waiting, self._settings, self._allocator.cached, 2 * rows_left)
        for state, shorter in zip(order, _shortest_behind(order, _ENDLESS), strict=True):
            if len(admitted) == rows_left or budget < min(self._settings.page_size, state.known):
                break
            if self._admission.has_twin(state):
                continue
            if ahead and not self._admission.may_be_early(state):
                break
            if self._admission.awaits_storage(state, now, ahead=awaits_storage):
                awaits_storage = True
                continue
            if self.is_late(state, now):
                self._late[state.rid] = None
                continue
            overtakes = blocked is not None and waiting.comes_first(blocked, state)
            if overtakes or not self._admission.place(state):
                self._blocked = state
                break
            chunk = self._start(state, budget, shorter, now)
            budget -= len(chunk.tokens)
            admitted.append((state, chunk))
            passed.append(state)
        if self._settings.schedule_policy == "lpm" and passed:
            youngest = max(state.seq for state in passed)
            for state in waiting.first(self._settings.lpm_scan_requests):
                state.skips += state.seq < youngest
        return admitted

    def _start(self, state: ReqState, budget: int, shortest: int, now: float) -> SeqWork:
        """Let a placed request run."""
        self._requests.waiting.remove(state)
        self._requests.shares.serve(state.request.share)
        state.move(Phase.PREFILL)
        self._allocator.take_row(state)
        self._batch.prefilling.append(state)
        state.retracted, state.is_fresh = False, True
        if state.started is None:
            state.started = now
            state.cached_tokens = beyond(state.found, state.handoff.held if state.handoff is not None else 0)
        self._totals.healed_tokens += state.repaired()
        chunk = self._batch.chunk_work(state, self._share(state.known - state.planned, budget, shortest))
        assert chunk is not None, f"sched: request {state.rid} has no chunk of {budget} tokens from {state.computed}"
        return chunk


def _shortest_behind(states: Sequence[ReqState], shortest: int) -> list[int]:
    """For each, the fewest tokens that one behind it needs; `shortest`: those of what comes behind them all."""
    found = []
    for state in reversed(states):
        found.append(shortest)
        shortest = min(shortest, state.known - state.planned)
    return found[::-1]
