"""Hypothesis drives two schedulers over tiny pools: arrivals, aborts in every state, retractions, handoffs that fail;
with one part or two, with and without a host tier and a storage. Copies end in any order, well or badly.

Up to three plans are under way, run as late as it likes and are committed in order; requests are aborted between.

Oracles: the fake model's own answers (a wrong row or an early free is a wrong token), every invariant after every rule,
and ledgers that drain to empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serinus.cache import PartGeometry
from serinus.core.errors import PromptTooLong
from serinus.core.parts import Part
from serinus.testing.builders import make_request
from serinus.testing.fake_mover import FakeMover, FakeStorage
from serinus.testing.handoff_pair import Handoff, HandoffPair
from serinus.testing.tiny_engine import TinyEngine

pytestmark = pytest.mark.slow

SHARED = [[1, 2, 1, 2, 3, 3, 1, 2, 1, 1], [1, 2, 1, 3, 2, 2, 2, 1], [2] * 12, []]
"""Beginnings that prompts share, at different lengths."""

SAMPLINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 1},
    {"max_new_tokens": 6},
    {"max_new_tokens": 9, "ignore_eos": True},
    {"max_new_tokens": 9, "min_new_tokens": 3, "stop_token_ids": (1,)},
    {"temperature": 1.0, "seed": 5, "max_new_tokens": 12},
    {"max_new_tokens": 4, "prompt_logprobs": 0, "logprobs": 1},
    {"max_new_tokens": 2, "hidden_state": True, "pooling": "mean"},
    {"ignore_eos": True},
]
"""The last one runs to the end of the context or the pool."""


class SchedulersUnderFire(RuleBasedStateMachine):
    pair: HandoffPair

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(10, 22),
        running=st.integers(1, 5),
        chunk=st.sampled_from([4, 6, 16, -1]),
        policy=st.sampled_from(["fcfs", "lpm", "priority"]),
        prefix=st.sampled_from([True, True, True, False]),
        growth=st.sampled_from([0, 4, 64]),
        min_remote=st.sampled_from([0, 6]),
        window=st.sampled_from([None, None, 2, 3, 5, 8]),
        swa_spare=st.integers(0, 10),
        host=st.sampled_from([0, 0, 4, 12, 30]),
        storage=st.sampled_from(["none", "none", "best_effort", "timeout", "wait_complete"]),
        write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "priority"]),
        auto=st.booleans(),
        depth=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        page_size: int,
        pages: int,
        running: int,
        chunk: int,
        policy: str,
        prefix: bool,
        growth: int,
        min_remote: int,
        window: int | None,
        swa_spare: int,
        host: int,
        storage: str,
        write_policy: str,
        eviction: str,
        auto: bool,
        depth: int,
    ) -> None:
        self.serial = 0
        swa = 0 if window is None else 3 + -(-window // page_size) + swa_spare
        beside = {Part.SWA: PartGeometry(pages=swa, host_pages=host, window=window)} if window else {}
        stored: dict[str, Any] = {"stored": {}, "prefetch_policy": storage} if host and storage != "none" else {}
        self.pair = HandoffPair(
            page_size=page_size, page_count=pages + 1, context_length=26, vocab_size=6, eos_ids=(0,),
            enable_prefix=prefix, max_running_requests=running, chunked_prefill_size=chunk, schedule_policy=policy,
            growth_tokens=growth, min_remote_tokens=min_remote, beside=beside,
            host_pages=host, write_policy=write_policy, policy=eviction,
            auto=auto, depth=depth, **stored,
        )  # fmt: skip

    @rule(
        shared=st.sampled_from(SHARED),
        cut=st.integers(0, 12),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=9),
        sampling=st.sampled_from(SAMPLINGS),
        remote=st.booleans(),
        salt=st.sampled_from(["", "", "", "salt"]),
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(
        self,
        shared: list[int],
        cut: int,
        tail: list[int],
        sampling: dict[str, Any],
        remote: bool,
        salt: str,
        copies: int,
    ) -> None:
        for _ in range(copies):
            self.serial += 1
            prompt = shared[:cut] + tail
            request = make_request(f"r{self.serial}", prompt, cache_salt=salt, **{"seed": self.serial, **sampling})
            request = replace(request, priority=self.serial % 3)
            cache = self.pair.decode.cache
            if len(prompt) + 1 > min(26, (cache.page_count - 1) * cache.page_size):
                with pytest.raises(PromptTooLong):
                    self.pair.add(request, remote=remote)
            else:
                self.pair.add(request, remote=remote)

    @rule(
        shared=st.sampled_from(SHARED),
        tail=st.lists(st.integers(1, 3), max_size=3),
        sampling=st.sampled_from(SAMPLINGS),
    )
    def arrive_at_prefill(self, shared: list[int], tail: list[int], sampling: dict[str, Any]) -> None:
        cache = self.pair.prefill.cache
        prompt = [*shared, 1, *tail][: (cache.page_count - 1) * cache.page_size - 1]
        self.serial += 1
        self.pair.add_guest(make_request(f"g{self.serial}", prompt, **{"seed": self.serial, **sampling}))

    @rule(steps=st.integers(1, 4))
    def step_decode(self, steps: int) -> None:
        for _ in range(steps):
            self.pair.step_decode()

    @rule(steps=st.integers(1, 3))
    def step_prefill(self, steps: int) -> None:
        for _ in range(steps):
            self.pair.step_prefill()

    @rule()
    def reserve(self) -> None:
        self.pair.reserve()

    def _some(self, data: st.DataObject, fits: Callable[[Handoff], bool]) -> Handoff | None:
        found = [handoff for handoff in self.pair.handoffs.values() if fits(handoff)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        handoff = self._some(data, lambda h: not h.asked and not h.over)
        if handoff:
            self.pair.ask(handoff)

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        handoff = self._some(data, lambda h: bool(h.chunks))
        if handoff:
            self.pair.deliver(handoff, data.draw(st.integers(0, len(handoff.chunks) - 1)))

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        handoff = self._some(data, lambda h: not h.over)
        if handoff:
            self.pair.recompute(handoff)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        handoff = self._some(data, lambda h: h.over)
        if handoff:
            self.pair.end(handoff)

    @rule(data=st.data())
    def prefill_aborts(self, data: st.DataObject) -> None:
        handoff = self._some(data, lambda h: h.asked and not h.over)
        if handoff:
            self.pair.abort_prefill(handoff)

    @precondition(lambda self: self.pair.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.pair.abort(data.draw(st.sampled_from(sorted(self.pair.requests))))

    def _engine(self, name: str) -> TinyEngine:
        return self.pair.decode if name == "decode" else self.pair.prefill

    @rule(name=st.sampled_from(["decode", "prefill"]), count=st.integers(1, 3))
    def plans_are_made(self, name: str, count: int) -> None:
        engine = self._engine(name)
        for _ in range(min(count, engine.settings.depth - engine.scheduler.under_way)):
            engine.plan()

    @rule(name=st.sampled_from(["decode", "prefill"]), count=st.integers(1, 2))
    def plans_run(self, name: str, count: int) -> None:
        self._engine(name).catch_up(count)

    @rule(name=st.sampled_from(["decode", "prefill"]))
    def a_plan_is_committed(self, name: str) -> None:
        engine = self._engine(name)
        if engine.scheduler.under_way:
            self.pair.commit(engine)

    @rule(data=st.data())
    def abort_in_the_middle_of_a_step(self, data: st.DataObject) -> None:
        engine = self.pair.decode
        if not engine.scheduler.under_way:
            engine.plan()
        under_way = [rid for rid in sorted(self.pair.requests) if engine.works_for(rid)]
        if under_way:
            self.pair.abort(data.draw(st.sampled_from(under_way)))

    def _copies(self) -> list[tuple[FakeMover, int]]:
        movers = [engine.mover for engine in (self.pair.decode, self.pair.prefill) if engine.mover is not None]
        return [(mover, op) for mover in movers for op in mover.pending]

    @precondition(lambda self: self._copies())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]), ends=st.booleans())
    def a_copy_ends(self, data: st.DataObject, fails: bool, ends: bool) -> None:
        mover, op = data.draw(st.sampled_from(self._copies()))
        if fails:
            mover.fail(op)
        if ends:
            mover.finish(op)

    def _reads(self) -> list[tuple[FakeStorage, int]]:
        stores = [engine.storage for engine in (self.pair.decode, self.pair.prefill) if engine.storage is not None]
        return [(store, op) for store in stores for op in store.pending]

    @precondition(lambda self: self._reads())
    @rule(data=st.data(), good=st.sampled_from([None, None, 0, 1]))
    def a_storage_operation_ends(self, data: st.DataObject, good: int | None) -> None:
        store, op = data.draw(st.sampled_from(self._reads()))
        store.finish(op, good)

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.decode.clock.advance(seconds)
        self.pair.prefill.clock.advance(seconds)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.calm()
            self.pair.check_answers()
            self.pair.check_drained()


class TestSchedulersUnderFire(SchedulersUnderFire.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, suppress_health_check=list(HealthCheck))


@pytest.mark.proof
class TestSchedulersUnderFireForLong(SchedulersUnderFire.TestCase):
    settings = settings(max_examples=300, stateful_step_count=40, suppress_health_check=list(HealthCheck))
