"""Ports: posts, codec and backends between two engines of this process; a network that loses, repeats, reorders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serinus.core.clock import ManualClock
from serinus.core.errors import ConfigError
from serinus.core.handoff import ChunkReady
from serinus.core.rng import Rng
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    Backend,
    CancelHandoff,
    DecodePort,
    Landed,
    LocalBackend,
    PeerChanged,
    PrefillDrained,
    PrefillPort,
    Recompute,
    ReleaseChunk,
    ShmBackend,
    Shutdown,
    StartHandoff,
    TcpBackend,
)
from serinus.pd.ports import OFFENCES_MAX
from serinus.wire import Arrived, ChannelEvent, Gone, LocalChannel, LocalHub, Post, encode
from serinus.wire.messages import DataOk, Keepalive
from tests.pd.tiny import LAYOUT, PAGE_BYTES, PAGE_SIZE, first_token, full, make_request, make_settings, page_content

PATIENT: dict[str, object] = dict.fromkeys(("connect_s_max", "handoff_s_max", "silence_s_max"), 1e6)
"""No timer runs out: what a bad network does to them is another matter."""


class Store:
    """Pages in an array."""

    page_bytes = PAGE_BYTES

    def __init__(self, count: int = 64) -> None:
        self.data = np.full((count, PAGE_BYTES), 0xEE, dtype=np.uint8)

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        out[:] = self.data[pages]

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.data[pages] = data


class Lossy(LocalChannel):
    """Loses, repeats and holds back what arrives, as a seeded rng says."""

    def __init__(self, hub: LocalHub, rng: Rng, badness: float) -> None:
        super().__init__(hub)
        self.rng, self.badness = rng, badness
        self.held: list[ChannelEvent] = []

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        out = self.held
        for event in super().poll(timeout_s):
            if isinstance(event, Gone) or self.rng.random() >= self.badness:
                out.append(event)
                if isinstance(event, Arrived) and self.rng.random() < self.badness:
                    out.append(event)
        self.rng.shuffle(out)
        keep = self.rng.randrange(len(out) + 1) if self.badness else len(out)
        self.held = out[keep:]
        return out[:keep]


class Pair:
    """A decode and a prefill engine; the prefill engine computes at once what it is asked for."""

    def __init__(self, backends: Sequence[Backend], seed: int = 0, badness: float = 0.0) -> None:
        self.hub = hub = LocalHub()
        rng = Rng(seed)
        self.clock = ManualClock(10.0)
        self.stores = (Store(), Store())
        self.results: dict[str, str] = {}
        self.ended: list[str] = []
        self.news: list[PeerChanged] = []
        listening, dialing = Lossy(hub, rng.split("p"), badness), Lossy(hub, rng.split("d"), badness)
        hub._bound["local://p"] = listening
        names = tuple(backend.name for backend in backends)
        self.decode = DecodePort(
            make_settings("d", 1, backends=names, **PATIENT),
            post=Post(dialing, incarnation=1, clock=self.clock, resend_s=0.5),
            backends=backends, store=self.stores[0], clock=self.clock,
        )  # fmt: skip
        self.prefill = PrefillPort(
            make_settings("p", 2, backends=names, **PATIENT),
            post=Post(listening, incarnation=2, clock=self.clock, resend_s=0.5),
            backends=backends, store=self.stores[1], clock=self.clock,
        )  # fmt: skip
        self.requests = {f"r{i}": make_request(f"r{i}", 3 + 5 * i, i) for i in range(5)}
        self.pages = {
            rid: np.arange(1 + 8 * i, 1 + 8 * i + -(-len(self.requests[rid].prompt) // PAGE_SIZE), dtype=np.int32)
            for i, rid in enumerate(self.requests)
        }

    def start(self, rid: str) -> None:
        event = StartHandoff(
            rid=rid, request=self.requests[rid], address="local://p", held=0, spans=full(0, self.pages[rid])
        )
        self.act_decode(self.decode.handle(event))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def turn(self, seconds: float = 0.1) -> None:
        """Both loops once."""
        self.clock.advance(seconds)
        self.act_decode(self.decode.poll(0.0))
        self.act_prefill(self.prefill.poll(0.0))

    def act_decode(self, results: Sequence[object]) -> None:
        for result in results:
            match result:
                case Landed():
                    prompt = self.requests[result.rid].prompt
                    assert result.token == first_token(prompt)
                    for i, page in enumerate(self.pages[result.rid].tolist()):
                        assert np.array_equal(self.stores[0].data[page], page_content(prompt, i))
                    assert result.rid not in self.results
                    self.results[result.rid] = "landed"
                case Recompute():
                    assert result.rid not in self.results
                    self.results[result.rid] = result.code
                case PeerChanged():
                    self.news.append(result)

    def act_prefill(self, results: Sequence[object]) -> None:
        for result in results:
            match result:
                case AddPrefill():
                    self._compute(result)
                case PrefillDrained() | AbortPrefill():
                    self.ended.append(result.xid)
                case ReleaseChunk():
                    self.stores[1].data[result.spans[0].pages] = 0xDD

    def _compute(self, order: AddPrefill) -> None:
        prompt = order.request.prompt
        count = -(-len(prompt) // PAGE_SIZE)
        base = int(order.rid[1:]) * 8 + 1
        for i in range(count):
            self.stores[1].data[base + i] = page_content(prompt, i)
            last = i == count - 1
            event = ChunkReady(
                xid=order.xid, spans=full(i, np.array([base + i], dtype=np.int32)), last=last,
                token=first_token(prompt) if last else None,
            )  # fmt: skip
            self.act_prefill(self.prefill.handle(event))


MakePair = Callable[[Sequence[Backend]], Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Pairs over a good network, closed at the end."""
    made: list[Pair] = []

    def make(backends: Sequence[Backend]) -> Pair:
        made.append(Pair(backends))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def backends_of(name: str) -> list[Backend]:
    """One way to move bytes; small areas, so that they fill up."""
    made: dict[str, Backend] = {"local": LocalBackend(256), "shm": ShmBackend(4096), "tcp": TcpBackend(256)}
    return [made[name]]


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_pages_land_over_every_backend(make_pair: MakePair, name: str) -> None:
    pair = make_pair(backends_of(name))
    for rid in pair.requests:
        pair.start(rid)
    for _ in range(20):
        pair.turn()
    assert pair.results == dict.fromkeys(pair.requests, "landed")
    assert len(pair.ended) == 5
    assert pair.prefill.staged_count == 0
    assert pair.decode.machine.handoff_count == pair.prefill.machine.handoff_count == 0
    assert pair.news[0].backend == name


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), badness=st.floats(0.0, 0.5), name=st.sampled_from(["local", "tcp", "shm"]))
def test_a_bad_network_changes_only_timing(seed: int, badness: float, name: str) -> None:
    pair = Pair(backends_of(name), seed, badness)
    for rid in pair.requests:
        pair.start(rid)
        pair.turn()
    for _ in range(2000):
        if len(pair.ended) == 5 and pair.prefill.staged_count == 0:
            break
        pair.turn(0.5)
    assert pair.results == dict.fromkeys(pair.requests, "landed")
    assert pair.prefill.staged_count == 0
    assert pair.decode.machine.handoff_count == pair.prefill.machine.handoff_count == 0
    pair.close()


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_a_byte_that_changes_on_the_way_is_noticed(make_pair: MakePair, name: str) -> None:
    pair = make_pair(backends_of(name))
    pair.start("r1")
    while not pair.prefill.staged_count:
        pair.turn()
    crew: Any = pair.prefill._crew
    (dock,) = crew.hands[0]._docks.values()
    sender: Any = dock.sender
    area = next(iter(sender._backend._staged.values())) if name == "local" else sender._area
    area[5] ^= 1
    for _ in range(5):
        pair.turn()
    assert pair.results == {"r1": "digest"}
    assert pair.prefill.machine.handoff_count == 0
    assert pair.prefill.staged_count == 0


