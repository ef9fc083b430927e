"""Ports: posts, codec and backends between two engines of this process; a network that loses, repeats, reorders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.core.clock import ManualClock
from serinus.core.errors import ConfigError
from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.engine.peers import Peers
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    Backend,
    CancelHandoff,
    DecodeSide,
    HandoffPort,
    Landed,
    LocalBackend,
    PageWorker,
    PeerChanged,
    PrefillDrained,
    PrefillSide,
    RankLayout,
    Recompute,
    ReleaseChunk,
    ShmBackend,
    Shutdown,
    StartHandoff,
    TcpBackend,
)
from serinus.pd.port import OFFENCES_MAX
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import Arrived, ChannelEvent, Gone, LocalChannel, LocalHub, Mailbox, encode
from serinus.wire.messages import DataOk, Keepalive
from tests.pd.tiny import (
    LAYOUT,
    PAGE_SIZE,
    Store,
    first_token,
    full,
    make_request,
    make_settings,
    page_content,
)

PATIENT: dict[str, object] = dict.fromkeys(("connect_s_max", "handoff_s_max", "silence_s_max"), 1e6)
"""No timer runs out: what a bad network does to them is another matter."""


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
        self.workers = tuple(
            PageWorker(0, layout=RankLayout(LAYOUT), stores={Part.FULL: store}, backends=backends, clock=self.clock)
            for store in self.stores
        )
        self.lines = tuple(AnsweringLine([worker]) for worker in self.workers)
        self.decode = HandoffPort(
            DecodeSide, make_settings("d", 1, backends=names, **PATIENT), line=self.lines[0],
            backends=backends,
        )  # fmt: skip
        self.prefill = HandoffPort(
            PrefillSide, make_settings("p", 2, backends=names, **PATIENT), line=self.lines[1],
            backends=backends,
        )  # fmt: skip
        self.decode_peers, self.prefill_peers = (
            Peers(Mailbox(channel, incarnation=number, clock=self.clock, resend_s=0.5))
            for number, channel in ((1, dialing), (2, listening))
        )
        self.requests = {f"r{i}": make_request(f"r{i}", 3 + 5 * i, i) for i in range(5)}
        self.pages = {
            rid: np.arange(1 + 8 * i, 1 + 8 * i + -(-len(self.requests[rid].prompt) // PAGE_SIZE), dtype=np.int32)
            for i, rid in enumerate(self.requests)
        }

    def start(self, rid: str) -> None:
        event = StartHandoff(
            rid=rid, request=self.requests[rid], address="local://p", held=0, spans=full(0, self.pages[rid])
        )
        self.act_decode(self.decode.handle(event, self.clock.now()))
        self.decode_peers.deliver(self.decode.take_outgoing())

    def close(self) -> None:
        self.workers[0].close()
        self.decode.close()
        self.decode_peers.close()
        self.close_prefill()

    def close_prefill(self) -> None:
        """The process of the prefill engine ends."""
        self.workers[1].close()
        self.prefill.close()
        self.prefill_peers.close()

    def turn(self, seconds: float = 0.1) -> None:
        """One turn of both engines."""
        self.clock.advance(seconds)
        self.turn_decode()
        self.turn_prefill()

    def turn_decode(self) -> None:
        """The decode engine's loop, once."""
        self.lines[0].pump()
        self.act_decode(self.decode.turn(self.clock.now(), self.decode_peers.receive()))
        self.decode_peers.deliver(self.decode.take_outgoing())

    def turn_prefill(self) -> None:
        """The prefill engine's loop, once."""
        self.lines[1].pump()
        self.act_prefill(self.prefill.turn(self.clock.now(), self.prefill_peers.receive()))
        self.prefill_peers.deliver(self.prefill.take_outgoing())

    def rejects(self, side: str) -> Counter[str]:
        """Frames and messages that an engine refused, by reason."""
        port: HandoffPort[Any] = getattr(self, side)
        peers: Peers = getattr(self, f"{side}_peers")
        return port.machine.rejects + peers.mailbox.rejects

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
            self.act_prefill(self.prefill.handle(event, self.clock.now()))


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
    assert pair.prefill.machine.staged_count == 0
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
        if len(pair.ended) == 5 and pair.prefill.machine.staged_count == 0:
            break
        pair.turn(0.5)
    assert pair.results == dict.fromkeys(pair.requests, "landed")
    assert pair.prefill.machine.staged_count == 0
    assert pair.decode.machine.handoff_count == pair.prefill.machine.handoff_count == 0
    pair.close()


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_a_byte_that_changes_on_the_way_is_noticed(make_pair: MakePair, name: str) -> None:
    pair = make_pair(backends_of(name))
    pair.start("r1")
    while not pair.prefill.machine.staged_count:
        pair.turn()
    (attached,) = pair.workers[1]._peers.values()
    sender: Any = attached.sender
    area = next(iter(sender._backend._staged.values())) if name == "local" else sender._area
    area[5] ^= 1
    for _ in range(5):
        pair.turn()
    assert pair.results == {"r1": "digest"}
    assert pair.prefill.machine.handoff_count == 0
    assert pair.prefill.machine.staged_count == 0


