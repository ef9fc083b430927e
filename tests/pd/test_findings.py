"""Findings of a canary: they reach the engine that had a part in the handoff, whatever engines are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serinus.core.handoff import HandoffFinding
from serinus.pd import DecodeSide, PrefillSide, Send, WantPeer
from serinus.wire import Gone, PeerMessage
from serinus.wire.messages import Hello, HelloOk, KvFound
from tests.pd.steps import of_type
from tests.pd.tiny import LAYOUT, make_settings

NAMES = "same", "same", "same", "unlike"
"""Of the engines at the other side."""


def prefill_side() -> PrefillSide:
    """It greeted four decode engines, as in-1 to in-4."""
    side = PrefillSide(make_settings("prefill-0", 9))
    for number, name in enumerate(NAMES, 1):
        hello = Hello(engine=name, role="decode", layout=LAYOUT, backends=("shm",), host="here")
        side.handle(PeerMessage(peer=f"in-{number}", incarnation=number, message=hello), 0.0)
    return side


def decode_side() -> DecodeSide:
    """Four prefill engines are up, as in-1#1 to in-4#4."""
    side = DecodeSide(make_settings("decode-9", 9))
    for number, name in enumerate(NAMES, 1):
        side.handle(WantPeer(address=f"in-{number}"), 0.0)
        welcome = HelloOk(engine=name, role="prefill", backend="shm", layout=LAYOUT)
        side.handle(PeerMessage(peer=f"in-{number}#{number}", incarnation=number, message=welcome), 0.0)
    return side


@pytest.mark.parametrize("is_recall", [False, True])
@pytest.mark.parametrize(
    ("make", "two", "all_of_name"),
    [(prefill_side, "in-2", ["in-1", "in-3"]), (decode_side, "in-2#2", ["in-1#1", "in-3#3"])],
    ids=["prefill", "decode"],
)
def test_a_finding_goes_over_the_connection_of_its_handoff_and_to_all_of_that_name_once_it_is_gone(
    make: Callable[[], PrefillSide | DecodeSide], two: str, all_of_name: list[str], is_recall: bool
) -> None:
    side = make()
    finding = HandoffFinding(engine="same", peer=two, xid="x", rid="r", reason="wrong", is_recall=is_recall)

    def told() -> list[str]:
        sends: list[Send] = of_type(side.handle(finding, 1.0), Send)
        return [send.peer for send in sends if isinstance(send.message, KvFound)]

    assert told() == [two]
    side.handle(Gone(peer=two, reason="lost"), 2.0)
    assert told() == all_of_name