def test_an_abort_leaves_nothing_staged(make_pair: MakePair) -> None:
    backends = backends_of("local")
    pair = make_pair(backends)
    pair.start("r4")
    pair.turn()
    pair.turn()
    assert pair.prefill.staged_count > 0
    assert pair.decode.handle(CancelHandoff(rid="r4")) == []
    for _ in range(6):
        pair.turn()
    assert pair.results == {}
    assert pair.prefill.staged_count == 0
    assert isinstance(backends[0], LocalBackend)
    assert backends[0].staged_count == 0


def test_the_end_of_prefill_is_a_recompute_and_its_staging_goes(make_pair: MakePair) -> None:
    backends = backends_of("local")
    pair = make_pair(backends)
    pair.start("r4")
    pair.turn()
    pair.turn()
    pair.prefill.close()
    pair.turn()
    assert pair.results["r4"] in ("peer_gone", "transfer"), "the end, or a piece whose bytes went with it, comes first"
    assert isinstance(backends[0], LocalBackend)
    assert backends[0].staged_count == 0


def test_an_engine_that_stops_tells_the_others(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("tcp"))
    pair.start("r0")
    pair.decode.poll(0.0)
    pair.act_prefill(pair.prefill.poll(0.0))
    pair.act_prefill(pair.prefill.handle(Shutdown(reason="bye")))
    pair.turn()
    assert set(pair.results.values()) <= {"refused", "shutdown", "peer_gone"}
    assert len(pair.results) == 1


