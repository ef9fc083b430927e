"""An engine without a model or a process: scheduler, tiny cache and fake runner under one manual clock. Torch-free.

Its runner is what a rank is: plans, and copies between device and host, are obeyed in the order in which they were
given, but as late as the test likes; by then no plan may have changed. Before pages are read or written from outside,
`catch_up` runs the plans under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.clock import ManualClock
from serinus.core.moves import Move
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import Request, TokenDelta
from serinus.sched import ChunkReady, Outcome, SchedSettings, Scheduler
from serinus.testing.builders import Answer, make_request
from serinus.testing.fake_mover import FakeMover, FakeStorage, StoredPages
from serinus.testing.fake_runner import FakeRunner


class _MoverInLine(FakeMover):
    """Copies stand in one line with the plans: those before them run first."""

    def __init__(self, catch_up: Callable[[], None], **mover: Any) -> None:
        super().__init__(**mover)
        self._catch_up = catch_up

    def submit(self, moves: Sequence[Move]) -> None:
        self._catch_up()
        super().submit(moves)


def _bytes_of(plan: StepPlan) -> bytes:
    """All that a plan's arrays say."""
    arrays: list[NDArray[Any]] = [write.slots for write in plan.table_writes]
    for work in (*plan.work, *(plan.ahead.work if plan.ahead is not None else ())):
        arrays += [work.tokens, *work.slots.values()]
        if work.next_ids is not None:
            arrays.append(work.next_ids)
        history = None if work.sample is None else work.sample.history
        if history is not None:
            arrays += [history.seen, history.output_ids, history.output_times]
    return b"".join(each.tobytes() for each in arrays)


class TinyEngine:
    """Steps when told; collects answers by request id, and chunks. `depth` (a setting) plans may be under way."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        page_count: int = 33,
        context_length: int = 64,
        vocab_size: int = 1000,
        enable_prefix: bool = True,
        host_pages: int = 0,
        beside: Mapping[Part, PartGeometry] = MappingProxyType({}),
        stored: StoredPages | None = None,
        auto: bool = True,
        policy: str = "lru",
        write_policy: str = "write_through",
        **settings: Any,
    ) -> None:
        """`page_count`, `host_pages`: of part FULL; `beside`: the other parts. `stored`: a storage behind
        the host, and what it holds. `auto`: copies and storage operations end by themselves at the next poll; else the
        test ends them, through `mover` and `storage`."""
        running = settings.setdefault("max_running_requests", 4)
        settings.setdefault("prefetch_policy", "none" if stored is None else "wait_complete")
        self.settings = SchedSettings(
            page_size=page_size, context_length=context_length, rows=running + 1, vocab_size=vocab_size, **settings
        )
        self.clock = ManualClock()
        self._line: deque[tuple[StepPlan, bytes]] = deque()
        self._under_way: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        parts = {Part.FULL: PartGeometry(pages=page_count, host_pages=host_pages), **beside}
        self.runner = FakeRunner(
            rows=running + 1, context=context_length, page_size=page_size, parts=parts, vocab_size=vocab_size
        )  # fmt: skip
        self.mover: FakeMover | None = None
        self.storage: FakeStorage | None = None
        if host_pages:
            host = {part: shape.host_pages for part, shape in parts.items()}
            self.mover = _MoverInLine(
                self.catch_up, page_size=page_size, device=self.runner.content, host_pages=host, auto=auto
            )
            self.runner.gate = self.mover.gate
            if stored is not None:
                self.storage = FakeStorage(stored, host=self.mover.host, use=self.mover.use, auto=auto)
        self.cache = PrefixCache(
            CacheGeometry(page_size=page_size, parts=parts),
            enable_prefix=enable_prefix, policy=policy, write_policy=write_policy, mover=self.mover,
            storage=self.storage,
        )  # fmt: skip
        self.scheduler = Scheduler(self.settings, self.cache)
        self._auto = auto
        self.answers: dict[str, Answer] = {}
        self.chunks: list[ChunkReady] = []

    def add(self, rid: str, prompt: Sequence[int], **sampling: Any) -> Request:
        """Add a request to be computed here."""
        request = make_request(rid, prompt, arrival=self.clock.now(), **sampling)
        self.scheduler.add(request)
        return request

    def take(self, delta: TokenDelta | None) -> None:
        """File a delta with the answer it belongs to."""
        if delta is not None:
            self.answers.setdefault(delta.rid, Answer()).take(delta)

    def step(self) -> Outcome | None:
        """Plan what may be planned, commit the oldest plan; None where there was nothing to run."""
        while self.scheduler.under_way < self.settings.depth and self.plan() is not None:
            pass
        return self.commit() if self.scheduler.under_way else None

    def plan(self) -> StepPlan | None:
        """The next plan goes into the line; None where nothing can run."""
        plan = self.scheduler.plan(self.clock.now())
        if unverified := self.scheduler.take_unverified():
            self.scheduler.vouch(unverified, {})
            plan = self.scheduler.plan(self.clock.now()) if plan is None else plan
        if plan is not None:
            self._line.append((plan, _bytes_of(plan)))
            self._under_way.append(plan)
        return plan

    def catch_up(self, count: int | None = None) -> None:
        """Run the plans that are in the line: the first `count` of them, or all."""
        for _ in range(len(self._line) if count is None else min(count, len(self._line))):
            plan, written = self._line.popleft()
            assert _bytes_of(plan) == written, f"testing: arrays of step {plan.step} changed while it was under way"
            self._results.append(self.runner.run(plan))

    def commit(self) -> Outcome:
        """Run the oldest plan under way, unless it has, and commit it."""
        if not self._results:
            self.catch_up(1)
        self.clock.advance(0.01)
        outcome = self.scheduler.commit(self._under_way.popleft(), self._results.popleft(), self.clock.now())
        for delta in outcome.deltas:
            self.take(delta)
        self.chunks.extend(outcome.chunks)
        return outcome

    def works_for(self, rid: str) -> bool:
        """Whether a plan under way has work of this request."""
        return any(work.rid == rid for plan in self._under_way for work in plan.work)

    def run(self, steps_max: int = 10_000) -> int:
        """Step until nothing can run, and every copy has ended that ends by itself; how many steps that took.

        Raises AssertionError where that takes more than `steps_max` steps."""
        steps = 0
        for _ in range(steps_max):
            if self.step() is not None:
                steps += 1
            elif self.scheduler.in_flight and self._auto:
                self.clock.advance(0.01)
            else:
                return steps
        raise AssertionError(f"testing: still running after {steps_max} steps: {self.scheduler.stats()}")

    def end_copies(self) -> None:
        """End every copy and storage operation that is under way, except those that the test made fail."""
        for op in list(self.mover.pending) if self.mover is not None else ():
            assert self.mover is not None, "testing: copies without a mover"
            self.mover.finish(op)
        for op in list(self.storage.pending) if self.storage is not None else ():
            assert self.storage is not None, "testing: storage operations without a storage"
            self.storage.finish(op)

    def check_drained(self) -> None:
        """No request, no row taken, and no page that is neither free nor evictable."""
        self.scheduler.sanity_check()
        assert self.scheduler.idle, f"testing: not idle: {self.scheduler.stats()}"
        used = self.cache.page_count - 1 - self.cache.available()
        assert used == 0, f"testing: {used} pages are still used: {self.cache.ledger.counts()}"
        for part, shape in self.cache.geometry.parts.items():
            left = shape.pages - 1 - self.cache.available(part)
            assert left == 0, f"testing: {left} {part.name} pages are still used"
