"""One step of one engine: plan, run, commit. What the loop, the offline LLM and the benchmarks all share.

Knows neither sockets nor processes: requests come in through `scheduler`, results leave through the Outcome. Who runs
plans, and how many at once, is the executor's business (executor.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from serinus.cache import PrefixCache
from serinus.core.clock import Clock
from serinus.core.errors import PeerGone
from serinus.core.log import get_logger
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import FinishReason, TokenDelta
from serinus.engine.executor import Executor
from serinus.engine.guard import Guard, NoGuard, Verdict
from serinus.engine.kv_events import KvEventPublisher
from serinus.engine.tiers import Tiers, pause
from serinus.engine.watch import StepWatch
from serinus.sched import Outcome, Scheduler

__all__ = ["EngineCore"]

_SANITY_NODES = 16
"""Nodes whose invariants are looked at in one step."""
_QUIET_S = 5.0
"""Seconds that copies and storage operations get to end before the engine goes."""
_PAUSE_S = 0.001
_LOOK_S = 0.05
_log = get_logger("engine")


class EngineCore:
    """Decide, do, commit."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        watch: StepWatch,
        clock: Clock,
        cache: PrefixCache,
        tiers: Tiers | None = None,
        events: KvEventPublisher | None = None,
        guard: Guard | None = None,
        sanity: bool = False,
    ) -> None:
        """`tiers` and `events` are closed with it; `guard`: the canary; `sanity`: check the cache's invariants."""
        self.scheduler = scheduler
        self.executor = executor
        """Who runs plans."""
        self.watch = watch
        self.turns = 0
        """Calls of `step`."""
        self._clock = clock
        self._cache = cache
        self._tiers = tiers
        self._events = events
        self.guard: Guard = guard or NoGuard()
        """The canary, or nobody."""
        self.leaving: Callable[[str], object] = _nobody
        """Told of each request that the guard is about to end, while its pages are still its own: whoever hands KV
        over closes its grants here."""
        self.ungranted: Callable[[], Collection[str]] = tuple
        """Who tells which requests of peers wait for their grant (a prefill engine's): a queue of its own."""
        self._open: deque[tuple[StepPlan, float]] = deque()
        """Plans under way, oldest first, and when each began."""
        self._sanity = sanity
        self._unchecked = False
        self._closed = False

    def step(self) -> Outcome | None:
        """Begin what can begin, and commit the oldest step that is done; None = none is: idle, or everybody waits for
        pages in transit or for other ranks."""
        self.turns += 1
        while True:
            planned = self._plan()
            result = self.executor.take() if self._open else None
            if result is not None:
                return self._commit(result)
            if not planned:
                break
        if not self._open:
            self.executor.pump(0.0)
            self._look_around()
        return None

    def _plan(self) -> bool:
        """Begin one more step, if there is room for it and somebody to work for."""
        executor = self.executor
        start = self._clock.now()
        plan = self.scheduler.plan(start) if len(self._open) < executor.depth else None
        if executor.journals:
            executor.record(self.scheduler.take_moves(), self.ungranted())
        if plan is None:
            executor.flush()
            return False
        self.guard.begin(plan)
        self._open.append((plan, start))
        executor.submit(plan)
        return True

    def _commit(self, result: StepResult) -> Outcome:
        """Take in what came of the oldest plan."""
        plan, start = self._open.popleft()
        result = self.guard.returned(result)
        ended = self._convict(self.guard.judge())
        end = self._clock.now()
        outcome = self.scheduler.commit(plan, result, end)
        if ended:
            outcome = replace(outcome, deltas=(*ended, *outcome.deltas))
        self.watch.stepped(outcome, end - start, self.scheduler)
        if self._sanity:
            self._unchecked = True
            self._cache.sanity_step(_SANITY_NODES)
        self._publish()
        return outcome

    @property
    def wait_s(self) -> float | None:
        """How long a caller without other work may wait before the next step; None = until something arrives, from
        outside or on the executor's channels."""
        return _PAUSE_S if self.scheduler.in_flight else None

    def waited(self) -> bool:
        """Wait a moment for what a caller without other work waits for: other ranks, or the storage. False = nothing
        will come by itself."""
        if self._open:
            self.executor.pump(_LOOK_S)
        elif self.scheduler.in_flight:
            pause(_PAUSE_S)
        else:
            return False
        return True

    def _convict(self, verdicts: Sequence[Verdict]) -> list[TokenDelta]:
        """End these requests before anything that came of their KV leaves; their last deltas."""
        ended: list[TokenDelta] = []
        for verdict in verdicts:
            self.leaving(verdict.rid)
            delta = self.scheduler.abort(verdict.rid, verdict.reason, FinishReason.ERROR, condemned=True)
            if delta is not None:
                ended.append(replace(delta, error_status=500))
        return ended

    def _look_around(self) -> None:
        """Nothing runs: the time for what takes long."""
        self.guard.late()
        if self._unchecked and self.scheduler.idle:
            self._unchecked = False
            self.scheduler.sanity_check()
        if not self.scheduler.idle:
            self._give_condemned_back()
        self._publish()

    def _give_condemned_back(self) -> None:
        """Requests wait for pages, nobody runs, nothing is under way: only condemned pages can stand in their way, and
        those that wait would wait for ever. What was wrong there is overwritten before it is read."""
        stats = self.scheduler.stats()
        waiting = stats.num_queue_reqs + stats.num_decode_prealloc_queue_reqs
        others = stats.num_running_reqs + stats.num_decode_transfer_queue_reqs + stats.num_prefill_inflight_queue_reqs
        if waiting and not others and not stats.in_flight and (count := self._cache.pardon_all()):
            _log.warning("engine: %d condemned pages are given back, %d requests need them", count, waiting)

    def _publish(self) -> None:
        if self._events is not None:
            self._events.publish(self._cache.take_events())

    def close(self) -> None:
        """Let copies and storage writes end, then close what carries them. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._tiers is not None:
            if left := self._quiet():
                _log.warning("engine: %d copies and storage operations are given up", left)
            self._tiers.close()
        self.executor.close()
        if self._events is not None:
            self._events.close()

    def _quiet(self) -> int:
        """Wait until nothing is under way in the tiers; what still is when there is no more use in waiting."""
        end, left = self._clock.now() + _QUIET_S, 0
        try:
            while self.executor.sound and (left := self._cache.poll().in_flight) and self._clock.now() < end:
                pause(_PAUSE_S)
        except PeerGone as error:
            _log.warning("%s, while the engine closes", error)
        return left


def _nobody(rid: str) -> None:
    """No handoffs."""
