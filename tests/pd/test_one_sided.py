"""Push and pull through real ports: what lands, and that no page is used again while somebody may still write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from serinus.core.clock import ManualClock
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    CancelHandoff,
    Capabilities,
    ChunkComputed,
    DecodePort,
    EndPrefill,
    ForgetPrefill,
    Landed,
    OpState,
    PageStore,
    PrefillDrained,
    PrefillPort,
    Quarantine,
    QuarantineOver,
    Recompute,
    ReleaseChunk,
    StartHandoff,
    StopPrefill,
)
from serinus.wire import LocalHub, Post
from tests.pd.shared_memory import PULL, PUSH, Bus, SharedBackend, SharedStore
from tests.pd.tiny import PAGE_SIZE, first_token, full, make_request, make_settings, page_content


class SharedPair:
    """A decode and a prefill engine over a bus; every page that is free, or not yet held, is spoiled."""

    def __init__(self, capabilities: Capabilities, **changes: object) -> None:
        self.capabilities = capabilities
        self.bus = Bus()
        self.hub = LocalHub()
        self.clock = ManualClock(10.0)
        self.stores = (SharedStore(), SharedStore())
        self.results: dict[str, str] = {}
        self.quarantined: dict[int, set[int]] = {}
        self.ended: list[str] = []
        self.held: dict[str, set[int]] = {}
        self.computing = True
        self.stopped: list[str] = []
        self.requests = {f"r{i}": make_request(f"r{i}", 3 + 5 * i, i) for i in range(5)}
        self.pages = {
            rid: np.arange(1 + 8 * i, 1 + 8 * i + -(-len(self.requests[rid].prompt) // PAGE_SIZE), dtype=np.int32)
            for i, rid in enumerate(self.requests)
        }
        backends = [SharedBackend(self.bus, store, capabilities) for store in self.stores]
        common: dict[str, object] = {"backends": ("shared",), "capabilities": {"shared": capabilities}, **changes}
        stores: list[PageStore] = list(self.stores)
        self.backend = backends[0]
        self.decode = DecodePort(
            make_settings("d", 1, **common), post=Post(self.hub.channel(), incarnation=1, clock=self.clock),
            backends=backends[:1], store=stores[0], clock=self.clock,
        )  # fmt: skip
        self.prefill = PrefillPort(
            make_settings("p", 2, **common),
            post=Post(self.hub.channel("local://p"), incarnation=2, clock=self.clock),
            backends=backends[1:], store=stores[1], clock=self.clock,
        )  # fmt: skip

    def start(self, rid: str) -> None:
        spans = full(0, self.pages[rid])
        event = StartHandoff(rid=rid, request=self.requests[rid], address="local://p", held=0, spans=spans)
        self.act_decode(self.decode.handle(event))

    def turn_decode(self, seconds: float = 0.1) -> None:
        self.clock.advance(seconds)
        self.act_decode(self.decode.poll(0.0))

    def turn_prefill(self, seconds: float = 0.1) -> None:
        self.clock.advance(seconds)
        self.act_prefill(self.prefill.poll(0.0))

    def turns(self, count: int = 12, seconds: float = 0.1) -> None:
        for _ in range(count):
            self.turn_decode(seconds)
            self.turn_prefill(seconds)

    def cancel(self, rid: str) -> None:
        self.act_decode(self.decode.handle(CancelHandoff(rid=rid)))
        self.over(rid, "cancelled")

    def over(self, rid: str, how: str) -> None:
        assert rid not in self.results, f"I7: {rid} ended twice"
        self.results[rid] = how
        held = set().union(*self.quarantined.values()) if self.quarantined else set()
        for page in set(self.pages[rid].tolist()) - held:
            self.stores[0].data[page] = 0xDD  # reused by somebody at once

    def spoiled(self, rid: str) -> bool:
        """Whether the pages are as whoever got them next has left them."""
        return bool((self.stores[0].data[self.pages[rid]] == 0xDD).all())

    def act_decode(self, results: Sequence[object]) -> None:
        for result in results:
            match result:
                case Landed():
                    prompt = self.requests[result.rid].prompt
                    assert result.token == first_token(prompt)
                    for i, page in enumerate(self.pages[result.rid].tolist()):
                        assert np.array_equal(self.stores[0].data[page], page_content(prompt, i)), "I6"
                    self.results[result.rid] = "landed"
                case Recompute():
                    self.over(result.rid, result.code)
                case Quarantine():
                    self.quarantined[result.grant] = set(result.spans[0].pages.tolist())
                case QuarantineOver():
                    pages = self.quarantined.pop(result.grant)
                    assert pages == set(result.spans[0].pages.tolist())
                    self.stores[0].data[sorted(pages)] = 0xDD

    def act_prefill(self, results: Sequence[object]) -> None:
        for result in results:
            match result:
                case AddPrefill() if self.computing:
                    self.compute(result)
                case ReleaseChunk():
                    self.release(result.xid, set(result.spans[0].pages.tolist()))
                case StopPrefill():
                    self.stopped.append(result.xid)
                case PrefillDrained() | AbortPrefill() | ForgetPrefill():
                    self.release(result.xid, set(self.held.get(result.xid, ())))
                    self.ended.append(result.xid)

    def release(self, xid: str, pages: set[int]) -> None:
        reading = {page for op in self.bus.ops.values() if op.state is OpState.PENDING and op.source is self.stores[1]
                   for page in op.sources.tolist()}  # fmt: skip
        assert self.capabilities is PULL or not pages & reading, "I4: pages are released while they are read"
        self.held[xid] -= pages
        self.stores[1].data[sorted(pages)] = 0xDD

    def compute(self, order: AddPrefill) -> None:
        prompt, base = order.request.prompt, int(order.rid[1:]) * 8 + 1
        count = -(-len(prompt) // PAGE_SIZE)
        pages = np.arange(base, base + count, dtype=np.int32)
        self.held[order.xid] = set(pages.tolist())
        for i in range(count):
            self.stores[1].data[base + i] = page_content(prompt, i)
        event = ChunkComputed(xid=order.xid, spans=full(0, pages), last=True, token=first_token(prompt))
        self.act_prefill(self.prefill.handle(event))

    def assert_empty(self) -> None:
        assert not self.quarantined, f"I11: {self.quarantined}"
        assert self.decode.machine.quarantined_pages == 0
        assert self.decode.machine.handoff_count == self.prefill.machine.handoff_count == 0
        assert not any(self.held.values()), "I12: sources are held"

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


MakePair = Callable[..., SharedPair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[SharedPair] = []

    def make(capabilities: Capabilities, **changes: object) -> SharedPair:
        made.append(SharedPair(capabilities, **changes))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize("capabilities", [PUSH, PULL], ids=["push", "pull"])
def test_prompts_land_through_memory_of_the_other_side(make_pair: MakePair, capabilities: Capabilities) -> None:
    pair = make_pair(capabilities)
    for rid in pair.requests:
        pair.start(rid)
    pair.turns(20)
    assert pair.results == dict.fromkeys(pair.requests, "landed")
    assert len(pair.ended) == 5
    pair.assert_empty()


def with_writes_under_way(make_pair: MakePair, capabilities: Capabilities, **changes: object) -> SharedPair:
    """A pair that is in the middle of r4; operations take their time from now on."""
    pair = make_pair(capabilities, **changes)
    pair.bus.is_prompt = False
    pair.start("r4")
    pair.turns(3)
    assert [op.state for op in pair.bus.ops.values()] == [OpState.PENDING] * len(pair.bus.ops)
    assert pair.bus.ops
    return pair


def test_pages_of_an_aborted_push_wait_for_the_acknowledgement_of_the_writer(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH)
    pair.cancel("r4")
    pair.turns(6)
    assert pair.quarantined, "a write is under way, so nobody acknowledges"
    assert not pair.ended
    assert len(pair.stopped) == 1, "but prefill works on it no more"
    assert pair.bus.land() == 1
    assert not pair.spoiled("r4")
    pair.turns(3)
    assert pair.spoiled("r4")
    pair.assert_empty()
    pair.bus.is_prompt = True
    pair.start("r1")
    pair.turns()
    assert pair.results == {"r4": "cancelled", "r1": "landed"}


def test_a_writer_that_never_acknowledges_is_cut_off_before_its_pages_are_free(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH, abort_s_max=2.0)
    pair.cancel("r4")
    for _ in range(15):
        pair.turn_decode(0.1)
    assert pair.quarantined
    assert not pair.bus.fences
    for _ in range(10):
        pair.turn_decode(0.1)
    assert pair.bus.fences == 1
    assert not pair.quarantined
    pair.bus.land()
    assert pair.spoiled("r4"), "the late write met the fence"
    pair.bus.is_prompt = True
    pair.turns(30, 0.3)
    assert pair.decode.machine.refusal("local://p") == ("", ""), "and the peer is greeted anew, at the new address"
    pair.start("r1")
    pair.turns()
    assert pair.results == {"r4": "cancelled", "r1": "landed"}
    pair.assert_empty()


def test_a_prefill_engine_that_vanishes_while_it_writes_is_cut_off(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH)
    pair.prefill._post.close()
    pair.turn_decode()
    assert pair.results == {"r4": "peer_gone"}
    assert pair.bus.fences == 1
    assert pair.spoiled("r4")
    pair.bus.land()
    assert pair.spoiled("r4"), "the late write met the fence"


def test_a_prefill_engine_that_gives_up_while_it_writes_frees_its_pages_after_the_write(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH)
    (xid,) = pair.held
    pair.act_prefill(pair.prefill.handle(EndPrefill(xid=xid, code="error", reason="no more")))
    pair.turns(2)
    assert pair.results == {"r4": "error"}
    assert pair.quarantined
    assert pair.held[xid]
    pair.bus.land()
    pair.turns(3)
    pair.assert_empty()


def test_a_write_that_fails_is_told_and_recomputed(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH)
    for op in pair.bus.ops.values():
        op.state = OpState.FAILED
    pair.turns(4)
    assert pair.results == {"r4": "transfer"}
    pair.assert_empty()


def test_a_write_that_is_lost_costs_the_connection_and_a_fence(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PUSH)
    for op in pair.bus.ops.values():
        op.state = OpState.LOST
    pair.turns(4)
    assert pair.results == {"r4": "peer_gone"}
    assert pair.bus.fences == 1
    pair.assert_empty()


def test_pages_of_an_aborted_pull_wait_for_our_own_reads(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PULL)
    pair.cancel("r4")
    assert pair.quarantined
    assert pair.backend.cancelled, "a hint was given"
    pair.turns(6)
    assert pair.quarantined, "and is no end"
    assert any(pair.held.values()), "prefill keeps the source until we have drained"
    pair.bus.land()
    assert not pair.spoiled("r4")
    pair.turns(3)
    assert pair.spoiled("r4")
    pair.assert_empty()


def test_an_aborted_pull_cancels_no_reads_of_others(make_pair: MakePair) -> None:
    pair = make_pair(PULL)
    pair.bus.is_prompt = False
    pair.start("r3")
    pair.start("r4")
    pair.turns(3)
    mine = [op.number for op in pair.bus.ops.values() if set(op.targets.tolist()) <= set(pair.pages["r4"].tolist())]
    pair.cancel("r4")
    assert pair.backend.cancelled == mine != []


def test_a_pull_that_comes_after_the_lease_is_recomputed(make_pair: MakePair) -> None:
    pair = with_writes_under_way(make_pair, PULL, lease_s=5.0)
    for _ in range(60):
        pair.turn_prefill(0.1)  # decode is stopped meanwhile
    assert len(pair.stopped) == 1
    assert any(pair.held.values()), "time alone frees nothing"
    pair.bus.land()
    pair.turns(4)
    assert pair.results == {"r4": "expired"}
    pair.assert_empty()


def test_bytes_that_change_on_the_way_do_not_pass(make_pair: MakePair) -> None:
    for capabilities in (PUSH, PULL):
        pair = with_writes_under_way(make_pair, capabilities)
        for op in pair.bus.ops.values():
            op.source.data[op.sources[0], 3] ^= 1
        pair.bus.land()
        pair.bus.is_prompt = True
        pair.turns(6)
        assert pair.results == {"r4": "digest"}
        pair.assert_empty()
