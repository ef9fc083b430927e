"""Ranks that come late to what they were told: nothing stays staged or unanswered, pages keep their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.clock import ManualClock
from serinus.core.errors import TransferFailed
from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.core.stamps import STAMP_BYTES
from serinus.engine.peers import Peers
from serinus.pd import (
    TICK_S,
    AbortPrefill,
    AddPrefill,
    CancelHandoff,
    DecodeSide,
    HandoffPort,
    Landed,
    MovePiece,
    PageWorker,
    PeerState,
    PieceStatus,
    PrefillDrained,
    PrefillSide,
    RankLayout,
    Recompute,
    ReleaseChunk,
    Routes,
    StartHandoff,
    TakeIn,
    TcpBackend,
)
from serinus.pd.arrival_account import ArrivalAccount
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import LocalHub, Mailbox
from serinus.wire.messages import Data, LayoutSignature
from tests.pd.tiny import LAYOUT, PAGE_SIZE, Store, first_token, full, make_request, make_settings

PATIENT: dict[str, object] = dict.fromkeys(("connect_s_max", "handoff_s_max", "silence_s_max"), 1e6)
LENGTH = 24
PAGES = LENGTH // PAGE_SIZE


def layout_of(**changes: Any) -> LayoutSignature:
    return msgspec.structs.replace(LAYOUT, kv_head_count=2, layer_count=2, **changes)


class Failing(TcpBackend):
    """A backend without memory."""

    def sender(self) -> Any:
        raise TransferFailed("no memory here")


class Pair:
    """Prefill and decode engines of two ranks each."""

    def __init__(
        self, prefill: LayoutSignature, decode: LayoutSignature, *, staging: int = 4096, depth: int = 3,
        failing: int | None = None,
    ) -> None:  # fmt: skip
        hub, self.clock = LocalHub(), ManualClock(10.0)
        self.lines, self.stores, ports, peers = [], [], [], []
        for number, layout in enumerate((prefill, decode)):
            shape = RankLayout(layout)
            ranks = range(len(shape.shards))
            stores = [Store(shape.page_bytes(rank, Part.FULL)) for rank in ranks]
            workers = [
                PageWorker(
                    rank, layout=shape, stores={Part.FULL: stores[rank]}, clock=self.clock,
                    backends=[Failing(staging) if (number, rank) == (0, failing) else TcpBackend(staging)],
                )
                for rank in ranks
            ]  # fmt: skip
            self.lines.append(AnsweringLine(workers, late=True))
            self.stores.append(stores)
            channel = hub.channel("local://p") if number == 0 else hub.channel()
            settings = make_settings(
                "pd"[number], number + 1, layout=layout, backends=("tcp",), staging_pieces=depth, piece_bytes_max=64,
                **PATIENT,
            )  # fmt: skip
            machine: Any = (PrefillSide, DecodeSide)[number]
            peers.append(Peers(Mailbox(channel, incarnation=number + 1, clock=self.clock)))
            ports.append(
                HandoffPort(machine, settings, line=self.lines[number], backends=[TcpBackend(staging)])
            )  # fmt: skip
        self.prefill, self.decode = ports
        self.prefill_peers, self.decode_peers = peers
        self.p, self.d = self.lines
        rng = np.random.default_rng(3)
        for store in self.stores[0]:
            store.data[:] = rng.integers(1, 250, store.data.shape)
        self.request = make_request("r", LENGTH)
        self.ends: list[object] = []
        self.orders: list[AddPrefill] = []

    def start(self) -> None:
        pages = np.arange(1, 1 + PAGES, dtype=np.int32)
        start = StartHandoff(rid="r", request=self.request, address="local://p", held=0, spans=full(0, pages))
        self._act(self.decode.handle(start, self.clock.now()))
        while not self.orders:
            self.turn()
        order = self.orders[0]
        chunk = ChunkReady(
            xid=order.xid, spans=full(0, np.arange(11, 11 + PAGES, dtype=np.int32)), last=True,
            token=first_token(order.request.prompt),
        )  # fmt: skip
        self._act(self.prefill.handle(chunk, self.clock.now()))

    def turn(self) -> None:
        self.clock.advance(0.1)
        for line, port, peers in (
            (self.d, self.decode, self.decode_peers), (self.p, self.prefill, self.prefill_peers),
        ):  # fmt: skip
            line.pump()
            self._act(port.turn(self.clock.now(), peers.receive()))
            peers.deliver(port.take_outgoing())

    def cancel(self) -> list[object]:
        """The client of the request leaves; what the decode engine must act on."""
        return self.decode.handle(CancelHandoff(rid="r"), self.clock.now())

    def settle(self) -> None:
        for _ in range(40):
            self.p.work()
            self.d.work()
            self.turn()

    def ended(self, kind: type) -> list[Any]:
        return [end for end in self.ends if isinstance(end, kind)]

    def check_empty(self) -> None:
        assert [worker.staged_count for worker in self.p.ranks] == [0] * self.p.size
        assert self.prefill.machine.staged_count == 0
        assert self.decode.machine._taking == {}
        assert self.decode.machine.handoff_count == self.prefill.machine.handoff_count == 0

    def _act(self, results: Sequence[object]) -> None:
        for result in results:
            if isinstance(result, AddPrefill):
                self.orders.append(result)
            elif isinstance(result, (Landed, Recompute, PrefillDrained, AbortPrefill, ReleaseChunk)):
                self.ends.append(result)


TWO = (layout_of(tp=2), layout_of(pp=2))


def test_a_prompt_lands_when_all_ranks_have_done_their_part() -> None:
    pair = Pair(*TWO)
    pair.start()
    pair.p.work(0)
    pair.turn()
    pair.d.work()
    pair.turn()
    assert pair.ended(Landed) == []
    assert pair.ended(ReleaseChunk) == [], "rank 1 has not read its pages"
    pair.settle()
    assert len(pair.ended(Landed)) == len(pair.ended(PrefillDrained)) == 1
    pair.check_empty()


def test_the_own_rank_is_asked_for_one_piece_at_a_time_and_other_ranks_for_several() -> None:
    """Its pieces are staged in the leader's thread: peers are told of one before the next."""
    pair = Pair(*TWO, depth=3)
    pair.start()
    for staged in range(1, 4):
        assert [sum(isinstance(command, MovePiece) for command in waiting) for waiting in pair.p.waiting] == [1, 3]
        assert pair.prefill.is_staging
        pair.p.work(0)
        pair.turn()
        assert pair.prefill.machine.staged_count == staged
    pair.settle()
    assert not pair.prefill.is_staging
    pair.check_empty()


