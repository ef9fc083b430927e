"""KV events: what a router that speaks vLLM's and SGLang's form reads from a real socket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from serinus.cache import AllBlocksCleared, BlockRemoved, BlockStored
from serinus.core.clock import ManualClock
from serinus.core.errors import ConfigError
from serinus.engine.kv_events import KvEventPublisher, KvEventSettings


class EventBatch(msgspec.Struct, array_like=True):
    """As a subscriber of the field declares it."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


STORED = BlockStored(
    block_hashes=(2**64 - 1, 7), parent_block_hash=None, token_ids=tuple(range(8)), block_size=4, medium="GPU"
)
REMOVED = BlockRemoved(block_hashes=(7,), medium="CPU")


@pytest.fixture
def sockets() -> Iterator[list[Any]]:
    """What a test opens, closed after it."""
    opened: list[Any] = []
    yield opened
    for each in opened:
        each.close()


def subscriber(publisher: KvEventPublisher, sockets: list[Any], topic: str = "") -> Any:
    """A SUB socket that the publisher knows of: an XPUB would tell, so it is asked until something comes."""
    sub = zmq.Context.instance().socket(zmq.SUB)
    sub.linger = 0
    sub.setsockopt_string(zmq.SUBSCRIBE, topic)
    sub.connect(publisher.address)
    sockets.append(sub)
    while not sub.poll(20):
        publisher.publish([REMOVED])
    return sub


def received(sub: Any) -> tuple[bytes, int, EventBatch]:
    """The next message: its topic, number and events. The time-out of the test ends the wait."""
    topic, seq, payload = sub.recv_multipart()
    return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=EventBatch)


@pytest.mark.slow
def test_a_subscriber_reads_every_event_in_the_form_of_the_field(sockets: list[Any]) -> None:
    settings = KvEventSettings.from_json('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "topic": "kv@0"}')
    publisher = KvEventPublisher(settings, ManualClock(5.0), data_parallel_rank=3)
    sockets.append(publisher)
    sub = subscriber(publisher, sockets, "kv@0")
    publisher.publish([AllBlocksCleared()])
    while (last := received(sub))[2].events != [Cleared()]:
        pass
    before = last[1]
    publisher.publish([])
    publisher.publish([STORED, REMOVED])
    publisher.publish([AllBlocksCleared(), dataclasses.replace(STORED, parent_block_hash=7)])
    one, two = received(sub), received(sub)
    assert (one[0], one[1], two[1]) == (b"kv@0", before + 1, before + 2)
    assert (one[2].ts, one[2].data_parallel_rank) == (1_700_000_005.0, 3)
    assert one[2].events == [
        Stored([2**64 - 1, 7], None, list(range(8)), 4, None, "GPU"),
        Removed([7], "CPU"),
    ]
    assert two[2].events == [Cleared(), Stored([2**64 - 1, 7], 7, list(range(8)), 4, None, "GPU")]


@pytest.mark.slow
def test_a_subscriber_that_missed_messages_can_ask_for_them(sockets: list[Any]) -> None:
    settings = KvEventSettings(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", buffer_steps=3)
    publisher = KvEventPublisher(settings, ManualClock())
    sockets.append(publisher)
    for _ in range(5):
        publisher.publish([STORED])
    asker = zmq.Context.instance().socket(zmq.REQ)
    asker.linger = 0
    asker.connect(publisher.replay_address)
    sockets.append(asker)
    asker.send((3).to_bytes(8, "big"))
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(publisher.replay_address)
    sockets.append(dealer)
    dealer.send_multipart((b"nonsense",))
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    got = []
    while not got or got[-1][1] != b"\xff" * 8:
        publisher.publish([])
        if dealer.poll(20):
            got.append(dealer.recv_multipart())
    assert [int.from_bytes(frames[1], "big", signed=True) for frames in got] == [2, 3, 4, -1]
    assert all(frames[0] == b"" for frames in got)
    assert msgspec.msgpack.decode(got[0][2], type=EventBatch).events == [
        Stored([2**64 - 1, 7], None, list(range(8)), 4, None, "GPU")
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "expected a JSON object"),
        ('{"port": 1}', "'port', expected some of"),
        ('{"publisher": "nats"}', "publisher is 'nats', expected zmq or null"),
        ('{"buffer_steps": 0}', "buffer_steps is 0, expected a number above 0"),
        ('{"buffer_steps": true}', "buffer_steps is True"),
        ('{"topic": null}', "topic is None, expected a text"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KvEventSettings.from_json(text)


def test_endpoints_that_cannot_be_used_are_refused_and_nothing_stays_open(sockets: list[Any]) -> None:
    first = KvEventPublisher(KvEventSettings(endpoint="tcp://127.0.0.1:*"), ManualClock())
    sockets.append(first)
    with pytest.raises(ConfigError, match="cannot be used"):
        KvEventPublisher(KvEventSettings(endpoint=first.address), ManualClock())
    with pytest.raises(ConfigError, match="cannot be used"):
        KvEventPublisher(KvEventSettings(endpoint="inproc://kv", replay_endpoint=first.address), ManualClock())
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:99999.*expected a port up to 65535"):
        KvEventPublisher(KvEventSettings(endpoint="tcp://127.0.0.1:99999"), ManualClock())
    again = KvEventPublisher(KvEventSettings(endpoint="inproc://kv"), ManualClock())
    sockets.append(again)
    assert again.replay_address == ""


def test_events_can_be_left_out() -> None:
    assert KvEventSettings.from_json("{}").enabled
    assert not KvEventSettings.from_json('{"enable_kv_cache_events": false}').enabled
    assert not KvEventSettings.from_json('{"publisher": "null", "replay_endpoint": null}').enabled
