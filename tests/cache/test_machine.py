"""Hypothesis drives the tiny engine of this room in every order it can think of; all oracles after every rule.

Together with the seeded driver (test_driver.py) the proofs run 20,000 rules and more, the normal suite 6,000; both
count what they ran.
`python -m tests.cache.night --minutes N` goes on from there.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import serinus.cache
from serinus.cache import PartGeometry
from serinus.core.parts import Part
from tests.cache.drive import BESIDE_FULL, POLICIES, WRITE_POLICIES
from tests.cache.model import Shape
from tests.cache.tiers import TieredWorld

INDEX = st.integers(0, 5)
SYMBOLS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
NORMAL = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

TIERS = st.sampled_from([(0, False), (8, False), (40, False), (12, True), (60, True)])
"""Host pages of FULL, and whether there is a storage."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Every page size, part, tier and policy."""
    size = draw(st.sampled_from([1, 2, 16]))
    host, storage = draw(TIERS)
    parts = {Part.FULL: PartGeometry(pages=draw(st.integers(4, 30)), host_pages=host)}
    for part in draw(st.sampled_from(BESIDE_FULL)):
        window = draw(st.sampled_from([1, 2, 3, size + 1, 2 * size, 3 * size + size // 2]))
        whole = part is Part.LATENT and draw(st.booleans())
        parts[part] = PartGeometry(
            pages=draw(st.integers(4, 30)), host_pages=host and draw(st.integers(3, 40)),
            window=None if whole else window,
        )  # fmt: skip
    return Shape(
        page_size=size, parts=parts, storage=storage, policy=draw(st.sampled_from(POLICIES)),
        write_policy=draw(st.sampled_from(WRITE_POLICIES)) if host else "write_through",
    )  # fmt: skip


class CacheMachine(RuleBasedStateMachine):
    """Every rule ends with all oracles; the teardown drains to an empty cache."""

    world: TieredWorld
    transfers: bool
    rules_run = 0

    @initialize(shape=shapes(), early=st.booleans(), transfers=st.booleans())
    def begin(self, shape: Shape, early: bool, transfers: bool) -> None:
        self.transfers = transfers
        self.world = TieredWorld(serinus.cache, shape, early=early)

    def done(self) -> None:
        """A rule has run."""
        CacheMachine.rules_run += 1
        self.world.check()

    # Requests

    @rule(
        namespace=st.sampled_from(["", "", "salt"]), symbols=SYMBOLS, ragged=st.integers(0, 3),
        priority=st.integers(0, 2), lazy=st.booleans(),
    )  # fmt: skip
    def arrive(self, namespace: str, symbols: list[int], ragged: int, priority: int, lazy: bool) -> None:
        repeat = max(1, self.world.size // 2)
        tokens = [s for s in symbols for _ in range(repeat)] + [2] * ragged
        self.world.arrive(namespace, tokens, priority=priority, lazy=lazy)
        self.done()

    @precondition(lambda self: self.world.waiting)
    @rule(which=INDEX, load=st.booleans(), drop=st.booleans())
    def admit(self, which: int, load: bool, drop: bool) -> None:
        self.world.admit(which, load=load, drop=drop)
        self.done()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, count=st.integers(1, 40), publish=st.booleans(), advance=st.sampled_from(["last", "first", ""]))
    def chunk(self, which: int, count: int, publish: bool, advance: str) -> None:
        self.world.chunk(which, count, publish=publish, advance=advance)
        self.done()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, token=st.integers(0, 2), advance=st.booleans())
    def decode(self, which: int, token: int, advance: bool) -> None:
        self.world.decode(which, token, advance=advance)
        self.done()

    @precondition(lambda self: self.world.running)
    @rule(which=INDEX, retract=st.booleans(), park=st.booleans())
    def end(self, which: int, retract: bool, park: bool) -> None:
        self.world.end(which, retract=retract, park=retract and park)
        self.done()

    @precondition(lambda self: self.world.waiting)
    @rule(which=INDEX, drop=st.booleans())
    def look(self, which: int, drop: bool) -> None:
        self.world.look(which, drop=drop)
        self.done()

    @precondition(lambda self: self.world.waiting)
    @rule(which=INDEX)
    def give_up(self, which: int) -> None:
        self.world.give_up(which)
        self.done()

    # Others

    @precondition(lambda self: self.transfers and self.world.running)
    @rule(
        which=INDEX, first=INDEX, count=st.integers(1, 4), name=st.sampled_from(["transfer", "restore"]),
        part=st.sampled_from(Part),
    )  # fmt: skip
    def hold(self, which: int, first: int, count: int, name: str, part: Part) -> None:
        self.world.hold(which, first, count, name, part if part in self.world.shape.parts else Part.FULL)
        self.done()

    @precondition(lambda self: self.world.holds)
    @rule(which=INDEX)
    def unhold(self, which: int) -> None:
        self.world.unhold(which)
        self.done()

    @rule(enough=st.integers(0, 5), which=INDEX)
    def evict(self, enough: int, which: int) -> None:
        pools = self.world.shape.pools
        self.world.evict(enough, pools[which % len(pools)])
        self.done()

    @rule()
    def flush(self) -> None:
        self.world.flush()
        self.done()

    # Tiers

    @precondition(lambda self: self.world.shape.tiered)
    @rule()
    def poll(self) -> None:
        self.world.poll()
        self.done()

    @precondition(lambda self: self.world.mover.pending)
    @rule(which=INDEX, ok=st.booleans(), tell=st.booleans())
    def end_copy(self, which: int, ok: bool, tell: bool) -> None:
        self.world.end_copy(which, ok=ok)
        if tell:
            self.world.poll()
        self.done()

    @precondition(lambda self: self.world.mover.pending)
    @rule(which=INDEX)
    def doom_copy(self, which: int) -> None:
        self.world.doom_copy(which)
        self.done()

    @precondition(lambda self: self.world.shape.tiered)
    @rule()
    def settle(self) -> None:
        self.world.settle()
        self.done()

    @precondition(lambda self: self.world.storage and self.world.waiting)
    @rule(which=INDEX)
    def prefetch(self, which: int) -> None:
        self.world.prefetch(which)
        self.done()

    @precondition(lambda self: self.world.storage and self.world.storage.pending)
    @rule(which=INDEX, good_max=st.none() | st.integers(0, 5), tell=st.booleans())
    def end_storage(self, which: int, good_max: int | None, tell: bool) -> None:
        self.world.end_storage(which, good_max)
        if tell:
            self.world.poll()
        self.done()

    @precondition(lambda self: self.world.storage and self.world.waiting)
    @rule(which=INDEX, abort=st.booleans())
    def cut(self, which: int, abort: bool) -> None:
        if abort:
            self.world.abort_prefetch(which)
        else:
            self.world.cut(which)
        self.done()

    @precondition(lambda self: self.world.storage)
    @rule(which=st.integers(0, 50))
    def lose(self, which: int) -> None:
        self.world.lose(which)
        self.done()

    @precondition(lambda self: self.world.storage)
    @rule(engine=st.sampled_from([None, None, "bf16", "fp8"]))
    def crash(self, engine: str | None) -> None:
        self.world.crash(engine)
        self.done()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


@pytest.mark.slow
def test_the_cache_keeps_its_promises_in_any_order_of_events() -> None:
    CacheMachine.rules_run = 0
    run_state_machine_as_test(CacheMachine, settings=settings(NORMAL, max_examples=50))
    assert CacheMachine.rules_run >= 1_000, f"{CacheMachine.rules_run} rules ran, expected 1,000 or more"


@pytest.mark.proof
def test_the_cache_keeps_its_promises_in_many_more_orders_of_events() -> None:
    CacheMachine.rules_run = 0
    run_state_machine_as_test(CacheMachine, settings=NORMAL)
    assert CacheMachine.rules_run >= 4_000, f"{CacheMachine.rules_run} rules ran, expected 4,000 or more"