def test_pieces_staged_after_the_end_are_given_back() -> None:
    pair = Pair(*TWO)
    pair.start()
    pair.p.work(0)
    pair.turn()
    assert pair.p.count(MovePiece) > 0
    pair._act(pair.cancel())
    while not pair.ended(AbortPrefill):
        pair.turn()
    pair.p.work(1)
    assert pair.p.ranks[1].staged_count > 0, "it was told so before the end"
    pair.settle()
    pair.check_empty()
    assert not pair.prefill.machine.rejects["unknown_piece"]


def test_a_page_that_is_still_to_be_filled_belongs_to_the_next_owner_on_the_line() -> None:
    """The copy of a closed grant is obeyed before what the next owner is told, and its sender hears of it."""
    pair = Pair(*TWO)
    pair.start()
    pair.p.work()
    while not pair.d.count(TakeIn):
        pair.turn()
    late = pair.d.count(TakeIn)
    assert pair.cancel() == [], "its pages are free, no quarantine"
    taken = pair.prefill.machine.staged_count
    assert taken >= late // 2
    pair.d.work()
    for store in pair.stores[1]:  # the next owner's plan comes down the line now
        store.data[1 : 1 + PAGES] = 255
    pair.settle()
    assert all((store.data[1 : 1 + PAGES] == 255).all() for store in pair.stores[1])
    assert pair.ended(Landed) == []
    pair.check_empty()


def test_a_connection_that_ends_leaves_nothing_at_ranks_that_come_late() -> None:
    pair = Pair(*TWO)
    pair.start()
    pair.p.work(0)
    pair.turn()
    pair.turn()
    assert pair.d.count(TakeIn) > 0
    pair.prefill.close()
    pair.prefill_peers.close()
    while not pair.ended(Recompute):
        pair.turn()
    pair.p.work()
    pair.d.work()
    pair.turn()
    assert [worker.staged_count for worker in pair.p.ranks] == [0, 0]
    assert [len(worker._peers) for worker in (*pair.p.ranks, *pair.d.ranks)] == [0] * 4
    assert pair.decode.machine._taking == {}
    assert pair.ended(Recompute)[0].code == "peer_gone"


def test_a_byte_that_one_rank_finds_changed_fails_the_handoff_once() -> None:
    pair = Pair(*TWO)
    pair.start()
    pair.p.work()
    while not pair.d.count(TakeIn):
        pair.turn()
    order = next(order for order in pair.d.waiting[1] if isinstance(order, TakeIn))
    spoilt = order.payload.copy()
    spoilt[3] ^= 1
    pair.d.waiting[1][pair.d.waiting[1].index(order)] = _with_payload(order, spoilt)
    pair.d.work(0)
    pair.turn()
    assert pair.ended(Recompute) == [], "rank 1 may still write: the copy is not over"
    pair.settle()
    assert [end.code for end in pair.ended(Recompute)] == ["digest"]
    assert pair.ended(Landed) == []
    pair.check_empty()


