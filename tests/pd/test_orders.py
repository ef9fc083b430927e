"""Orders of a prefill engine: however PREPARE, GRANT, FAIL and ABORT overtake each other; and those that are parked."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.handoff import ChunkReady
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    Capabilities,
    Fence,
    ForgetPrefill,
    Mode,
    MovePiece,
    PieceMoved,
    PieceStatus,
    PrefillSide,
    ReleaseChunk,
    StopPrefill,
    Tick,
)
from serinus.wire.messages import (
    AbortAck,
    AbortGrant,
    Fail,
    Grant,
    Hello,
    Keepalive,
    Message,
    Prepare,
)
from tests.pd.steps import of_type, sent, tell
from tests.pd.tiny import LAYOUT, full, make_request, make_settings

PREPARE = Prepare(xid="x", grant=7, request=make_request("r", 9), held=0)
GRANT = Grant(xid="x", grant=7, spans=full(0, [5, 6, 7]), digest_seed=1)
FAIL = Fail(xid="x", grant=7, code="aborted")
ABORT = AbortGrant(xid="x", grant=7, floor=1)


def greeted_prefill(*, push: bool = False, **changes: object) -> PrefillSide:
    """A prefill side that has greeted a decode engine as in-1."""
    if push:
        capabilities = Capabilities(mode=Mode.PUSH, fence=Fence.CLOSE)
        changes = {"backends": ("b",), "capabilities": {"b": capabilities}, **changes}
    side = PrefillSide(make_settings("p", 2, **changes))
    names = ("b",) if push else ("shm",)
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=names, host="here"))
    return side


def chunk(xid: str = "x", pages: tuple[int, ...] = (1, 2, 3)) -> ChunkReady:
    """A whole prompt of 9 tokens, computed."""
    return ChunkReady(xid=xid, spans=full(0, np.array(pages, dtype=np.int32)), last=True, token=3)


@pytest.mark.parametrize(
    "order", list(permutations([PREPARE, GRANT, FAIL])), ids=lambda o: " ".join(type(m).__name__ for m in o)
)
def test_an_end_is_an_end_in_whatever_order_it_comes(order: tuple[Message, ...]) -> None:
    side = greeted_prefill()
    out: list[Any] = []
    for message in order:
        out += tell(side, "in-1", message)
    assert len(of_type(out, AddPrefill)) == len(of_type(out, AbortPrefill)) <= 1
    assert side.handoff_count == 0
    assert not side.clients[0].live
    assert not side.clients[0].early
    for message in order:
        assert not of_type(tell(side, "in-1", message), AddPrefill), "a number that has ended is never used again"
    tell(side, "in-1", Keepalive(grant_floor=8))
    assert not side.clients[0].closed, "tombstones go when the floor passes them"
    assert not of_type(tell(side, "in-1", PREPARE), AddPrefill), "and below the floor nothing lives"


@pytest.mark.parametrize(
    "order", list(permutations([PREPARE, GRANT, ABORT])), ids=lambda o: " ".join(type(m).__name__ for m in o)
)
def test_an_abort_leaves_a_tombstone_for_a_grant_that_it_overtook(order: tuple[Message, ...]) -> None:
    side = greeted_prefill(push=True)
    out: list[Any] = []
    for message in order:
        out += tell(side, "in-1", message)
        if isinstance(message, Prepare) and of_type(out, AddPrefill):
            out += side.handle(chunk(), 0.0)
    writes = of_type(out, MovePiece)
    acks = [message for message in sent(out) if isinstance(message, AbortAck)]
    assert len(acks) == (not writes), "nothing is acknowledged while something is outstanding"
    for write in writes:
        out += side.handle(PieceMoved(peer="in-1", xid="x", piece=write.piece, rank=write.rank), 1.0)
    assert [m for m in sent(out) if isinstance(m, AbortAck)] == [AbortAck(grant=7, ranks=(0,))]
    assert side.handoff_count == 0
    assert not of_type(side.handle(Tick(), 2.0), MovePiece)


def test_a_grant_before_its_prepare_waits_for_it() -> None:
    side = greeted_prefill()
    assert tell(side, "in-1", GRANT) == []
    assert of_type(tell(side, "in-1", PREPARE), AddPrefill)
    assert side.ungranted_count == 0
    assert of_type(side.handle(chunk(), 0.0), MovePiece)


def test_writing_stops_between_two_pieces_when_the_grant_is_closed() -> None:
    side = greeted_prefill(push=True)
    tell(side, "in-1", PREPARE)
    tell(side, "in-1", GRANT)
    (first,) = of_type(side.handle(chunk(), 0.0), MovePiece)
    assert (first.pages.tolist(), first.targets.tolist()) == ([1, 2], [5, 6])
    out = tell(side, "in-1", ABORT)
    assert of_type(out, StopPrefill)
    assert not of_type(out, AbortPrefill), "its pages are being read"
    out = side.handle(
        PieceMoved(peer="in-1", xid="x", piece=0, rank=0, status=PieceStatus.FAILED, reason="refused"), 0.0
    )
    assert not of_type(out, MovePiece)
    assert of_type(out, AbortPrefill)
    assert sent(out) == [AbortAck(grant=7, ranks=(0,))]


def test_finished_orders_without_a_grant_are_parked_up_to_a_budget_and_forgotten_beyond_it() -> None:
    side = greeted_prefill(park_tokens=20)
    for number in range(1, 4):
        tell(side, "in-1", msgspec.structs.replace(PREPARE, xid=f"x{number}", grant=number))
    outs = [side.handle(chunk(f"x{number}"), 0.0) for number in range(1, 4)]
    assert [of_type(out, ForgetPrefill) for out in outs] == [[], [], [ForgetPrefill(xid="x3")]]
    assert side.parked_tokens == 18
    assert side.ungranted_count == 3
    for number in (3, 1):
        out = tell(side, "in-1", Grant(xid=f"x{number}", grant=number, spans=full(0, [5, 6, 7])))
        assert [action.xid for action in of_type(out, AddPrefill)] == ["x3"] * (number == 3), "from cache"
        assert bool(of_type(out, MovePiece)) == (number == 1)
    assert of_type(side.handle(chunk("x3"), 0.0), ForgetPrefill) == []
    assert side.parked_tokens == 9


def test_a_later_grant_for_less_releases_what_decode_does_not_want() -> None:
    side = greeted_prefill()
    tell(side, "in-1", PREPARE)
    side.handle(chunk(), 0.0)
    out = tell(side, "in-1", Grant(xid="x", grant=7, spans=full(2, [9])))
    (stage,) = of_type(out, MovePiece)
    assert stage.pages.tolist() == [3]
    assert not of_type(out, ReleaseChunk), "the chunk is held as a whole until its last page is read"


@pytest.mark.slow
def test_a_client_that_never_raises_its_floor_is_cut_off_at_a_bound() -> None:
    side = greeted_prefill()
    for number in range(2, (1 << 16) + 3):
        tell(side, "in-1", Fail(xid=f"x{number}", grant=number, code="aborted"))
    side.handle(Tick(), 0.1)
    assert not side.clients


def test_the_first_pieces_are_smaller_and_the_rest_are_whole() -> None:
    """The peer takes the first in while the next, larger one is staged; chunks that follow begin with whole pieces."""
    layout = msgspec.structs.replace(LAYOUT, head_size=1 << 14)  # pages of 256 KiB
    side = PrefillSide(make_settings("p", 2, piece_bytes_max=8 << 20, layout=layout))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=layout, backends=("shm",), host="here"))
    count = 90
    tell(side, "in-1", Prepare(xid="x", grant=7, request=make_request("r", 4 * count), held=0))
    tell(side, "in-1", Grant(xid="x", grant=7, spans=full(0, np.arange(1, 1 + count)), digest_seed=1))
    pages: list[int] = []
    for first, end in ((0, 50), (50, count)):
        ready = ChunkReady(
            xid="x", spans=full(first, np.arange(1 + first, 1 + end)), last=end == count,
            token=3 if end == count else None,
        )  # fmt: skip
        moves = of_type(side.handle(ready, 0.0), MovePiece)
        while moves:
            move = moves.pop(0)
            pages.append(len(move.pages))
            moved = PieceMoved(peer="in-1", xid="x", piece=move.piece, digests=bytes(8 * pages[-1]), byte_count=1)
            moves += of_type(side.handle(moved, 0.0), MovePiece)
    assert pages == [8, 16, 26, 32, 8]
