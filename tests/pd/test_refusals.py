"""What is not accepted: engines that do not fit, messages that do not add up, contracts that are broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.errors import InvariantError
from serinus.core.handoff import ChunkReady
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    Capabilities,
    DecodeSide,
    Landed,
    Mode,
    PeerChanged,
    PrefillSide,
    Recompute,
    StartHandoff,
    TakenIn,
    WantPeer,
    difference,
)
from serinus.pd.actions import ClosePeer
from serinus.pd.clients import EARLY_BYTES_MAX
from serinus.wire.messages import (
    Data,
    DataOk,
    Done,
    Fail,
    Grant,
    Hello,
    HelloNo,
    HelloOk,
    LayoutSignature,
    Prepare,
)
from tests.pd.steps import GOOD, greeted, of_type, sent, start_event, tell
from tests.pd.tiny import LAYOUT, PAGE_BYTES, full, make_request, make_settings
from tests.pd.world import World

# ---- engines that do not fit ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("kv_dtype", "int8"),
        ("page_size", 6),
        ("layer_count", 2),
        ("kv_head_count", 3),
        ("head_size", 2),
    ],
)
def test_engines_of_other_layouts_are_refused_by_the_name_of_the_field(field: str, value: object) -> None:
    world = World()
    values = {name: getattr(LAYOUT, name) for name in LayoutSignature.__struct_fields__}
    other = LayoutSignature(**{**values, field: value})
    world.decode[0] = DecodeSide(make_settings("d", 9, layout=other))
    event = start_event()
    if field == "page_size":
        event = StartHandoff(
            rid="r", request=make_request("r", 9), address="p0", held=0, spans=full(0, event.spans[0].pages[:2])
        )
    opened = world.decode[0].handle(event, 0.0)
    (hello,) = sent(opened)
    answer = sent(tell(world.prefill[0], "in-1", hello))[0]
    assert isinstance(answer, HelloNo)
    assert field in answer.reason
    assert repr(value) in answer.reason
    out = tell(world.decode[0], "p0#1", answer)
    (recompute,) = of_type(out, Recompute)
    assert recompute.code == "refused"
    assert field in recompute.reason
    assert world.decode[0].refusal("p0")[0] == "refused"
    assert [n.state for n in of_type(out, PeerChanged)] == ["refused"]


def test_equal_layouts_have_no_difference() -> None:
    assert difference(LAYOUT, LAYOUT) == ""


_WINDOW = {"layer_parts": bytes([1]), "window": 8}
_WHOLE = Capabilities(mode=Mode.PULL)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"kv_dtype": "bfloat16"}, {"kv_dtype": "float32"}, "in kv_dtype: 'bfloat16' here, 'float32' there; KV is not"),
        ({"page_size": 16}, {"page_size": 24}, "in page_size: 16 here, 24 there, neither divides the other"),
        (_WINDOW, {**_WINDOW, "window": 12}, "in window: 8 here, 12 there"),
        (_WINDOW, {**_WINDOW, "page_size": 8}, "in page_size: 4 here, 8 there; with sliding layers"),
    ],
    ids=["dtype", "page size", "window", "page size with a window"],
)
def test_both_sides_say_both_values_when_they_greet(ours: dict[str, Any], theirs: dict[str, Any], words: str) -> None:
    """An engine on a GPU and one on a CPU, say: what must be equal is told before any prompt."""
    here, there = (msgspec.structs.replace(LAYOUT, **fields) for fields in (ours, theirs))
    prefill = PrefillSide(make_settings("p", 2, layout=here))
    hello = Hello(engine="d", role="decode", layout=there, backends=("shm",), host="here")
    (answer,) = sent(tell(prefill, "in-1", hello))
    assert isinstance(answer, HelloNo)
    assert answer.reason.startswith(f"pd: layout differs {words}")
    if "sliding" not in words:
        decode = DecodeSide(make_settings("d", 1, layout=here))
        decode.handle(WantPeer(address="p0"), 0.0)
        out = tell(decode, "p0#1", HelloOk(engine="p", role="prefill", backend="shm", layout=there))
        (news,) = of_type(out, PeerChanged)
        assert news.reason.startswith(f"layout differs {words}")


def test_a_backend_that_moves_whole_pages_says_so_when_they_greet() -> None:
    settings = make_settings("p", 2, backends=("b",), capabilities={"b": _WHOLE})
    for name, value in (("page_size", 8), ("pp", 1), ("tp", 1)):
        there = msgspec.structs.replace(LAYOUT, kv_head_count=2, layer_count=2, **{name: value})
        here = msgspec.structs.replace(there, **{name: 2 * value})
        prefill = PrefillSide(replace(settings, layout=here))
        (answer,) = sent(tell(prefill, "in-1", Hello(engine="d", role="decode", layout=there, backends=("b",))))
        assert isinstance(answer, HelloNo)
        assert f"in {name}: {2 * value} here, {value} there; the data backend moves pages whole" in answer.reason


def answered(page_size: int = 4, host: str = "here", **reach: Any) -> tuple[Any, list[PeerChanged]]:
    """The answer of an engine that prefers pages by `near`, between two processes of one machine, to one that has the
    same; and what its own log is told."""
    capabilities = {"near": replace(_WHOLE, same_host=True)}
    both: dict[str, Any] = {"backends": ("near", "shm"), "capabilities": capabilities, **reach}
    prefill = PrefillSide(make_settings("p", 2, **both))
    layout = msgspec.structs.replace(LAYOUT, page_size=page_size)
    hello = Hello(
        engine="d", role="decode", layout=layout, backends=both["backends"], host=host, endpoints={"near": (b"seven",)}
    )
    out = tell(prefill, "in-1", hello)
    return sent(out)[0], of_type(out, PeerChanged)


def _far(ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
    return f"{theirs[0].decode()} is too far"


def test_the_next_backend_is_taken_where_the_best_one_does_not_reach_and_the_log_says_why() -> None:
    answer, news = answered()
    assert (answer.backend, answer.mode, news[0].reason) == ("near", "pull", "")
    answer, news = answered(refusals={"near": _far})
    assert (answer.backend, answer.mode) == ("shm", "receiver_checked")
    assert news[0].reason == "pages travel by shm, as near: seven is too far"
    answer, news = answered(page_size=8)
    assert answer.backend == "shm"
    assert "page_size: 4 here, 8 there" in news[0].reason


def test_a_backend_that_does_not_reach_is_refused_in_words_where_there_is_no_other() -> None:
    alone = {"backends": ("near",)}
    assert answered(refusals={"near": _far}, **alone)[0].reason == "pd: near: seven is too far"
    assert "near works within one machine" in answered(host="there", **alone)[0].reason
    assert "page_size: 4 here, 8 there" in answered(page_size=8, **alone)[0].reason


def test_engines_of_pages_that_divide_greet_each_other_whatever_their_device() -> None:
    """The signature names no device: a prefill engine on a GPU with large pages, a decode engine on a CPU."""
    prefill = PrefillSide(make_settings("p", 2, layout=msgspec.structs.replace(LAYOUT, page_size=64)))
    hello = Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here")
    (answer,) = sent(tell(prefill, "in-1", hello))
    assert isinstance(answer, HelloOk)


def test_decode_checks_the_layout_as_well() -> None:
    side = DecodeSide(make_settings("d", 1))
    side.handle(start_event(), 0.0)
    other = msgspec.structs.replace(LAYOUT, layer_count=7)
    out = tell(side, "p0#1", HelloOk(engine="p", role="prefill", backend="shm", layout=other))
    assert [r.code for r in of_type(out, Recompute)] == ["refused"]


@pytest.mark.parametrize(
    ("theirs", "host", "chosen"),
    [(("shm", "tcp"), "here", "shm"), (("shm", "tcp"), "there", "tcp"), (("tcp", "shm"), "here", "tcp")],
)
def test_the_backend_is_the_first_of_decode_that_both_can_use(theirs: tuple[str, ...], host: str, chosen: str) -> None:
    side = PrefillSide(make_settings("p", 2, backends=("shm", "tcp")))
    (answer,) = sent(tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=theirs, host=host)))
    assert isinstance(answer, HelloOk)
    assert answer.backend == chosen


@pytest.mark.parametrize("changes", [{"backends": ("nixl",)}, {"host": "elsewhere"}, {"role": "prefill"}])
def test_engines_without_a_common_way_are_refused(changes: dict[str, Any]) -> None:
    side = PrefillSide(make_settings("p", 2))
    values = {"engine": "d", "role": "decode", "layout": LAYOUT, "backends": ("shm",), "host": "here"}
    (answer,) = sent(tell(side, "in-1", Hello(**{**values, **changes})))
    assert isinstance(answer, HelloNo)
    assert not side.clients


def test_no_peer_is_served_before_hello() -> None:
    side = PrefillSide(make_settings("p", 2))
    out = tell(side, "in-1", Prepare(xid="x", grant=1, request=make_request("r", 1), held=0))
    assert isinstance(sent(out)[0], HelloNo)
    assert not of_type(out, AddPrefill)
    assert side.rejects["no_hello"] == 1


# ---- granted = sent = landed, or the request fails ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"part": 1},
        {"part": 1 << 62},
        {"rank": 1},
        {"pages": [1]},
        {"first": 1},
        {"digests": b""},
        {"digests": bytes(7)},
        {"digests": bytes(8 * 4), "byte_count": 4 * PAGE_BYTES},
        {"byte_count": PAGE_BYTES + 1},
        {"byte_count": 1 << 62},
    ],
    ids=str,
)
def test_data_that_does_not_follow_fails_the_handoff_on_both_sides(wrong: dict[str, Any]) -> None:
    side = greeted()
    side.handle(start_event(length=9), 0.0)
    out = tell(side, "p0#1", Data(**{**GOOD, **wrong}))
    assert [r.code for r in of_type(out, Recompute)] == ["mismatch"]
    fail, taken = sent(out)
    assert isinstance(fail, Fail)
    assert isinstance(taken, DataOk), "the sender gets its staging bytes back all the same"
    assert side.rejects["bad_data"] == 1


@pytest.mark.parametrize("wrong", [{"piece_count": 2}, {"page_count": 3}, {"byte_count": 5}, {"token": 1000}], ids=str)
def test_a_done_that_does_not_add_up_fails_the_handoff(wrong: dict[str, Any]) -> None:
    side = greeted()
    side.handle(start_event(length=4), 0.0)
    tell(side, "p0#1", Data(**GOOD))
    side.handle(TakenIn(xid="x0", piece=0), 0.0)
    values = {"xid": "x0", "grant": 1, "token": 5, "piece_count": 1, "page_count": 1, "byte_count": PAGE_BYTES}
    out = tell(side, "p0#1", Done(**{**values, **wrong}))
    assert [r.code for r in of_type(out, Recompute)] == ["mismatch"]
    assert not of_type(out, Landed)


def test_what_a_peer_says_it_found_cached_is_believed_as_far_as_it_can_be() -> None:
    side = greeted()
    side.handle(start_event(length=4), 0.0)
    tell(side, "p0#1", Data(**GOOD))
    side.handle(TakenIn(xid="x0", piece=0), 0.0)
    said = {"device": 4, "host": -1, "storage": 5, "a label of its own": 1}
    done = Done(xid="x0", grant=1, token=5, piece_count=1, page_count=1, byte_count=PAGE_BYTES, cached_tokens=said)
    (landed,) = of_type(tell(side, "p0#1", done), Landed)
    assert landed.cached_tokens == {"device": 4}


def test_a_done_without_all_pages_fails_the_handoff() -> None:
    side = greeted()
    side.handle(start_event(length=8), 0.0)
    out = tell(side, "p0#1", Done(xid="x0", grant=1, token=5, piece_count=0, page_count=0, byte_count=0))
    assert [r.code for r in of_type(out, Recompute)] == ["mismatch"]


def test_a_flipped_byte_fails_the_handoff_with_the_code_digest() -> None:
    world = World()
    world.start(0, 0, 20, 0)
    world.settle(compute=False)
    (xid,) = world.jobs[0]
    world.compute(0, xid, 5)
    world.corrupt(world.links[0])
    world.settle()
    assert world.over == {"digest": 1}
    world.assert_empty()


@pytest.mark.parametrize(
    "wrong",
    [{"request": make_request("r", 0)}, {"grant": 0}, {"held": 8}, {"deadline_s": float("nan")}],
    ids=str,
)  # fmt: skip
def test_a_senseless_prepare_is_answered_with_fail(wrong: dict[str, Any]) -> None:
    side = PrefillSide(make_settings("p", 2))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    values = {"xid": "x", "grant": 1, "request": make_request("r", 8), "held": 0}
    out = tell(side, "in-1", Prepare(**{**values, **wrong}))
    (fail,) = sent(out)
    assert isinstance(fail, Fail)
    assert (fail.xid, fail.code) == ("x", "rejected")
    assert not of_type(out, AddPrefill)


def test_a_grant_of_another_size_or_a_used_number_is_not_accepted() -> None:
    side = PrefillSide(make_settings("p", 2))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    for grant, xid in ((4, "x"), (5, "y")):
        tell(side, "in-1", Prepare(xid=xid, grant=grant, request=make_request(xid, 9), held=4))
    two = full(1, [1, 2])
    out = tell(side, "in-1", Grant(xid="x", grant=4, spans=full(1, [1])))
    assert [action.code for action in of_type(out, AbortPrefill)] == ["mismatch"]
    assert tell(side, "in-1", Grant(xid="x", grant=4, spans=two)) == []
    assert tell(side, "in-1", Grant(xid="y", grant=4, spans=two)) == []
    assert side.rejects["old_grant"] == 2
    assert tell(side, "in-1", Grant(xid="y", grant=6, spans=two)) == []
    assert side.rejects["repeated_grant"] == 1
    assert side.ungranted_count == 1


def test_a_peer_that_grants_more_than_a_bound_of_pages_before_it_says_what_for_is_cut_off() -> None:
    """Grants may come before their PREPARE, and are kept until then; what went, or came, does not count."""
    side = PrefillSide(make_settings("p", 2))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    pages = list(range(1 << 16))  # half a megabyte
    (client,) = side._clients
    for grant in range(1, 100):
        assert tell(side, "in-1", Grant(xid=f"x{grant}", grant=grant, spans=full(1, pages))) == []
        tell(side, "in-1", Prepare(xid=f"x{grant}", grant=grant, request=make_request("r", 9), held=4))
        assert (client.early, client.early_bytes) == ({}, 0)
    out: list[Any] = []
    for grant in range(100, 200):
        assert not out
        out = tell(side, "in-1", Grant(xid=f"x{grant}", grant=grant, spans=full(1, pages)))
        if out:
            break
    assert EARLY_BYTES_MAX - (1 << 20) < client.early_bytes <= EARLY_BYTES_MAX
    assert [message.reason for message in sent(out)] == [
        "pd: you granted over 16 MiB of pages for what you did not ask for"
    ]
    assert of_type(out, ClosePeer)


@pytest.mark.parametrize(
    ("pages", "shown"), [([2, 2], "(2,)"), ([-1, 2], "(2,)"), ([[1, 2], [3, 4]], "(2, 2)")], ids=str
)
def test_a_grant_of_pages_that_cannot_be_is_answered_with_fail(pages: list[int], shown: str) -> None:
    side = PrefillSide(make_settings("p", 2))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    tell(side, "in-1", Prepare(xid="x", grant=4, request=make_request("r", 9), held=4))
    out = tell(side, "in-1", Grant(xid="x", grant=4, spans=full(1, pages)))
    (fail,) = sent(out)
    assert isinstance(fail, Fail)
    assert (fail.code, fail.reason) == (
        "mismatch",
        f"pd: pages of shape {shown}, expected one row of distinct ones from 0 on",
    )


def test_what_decode_asks_for_is_computed_under_the_name_of_the_handoff() -> None:
    side = PrefillSide(make_settings("p", 2))
    tell(side, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    asked = replace(make_request("r", 9), cache_salt="tenant", prefill_address="p0", arrival=77.0)
    (add,) = of_type(tell(side, "in-1", Prepare(xid="x", grant=4, request=asked, held=4)), AddPrefill)
    assert add.rid == "r"
    assert add.request == replace(asked, rid="x", prefill_address="", arrival=0.0)


def test_an_engine_that_breaks_its_own_contract_is_told() -> None:
    side = greeted()
    side.handle(start_event(), 0.0)
    with pytest.raises(InvariantError, match="already"):
        side.handle(start_event(), 0.0)
    with pytest.raises(InvariantError, match="held"):
        side.handle(start_event(rid="s", length=4, held=4), 0.0)
    bad = start_event(rid="t")
    with pytest.raises(InvariantError, match="pages"):
        side.handle(
            StartHandoff(rid="t", request=bad.request, address="p0", held=0, spans=full(0, bad.spans[0].pages * 0)), 0.0
        )
    world = World()
    world.start(0, 0, 9, 0)
    world.settle(compute=False)
    (xid,) = world.jobs[0]
    with pytest.raises(InvariantError, match="announced"):
        world.prefill[0].handle(ChunkReady(xid=xid, spans=full(1, np.array([1], dtype=np.int32))), 0.0)
