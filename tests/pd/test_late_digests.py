"""Pull: decode reads pages while prefill digests them. The digests come with DONE, and nothing lands before they were
compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.pd import (
    DigestPiece,
    Landed,
    MovePiece,
    PieceDigested,
    PieceMoved,
    PrefillDrained,
    Recompute,
    TakeIn,
    TakenIn,
)
from serinus.pd.actions import StopPrefill
from serinus.pd.events import EndPrefill
from serinus.wire.messages import Confirm, Data, Done, DoneOk, Fail
from tests.pd.slices_pair import SlicesPair, shaped
from tests.pd.steps import of_type, sent
from tests.pd.test_holds import Two, Unreadable
from tests.pd.test_slices import check_landed, pages_of, pair
from tests.pd.tiny import PAGE_BYTES, full

MADE = bytes(range(16)), bytes(range(16, 24))
"""Digests of two pages, and of one."""


class Offered(Two):
    """Three pages in two chunks, offered without digests."""

    def offer(self) -> list[Any]:
        """Says which pages may be read; `asked` for their digests."""
        self.asked: list[DigestPiece] = []
        said: list[Any] = []
        for first, pages in ((0, [4, 5]), (2, [6])):
            last = first == 2
            chunk = ChunkReady(
                xid=self.xid, spans=full(first, np.array(pages, np.int32)), last=last, token=7 if last else None
            )
            (move,) = of_type(self.prefill.handle(chunk, 0.0), MovePiece)
            moved = PieceMoved(
                peer=move.peer, xid=move.xid, piece=move.piece, byte_count=len(move.pages) * PAGE_BYTES
            )  # fmt: skip
            out = self.prefill.handle(moved, 0.0)
            said += sent(out)
            self.asked += of_type(out, DigestPiece)
        return said

    def digested(self, piece: int) -> list[Any]:
        """What prefill does when a rank has digested a piece."""
        asked = self.asked[piece]
        made = PieceDigested(peer=asked.peer, xid=asked.xid, piece=piece, rank=0, digests=MADE[piece])
        return self.prefill.handle(made, 0.0)

    def begin(self, offered: list[Any]) -> list[TakeIn]:
        return of_type(self._pass(self.decode, "p0#1", 2, offered), TakeIn)

    def end(self, takes: list[TakeIn], found: tuple[bytes, ...] = MADE) -> list[Any]:
        ends = [TakenIn(xid=take.xid, piece=take.piece, digests=found[take.piece]) for take in takes]
        return [action for end in ends for action in self.decode.handle(end, 0.0)]


def test_prefill_says_what_may_be_read_has_it_digested_then_and_is_done_when_all_digests_are_made() -> None:
    two = Offered()
    said = two.offer()
    assert [(type(data), data.digests, data.pages) for data in said] == [(Data, b"", [4, 5]), (Data, b"", [6])]
    assert [asked.pages.tolist() for asked in two.asked] == [[4, 5], [6]]
    assert two.digested(1) == []
    (done,) = sent(two.digested(0))
    assert isinstance(done, Done)
    assert {(each.piece, each.rank, each.digests) for each in done.digests} == {(0, 0, MADE[0]), (1, 0, MADE[1])}


@pytest.mark.parametrize("order", ["read first", "done first"])
def test_a_handoff_lands_when_it_was_read_and_its_digests_are_those_of_done(order: str) -> None:
    two = Offered()
    takes = two.begin(two.offer())
    assert [take.digests for take in takes] == [b"", b""]
    assert two.digested(0) == []
    steps: list[Callable[[], list[Any]]] = [lambda: two.end(takes), lambda: two.to_decode(two.digested(1))]
    first, second = steps if order == "read first" else steps[::-1]
    assert first() == []
    out = second()
    assert [type(message) for message in sent(out)] == [DoneOk]
    assert of_type(out, Landed)
    assert [type(action) for action in two.to_prefill(out)] == [PrefillDrained]


@pytest.mark.parametrize("holds", [None, Unreadable()], ids=["held", "asked"])
@pytest.mark.parametrize("wrong", ["another page was read", "digests of a piece are missing"])
def test_a_handoff_with_other_digests_fails_before_anything_is_asked(wrong: str, holds: Any) -> None:
    two = Offered() if holds is None else Offered(holds)
    takes = two.begin(two.offer())
    found = (MADE[0][:8] + bytes(8), MADE[1]) if wrong == "another page was read" else MADE
    assert two.end(takes, found) == []
    assert two.digested(0) == []
    if wrong != "another page was read":
        two.prefill._table.under_way[two.xid].digests.clear()
    out = two.to_decode(two.digested(1))
    (fail,) = sent(out)
    assert isinstance(fail, Fail)
    assert fail.code == "digest"
    place = "page 1" if wrong == "another page was read" else "page 0"
    (recompute,) = of_type(out, Recompute)
    assert (recompute.code, place in recompute.reason) == ("digest", True)
    assert not of_type(out, (Landed, Confirm))
    assert two.decode.handoff_count == 0


def test_digests_of_a_handoff_that_has_ended_change_nothing() -> None:
    two = Offered()
    two.offer()
    failed = two.prefill.handle(EndPrefill(xid=two.xid, code="aborted", reason="its client left"), 0.0)
    assert of_type(failed, StopPrefill)
    assert two.digested(0) == two.digested(1) == []
    assert two.prefill.rejects["unknown_piece"] == 2


def test_only_pages_that_are_read_come_without_digests() -> None:
    two = Offered()
    handoff = two.decode._table.of_xid(two.xid)
    assert handoff is not None
    assert handoff.account is not None
    data = Data(xid=two.xid, grant=1, piece=0, first=0, digests=b"", byte_count=2 * PAGE_BYTES, pages=[4, 5])
    assert handoff.account.fault(data) == ""
    staged = Data(xid=two.xid, grant=1, piece=0, first=0, digests=b"", byte_count=2 * PAGE_BYTES)
    assert "0 bytes of digests" in handoff.account.fault(staged)


def said_by_prefill(both: SlicesPair) -> list[Data]:
    """Fills with DATA as prefill says it."""
    said: list[Data] = []

    def hear(event: object, actions: Any, now: float) -> None:
        said.extend(message for message in sent(list(actions)) if isinstance(message, Data))

    both.p.port.tap = hear
    return said


@pytest.mark.parametrize("idle", [True, False])
def test_pages_come_with_digests_while_steps_are_queued_on_the_device(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued may compute them: they are digested behind it, and offered when that is done."""
    both = pair("TP2 each")
    for library in both.p.libraries:
        monkeypatch.setattr(type(library), "is_idle", lambda self: idle)
    said = said_by_prefill(both)
    both.begin()
    both.settle()
    check_landed(both)
    assert {(data.rank, bool(data.digests)) for data in said} == {(0, not idle), (1, True)}


