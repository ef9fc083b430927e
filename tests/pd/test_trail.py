"""The trail of handoffs, which dashboards show: it is bounded, whatever comes late."""

from __future__ import annotations

import pickle
from typing import Any

from serinus.pd import CancelHandoff, HandoffTrail
from serinus.wire import PeerMessage
from serinus.wire.messages import Data, Prepare
from tests.pd.steps import GOOD, greeted, sent, start_event


def test_pieces_that_come_after_the_end_of_their_handoff_are_not_kept() -> None:
    trail, side = HandoffTrail(kept=4), greeted()

    def tell(event: Any) -> list[Any]:
        actions = side.handle(event, 1.0)
        trail.hear(event, actions, 1.0)
        return actions

    def give_up(rid: str) -> None:
        """Hand a request over, cancel that, and take in what was under way."""
        (prepare,) = sent(tell(start_event(rid)))
        assert isinstance(prepare, Prepare)
        tell(CancelHandoff(rid=rid, reason="gone"))
        data = Data(**{**GOOD, "xid": prepare.xid, "grant": prepare.grant, "shm_name": "1:2:3"})
        tell(PeerMessage(peer="p0#1", incarnation=2, message=data))

    sizes = []
    for first in (100, 500):
        for number in range(first, first + 300):
            give_up(f"r{number}")
        sizes.append(len(pickle.dumps(trail)))
    assert sizes[0] == sizes[1]
    assert [each["rid"] for each in trail.as_json()] == ["r796", "r797", "r798", "r799"]
