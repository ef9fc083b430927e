"""KvEventPublisher: tells routers over zmq which blocks of KV this engine has, in the form vLLM and SGLang use.

Every message has three frames: the topic, a sequence number (8 bytes, big endian) and a msgpack array

    [ts, [event, ...], data_parallel_rank]
    event: ["BlockStored", [hash, ...], parent hash or nil, [token id, ...], block size, lora id (nil), medium]
           ["BlockRemoved", [hash, ...], medium]
           ["AllBlocksCleared"]

A hash is a number of 64 bits, chained over everything before the block. A block is one page of the part FULL; medium is
GPU (the device, whatever it is), CPU (host) or DISK (storage). A subscriber that missed messages sends
(empty, 8 bytes: first number wanted) to the replay endpoint and gets (empty, number, payload) of each kept one, then
number -1. Sending never waits: a subscriber that falls behind loses messages and sees the gap.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import zmq

from serinus.cache import BlockRemoved, BlockStored, KvEvent
from serinus.core.addresses import is_loopback
from serinus.core.clock import Clock
from serinus.core.errors import ConfigError

_PORT_MAX = 65_535
_END = (-1).to_bytes(8, "big", signed=True)
_KINDS = {"bool": bool, "str": str, "int": int, "str | None": str}
_WORDS = {bool: "true or false", str: "a text", int: "a number above 0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings:
    """The settings in the JSON object of `--kv-events-config`."""

    enable_kv_cache_events: bool = True
    """False: as if the setting were not there."""
    publisher: str = "zmq"
    """zmq, or null: nothing is published."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Bound where its host is `*`, `::` or loopback, or it is ipc or inproc; connected elsewhere."""
    replay_endpoint: str | None = None
    """Where messages that were missed can be asked for; None = nowhere."""
    buffer_steps: int = 10_000
    """Messages kept for that."""
    hwm: int = 100_000
    """Messages zmq keeps for a subscriber that is slow."""
    max_queue_size: int = 100_000
    """Of vLLM's configuration; there is no queue here, messages are sent at once."""
    topic: str = ""
    """First frame of every message."""

    @property
    def enabled(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @classmethod
    def from_json(cls, text: str) -> KvEventSettings:
        """The settings in a JSON object. Raises ConfigError: no object, an unknown field, a value of a wrong kind."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"config: --kv-events-config is no JSON ({error}), expected an object") from error
        if not isinstance(data, dict):
            raise ConfigError(f"config: --kv-events-config is {text[:80]!r}, expected a JSON object")
        known = {item.name: str(item.type) for item in fields(cls)}
        for name, value in data.items():
            if name not in known:
                raise ConfigError(f"config: --kv-events-config has {name!r}, expected some of {', '.join(known)}")
            kind = _KINDS[known[name]]
            right = type(value) is kind and not (type(value) is int and value <= 0)
            if not right and not (value is None and known[name].endswith("None")):
                raise ConfigError(f"config: --kv-events-config {name} is {value!r}, expected {_WORDS[kind]}")
        made = cls(**data)
        if made.publisher not in ("zmq", "null"):
            raise ConfigError(f"config: --kv-events-config publisher is {made.publisher!r}, expected zmq or null")
        return made


class KvEventPublisher:
    """Belongs to the engine's thread."""

    def __init__(self, settings: KvEventSettings, clock: Clock, *, data_parallel_rank: int | None = None) -> None:
        """Raises ConfigError: an endpoint cannot be used."""
        self._clock, self._rank = clock, data_parallel_rank
        self._topic = settings.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._seq = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._socket = _open(zmq.PUB, settings.endpoint, settings.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if settings.replay_endpoint is not None:
            try:
                self._replay = _open(zmq.ROUTER, settings.replay_endpoint, settings.hwm)
            except ConfigError:
                _shut(self._socket)
                raise

    @property
    def address(self) -> str:
        """Where subscribers find it (the port where the endpoint left it open)."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_address(self) -> str:
        """Where replays are asked for; empty = nowhere."""
        return "" if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Tell these in one message (none: nothing is sent), and answer requests for old ones. Never waits.

        Cost: some microseconds a message and 0.1 us a token id.
        """
        if events:
            batch = [self._clock.unix(), [_plain(event) for event in events], self._rank]
            payload = self._encoder.encode(batch)
            self._socket.send_multipart((self._topic, self._seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._kept.append((self._seq, payload))
            self._seq += 1
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not one of ours; a ROUTER drops what it cannot deliver just so
        asker, first = frames[0], int.from_bytes(frames[2], "big")
        for seq, payload in self._kept:
            if seq >= first:
                replay.send_multipart((asker, b"", seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        replay.send_multipart((asker, b"", _END, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Give the sockets back."""
        _shut(self._socket)
        if self._replay is not None:
            _shut(self._replay)


def _plain(event: KvEvent) -> list[Any]:
    name = type(event).__name__
    if isinstance(event, BlockStored):
        tokens = [int(token) for token in event.token_ids]
        return [name, event.block_hashes, event.parent_block_hash, tokens, event.block_size, None, event.medium]
    if isinstance(event, BlockRemoved):
        return [name, event.block_hashes, event.medium]
    return [name]


def _open(kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > _PORT_MAX:  # zmq takes it modulo 65,536
        raise ConfigError(f"config: --kv-events-config endpoint {endpoint!r}, expected a port up to {_PORT_MAX}")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.sndhwm = hwm
    socket.ipv6 = "[" in endpoint
    try:
        if _is_ours(endpoint):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"config: --kv-events-config endpoint {endpoint!r} cannot be used ({error})") from error
    return socket


def _shut(socket: zmq.Socket[bytes]) -> None:
    """Close, and give the address back at once: by itself zmq does that later, in a thread of its own."""
    if not socket.closed:
        with suppress(zmq.ZMQError):
            socket.unbind(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    socket.close()


def _is_ours(endpoint: str) -> bool:
    """Whether subscribers come to us."""
    scheme, _, where = endpoint.partition("://")
    host = where.rpartition(":")[0]
    return scheme in ("ipc", "inproc") or host in ("*", "[::]", "::") or is_loopback(host)
