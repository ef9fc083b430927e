"""Engine: one engine as an object that takes messages and time, and gives messages. Owns no socket, clock or thread.

    output = engine.turn(now, messages)    # decide: take messages, commit what is done, plan the next step
    engine.line.flush(meanwhile)           # the ranks do: the plan and all commands of the turn leave; meanwhile the
                                           # caller sends the output

The process loop (loop.py), the offline LLM (llm.py), the test pair and the simulated cluster drive this object, each
with its own time and transport. Knows neither how a model computes (the ranks do, behind `line`) nor how a handoff is
agreed (`pd`, through roles.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from serinus.cache import PrefixCache
from serinus.canary import CanaryLead, Verdict
from serinus.core.errors import CapacityError, RequestError
from serinus.core.log import get_logger
from serinus.core.parts import OwnPages
from serinus.core.plan import StepPlan
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.engine.calls import EngineCalls
from serinus.engine.deadlines import Deadlines
from serinus.engine.healing import Healer
from serinus.engine.inspect import EngineFacts
from serinus.engine.messages import FailRequest, FrontEvent, FrontGone, TurnOutput, failed_delta
from serinus.engine.outbox import Outbox
from serinus.engine.roles import Handoffs
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.engine.step_metrics import StepMetrics
from serinus.engine.watcher import Watcher
from serinus.ranks import FinishedStep, LeaderLine
from serinus.sched import Outcome, Scheduler
from serinus.wire import Gone, PeerMessage
from serinus.wire.messages import Abort, EngineCall, EngineReply, Generate, StopEngine

_SANITY_NODES = 16
"""Nodes whose invariants are looked at in one step."""
_IDLE_S = 0.2
"""Longest sleep of an idle caller; messages wake it at once, so this only paces timers."""
_COPIES_S = 0.001
"""...and while copies or storage operations are under way: their end wakes nothing."""
_log = get_logger("engine")


class Engine:
    """Decides everything that one engine does."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: PrefixCache,
        line: LeaderLine,
        handoffs: Handoffs,
        metrics: StepMetrics,
        canary: CanaryLead | None = None,
        healer: Healer | None = None,
        facts: EngineFacts | None = None,
        spans: SpanLog = NO_SPANS,
        stream_interval: int = 1,
        sanity: bool = False,
        publishes: bool = False,
    ) -> None:
        """
        Args:
            line: to the ranks, the leader's own included.
            handoffs: the engine's role.
            canary: the leader's half of the canary, which checks each step; None = there is none.
            healer: has requests that read wrong KV computed again; None = they end.
            spans: records what is traced.
            facts: what `info` and `cache` calls tell beside the state.
            sanity: check the cache's invariants, some nodes a step, all when idle.
            publishes: whether changes of the cache are part of the output.
        """
        self.scheduler = scheduler
        self.line = line
        self.handoffs = handoffs
        self.metrics = metrics
        self.canary = canary
        self.healer = healer
        self.spans = spans
        self.turns = 0
        """Turns so far; peers see by it that the engine goes on."""
        self._cache = cache
        facts = facts or EngineFacts()
        self.watcher = watcher = Watcher(
            scheduler=scheduler, cache=cache, handoffs=handoffs, metrics=metrics, canary=canary, facts=facts
        )
        self.calls = EngineCalls(
            scheduler=scheduler, cache=cache, handoffs=handoffs, metrics=metrics, canary=canary, healer=healer,
            watcher=watcher, facts=facts,
        )  # fmt: skip
        self._outbox = Outbox(stream_interval=stream_interval)
        self._deadlines = Deadlines()
        self._replies: list[tuple[str, EngineReply]] = []
        self._fronts: set[str] = set()
        self._open: deque[tuple[StepPlan, float]] = deque()
        """Plans under way, oldest first, and when each began."""
        self._sanity, self._unchecked = sanity, False
        self._publishes = publishes
        self._worked = False
        """Whether the last turn planned or committed a step, or made room for one."""
        self._draining = False
        self._stopping = False

    # ---- the turn ---------------------------------------------------------------------------------------------------

    def turn(
        self, now: float, messages: Sequence[FrontEvent] = (), peers: Sequence[PeerMessage | Gone] = ()
    ) -> TurnOutput:
        """Take these messages of fronts and of peers, commit the oldest step that is done, plan the next one.

        What is planned is done when the caller flushes the line. Raises whatever breaks the engine: PeerGone (a rank
        is lost), InvariantError, KvViolation.
        """
        self.turns += 1
        self.spans.turn(now)
        if self.watcher.on:
            self.watcher.turn(now)
        self.line.pump()
        finished = self.line.finished()
        verdicts: Sequence[Verdict] = ()
        if finished is not None and self.canary is not None:
            self.scheduler.settle()  # what never came from the host is computed again; it is no fault here
            verdicts = self.canary.judge(finished.findings)  # while the pages still have the owners that they had
        for event in messages:
            self._take(event, now)
        for rid in self._deadlines.over(now):
            self._time_out(rid, now)
        for delta in self.handoffs.turn(now, peers, self.turns):
            self._answer(delta)
        if finished is not None:
            self._commit(finished, verdicts, now)
        planned = not self.handoffs.is_staging and self._plan(now)
        self._worked = finished is not None or planned
        if not self._worked and not self._open:
            self._worked = self._look_around(now)
        for finding in () if self.canary is None else self.canary.take_findings():
            self.handoffs.tell(finding, now)
        return self._output()

    @property
    def wait_s(self) -> float:
        """How long the caller may sleep after the line was flushed, if no message comes; 0 = turn again at once."""
        if self._worked or self.line.has_news or self.ended:
            return 0.0
        return self.handoffs.wait_s(_COPIES_S if self.scheduler.in_flight else _IDLE_S)

    @property
    def stalled(self) -> bool:
        """Nothing can run, and nothing is under way that could change that by itself: only a message can."""
        line = self.line
        return not (self._worked or line.has_news or line.under_way or self.scheduler.in_flight)

    @property
    def idle(self) -> bool:
        """No request in any state, and no step under way."""
        return self.scheduler.idle

    @property
    def ended(self) -> bool:
        """Told to stop, and every request that was to finish has."""
        return self._stopping or (self._draining and self.scheduler.idle)

    def stop(self, now: float) -> TurnOutput:
        """The last turn: end every request and tell peers that this engine stops."""
        for delta in self.scheduler.abort_all("the engine is stopping"):
            self._put(delta)
        self.handoffs.shut_down(now)
        return self._output()

    def fail(self, reason: str) -> TurnOutput:
        """The engine broke: what its fronts are told. Asks nothing of ranks or peers."""
        broke = EngineReply(call=0, ok=False, body=f"the engine stopped: {reason}".encode())
        self._replies += [(front, broke) for front in self._fronts]
        return self._output()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _commit(self, finished: FinishedStep, verdicts: Sequence[Verdict], now: float) -> None:
        """Take in what came of the oldest plan. `verdicts` of the canary: requests that are healed or ended before
        a token of it leaves."""
        plan, start = self._open.popleft()
        if finished.failed:
            said = {"step": plan.step, "rids": [work.rid for work in plan.work]}
            _log.error(
                "engine: step %d fails its %d requests: %s", plan.step, len(plan.work), finished.failed, extra=said
            )
        ended = [self._violated(verdict, now) for verdict in verdicts]
        ended += [self._fail(work.rid, "error", finished.failed, now) for work in plan.work if finished.failed]
        pairs = zip(plan.work, finished.result.seqs, strict=False)
        ended += [self._refuse(work.rid, seq.failure, now) for work, seq in pairs if seq.failure]
        ended += self._check_rows(self.scheduler.ending(finished.result), now)
        outcome = self.scheduler.commit(plan, finished.result, now, finished.checked)
        outcome = replace(outcome, deltas=(*(delta for delta in ended if delta is not None), *outcome.deltas))
        self.metrics.stepped(outcome, now - start, self.scheduler, now)
        self.metrics.masked(finished.result)
        self.spans.stepped(plan, start, now)
        if self._sanity:
            self._unchecked = True
            self._cache.sanity_step(_SANITY_NODES)
        self._send_outcome(outcome, now)

    def _check_rows(self, rows: Mapping[str, OwnPages], now: float) -> list[TokenDelta | None]:
        """Requests are about to end, or to give their pages back: what they were computed on is verified before. The
        last deltas of those whose KV is wrong, and of others that use it."""
        if self.canary is None or not rows:
            return []
        found = self.canary.check(rows)
        wrong = {verdict.rid for verdict in found.verdicts}
        self.scheduler.vouch({rid: own for rid, own in rows.items() if rid not in wrong}, found.slots)
        return [self._violated(verdict, now) for verdict in found.verdicts]

    def _send_outcome(self, outcome: Outcome, now: float) -> None:
        for delta in outcome.deltas:
            self._put(delta)
        if outcome.chunks:
            self.handoffs.computed(outcome.chunks, now)

    def _plan(self, now: float) -> bool:
        """Begin one more step, if there is room for it and a request to work for."""
        plan = self.scheduler.plan(now) if len(self._open) < self.line.depth else None
        if self._verify_retracted(now) and plan is None:
            plan = self.scheduler.plan(now)
        for rid in self.scheduler.take_late():
            self._time_out(rid, now, "the turn of the request came too late for")
        if plan is None:
            return False
        if self.canary is not None:
            self.canary.begin(plan)
        self._open.append((plan, now))
        self.line.run(plan)
        return True

    def _verify_retracted(self, now: float) -> bool:
        """Verify requests that are to give their pages back, or heal them; whether there were any."""
        unverified = self.scheduler.take_unverified()
        for delta in self._check_rows(unverified, now):
            if delta is not None:
                self._answer(delta)
        return bool(unverified)

    def _violated(self, verdict: Verdict, now: float) -> TokenDelta | None:
        """A request read wrong KV: it is healed, or ends; its last delta then."""
        reason = verdict.reason
        if self.healer is not None and not (reason := self.healer.heal(verdict.rid, reason, now)):
            return None
        if self.scheduler.is_remote(verdict.rid):  # no token of it has left: its prompt is computed here
            self.handoffs.aborted(verdict.rid, now, code="kv_canary", reason=reason)
            self.scheduler.recompute(verdict.rid, "kv_canary")
            return None
        return self._fail(verdict.rid, "kv_canary", reason, now)

    def _fail(self, rid: str, code: str, reason: str, now: float) -> TokenDelta | None:
        """End a request that cannot go on (wrong KV, a step that failed), before anything more of it leaves: none of
        its KV is published. Its last delta; `code` and `reason`: what a peer is told."""
        self.handoffs.aborted(rid, now, code=code, reason=reason)  # while its pages are still its own
        delta = self.scheduler.abort(rid, reason, FinishReason.ERROR, untrusted=True)
        return None if delta is None else replace(delta, error_status=500)

    def _refuse(self, rid: str, reason: str, now: float) -> TokenDelta | None:
        """End a request with a grammar that cannot be followed; its KV is sound. Its last delta."""
        self.handoffs.aborted(rid, now, code="grammar", reason=reason)
        delta = self.scheduler.abort(rid, reason, FinishReason.ERROR)
        return None if delta is None else replace(delta, error_status=400)

    def _look_around(self, now: float) -> bool:
        """No step is under way: the time for what takes long. Returns whether requests can run now that could not."""
        if self._unchecked and self.scheduler.idle:
            self._unchecked = False
            self.scheduler.sanity_check()
        if self.canary is not None:
            self.canary.idle()
        return not self.scheduler.idle and self._release_quarantined(now)

    def _release_quarantined(self, now: float) -> bool:
        """Where requests found no room and nothing else is under way, only quarantined pages can stand in their way,
        and they would wait for ever. What was wrong in a page is overwritten before it is read."""
        stats = self.scheduler.stats()
        waiting = stats.num_queue_reqs + stats.num_decode_prealloc_queue_reqs
        others = stats.num_running_reqs + stats.num_decode_transfer_queue_reqs + stats.num_prefill_inflight_queue_reqs
        if not self.scheduler.is_blocked or others or stats.in_flight:
            return False
        count = self._cache.release_all_quarantined()
        if not count:
            return self._refuse_what_never_fits(now)
        _log.warning("engine: %d quarantined pages are released, %d requests need them", count, waiting)
        return True

    def _refuse_what_never_fits(self, now: float) -> bool:
        """End requests that need more pages than are left beside the retired ones. Returns whether there were any."""
        pages = self._cache.stats().pages.retired
        tokens = (self._cache.page_count - 1 - pages) * self._cache.page_size
        ended = self.scheduler.waiting_beyond(tokens) if pages else []
        for rid in ended:
            self.handoffs.aborted(rid, now)
            reason = f"engine: {pages} KV pages are retired, and the prompt is longer than the {tokens} tokens left"
            delta = self.scheduler.abort(rid, reason, FinishReason.ERROR)
            if delta is not None:
                self._answer(replace(delta, error_status=503))
        return bool(ended)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise what a front would be answered for this request at once: BadRequest, PromptTooLong."""
        self.scheduler.check(request)

    def drop(self, rid: str, reason: str) -> None:
        """End a request that its caller wants to hear nothing more of, outside of a turn."""
        self._outbox.forget(rid)
        self.scheduler.abort(rid, reason)

    def _take(self, event: FrontEvent, now: float) -> None:
        if isinstance(event, FrontGone):
            self._front_gone(event.front, now)
            return
        message = event.message
        if event.front:  # else it comes from this process, and no answer goes there
            self._fronts.add(event.front)
        match message:
            case Generate(request=request):
                self._generate(event.front, replace(request, arrival=now), now)
            case Request():
                self._generate(event.front, message, now)
            case Abort():
                self._abort(message, now)
            case EngineCall():
                self._replies.append((event.front, self.calls.answer(message, now, self.turns)))
            case FailRequest():
                self._outbox.forget(message.rid)
                self._end(message.rid, message.reason, now, FinishReason.ERROR)
            case StopEngine():
                self._stopping |= not message.drain
                if not self._draining:
                    self._draining = True
                    self.handoffs.drain(now)

    def _generate(self, front: str, request: Request, now: float) -> None:
        if request.rid in self.scheduler:
            _log.warning(
                "engine: request %s is here already, dropped the second one", request.rid, extra={"rid": request.rid}
            )
            return
        self._outbox.expect(request.rid, front)
        if self._draining:
            self._outbox.put(failed_delta(request.rid, "engine: shutting down, expected no new requests", 503))
            return
        self.spans.begin(request)
        try:
            self.handoffs.admit(request, now)
        except (RequestError, CapacityError) as error:
            self._put(failed_delta(request.rid, str(error), error.status))
            return
        self._deadlines.add(request.rid, self.scheduler.deadline_of(request), self.scheduler)

    def _time_out(self, rid: str, now: float, how: str = "the request reached") -> None:
        """Its deadline has come, or comes before it can end: end it, where it has not ended."""
        if rid not in self.scheduler:
            return
        self.handoffs.aborted(rid, now, code="timeout", reason=f"{how} its deadline")
        delta = self.scheduler.abort(rid, "its deadline came", FinishReason.ERROR)
        if delta is None:
            return
        self.metrics.metrics.add("num_timed_out_requests")
        count = delta.usage.completion_tokens if delta.usage is not None else 0
        reason = (
            f"engine: {how} its deadline with {count} tokens generated, expected it to end within its"
            f" timeout (or --request-timeout)"
        )
        self._answer(replace(delta, error=reason, error_status=504))

    def _abort(self, message: Abort, now: float) -> None:
        if message.all:
            own = [rid for front in self._fronts for rid in self._outbox.owned_by(front)]
            for rid in own + self.handoffs.asked_by_peers():
                self._end(rid, message.reason, now)
            return
        if message.silent:
            self._outbox.silence(message.rid)
        if message.matched_stop:
            self._stop_text(message, now)
        else:
            self._end(message.rid, message.reason, now)

    def _end(
        self, rid: str, reason: str, now: float, finish: FinishReason = FinishReason.ABORT, *, kept: int | None = None
    ) -> None:
        self.handoffs.aborted(rid, now)
        delta = self.scheduler.abort(rid, reason, finish, kept=kept)
        if delta is not None:
            self._answer(delta)

    def _stop_text(self, message: Abort, now: float) -> None:
        """A front found a stop text in an answer: that ends, once all that it was computed on is known to be sound."""
        rid = message.rid
        rows = self.scheduler.stopping(rid)
        if rows or self.scheduler.halts(rid):
            self.scheduler.halt(rid)
        for delta in self._check_rows(rows, now):
            if delta is not None:
                self._answer(delta)
        if not self.scheduler.halts(rid):
            self._end(rid, message.reason, now, FinishReason.STOP, kept=message.kept)

    def _front_gone(self, front: str, now: float) -> None:
        for rid in self._outbox.owned_by(front):
            self._outbox.silence(rid)
            self._end(rid, "the front is gone", now)
        self._fronts.discard(front)

    def _answer(self, delta: TokenDelta) -> None:
        """A delta that no step brought."""
        self.metrics.answered(delta)
        self._put(delta)

    def _put(self, delta: TokenDelta) -> None:
        self.spans.answered(delta)
        self._outbox.put(delta)

    def _output(self) -> TurnOutput:
        replies, self._replies = self._replies, []
        events = self._cache.take_events() if self._publishes else ()
        front = min(self._fronts, default="") if self.spans else ""
        return TurnOutput(
            deltas=self._outbox.take(), replies=replies, peers=self.handoffs.take_outgoing(), cache_events=events,
            spans=self.spans.take() if front else (), spans_to=front,
        )  # fmt: skip
