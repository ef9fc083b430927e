"""The cluster secret: a peer that knows it is greeted, another is refused in words, and a repeated greeting fails."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serinus.pd import ClosePeer, DecodeSide, PeerChanged, PeerState, PrefillSide, Send, WantPeer
from serinus.wire import PeerMessage
from serinus.wire.messages import Hello, HelloAgain, HelloNo, HelloOk, Message
from tests.pd.steps import of_type, sent
from tests.pd.tiny import make_settings

Log = list[tuple[str, Message]]


def sides(ours: str, theirs: str) -> tuple[DecodeSide, PrefillSide]:
    """A decode engine that knows `ours` and a prefill engine that knows `theirs`."""
    return (
        DecodeSide(make_settings("d", 1, cluster_secret=ours)),
        PrefillSide(make_settings("p", 2, cluster_secret=theirs)),
    )


def greet(decode: DecodeSide, prefill: PrefillSide, peer: str = "in-1", incarnation: int = 1) -> tuple[Log, list[Any]]:
    """Let them greet each other; what was said, and all that decode did."""
    log: Log = []
    actions: list[Any] = list(decode.handle(WantPeer(address="p0"), 0.0))
    to_prefill = sent(actions)
    while to_prefill:
        message = to_prefill.pop(0)
        log.append(("decode", message))
        for answer in sent(prefill.handle(PeerMessage(peer=peer, incarnation=incarnation, message=message), 0.0)):
            log.append(("prefill", answer))
            name = next(p.name for p in decode.peers)
            out = decode.handle(PeerMessage(peer=name, incarnation=2, message=answer), 0.0)
            actions.extend(out)
            to_prefill.extend(sent(out))
    return log, actions


def test_two_that_share_a_secret_greet_each_other_in_two_round_trips() -> None:
    decode, prefill = sides("s", "s")
    log, _ = greet(decode, prefill)
    assert [type(message) for _, message in log] == [Hello, HelloAgain, Hello, HelloOk]
    assert decode.peers[0].state is PeerState.UP
    assert len(prefill.clients) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [("s", "t", "you do not know the cluster secret"), ("", "t", "it wants a cluster secret"),
     ("s", "", "it does not know the cluster secret")],
)  # fmt: skip
def test_an_engine_that_does_not_know_the_secret_is_refused_with_a_reason(ours: str, theirs: str, words: str) -> None:
    decode, prefill = sides(ours, theirs)
    _, actions = greet(decode, prefill)
    assert decode.peers[0].state is PeerState.REFUSED
    assert words in decode.refusal("p0")[1]
    assert [news.state for news in of_type(actions, PeerChanged)] == ["refused"]
    if theirs:
        assert not prefill.clients


def test_a_greeting_that_was_overheard_is_of_no_use() -> None:
    decode, prefill = sides("s", "s")
    log, _ = greet(decode, prefill)
    proof = log[2][1]
    assert isinstance(proof, Hello)
    assert proof.mac
    for peer, first in (("in-2", None), ("in-3", msgspec.structs.replace(proof, mac=b""))):
        if first is not None:
            (again,) = sent(prefill.handle(PeerMessage(peer=peer, incarnation=1, message=first), 0.0))
            assert isinstance(again, HelloAgain)
        out = prefill.handle(PeerMessage(peer=peer, incarnation=1, message=proof), 0.0)
        assert isinstance(sent(out)[0], HelloNo), "it covers the nonce of another connection"
        assert of_type(out, ClosePeer)
    assert [client.peer for client in prefill.clients] == ["in-1"]


CHANGES = [{"engine": "e"}, {"endpoints": {"shm": (b"mine",)}}, {"host": "elsewhere"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_greeting_that_was_changed_on_the_way_is_refused(change: dict[str, Any]) -> None:
    decode, prefill = sides("s", "s")
    hello = sent(decode.handle(WantPeer(address="p0"), 0.0))[0]
    (again,) = sent(prefill.handle(PeerMessage(peer="in-1", incarnation=1, message=hello), 0.0))
    (proof,) = sent(decode.handle(PeerMessage(peer="p0#1", incarnation=2, message=again), 0.0))
    forged = msgspec.structs.replace(proof, **change)
    assert isinstance(sent(prefill.handle(PeerMessage(peer="in-1", incarnation=1, message=forged), 0.0))[0], HelloNo)


def test_an_incarnation_cannot_be_borrowed() -> None:
    decode, prefill = sides("s", "s")
    greet(decode, prefill, incarnation=9)
    assert decode.peers[0].state is PeerState.REFUSED
    assert not prefill.clients


def test_strangers_that_never_answer_are_forgotten() -> None:
    decode, prefill = sides("s", "s")
    (hello,) = sent(decode.handle(WantPeer(address="p0"), 0.0))
    for i in range(1000):
        prefill.handle(PeerMessage(peer=f"in-{i}", incarnation=1, message=hello), 0.0)
    assert len(prefill._clients._strangers) <= 256


def test_a_peer_that_asks_for_the_proof_twice_is_refused() -> None:
    decode, _ = sides("s", "s")
    decode.handle(WantPeer(address="p0"), 0.0)
    outs = [
        decode.handle(PeerMessage(peer="p0#1", incarnation=2, message=HelloAgain(nonce=b"n")), 0.0) for _ in range(2)
    ]
    assert [len(of_type(out, Send)) for out in outs] == [1, 0]
    assert "twice" in decode.refusal("p0")[1]


def test_the_secret_is_in_no_text_about_the_settings() -> None:
    assert "sesame" not in repr(make_settings("d", 1, cluster_secret="sesame"))
