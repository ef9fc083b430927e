"""One handoff at a time: how it goes well, how it ends in every phase, and that it ends in time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    CancelHandoff,
    ClosePeer,
    DecodeSide,
    Drain,
    Landed,
    OpenPeer,
    PeerChanged,
    PrefillSide,
    Recompute,
    Send,
    Shutdown,
    TakenIn,
    Tick,
    WantPeer,
)
from serinus.pd.pulse import Pace
from serinus.wire import Gone
from serinus.wire.messages import (
    Data,
    DataOk,
    Done,
    DoneOk,
    Fail,
    Hello,
    HelloNo,
    HelloOk,
    Keepalive,
    Message,
    Prepare,
)
from tests.pd.steps import greeted, of_type, sent, start_event, tell
from tests.pd.tiny import LAYOUT, PAGE_BYTES, make_request, make_settings
from tests.pd.world import World

# ---- going well ----


@pytest.mark.parametrize("held_pages", [0, 1, 2])
@pytest.mark.parametrize("length", [9, 12, 13])
def test_a_prompt_lands_whole_and_only_what_decode_lacks_travels(length: int, held_pages: int) -> None:
    world = World()
    world.start(0, 0, length, held_pages)
    world.settle()
    assert world.over == {"landed": 1}
    world.assert_empty()


def test_chunks_travel_while_the_rest_is_computed() -> None:
    world = World()
    rid = world.start(0, 0, 20, 0)
    world.settle(compute=False)
    (xid,) = world.jobs[0]
    world.compute(0, xid, 2)
    world.settle(compute=False)
    assert world.jobs[0][xid].chunks == [], "the first chunk was read and its hold dropped"
    assert rid in world.asked[0]
    world.settle()
    assert world.over == {"landed": 1}


def test_work_may_begin_before_the_grant_comes() -> None:
    world = World()
    world.start(0, 0, 9, 0, early=True)
    (link,) = world.links
    world.deliver_to_prefill(link)
    world.deliver_to_decode(link)
    world.deliver_to_prefill(link)
    world.to_decode(0, world.late_grant)
    assert world.prefill[0].ungranted_count == 1
    (xid,) = world.jobs[0]
    world.compute(0, xid, 3)
    assert len(world.jobs[0][xid].chunks) == 1, "kept until there is a grant"
    world.settle()
    assert world.over == {"landed": 1}
    assert world.prefill[0].ungranted_count == 0


def test_one_greeting_serves_many_handoffs() -> None:
    world = World(1, 1, pages=40)
    for _ in range(5):
        world.start(0, 0, 9, 0)
    world.settle()
    assert world.over == {"landed": 5}
    assert [news.state for news in world.news] == ["up", "up"]


def test_many_engines_serve_each_other() -> None:
    world = World(2, 2, pages=60)
    for i in range(12):
        world.start(i % 2, (i // 2) % 2, 5 + i, i % 3)
    world.settle()
    assert world.over == {"landed": 12}
    world.assert_empty()


def test_what_prefill_says_of_its_work_comes_with_the_landing() -> None:
    side = greeted()
    side.handle(start_event(length=4), 1.0)
    data = Data(xid="x0", grant=1, piece=0, first=0, digests=bytes(8), byte_count=PAGE_BYTES)
    (copy,) = tell(side, "p0#1", data, 2.0)
    assert copy.pages.tolist() == [1]
    done = Done(
        xid="x0", grant=1, token=5, piece_count=1, page_count=1, byte_count=PAGE_BYTES,
        cached_tokens={"device": 4}, queue_seconds=0.5, compute_seconds=0.25,
    )  # fmt: skip
    assert tell(side, "p0#1", done, 3.0) == [], "not before the copy is made"
    out = side.handle(TakenIn(xid="x0", piece=0, seconds=0.1), 4.0)
    assert sent(out) == [DataOk(xid="x0", grant=1, piece=0), DoneOk(xid="x0", grant=1)]
    (landed,) = of_type(out, Landed)
    assert (landed.rid, landed.token, landed.engine, landed.cached_tokens) == ("r", 5, "prefill-0", {"device": 4})
    assert (landed.wait_seconds, landed.seconds, landed.copy_seconds) == (1.0, 2.0, 0.1)
    assert (landed.queue_seconds, landed.compute_seconds) == (0.5, 0.25)


# ---- client aborts, in every phase ----


PHASES = ["before HELLO_OK", "after PREPARE", "after GRANT", "during Data", "after Done"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_ends_both_sides_within_one_round_trip(phase: str) -> None:
    world = World()
    rid = world.start(0, 0, 20, 0)
    assert rid is not None
    (link,) = world.links
    if phase != "before HELLO_OK":
        world.deliver_to_prefill(link)  # HELLO
        world.deliver_to_decode(link)  # HELLO_OK
        world.deliver_to_prefill(link)  # PREPARE
    if phase not in ("before HELLO_OK", "after PREPARE"):
        world.deliver_to_prefill(link)  # GRANT
        (xid,) = world.jobs[0]
        world.compute(0, xid, 3)
    if phase == "during Data":
        world.deliver_to_decode(link)
        assert link.to_decode, "more data is on its way"
    if phase == "after Done":
        world.compute(0, next(iter(world.jobs[0])), 5)
    world.cancel(0, rid)
    assert not world.pools[0].owner, "decode's pages are free at once"
    again = world.start(0, 0, 20, 0)
    assert again is not None, "and may be used at once"
    while link.to_prefill:
        world.deliver_to_prefill(link)
    assert [job.request.rid for job in world.jobs[0].values()] == ["x2"] * (phase != "before HELLO_OK")
    world.settle()
    assert world.over == {"cancelled": 1, "landed": 1}
    world.assert_empty()


@pytest.mark.parametrize("phase", ["computing", "sending"])
def test_prefill_giving_up_makes_decode_recompute_within_one_message(phase: str) -> None:
    world = World()
    world.start(0, 0, 20, 0)
    world.settle(compute=False)
    (xid,) = world.jobs[0]
    if phase == "sending":
        world.compute(0, xid, 3)
    world.end_prefill(0, xid)
    world.settle()
    assert world.over == {"error": 1}
    world.assert_empty()


def test_late_data_of_a_closed_grant_is_counted_answered_and_dropped() -> None:
    side = greeted()
    side.handle(start_event(length=8), 0.0)
    out = side.handle(CancelHandoff(rid="r"), 0.0)
    assert sent(out) == [Fail(xid="x0", grant=1, code="aborted", reason="aborted by the client")]
    data = Data(xid="x0", grant=1, piece=0, first=0, digests=bytes(8), byte_count=PAGE_BYTES)
    assert tell(side, "p0#1", data) == [Send(peer="p0#1", message=DataOk(xid="x0", grant=1, piece=0))]
    assert side.rejects["closed_grant"] == 1
    assert side.handle(CancelHandoff(rid="r"), 0.0) == [], "an end is an end"


# ---- peers come and go ----


def test_a_killed_prefill_engine_means_recompute_and_later_requests_stay_local_until_it_is_back() -> None:
    world = World()
    world.start(0, 0, 9, 0)
    world.settle(compute=False)
    world.kill_prefill(0)
    world.settle()
    assert world.over == {"peer_gone": 1}
    assert world.decode[0].refusal("p0")[0] == "peer_gone"
    world.start(0, 0, 9, 0)
    assert world.over == {"peer_gone": 2}, "at once, without asking"
    world.tick(1.0)
    world.settle()
    assert world.decode[0].refusal("p0")[0] == "peer_gone", "tried again, and still not there"
    world.revive_prefill(0)
    world.tick(5.0)
    assert world.decode[0].refusal("p0")[0] == "peer_gone", "not before it has answered"
    world.settle()
    assert world.decode[0].refusal("p0") == ("", "")
    world.start(0, 0, 9, 0)
    world.settle()
    assert world.over == {"peer_gone": 2, "landed": 1}
    assert sum(news.state == "up" for news in world.news if news.address) == 2


def test_a_killed_decode_engine_frees_everything_on_prefill() -> None:
    world = World()
    for length in (9, 20):
        world.start(0, 0, length, 0)
    world.settle(compute=False)
    for xid in list(world.jobs[0]):
        world.compute(0, xid, 3)
    world.kill_decode(0)
    world.settle()
    world.assert_empty()
    assert not world.prefill[0].clients
    world.start(0, 0, 9, 0)
    world.settle()
    assert world.over["landed"] == 1, "its next life is welcome"


def test_the_wait_before_a_retry_doubles_up_to_its_bound() -> None:
    side = DecodeSide(make_settings("d", 1, retry_s_min=1.0, retry_s_max=4.0))
    now, opened = 0.0, []
    out = side.handle(WantPeer(address="p0"), now)
    while now < 25.0:
        for action in of_type(out, OpenPeer):
            opened.append(now)
            side.handle(Gone(peer=action.peer, reason="refused"), now)
        now += 0.5
        out = side.handle(Tick(), now)
    assert opened == [0.0, 1.0, 3.0, 7.0, 11.0, 15.0, 19.0, 23.0]


def ticks_until_recompute(side: DecodeSide, start: float, end: float) -> float:
    """A loop that listens twice a second; returns when the first request was given up, or `end`."""
    now = start
    while now < end and not of_type(side.handle(Tick(), now), Recompute):
        now += 0.5
    return now


def test_a_peer_that_never_answers_hello_is_given_up_in_time() -> None:
    side = DecodeSide(make_settings("d", 1, connect_s_max=2.0, silence_s_max=8.0))
    side.handle(start_event(), 0.0)
    out: list[Any] = []
    for step in range(1, 20):
        out += side.handle(Tick(), step * 0.5)
    assert [news.state for news in of_type(out, PeerChanged)] == ["down"]
    assert of_type(out, ClosePeer)
    assert side.refusal("p0")[0] == "peer_gone"


def test_a_request_does_not_wait_long_for_a_greeting_and_the_peer_may_answer_later_still() -> None:
    side = DecodeSide(make_settings("d", 1, connect_s_max=10.0, silence_s_max=60.0))
    side.handle(start_event(), 0.0)
    assert side.handle(Tick(), 9.9) == []
    out = side.handle(Tick(), 10.1)
    assert [(r.rid, r.code) for r in of_type(out, Recompute)] == [("r", "peer_slow")]
    assert not of_type(out, ClosePeer) + of_type(out, PeerChanged), "it is not lost"
    assert side.refusal("p0")[0] == "peer_slow", "younger requests do not wait at all"
    welcome = HelloOk(engine="prefill-0", role="prefill", backend="shm", layout=LAYOUT)
    tell(side, "p0#1", welcome, 45.0)
    assert side.refusal("p0") == ("", "")
    (prepare,) = sent(side.handle(start_event("s"), 45.0))
    assert isinstance(prepare, Prepare)
    assert prepare.spans
    assert not of_type(side.handle(Tick(), 45.5), Recompute)


@pytest.mark.parametrize("told_by", [HelloOk, Keepalive], ids=lambda kind: kind.__name__)
def test_a_peer_may_be_silent_for_four_of_the_steps_it_announced(told_by: type) -> None:
    side = DecodeSide(make_settings("d", 1, silence_s_max=20.0, handoff_s_max=900.0))
    side.handle(start_event(), 0.0)
    step_s = 100.0 if told_by is HelloOk else 0.0
    tell(side, "p0#1", HelloOk(engine="p", role="prefill", backend="shm", layout=LAYOUT, step_s_max=step_s))
    if told_by is Keepalive:
        tell(side, "p0#1", Keepalive(step_s_max=100.0))
    assert 395.0 < ticks_until_recompute(side, 0.5, 800.0) < 405.0


def test_no_announcement_makes_us_wait_longer_than_a_handoff_may_take() -> None:
    side = greeted(silence_s_max=20.0, handoff_s_max=50.0)
    tell(side, "p0#1", Keepalive(step_s_max=1e5))
    out: list[Any] = []
    for step in range(1, 120):
        out += side.handle(Tick(), step * 0.5)
    assert [news.state for news in of_type(out, PeerChanged)] == ["down"]


@pytest.mark.parametrize("told_by", [Hello, Keepalive], ids=lambda kind: kind.__name__)
def test_a_decode_engine_in_a_long_step_keeps_its_handoffs(told_by: type) -> None:
    side = PrefillSide(make_settings("p", 2, silence_s_max=5.0))
    step_s = 30.0 if told_by is Hello else 0.0
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here", step_s_max=step_s)
    tell(side, "in-1", hello)
    if told_by is Keepalive:
        tell(side, "in-1", Keepalive(step_s_max=30.0))
    for step in range(1, 238):
        side.handle(Tick(), step * 0.5)
    assert side.clients
    for step in range(238, 244):
        side.handle(Tick(), step * 0.5)
    assert not side.clients


def test_an_engine_announces_its_longest_step_in_every_greeting_and_sign_of_life() -> None:
    side = PrefillSide(make_settings("p", 2, keepalive_s=1.0))
    side.handle(Tick(step_s=70.0), 0.0)
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here")
    (welcome,) = sent(tell(side, "in-1", hello))
    assert isinstance(welcome, HelloOk)
    assert welcome.step_s_max == 70.0
    assert sent(side.handle(Tick(step_s=80.0), 1.0)) == [Keepalive(step_s_max=80.0)]
    decode = greeted(keepalive_s=1.0)
    assert sent(decode.handle(Tick(step_s=7.0), 1.0)) == [Keepalive(grant_floor=1, step_s_max=7.0)]
    (greeting,) = sent(decode.handle(WantPeer(address="p1"), 1.0))
    assert isinstance(greeting, Hello)
    assert greeting.step_s_max == 7.0


def test_a_long_step_is_remembered_for_ten_minutes_and_forgotten_after_twenty() -> None:
    pace = Pace()
    for now in (50.0, 51.0, 91.0, 91.5):
        pace.look(now)
    assert pace.longest_s == 40.0, "the time before the first look is no step"
    now = 91.5
    while now < 91.5 + 600.0:
        now += 0.5
        pace.look(now)
    assert pace.longest_s == 40.0
    while now < 91.5 + 1300.0:
        now += 0.5
        pace.look(now)
    assert pace.longest_s == 0.5


def test_a_silent_peer_is_gone_and_our_own_pause_is_no_silence_of_theirs() -> None:
    side = greeted(silence_s_max=20.0, handoff_s_max=900.0)
    side.handle(start_event(), 0.0)
    assert not of_type(side.handle(Tick(), 120.0), Recompute), "we were away for two minutes, not they"
    now = 120.0
    out: list[Any] = []
    while not of_type(out, Recompute):
        now += 0.5
        out = side.handle(Tick(), now)
        assert now < 150.0
    assert 138.0 < now < 142.0
    assert of_type(out, Recompute)[0].code == "peer_gone"


def test_a_prefill_engine_hangs_up_on_a_silent_decode_engine_and_says_so() -> None:
    side = PrefillSide(make_settings("p", 2, silence_s_max=5.0))
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here")
    tell(side, "in-1", hello)
    tell(side, "in-1", Prepare(xid="x", grant=1, request=make_request("r", 9), held=0))
    out: list[Any] = []
    for step in range(1, 12):
        out += side.handle(Tick(), step * 0.5)
    assert [action.xid for action in of_type(out, AbortPrefill)] == ["x"]
    assert isinstance(sent(out)[-1], HelloNo)
    assert not side.clients


def test_both_sides_give_signs_of_life() -> None:
    side = greeted(keepalive_s=1.0)
    side.handle(start_event(), 0.0)
    assert sent(side.handle(Tick(load=3, turn=9), 1.0)) == [Keepalive(grant_floor=1, load=3, turn=9)]
    assert sent(side.handle(Tick(), 1.5)) == []
    tell(side, "p0#1", Keepalive(load=17))
    assert side.peers[0].load == 17
    prefill = PrefillSide(make_settings("p", 2, keepalive_s=1.0))
    tell(prefill, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    said = sent(prefill.handle(Tick(load=2, queue_s=3.0, token_s=0.5), 1.0))
    assert said == [Keepalive(load=2, queue_s=3.0, token_s=0.5)]
    tell(side, "p0#1", said[0])
    side.handle(start_event(rid="more"), 1.6)
    sent_tokens = len(start_event().request.prompt) - start_event().held
    assert side.peers[0].queue_s == 3.0 + 0.5 * sent_tokens, "as it said, and what was sent there since"


def test_a_connection_that_takes_the_place_of_another_is_told_to_the_other() -> None:
    side = PrefillSide(make_settings("p", 2))
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here")
    tell(side, "in-1", hello)
    out = tell(side, "in-2", hello)
    assert [(s.peer, type(s.message)) for s in of_type(out, Send)] == [("in-1", HelloNo), ("in-2", HelloOk)]
    assert [client.peer for client in side.clients] == ["in-2"]


def test_a_decode_engine_that_knows_two_names_of_this_one_is_served_over_both_connections() -> None:
    """Its own settings say localhost, say, and a router an address. It would connect anew to the one that is cut."""
    side = PrefillSide(make_settings("p", 2))
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here")
    prepare = Prepare(xid="x", grant=1, request=make_request("r", 9), held=0)
    tell(side, "in-1", hello)
    tell(side, "in-1", prepare)
    out = tell(side, "in-2", msgspec.structs.replace(hello, address="tcp://10.0.0.1:5000"))
    assert [(s.peer, type(s.message)) for s in of_type(out, Send)] == [("in-2", HelloOk)]
    assert [client.peer for client in side.clients] == ["in-1", "in-2"]
    out = tell(side, "in-2", msgspec.structs.replace(prepare, xid="y", grant=2))
    assert [action.xid for action in of_type(out, AddPrefill)] == ["y"]
    assert [action.xid for action in of_type(side.handle(Gone(peer="in-1", reason="cut"), 1.0), AbortPrefill)] == ["x"]


def test_requests_cannot_make_us_know_addresses_without_bound() -> None:
    side = DecodeSide(make_settings("d", 1))
    codes = []
    for i in range(100):
        out = side.handle(start_event(rid=f"r{i}", address=f"p{i}"), 0.0)
        codes += [r.code for r in of_type(out, Recompute)]
    assert len(side.peers) == 64
    assert codes == ["refused"] * 36


# ---- engines that end ----


def test_a_draining_prefill_engine_takes_nothing_new_and_finishes_what_it_has() -> None:
    world = World(2, 1)
    world.start(0, 0, 20, 0)
    world.settle(compute=False)
    world.to_prefill(0, Drain(reason="bye"))
    world.start(0, 0, 5, 0)
    world.start(1, 0, 5, 0)
    world.settle(compute=False)
    assert world.over == {"shutdown": 1, "refused": 1}
    assert world.decode[1].refusal("p0") == ("refused", "bye")
    assert len(world.jobs[0]) == 1
    world.to_prefill(0, Drain())
    world.settle()
    assert world.over == {"shutdown": 1, "refused": 1, "landed": 1}
    world.assert_empty()


def test_an_engine_that_stops_ends_everything_and_says_so() -> None:
    for side in ("decode", "prefill"):
        world = World()
        world.start(0, 0, 9, 0)
        world.settle(compute=False)
        if side == "decode":
            world.to_decode(0, Shutdown())
        else:
            world.to_prefill(0, Shutdown())
        world.settle()
        assert world.over == {"shutdown": 1}
        world.assert_empty()


def test_a_slow_peer_holds_up_only_itself() -> None:
    world = World(2, 1, pages=30, room=2)
    world.start(0, 0, 80, 0)
    world.start(1, 0, 80, 0)
    slow, fast = world.links
    for _ in range(40):
        for p, jobs in enumerate(world.jobs):
            for xid in list(jobs):
                world.compute(p, xid, 8)
        world.deliver_to_prefill(fast)
        world.deliver_to_decode(fast)
        if not slow.staging:
            world.deliver_to_prefill(slow)
            world.deliver_to_decode(slow)
    assert world.over == {"landed": 1}
    assert len(slow.staging) == 2
    world.settle()
    assert world.over == {"landed": 2}


@pytest.mark.parametrize("message", [Prepare, Hello, DoneOk], ids=lambda m: m.__name__)
def test_a_message_that_makes_no_sense_here_changes_only_a_counter(message: type) -> None:
    side = greeted()
    side.handle(start_event(), 0.0)
    values: dict[type, Message] = {
        Prepare: Prepare(xid="x", grant=1, request=make_request("r", 0), held=0),
        Hello: Hello(engine="d", role="decode", layout=LAYOUT, backends=()),
        DoneOk: DoneOk(xid="x0", grant=1),
    }
    assert tell(side, "p0#1", values[message]) == []
    assert tell(side, "stranger", Keepalive()) == []
    assert side.rejects == {"unexpected": 1, "unknown_peer": 1}
    assert side.handoff_count == 1
