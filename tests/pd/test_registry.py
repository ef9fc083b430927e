"""The prefill engines that a decode engine knows: which of them stays where there are too many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serinus.core.addresses import PEERS_MAX
from serinus.pd import DecodeSide, OpenPeer, Recompute, WantPeer
from serinus.pd.events import Tick
from serinus.wire import Gone
from serinus.wire.messages import HelloOk, Keepalive
from tests.pd.steps import of_type, start_event, tell
from tests.pd.tiny import LAYOUT, make_settings


@pytest.mark.parametrize("end", ["refused connections", "no answer"])
def test_addresses_that_nothing_answers_at_do_not_keep_a_new_one_out(end: str) -> None:
    """64 of them did, for ten minutes. A configured address and a peer that is up stay."""
    side = DecodeSide(make_settings("d", 1, connect_s_max=2.0, silence_s_max=8.0))
    side.handle(WantPeer(address="kept"), 0.0)
    side.handle(replace(start_event("u"), address="up"), 0.0)
    tell(side, "up#2", HelloOk(engine="prefill-0", role="prefill", backend="shm", layout=LAYOUT), 0.1)
    for number in range(PEERS_MAX - 2):
        side.handle(replace(start_event(f"r{number}"), address=f"invented{number}"), 0.2)
    full = replace(start_event("full"), address="new0")
    assert of_type(side.handle(full, 0.3), OpenPeer) == [], "each of them may still answer"
    if end == "no answer":
        out = side.handle(Tick(), 3.0)
    else:
        out = [a for n in range(PEERS_MAX - 2) for a in side.handle(Gone(peer=f"invented{n}#{n + 3}", reason=""), 0.4)]
    assert len(of_type(out, Recompute)) == PEERS_MAX - 2
    for number in range(1, PEERS_MAX):
        out = side.handle(replace(start_event(f"s{number}"), address=f"new{number}"), 3.0 + number / 1000)
        opened = [action.address for action in of_type(out, OpenPeer)]
        assert opened == [f"new{number}"] * (number <= PEERS_MAX - 2), number
    known = {peer.address for peer in side.peers}
    assert {"kept", "up"} < known
    assert len(known) == PEERS_MAX


def test_of_configured_engines_a_burst_goes_to_each_by_its_load_before_any_of_them_says_anew_what_it_has() -> None:
    side = DecodeSide(make_settings("d", 1))
    assert side.least_loaded() == ""
    for number, load in enumerate((0, 2, 0), 1):
        side.handle(WantPeer(address=f"p{number}"), 0.0)
        if number < 3:
            tell(side, f"p{number}#{number}", HelloOk(engine="p", role="prefill", backend="shm", layout=LAYOUT))
            tell(side, f"p{number}#{number}", Keepalive(load=load))
    assert [side.least_loaded() for _ in range(6)] == ["p1", "p1", "p1", "p2", "p1", "p2"], "p3 is not up"
    tell(side, "p1#1", Keepalive(load=9))
    assert side.least_loaded() == "p2", "what it says itself counts anew"


def test_a_configured_engine_that_stands_still_is_asked_only_where_all_do() -> None:
    """Its load is what it last said: what is sent to it waits until it is declared gone."""
    side = DecodeSide(make_settings("d", 1))
    for number in (1, 2):
        side.handle(WantPeer(address=f"p{number}"), 0.0)
        tell(side, f"p{number}#{number}", HelloOk(engine="p", role="prefill", backend="shm", layout=LAYOUT))
    for second in range(1, 10):
        tell(side, "p2#2", Keepalive(load=5), float(second))
        side.handle(Tick(), float(second))
    assert [side.least_loaded() for _ in range(3)] == ["p2"] * 3
    tell(side, "p1#1", Keepalive(), 9.0)
    assert side.least_loaded() == "p1", "it moves again"
    for second in range(10, 20):
        side.handle(Tick(), float(second))
    assert side.least_loaded() == "p1", "nothing was heard of either"
