"""Holds: decode reads from shared memory that prefill still holds its pages, and asks only where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from serinus.core.handoff import ChunkReady
from serinus.pd import (
    AbortPrefill,
    Capabilities,
    DecodeSide,
    Landed,
    Mode,
    MovePiece,
    PieceMoved,
    PrefillSide,
    Send,
    TakeIn,
    TakenIn,
)
from serinus.pd.actions import AddPrefill, PrefillDrained, StopPrefill
from serinus.pd.backends.holds import SharedHolds
from serinus.pd.backends.shm import Segments, segment_name
from serinus.pd.events import EndPrefill, WantPeer
from serinus.pd.pages import PagesGranted
from serinus.pd.settings import Holds
from serinus.wire import Gone, PeerMessage
from serinus.wire.messages import Confirm, ConfirmOk, DoneOk, Message
from tests.pd.steps import of_type, sent, start_event
from tests.pd.tiny import PAGE_BYTES, full, make_settings

HOLDER = """
from serinus.pd.backends.holds import SharedHolds
holds = SharedHolds()
print(holds.begin(), holds.begin(), flush=True)
input()
holds.end(HOLD) if (HOLD := input()) else None
print("ended", flush=True)
input()
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process, with two holds."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_hold_of_another_process_is_read_until_it_ends(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None
    first, second = holder.stdout.readline().split()
    holds = SharedHolds()
    assert (holds.lasts(first), holds.lasts(second)) == (True, True)
    holder.stdin.write(f"\n{first}\n")
    holder.stdin.flush()
    holder.stdout.readline()
    assert (holds.lasts(first), holds.lasts(second)) == (False, True)
    holds.close()


def test_a_hold_outlives_its_process_where_it_was_read_before_as_the_pages_do(
    holder: subprocess.Popen[str],
) -> None:
    assert holder.stdout is not None
    first, second = holder.stdout.readline().split()
    seen, unseen = SharedHolds(), SharedHolds()
    assert seen.lasts(first)
    holder.kill()
    holder.wait()
    assert seen.lasts(second), "the memory lives as long as its last reader, and nobody writes it"
    assert not unseen.lasts(first)


def test_a_word_is_used_again_with_another_number() -> None:
    owner, reader = SharedHolds(), SharedHolds()
    first = owner.begin()
    owner.end(first)
    second = owner.begin()
    assert (reader.lasts(first), reader.lasts(second)) == (False, True)
    assert first.split("/")[:2] == second.split("/")[:2]


def test_a_close_ends_all_holds_and_beyond_a_number_of_them_peers_ask() -> None:
    owner, reader = SharedHolds(), SharedHolds()
    found = [owner.begin() for _ in range(600)]
    assert found.count("") == 600 - 512
    assert reader.lasts(found[511])
    assert not reader.lasts("")
    owner.end("")
    owner.close()
    assert not any(reader.lasts(hold) for hold in found)


@pytest.mark.parametrize("place", ["/512/1", "/-1/0", "/7/0", "/0/2", "/0/\u0661", "/x/1", "/0", "", "/0/1/1"])
def test_whatever_is_no_hold_of_a_segment_is_not_believed(place: str) -> None:
    owner = SharedHolds()
    hold = owner.begin()
    segment = hold.partition("/")[0]
    assert SharedHolds().lasts(hold)
    assert not SharedHolds().lasts(segment + place)
    owner.close()


@pytest.mark.parametrize("hold", ["", "1", "1:2:3/0/1", "a/b/c", "/0/1"])
def test_a_segment_that_is_not_there_holds_nothing(hold: str) -> None:
    assert not SharedHolds().lasts(hold)


@pytest.mark.parametrize("byte_count", [1, 12])
def test_a_segment_of_any_size_is_read(byte_count: int) -> None:
    own = Segments().create(byte_count)
    own.area[:] = 1
    name = segment_name(os.getpid(), own)
    assert not SharedHolds().lasts(f"{name}/1/1")
    assert SharedHolds().lasts(f"{name}/0/{0x0101010101010101}") == (byte_count > 8)
    os.close(own.fd)


class Unreadable:
    """Holds of a process that decode cannot open."""

    def begin(self) -> str:
        return ""

    def end(self, hold: str) -> None:
        raise AssertionError("none was given")

    def lasts(self, hold: str) -> bool:
        return False


