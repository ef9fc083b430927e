"""Hypothesis drives the tiny engine of world.py in every order it can think of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import serinus.cache
from tests.cache.world import World

INDEX = st.integers(0, 5)
SYMBOLS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class CacheMachine(RuleBasedStateMachine):
    """Every rule ends with all oracles; the teardown drains to an empty cache."""

    world: World
    transfers: bool

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        page_count=st.integers(4, 30),
        policy=st.sampled_from(["lru", "lfu", "fifo"]),
        transfers=st.booleans(),
    )
    def begin(self, page_size: int, page_count: int, policy: str, transfers: bool) -> None:
        self.transfers = transfers
        self.world = World(serinus.cache, page_size=page_size, page_count=page_count, policy=policy)

    @rule(namespace=st.sampled_from(["", "", "salt"]), symbols=SYMBOLS, ragged=st.integers(0, 3))
    def arrive(self, namespace: str, symbols: list[int], ragged: int) -> None:
        repeat = max(1, self.world.size // 2)
        self.world.arrive(namespace, [s for s in symbols for _ in range(repeat)] + [2] * ragged)
        self.world.check()

    @precondition(lambda self: self.world.waiting)
    @rule(which=INDEX)
    def admit(self, which: int) -> None:
        self.world.admit(which)
        self.world.check()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, count=st.integers(1, 40), publish=st.booleans())
    def chunk(self, which: int, count: int, publish: bool) -> None:
        self.world.chunk(which, count, publish=publish)
        self.world.check()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, token=st.integers(0, 2))
    def decode(self, which: int, token: int) -> None:
        self.world.decode(which, token)
        self.world.check()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, retract=st.booleans())
    def end(self, which: int, retract: bool) -> None:
        self.world.end(which, retract=retract)
        self.world.check()

    @precondition(lambda self: self.transfers and self.world.running)
    @rule(which=INDEX, first=INDEX, count=st.integers(1, 4), name=st.sampled_from(["transfer", "restore"]))
    def hold(self, which: int, first: int, count: int, name: str) -> None:
        self.world.hold(which, first, count, name)
        self.world.check()

    @precondition(lambda self: self.world.holds)
    @rule(which=INDEX)
    def unhold(self, which: int) -> None:
        self.world.unhold(which)
        self.world.check()

    @rule(enough=st.integers(0, 5))
    def evict(self, enough: int) -> None:
        self.world.evict(enough)
        self.world.check()

    @rule()
    def flush(self) -> None:
        self.world.flush()
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


@pytest.mark.slow
def test_the_cache_keeps_its_promises_in_any_order_of_events() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