def _with_payload(order: TakeIn, payload: NDArray[np.uint8]) -> TakeIn:
    values = {name: getattr(order, name) for name in order.__dataclass_fields__}
    return TakeIn(**{**values, "payload": payload})


def test_a_rank_that_cannot_stage_fails_the_handoff_once() -> None:
    pair = Pair(*TWO, failing=1)
    pair.start()
    pair.settle()
    assert [end.code for end in pair.ended(Recompute)] == ["transfer"]
    (end,) = pair.ended(AbortPrefill)
    assert "rank 1 cannot stage its pages: no memory here" in end.reason
    pair.check_empty()
    (peer,) = pair.decode.machine.peers
    assert peer.state is PeerState.UP


def stamps_known(worker: PageWorker) -> int:
    """Handoffs whose stamps a rank remembers."""
    intakes = [attached.intake for attached in worker._peers.values() if attached.intake is not None]
    return sum(len(intake._stamps._begun) for intake in intakes if intake._stamps is not None)


@pytest.mark.parametrize("ends_well", [True, False])
def test_ranks_forget_the_stamps_of_a_handoff_that_is_over(ends_well: bool) -> None:
    stamped = {"stamp_bytes": 2 * STAMP_BYTES, "stamp_data": "none"}
    pair = Pair(layout_of(tp=2, **stamped), layout_of(pp=2, **stamped), staging=1 << 20)
    pair.start()
    pair.p.work()
    while not pair.d.count(TakeIn):
        pair.turn()
    pair.d.work(0)
    assert stamps_known(pair.d.ranks[0]) == 1
    if not ends_well:
        pair._act(pair.cancel())
    pair.settle()
    assert len(pair.ended(Landed)) == ends_well
    assert [len(worker._peers) for worker in pair.d.ranks] == [1, 1]
    assert [stamps_known(worker) for worker in pair.d.ranks] == [0, 0]
    pair.check_empty()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("staging", [64, 128, 192])
def test_a_full_area_keeps_pieces_in_order_however_many_are_asked_for(depth: int, staging: int) -> None:
    """One piece has 64 bytes: some fit, the next does not, and one behind it must not overtake it."""
    pair = Pair(layout_of(pp=2), layout_of(tp=2), staging=staging, depth=depth)
    pair.start()
    pair.settle()
    assert len(pair.ended(Landed)) == 1
    assert pair.ended(Recompute) == []
    pair.check_empty()


def test_no_room_when_it_was_asked_for_is_room_when_the_answer_comes() -> None:
    """Rank 1 was full; before the leader hears of it the peer has taken everything: it is asked again, not given up."""
    pair = Pair(layout_of(pp=2), layout_of(tp=2), staging=64, depth=2)
    pair.start()
    pair.p.work(1)  # the first is staged, the second finds no room; the leader has not looked
    answers, pair.p.answers = pair.p.answers, []
    assert [answer.status for _rank, answer in answers] == [PieceStatus.DONE, PieceStatus.FULL]
    pair.p.answers.append(answers[0])
    for _ in range(4):
        pair.turn()
        pair.d.work()
    assert pair.prefill.machine.staged_count == 0
    pair.p.answers.append(answers[1])
    pair.settle()
    assert len(pair.ended(Landed)) == 1
    pair.check_empty()


def test_a_piece_that_is_larger_than_an_empty_area_fails() -> None:
    pair = Pair(layout_of(pp=2), layout_of(tp=2), staging=32)
    pair.start()
    pair.settle()
    (end,) = pair.ended(AbortPrefill)
    assert "do not fit into the empty staging area" in end.reason
    pair.check_empty()


def test_a_page_of_the_source_that_no_engine_has_is_refused_not_read() -> None:
    """Page numbers come from the peer: one that does not fit 32 bits must not end the engine."""
    layout, spans = RankLayout(LAYOUT), full(0, np.array([1], np.int32))
    account = ArrivalAccount.of(make_settings("d", 1), layout, layout, Routes(layout, layout), spans, 0, 4)
    data = Data(xid="x", grant=1, piece=0, first=0, digests=bytes(8), byte_count=16, pages=[1 << 31])
    assert "expected one below 2^31" in account.fault(data)


def test_the_loop_does_not_sleep_while_the_own_rank_has_an_answer() -> None:
    """Followers wake it through their sockets; the leader's rank obeys in the same thread."""
    pair = Pair(*TWO)
    pair.start()
    assert pair.prefill.wait_s == 0.0, "commands have not left"
    pair.p.work(1)
    pair.turn()
    assert pair.prefill.wait_s == 0.0, "rank 0 has not answered"
    pair.p.work(0)
    pair.settle()
    assert pair.prefill.wait_s == TICK_S
    assert pair.decode.wait_s == TICK_S
