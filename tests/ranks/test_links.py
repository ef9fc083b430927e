"""The connection between a leader and its ranks: which frames are heard, and two threads at each end of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from serinus.core.errors import ConfigError, PeerGone
from serinus.core.moves import MoveDone
from serinus.parallel import Mesh
from serinus.ranks import (
    LeaderLinks,
    RankLink,
)
from serinus.ranks.codec import (
    decode_answers,
    decode_header,
    encode_answers,
    encode_header,
    pack_commands,
)
from serinus.ranks.links import WATCHER, Sign, Weight
from serinus.ranks.tiers import CancelPages
from serinus.wire import Arrived, Gone, ZmqChannel, decode, encode
from serinus.wire.messages import EngineEnd, StopEngine
from tests.ranks.linked import CLOCK, Ranks, hello


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("l"), Mesh(tp=2, pp=2))
    yield found
    found.close()


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_strangers_on_the_line_are_sent_away(way: str, tmp_path: Path) -> None:
    """A wrong secret, a rank that there is not, one that is there already, or nonsense: none of them is heard."""
    mesh = Mesh(tp=2)
    bind = f"ipc://{tmp_path}/c" if way == "ipc" else "tcp://127.0.0.1:0"
    links = LeaderLinks(bind, mesh=mesh, clock=CLOCK, secret="right")
    strangers = ZmqChannel(clock=CLOCK)
    strange = [hello(1, "wrong"), hello(9, "right"), StopEngine(), hello(0, "right")]
    for index, said in enumerate(strange):
        strangers.connect(f"s{index}", links.address)
        strangers.send(f"s{index}", encode(said))
    with pytest.raises(ConfigError, match="TP1 PP0 did not report"):
        links.gather(lambda: None, 0.2)
    right = RankLink(links.address, hello(1, "right"), clock=CLOCK)
    links.gather(lambda: None, 10.0)
    assert list(links.facts) == [1]
    refused = [event for event in strangers.poll(1.0) if isinstance(event, Arrived)]
    assert {type(decode(event.parts).message) for event in refused} == {EngineEnd}
    strangers.send("s3", encode_answers((), "the stranger broke"))
    assert links.answers(0.1) == []
    for end in (right, strangers, links):
        end.close()


def test_a_process_that_only_watches_the_leader_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts ranks on another machine: it is told by the end of its connection alone."""
    monkeypatch.setattr("serinus.wire.tcp_listener.STRANGER_S_MAX", 0.1)
    links = LeaderLinks("tcp://127.0.0.1:0", mesh=Mesh(tp=2), clock=CLOCK, secret="right")
    ends: dict[str, ZmqChannel] = {}
    for name, said in (("watcher", hello(WATCHER, "right")), ("stranger", None)):
        ends[name] = ZmqChannel(clock=CLOCK)
        ends[name].connect(name, links.address)
        if said is not None:
            ends[name].send(name, encode(said))
    until, gone = CLOCK.now() + 60.0, False
    while not gone and CLOCK.now() < until:
        links.look()
        gone = bool(ends["stranger"].poll(0.02))
    assert gone
    assert not ends["watcher"].poll(0.1)
    links.close(0.0)
    assert [type(event) for event in ends["watcher"].poll(5.0)] == [Gone]
    for end in ends.values():
        end.close()


def test_answers_that_the_supervisor_took_in_are_the_loops_and_it_does_not_sleep_on_them(ranks: Ranks) -> None:
    """Its look comes between the loop's last question and its sleep."""
    for number in (1, 2):
        ranks.ends[0].send(encode_answers([MoveDone(op=number, ok=True)]))
    ranks.ends[0].leave("it broke", 3)
    signs: list[Sign] = []
    until = CLOCK.now() + 60
    while not signs and CLOCK.now() < until:
        signs += ranks.links.look()
    assert [(sign.rank, sign.weight, sign.reason) for sign in signs] == [(1, Weight.WORDS, "it broke")]
    begun = CLOCK.now()
    ranks.links.wait_any([], 20.0)
    assert CLOCK.now() - begun < 10
    found = [(rank, decode_answers(came).answers) for rank, came in ranks.links.answers()]
    assert found == [(1, (MoveDone(op=1, ok=True),)), (1, (MoveDone(op=2, ok=True),))]


def test_a_rank_whose_end_another_thread_closes_does_not_look_for_headers_for_ever(ranks: Ranks) -> None:
    """So the leader of ranks that are threads releases them; what it sent before is given out first."""
    link = ranks.ends[0]
    ranks.links.send(1, encode_header(1, 0, pack_commands([])))
    while not link._headers:
        link._take_in(10.0)
    link.close()
    assert [decode_header(came).number for came in link.headers(10.0)] == [1]
    with pytest.raises(PeerGone, match="hung up"):
        link.headers(10.0)


def test_headers_that_a_ranks_second_thread_took_in_are_given_out_before_the_end(ranks: Ranks) -> None:
    """The main thread stood in a step meanwhile."""
    sent = [encode_header(number, 0, pack_commands([])) for number in (1, 2, 3)]
    for parts in sent:
        ranks.links.send(2, parts)
    ranks.links.tell(EngineEnd(reason="engine: rank TP1 PP0 died of SIGKILL", code=3))
    link = ranks.ends[1]
    link.start()
    until = CLOCK.now() + 60
    while link._end is None and CLOCK.now() < until:
        link._leaving.wait(0.01)
    assert len(link._headers) == 3
    assert [decode_header(came).number for came in link.headers(10.0)] == [1, 2, 3]
    with pytest.raises(PeerGone, match="TP1 PP0 died of SIGKILL"):
        link.headers(10.0)


@pytest.mark.slow
def test_two_threads_at_each_end_lose_nothing_and_wait_for_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second threads look in as often as steps end; a frame that is taken in by one is missed by no sleeper."""
    monkeypatch.setattr("serinus.ranks.links._TICK_S", 0.001)
    ranks.start()
    for end in ranks.ends:
        end.start()
    told: list[int] = []
    ranks.bodies[1].on(CancelPages, lambda command: [MoveDone(op=command.op, ok=True)])
    ranks.line.subscribe(MoveDone, lambda rank, done: told.append(done.op))
    done = Event()

    def look() -> None:
        while not done.wait(0.0002):
            assert ranks.links.look() == []

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            for number in range(300):
                ranks.line.command(CancelPages(op=number), rank=1)
                ranks.line.flush()
                begun = CLOCK.now()
                while len(told) <= number:
                    ranks.line.wait_any([], 20.0)
                    ranks.line.pump()
                assert CLOCK.now() - begun < 10, "it slept with an answer before it"
        finally:
            done.set()
        looking.result(60)
    assert told == list(range(300))
