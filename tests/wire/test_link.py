"""ReliableLink: loss, repetition and reordering change only when things arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import CapacityError
from serinus.core.rng import Rng
from serinus.wire import LinkFrame, ReliableLink

Link = ReliableLink[int, int]


class LossyPair:
    """Two links and the frames between them, at the mercy of a seeded rng."""

    def __init__(self, seed: int, loss: float, repeat: float) -> None:
        self.rng = Rng(seed)
        self.loss, self.repeat = loss, repeat
        self.links = (Link(resend_s=1.0), Link(resend_s=1.0))
        self.wires: tuple[list[LinkFrame[int]], list[LinkFrame[int]]] = ([], [])
        self.got: tuple[list[int], list[int]] = ([], [])
        self.now = 0.0

    def put(self, side: int, outgoing: LinkFrame[int]) -> None:
        for _ in range(2 if self.rng.random() < self.repeat else 1):
            if self.rng.random() >= self.loss:
                self.wires[side].append(outgoing)

    def send(self, side: int, item: int) -> None:
        self.put(side, self.links[side].send(item, self.now))

    def deliver_any(self, side: int) -> None:
        """One frame that `side` sent arrives, out of order."""
        wire = self.wires[side]
        if wire:
            out = wire.pop(self.rng.randrange(len(wire)))
            item = out.item if out.item is not None else -1
            self.got[1 - side].extend(self.links[1 - side].receive(out.seq, out.ack, item))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for side in (0, 1):
            for outgoing in self.links[side].due(self.now):
                self.put(side, outgoing)


@given(
    seed=st.integers(0, 1 << 32),
    loss=st.floats(0, 0.6),
    repeat=st.floats(0, 0.6),
    counts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_everything_arrives_once_and_in_order(seed: int, loss: float, repeat: float, counts: tuple[int, int]) -> None:
    pair = LossyPair(seed, loss, repeat)
    sent = [0, 0]
    for _ in range(400):
        side = pair.rng.randrange(2)
        if sent[side] < counts[side]:
            pair.send(side, sent[side])
            sent[side] += 1
        pair.deliver_any(pair.rng.randrange(2))
        if pair.rng.random() < 0.2:
            pair.tick(0.7)
    pair.loss = 0.0
    for _ in range(200):
        pair.tick(30.0)
        while pair.wires[0] or pair.wires[1]:
            pair.deliver_any(0)
            pair.deliver_any(1)
    for side in (0, 1):
        assert pair.got[1 - side] == list(range(sent[side]))
        assert not pair.links[side]._waiting
    assert not pair.wires[0]


def test_nothing_is_sent_again_while_acknowledgements_come() -> None:
    pair = LossyPair(1, 0.0, 0.0)
    for item in range(10):
        pair.send(0, item)
        pair.deliver_any(0)
        pair.tick(0.1)
        pair.deliver_any(1)
    assert pair.got[1] == list(range(10))
    assert pair.links[0].resent_count == 0


def test_the_wait_before_a_repeat_doubles_up_to_its_bound() -> None:
    link = Link(resend_s=1.0, resend_s_max=4.0)
    link.send(7, 0.0)
    times = [t / 10 for t in range(200) if link.due(t / 10)]
    assert times == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_many_overdue_frames_go_out_in_bounded_bursts() -> None:
    link = Link(resend_s=1.0, resend_s_max=1.0)
    for item in range(150):
        link.send(item, 0.0)
    assert [len(link.due(now)) for now in (0.5, 1.0, 1.1, 1.2, 1.3, 2.0)] == [0, 64, 64, 22, 0, 64]


def test_an_acknowledgement_of_what_was_never_sent_is_not_believed() -> None:
    link = Link()
    link.send(1, 0.0)
    assert link.receive(0, 5, 0) == []
    assert len(link._waiting) == 1


def test_frames_too_far_ahead_are_dropped_and_come_again() -> None:
    link = Link(ahead_max=2)
    for seq in (4, 3, 2):
        assert link.receive(seq, 0, seq) == []
    assert link.receive(1, 0, 1) == [1], "2 did not fit and comes again"
    assert link.receive(2, 0, 2) == [2, 3, 4]


def test_frames_ahead_of_their_turn_are_kept_up_to_a_number_of_bytes() -> None:
    link = Link(ahead_bytes_max=100)
    for seq in (4, 3, 2):
        assert link.receive(seq, 0, seq, 50) == []
    assert link.receive(1, 0, 1, 500) == [1], "in its turn nothing is kept, whatever the size; 2 did not fit"
    assert link.receive(2, 0, 2, 500) == [2, 3, 4]
    for seq in (7, 8, 6):
        assert link.receive(seq, 0, seq, 50) == []
    assert link.receive(5, 0, 5) == [5], "the room came back: 7 and 8 were kept, and 6 did not fit"
    assert link.receive(6, 0, 6) == [6, 7, 8]


def test_a_peer_that_acknowledges_nothing_is_noticed() -> None:
    link = Link(window_max=3)
    for item in range(3):
        link.send(item, 0.0)
    with pytest.raises(CapacityError, match="unacknowledged"):
        link.send(3, 0.0)


def test_an_acknowledgement_waits_a_little_for_a_frame_that_takes_it_along() -> None:
    link: ReliableLink[int, int] = ReliableLink(ack_s=0.02)
    link.receive(1, 0, 7)
    assert link.due(1.0) == []
    assert link.send(5, 1.01).ack == 1
    assert link.due(2.0) == [], "it went with the frame"
    link.receive(2, 0, 8)
    assert link.due(3.0) == []
    assert [(out.seq, out.ack) for out in link.due(3.02)] == [(0, 2)]
    link.receive(2, 0, 8)
    assert [out.ack for out in link.due(3.03)] == [2], "who repeats a frame does not know that it came"