@dataclass(slots=True)
class Two:
    """A decode and a prefill machine, up, with one handoff of three pages under way."""

    holds: Holds = field(default_factory=SharedHolds)
    decode: DecodeSide = field(init=False)
    prefill: PrefillSide = field(init=False)
    xid: str = ""

    def __post_init__(self) -> None:
        more: dict[str, Any] = {
            "backends": ("far",),
            "capabilities": {"far": Capabilities(mode=Mode.PULL)},
            "holds": {"far": self.holds},
        }
        self.decode = DecodeSide(make_settings("d", 1, **more), mint=iter(f"x{i}" for i in range(9)).__next__)
        self.prefill = PrefillSide(make_settings("p", 2, **more))
        self.to_decode(self.to_prefill(self.decode.handle(WantPeer(address="p0"), 0.0)))
        asked = self.decode.handle(start_event(length=12), 0.0)
        assert [type(action) for action in asked] == [PagesGranted, Send], "ranks hear of the grant before the peer"
        (job,) = of_type(self.to_prefill(asked), AddPrefill)
        self.xid = job.xid

    def to_prefill(self, actions: list[Any]) -> list[Any]:
        return self._pass(self.prefill, "in-1", 1, sent(actions))

    def to_decode(self, actions: list[Any]) -> list[Any]:
        return self._pass(self.decode, "p0#1", 2, sent(actions))

    def _pass(self, side: Any, peer: str, incarnation: int, messages: list[Message]) -> list[Any]:
        events = [PeerMessage(peer=peer, incarnation=incarnation, message=message) for message in messages]
        return [action for event in events for action in side.handle(event, 0.0)]

    def offer(self) -> list[Any]:
        """All is computed and offered: what prefill says."""
        pages = np.array([4, 5, 6], np.int32)
        out = self.prefill.handle(ChunkReady(xid=self.xid, spans=full(0, pages), last=True, token=7), 0.0)
        for action in out:  # which grows
            if isinstance(action, MovePiece):
                moved = PieceMoved(
                    peer=action.peer, xid=action.xid, piece=action.piece, digests=bytes(8 * len(action.pages)),
                    byte_count=len(action.pages) * PAGE_BYTES,
                )  # fmt: skip
                out += self.prefill.handle(moved, 0.0)
        return out

    def read(self, offered: list[Any]) -> list[Any]:
        """Decode reads all of it: what it does when the last read has ended."""
        out: list[Any] = []
        for take in of_type(self.to_decode(offered), TakeIn):
            out = self.decode.handle(TakenIn(xid=take.xid, piece=take.piece), 0.0)
        return out


def test_a_handoff_lands_without_a_question_while_its_hold_lasts() -> None:
    two = Two()
    out = two.read(two.offer())
    assert [type(message) for message in sent(out)] == [DoneOk]
    (landed,) = of_type(out, Landed)
    assert (landed.token, landed.confirm_seconds) == (7, 0.0)
    assert [type(action) for action in two.to_prefill(out)] == [PrefillDrained]
    assert two.prefill.handoff_count == 0


def test_where_no_hold_can_be_read_decode_asks_and_says_nothing_twice() -> None:
    two = Two(Unreadable())
    asked = two.read(two.offer())
    assert [type(message) for message in sent(asked)] == [Confirm]
    answer = two.to_prefill(asked)
    assert (type(answer[0].message), type(answer[1])) == (ConfirmOk, PrefillDrained)
    out = two.to_decode(answer)
    assert [type(action) for action in out] == [Landed]
    assert not two.prefill.rejects


def test_a_hold_is_over_before_the_pages_of_a_lost_peer_are_given_up() -> None:
    two = Two()
    offered, ended = two.offer(), []
    end = two.holds.end
    two.holds.end = lambda hold: (ended.append(two.prefill.handoff_count), end(hold))  # type: ignore[method-assign, func-returns-value]
    out = two.prefill.handle(Gone(peer="in-1", reason="silent"), 0.0)
    assert of_type(out, AbortPrefill)
    assert ended == [1], "the handoff had not ended yet"
    assert [type(message) for message in sent(two.read(offered))] == [Confirm]


def test_a_handoff_that_prefill_has_ended_meanwhile_is_let_go_when_decode_has_read_it() -> None:
    """Its pages are held until then, so what decode has read is right."""
    two = Two()
    offered = two.offer()
    failed = two.prefill.handle(EndPrefill(xid=two.xid, code="aborted", reason="its client left"), 0.0)
    assert (len(of_type(failed, StopPrefill)), of_type(failed, AbortPrefill)) == (1, [])
    landed = two.read(offered)
    assert of_type(landed, Landed)
    assert two.to_decode(failed) == []
    assert [type(action) for action in two.to_prefill(landed)] == [AbortPrefill]
    assert two.prefill.handoff_count == 0