def test_an_abort_leaves_nothing_staged(make_pair: MakePair) -> None:
    backends = backends_of("local")
    pair = make_pair(backends)
    pair.start("r4")
    while not pair.prefill.machine.staged_count:
        pair.turn()
    assert pair.decode.handle(CancelHandoff(rid="r4"), pair.clock.now()) == []
    for _ in range(6):
        pair.turn()
    assert pair.results == {}
    assert pair.prefill.machine.staged_count == 0
    assert isinstance(backends[0], LocalBackend)
    assert backends[0].staged_count == 0


def test_the_end_of_prefill_is_a_recompute_and_its_staging_goes(make_pair: MakePair) -> None:
    backends = backends_of("local")
    pair = make_pair(backends)
    pair.start("r4")
    while not pair.prefill.machine.staged_count:
        pair.turn()
    pair.close_prefill()
    pair.turn_decode()
    assert pair.results["r4"] in ("peer_gone", "transfer"), "the end, or a piece whose bytes went with it, comes first"
    assert isinstance(backends[0], LocalBackend)
    assert backends[0].staged_count == 0


def test_an_engine_that_stops_tells_the_others(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("tcp"))
    pair.start("r0")
    pair.turn_decode()
    pair.turn_prefill()
    pair.act_prefill(pair.prefill.handle(Shutdown(reason="bye"), pair.clock.now()))
    pair.turn_prefill()
    pair.turn_decode()
    assert set(pair.results.values()) <= {"refused", "shutdown", "peer_gone"}
    assert len(pair.results) == 1


def test_the_time_between_two_reads_of_the_mailbox_is_announced_as_a_step(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("local"))
    pair.start("r0")
    for _ in range(5):
        pair.turn()
    pair.clock.advance(70.0)
    pair.turn_prefill()
    pair.turn_decode()
    (peer,) = pair.decode.machine.peers
    assert 70.0 <= peer.pulse.step_s < 71.0
    (client,) = pair.prefill.machine.clients
    pair.clock.advance(1.0)
    pair.turn_decode()
    pair.turn_prefill()
    assert 70.0 <= client.pulse.step_s < 71.0


def test_a_port_counts_what_was_refused_and_what_was_sent_again(make_pair: MakePair) -> None:
    pair = make_pair(backends_of("local"))
    raw = pair.hub.channel()
    raw.connect("s", "local://p")
    raw.send("s", [b"short"])
    raw.send("s", encode(Keepalive(), 5, 1))
    pair.turn()
    assert pair.rejects("prefill") == {"short": 1, "no_hello": 1}
    pair.start("r0")
    pair.turn_decode()
    pair.clock.advance(0.6)
    pair.turn_decode()
    assert (pair.decode_peers.mailbox.resent_count, pair.prefill_peers.mailbox.resent_count) == (1, 0)


def test_ports_check_that_everything_fits() -> None:
    backends, stores = [TcpBackend()], {Part.FULL: Store()}
    worker = PageWorker(0, layout=RankLayout(LAYOUT), stores=stores, backends=backends, clock=ManualClock())
    with pytest.raises(ConfigError, match="backends"):
        HandoffPort(DecodeSide, make_settings("d", 1), line=AnsweringLine([worker]), backends=backends)
    settings_ = make_settings("d", 1, layout=msgspec.structs.replace(LAYOUT, tp=1, pp=1), backends=("tcp",))
    with pytest.raises(ConfigError, match="a line of 2 ranks, the layout has 1"):
        HandoffPort(PrefillSide, settings_, line=AnsweringLine([worker, worker]), backends=backends)
    layout = RankLayout(msgspec.structs.replace(LAYOUT, head_size=2))
    with pytest.raises(ConfigError, match="bytes a page"):
        PageWorker(0, layout=layout, stores=stores, backends=backends, clock=ManualClock())


def test_a_peer_whose_messages_make_no_sense_is_given_up_after_a_few_of_them(make_pair: MakePair) -> None:
    """Every frame is sound, so the mailbox has nothing against it; its handoffs are computed here."""
    pair = make_pair([LocalBackend(4096)])
    pair.start("r1")
    while pair.results.get("r1") != "landed":
        pair.turn()
    (client,) = pair.prefill.machine.clients
    for number in range(OFFENCES_MAX):
        assert [news.state for news in pair.news] == ["up"], f"given up after {number}"
        pair.prefill_peers.mailbox.send(client.peer, DataOk(xid="x", grant=number, piece=0, rank=0))
        pair.turn()
    assert [news.state for news in pair.news] == ["up", "down"]
    assert "make no sense" in pair.news[-1].reason
    assert pair.rejects("decode")["unexpected"] == OFFENCES_MAX