class Step:
    """Stands for a step of another prompt."""


def test_no_digests_are_made_behind_a_step_that_was_planned_later() -> None:
    """A rank that does not lead is behind: the leader plans the next step when its own rank is done."""
    both, done = pair("TP2 each"), list[tuple[int, str]]()
    for worker in both.p.workers:

        def obey(command: Any, obey: Any = worker.obey, rank: int = worker.rank) -> Any:
            done.append((rank, type(command).__name__))
            return None if isinstance(command, Step) else obey(command)

        worker.obey = obey  # type: ignore[method-assign]
    line = both.p.line
    both.begin(chunks=1)
    line._late = True
    is_planned = False
    for turn in range(6):
        line.work(0)
        both._act(both.p.turn())
        if not is_planned and not both.p.port.is_staging:
            is_planned = True
            for rank in (0, 1):
                line.waiting[rank].append(Step())
        if turn >= 3:
            line.work(1)
    for rank, made in ((0, "DigestPiece"), (1, "MovePiece")):
        of_rank = [name for number, name in done if number == rank]
        assert of_rank.index(made) < of_rank.index("Step")
    assert (1, "DigestPiece") not in done


@pytest.mark.parametrize("shape", ["one to TP2", "TP2 to one"])
def test_slices_come_with_digests_and_no_piece_has_more_pages_than_a_kernel_has_rows(shape: str) -> None:
    both = pair(shape)
    both.begin()
    (handoff,) = both.d.port.machine._table
    size = both.p.layout.page_bytes(0, Part.FULL)
    data = Data(xid=handoff.xid, grant=1, piece=0, first=0, digests=b"", byte_count=2 * size, pages=[4, 5])
    assert "0 bytes of digests" in handoff.account.fault(data)
    handoff.account.end = 1 << 17
    each = 8 * handoff.account.routes.digest_count(0, Part.FULL)
    for count, said in ((65535, ""), (65536, "65536 pages, expected at most 65535")):
        many = msgspec.structs.replace(data, digests=bytes(each * count), byte_count=count * size, pages=[4] * count)
        assert handoff.account.fault(many) == said


@pytest.mark.parametrize("order", ["after they were digested", "after they were read"])
def test_pages_that_change_between_their_reading_and_their_digests_do_not_land(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = SlicesPair(shaped(), shaped(), pages_of)
    library, spoiled = type(both.p.libraries[0]), list[bool]()
    sums = library.sums

    def spoil() -> None:
        for rank, pools in enumerate(both.p.pools):
            for part, pool in pools.items():
                pages = both.sources[part]
                pool.write_pages(pages, np.full((len(pages), both.p.layout.page_bytes(rank, part)), 0x77, np.uint8))
        spoiled.append(True)

    def summed(self: Any, *rest: Any) -> bytes:
        if spoiled or self not in both.p.libraries:
            return sums(self, *rest)
        if order == "after they were read":
            both._act(both.d.turn())
            assert [gather.sums() for gather in both.gathers], "nothing was read yet"
            spoil()
            return sums(self, *rest)
        made = sums(self, *rest)
        spoil()
        return made

    monkeypatch.setattr(library, "sums", summed)
    both.begin(chunks=1)
    both.settle()
    assert spoiled
    assert not both.ended(Landed)
    (recompute,) = both.ended(Recompute)
    assert recompute.code == "digest"
