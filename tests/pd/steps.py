"""Short words for the tests of single machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from serinus.pd import (
    DecodeSide,
    Send,
    StartHandoff,
    WantPeer,
)
from serinus.wire import PeerMessage
from serinus.wire.messages import (
    HelloOk,
    Message,
)
from tests.pd.tiny import LAYOUT, PAGE_BYTES, PAGE_SIZE, full, make_request, make_settings

GOOD: dict[str, Any] = {"xid": "x0", "grant": 1, "piece": 0, "first": 0, "digests": bytes(8), "byte_count": PAGE_BYTES}
"""The first Data of the first handoff, one page."""


def sent(actions: list[Any]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def of_type(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def start_event(rid: str = "r", length: int = 9, held: int = 0, address: str = "p0") -> StartHandoff:
    pages = np.arange(1, 1 + -(-length // PAGE_SIZE) - held // PAGE_SIZE, dtype=np.int32)
    return StartHandoff(
        rid=rid, request=make_request(rid, length), address=address, held=held, spans=full(held // PAGE_SIZE, pages)
    )


def greeted(**changes: object) -> DecodeSide:
    """A decode side with prefill `p0` up under the name p0#1."""
    side = DecodeSide(make_settings("d", 1, **changes), mint=iter(f"x{i}" for i in range(1000)).__next__)
    side.handle(WantPeer(address="p0"), 0.0)
    welcome = HelloOk(engine="prefill-0", role="prefill", backend="shm", layout=LAYOUT)
    side.handle(PeerMessage(peer="p0#1", incarnation=2, message=welcome), 0.0)
    return side


def tell(side: Any, peer: str, message: Message, now: float = 0.0) -> list[Any]:
    result: list[Any] = side.handle(PeerMessage(peer=peer, incarnation=7, message=message), now)
    return result
