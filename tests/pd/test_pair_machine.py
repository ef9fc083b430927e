"""Hypothesis drives decode and prefill machines in every order it can think of; the world keeps the account."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.pd.tiny import PAGE_SIZE
from tests.pd.world import World

INDEX = st.integers(0, 7)


class PairMachine(RuleBasedStateMachine):
    """Two decode and two prefill engines. Every rule is one step; the teardown brings calm and wants nothing left."""

    world: World

    @initialize(pages=st.integers(6, 20), room=st.integers(1, 4))
    def begin(self, pages: int, room: int) -> None:
        self.world = World(2, 2, pages=pages, room=room)

    @rule(d=st.integers(0, 1), p=st.integers(0, 1), length=st.integers(1, 5 * PAGE_SIZE), held=st.integers(0, 3))
    def start(self, d: int, p: int, length: int, held: int) -> None:
        self.world.start(d, p, length, held)

    @precondition(lambda self: any(link.to_prefill for link in self.world.links))
    @rule(which=INDEX, count=st.integers(1, 4))
    def deliver_to_prefill(self, which: int, count: int) -> None:
        links = [link for link in self.world.links if link.to_prefill]
        for _ in range(count):
            self.world.deliver_to_prefill(links[which % len(links)])

    @precondition(lambda self: any(link.to_decode for link in self.world.links))
    @rule(which=INDEX, count=st.integers(1, 4))
    def deliver_to_decode(self, which: int, count: int) -> None:
        links = [link for link in self.world.links if link.to_decode]
        for _ in range(count):
            self.world.deliver_to_decode(links[which % len(links)])

    @precondition(lambda self: any(self.world.jobs))
    @rule(which=INDEX, count=st.integers(1, 5))
    def compute(self, which: int, count: int) -> None:
        jobs = [(p, xid) for p, jobs in enumerate(self.world.jobs) for xid in jobs]
        p, xid = jobs[which % len(jobs)]
        self.world.compute(p, xid, count)

    @precondition(lambda self: any(self.world.asked))
    @rule(which=INDEX)
    def cancel(self, which: int) -> None:
        asked = [(d, rid) for d, asked in enumerate(self.world.asked) for rid in asked]
        self.world.cancel(*asked[which % len(asked)])

    @precondition(lambda self: any(self.world.jobs))
    @rule(which=INDEX)
    def give_up(self, which: int) -> None:
        jobs = [(p, xid) for p, jobs in enumerate(self.world.jobs) for xid in jobs]
        self.world.end_prefill(*jobs[which % len(jobs)])

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: self.world.links)
    @rule(which=INDEX, really=st.integers(0, 5))
    def cut(self, which: int, really: int) -> None:
        if not really:
            self.world.cut(self.world.links[which % len(self.world.links)])

    @precondition(lambda self: self.world.links)
    @rule(which=INDEX)
    def corrupt(self, which: int) -> None:
        self.world.corrupt(self.world.links[which % len(self.world.links)])

    @rule(p=st.integers(0, 1), really=st.integers(0, 7))
    def kill_or_revive_prefill(self, p: int, really: int) -> None:
        if not self.world.prefill_alive[p]:
            self.world.revive_prefill(p)
        elif not really:
            self.world.kill_prefill(p)

    @rule(d=st.integers(0, 1), really=st.integers(0, 7))
    def kill_decode(self, d: int, really: int) -> None:
        if not really:
            self.world.kill_decode(d)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for p, alive in enumerate(world.prefill_alive):
            if not alive:
                world.revive_prefill(p)
        for _ in range(8):
            world.settle()
            world.tick(2.0)
        world.settle()
        world.assert_empty()
        for d in range(2):
            for p in range(2):
                before = world.over["landed"]
                assert world.start(d, p, 9, 1) is not None
                world.settle()
                assert world.over["landed"] == before + 1, f"calm, and decode {d} cannot use prefill {p}: {world.over}"


@pytest.mark.slow
def test_no_order_of_events_mixes_pages_or_leaves_anything_behind() -> None:
    run_state_machine_as_test(
        PairMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=60,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
