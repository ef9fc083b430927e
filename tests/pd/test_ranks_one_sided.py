"""A port over several ranks with a one-sided backend: what each is asked, what all must do, what one of them cannot."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.clock import ManualClock
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.pd import (
    AttachPeer,
    ClosePeer,
    FencePeer,
    HandoffPort,
    Mode,
    MovePiece,
    PageWorker,
    PeerFenced,
    PieceMoved,
    PieceStatus,
    RankLayout,
)
from serinus.pd.backends import MooncakeBackend, OpResult, OpState
from serinus.pd.backends.mooncake import MooncakeLibrary
from serinus.pd.modes import Capabilities, Fence
from serinus.pd.pages import MemoryShared, PagesGranted, PeerUnreachable, RankFenced, ShareMemory, TakeIn
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import Gone
from tests.pd.tiny import LAYOUT, Store, make_settings

PUSH = MooncakeBackend.capabilities
LAYOUT_2 = msgspec.structs.replace(LAYOUT, kv_head_count=2, tp=2)


class Machine:
    """Asks for what it is given as an event; remembers the events."""

    def __init__(self, settings: Any, *, mint: object) -> None:
        self.settings, self.events = settings, []
        self.rejects: Counter[str] = Counter()

    def handle(self, event: Any, now: float) -> list[Any]:
        self.events.append(event)
        return [event] if isinstance(event, (AttachPeer, FencePeer, MovePiece)) else []


class Rank:
    """Says where its memory is; keeps what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.told = number, []

    def obey(self, command: object) -> object | None:
        self.told.append(command)
        shared = MemoryShared(endpoints={"mooncake": b"rank %d" % self.number})
        return shared if isinstance(command, ShareMemory) else None


class Engine:
    """Nothing of a library."""

    def initialize(self, *settings: str) -> int:
        return 0


def make_port() -> tuple[HandoffPort[Machine], AnsweringLine]:
    backend = MooncakeBackend("here", MooncakeLibrary(engine=Engine, writer=Any))
    line = AnsweringLine([Rank(0), Rank(1)])
    settings = make_settings("d", 1, backends=("mooncake",), capabilities={"mooncake": PUSH}, layout=LAYOUT_2)
    port = HandoffPort(Machine, settings, line=line, backends=[backend])
    port.handle(AttachPeer(peer="p", backend="mooncake", layout=LAYOUT_2, endpoints=(b"0", b"1")), 0.0)
    port.turn(0.0)
    port.take_outgoing()
    return port, line


def events(port: HandoffPort[Machine], kind: type) -> list[Any]:
    return [event for event in port.machine.events if isinstance(event, kind)]


def test_peers_hear_how_the_memory_of_every_rank_is_reached() -> None:
    port, line = make_port()
    assert port.machine.settings.endpoints == {"mooncake": (b"rank 0", b"rank 1")}
    assert [type(rank.told[0]) for rank in line.ranks] == [ShareMemory, ShareMemory]


def reading(**backend: Any) -> PageWorker:
    """A rank of one, to which a peer is attached that it reads by such a backend."""
    pull = Capabilities(mode=Mode.PULL, fence=Fence.CLOSE)
    more = {"connect": lambda *_: None, "digests": lambda *_: None, **backend}
    one = msgspec.structs.replace(LAYOUT, tp=1, pp=1)
    worker = PageWorker(
        0, layout=RankLayout(one), stores={Part.FULL: Store(16)},
        backends=[SimpleNamespace(name="reader", capabilities=pull, **more)], clock=ManualClock(),
    )  # fmt: skip
    worker.obey(AttachPeer(peer="p", backend="reader", layout=one, endpoints=(b"0",)))
    return worker


def take(xid: str) -> TakeIn:
    """One page of it."""
    pages = np.array([1], np.int32)
    return TakeIn(
        peer="p", xid=xid, piece=0, source=0, rank=0, mode=Mode.PULL, part=Part.FULL, first=0, digests=b"",
        digest_seed=1, pages=pages, target_first=0, byte_count=16, sources=pages,
    )  # fmt: skip


def test_reads_begin_behind_what_was_queued_when_their_pages_were_granted() -> None:
    marks, behind = iter(range(100_000)), list[object]()
    worker = reading(mark=lambda: next(marks), read=lambda *rest: behind.append(rest[-1]) or 7)
    worker.obey(PagesGranted(peer="p", xid="x"))
    worker.obey(PagesGranted(peer="p", xid="y"))
    worker.obey(PagesGranted(peer="gone", xid="z"))
    for xid in ("y", "x", "y", "z"):
        assert worker.obey(take(xid)) is None
    assert behind == [1, 0, 1, None], "None: all that is queued when it is asked for"
    for number in range(1024):
        worker.obey(PagesGranted(peer="p", xid=f"later {number}"))
    worker.obey(take("x"))
    assert behind[-1] is None, "so many are noted"


def test_a_read_that_may_go_on_is_never_taken_for_over() -> None:
    """What a backend calls LOST could still write into pages that are given back with this answer."""
    worker = reading(read=lambda *_: 7, poll=lambda op: OpResult(state=OpState.LOST, error="no word of it"))
    assert worker.obey(take("x")) is None
    with pytest.raises(InvariantError, match="a read from p is lost"):
        worker.answers()


def test_a_peer_is_fenced_when_every_rank_has_cut_it_off() -> None:
    port, line = make_port()
    port.handle(FencePeer(peer="p", backend="mooncake", ranks=2), 1.0)
    line.answer(1, RankFenced(peer="p", backend="mooncake", all_peers=True, endpoint=b"new 1"))
    port.turn(1.0)
    assert not events(port, PeerFenced), "rank 0 can still be written to"
    line.answer(0, RankFenced(peer="p", backend="mooncake", all_peers=False, endpoint=b""))
    port.turn(1.0)
    assert events(port, PeerFenced) == [PeerFenced(peer="p", all_peers=True, endpoints=(b"rank 0", b"new 1"))]


def test_a_peer_that_one_rank_cannot_reach_is_given_up_by_all() -> None:
    port, line = make_port()
    line.answer(1, PeerUnreachable(peer="p", reason="nothing is there"))
    port.turn(1.0)
    assert events(port, Gone) == [Gone(peer="p", reason="nothing is there")]
    assert port.take_outgoing() == [ClosePeer(peer="p")]
    line.answer(0, PeerUnreachable(peer="p", reason="nothing is there"))
    port.turn(1.0)
    assert len(events(port, Gone)) == 1
    assert all(ClosePeer(peer="p") in rank.told for rank in line.ranks)


def test_a_write_that_was_lost_is_reported_behind_the_end_of_its_peer() -> None:
    port, line = make_port()
    pages = np.array([1], np.int32)
    command = MovePiece(
        peer="p", xid="x", piece=0, rank=0, mode=Mode.PUSH, part=Part.FULL, pages=pages, digest_seed=1, targets=pages
    )
    port.handle(command, 1.0)
    port.turn(1.0)
    assert 0 < port.wait_s < 0.01, "no message tells when the own rank's write is over"
    lost = PieceMoved(peer="p", xid="x", piece=0, status=PieceStatus.LOST, reason="the peer is gone")
    line.answer(0, lost)
    port.turn(1.0)
    assert [type(event) for event in port.machine.events if event == lost or isinstance(event, Gone)] == [
        Gone, PieceMoved,
    ]  # fmt: skip
    assert port.wait_s > 0.1