def test_the_time_between_two_looks_at_the_letters_is_announced_as_a_step(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("local"))
    pair.start("r0")
    for _ in range(5):
        pair.turn()
    pair.clock.advance(70.0)
    pair.prefill.poll(0.0)
    pair.decode.poll(0.0)
    (peer,) = pair.decode.machine.peers
    assert 70.0 <= peer.pulse.step_s < 71.0
    (client,) = pair.prefill.machine.clients
    pair.clock.advance(1.0)
    pair.decode.poll(0.0)
    pair.prefill.poll(0.0)
    assert 70.0 <= client.pulse.step_s < 71.0


def test_a_port_counts_what_was_refused_and_what_was_sent_again(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("local"))
    raw = pair.hub.channel()
    raw.connect("s", "local://p")
    raw.send("s", [b"short"])
    raw.send("s", encode(Keepalive(), 5, 1))
    pair.turn()
    assert pair.prefill.rejects == {"short": 1, "no_hello": 1}
    pair.start("r0")
    pair.decode.poll(0.0)
    pair.clock.advance(0.6)
    pair.decode.poll(0.0)
    assert (pair.decode.resent_count, pair.prefill.resent_count) == (1, 0)


def test_ports_check_that_everything_fits() -> None:
    clock, store = ManualClock(), Store()
    post = Post(LocalHub().channel(), incarnation=1, clock=clock)
    with pytest.raises(ConfigError, match="backends"):
        DecodePort(make_settings("d", 1), post=post, backends=[TcpBackend()], store=store, clock=clock)
    layout = msgspec.structs.replace(LAYOUT, head_size=2)
    settings_ = make_settings("d", 1, layout=layout, backends=("tcp",))
    with pytest.raises(ConfigError, match="bytes a page"):
        PrefillPort(settings_, post=post, backends=[TcpBackend()], store=store, clock=clock)


def test_a_peer_whose_messages_make_no_sense_is_given_up_after_a_few_of_them(make_pair: MakePair) -> None:
    """Every frame is sound, so the post office has nothing against it; its handoffs are computed here."""
    pair = make_pair([LocalBackend(4096)])
    pair.start("r1")
    while pair.results.get("r1") != "landed":
        pair.turn()
    (client,) = pair.prefill.machine.clients
    for number in range(OFFENCES_MAX):
        assert [news.state for news in pair.news] == ["up"], f"given up after {number}"
        pair.prefill._post.send(client.peer, DataOk(xid="x", grant=number, piece=0, rank=0))
        pair.turn()
    assert [news.state for news in pair.news] == ["up", "down"]
    assert "make no sense" in pair.news[-1].reason
    assert pair.decode.rejects["unexpected"] == OFFENCES_MAX
