"""Two real processes, real pages, and kill -9 of either."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serinus.pd import AbortPrefill, Landed, PrefillDrained, Recompute
from tests.children import Spawn, children
from tests.pd.peer import DecodePeer, PrefillPeer
from tests.pd.tiny import segment_count

PROGRAM = str(Path(__file__).with_name("peer.py"))

pytestmark = pytest.mark.slow


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start the other process; returns it and the first line it prints."""
    with children() as start:
        yield lambda *words: start(PROGRAM, *words)


@pytest.fixture(autouse=True)
def peers() -> Iterator[Peers]:
    """Engines of this process, closed at the end; then no descriptor of a segment is left here. Segments have no names
    (tests/pd/test_backends.py)."""
    segments = segment_count()
    made = Peers()
    yield made
    made.close()
    assert segment_count() == segments


class Peers:
    """Makes engines and remembers to close them."""

    def __init__(self) -> None:
        self._made: list[DecodePeer | PrefillPeer] = []

    def decode(self, backend: str) -> DecodePeer:
        peer = DecodePeer(backend)
        self._made.append(peer)
        return peer

    def prefill(self, backend: str, *, everything: bool = True) -> PrefillPeer:
        peer = PrefillPeer(backend, everything=everything)
        self._made.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._made:
            peer.close()


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.proof)])
def test_prompts_land_from_another_process(peers: Peers, spawn: Spawn, backend: str) -> None:
    _, address = spawn("prefill", backend, "tcp://127.0.0.1:0", "all")
    decode = peers.decode(backend)
    for i, (length, held_pages) in enumerate([(400, 0), (9, 1), (401, 50), (3, 0)]):
        decode.ask(f"r{i}", address, length, held_pages=held_pages)
        decode.until(lambda: not decode.asked)
    assert [type(result) for result in decode.results] == [Landed] * 4
    (peer,) = decode.port.machine.peers
    assert peer.backend == backend


@pytest.mark.parametrize("backend", ["tcp", pytest.param("shm", marks=pytest.mark.proof)])
def test_a_killed_prefill_engine_is_a_recompute_as_soon_as_its_connection_ends_and_welcome_again(
    peers: Peers, spawn: Spawn, backend: str
) -> None:
    child, address = spawn("prefill", backend, "tcp://127.0.0.1:0", "some")
    decode = peers.decode(backend)
    decode.ask("r", address, 400)
    decode.until(lambda: decode.port.machine.landed_pages("r") >= 80)
    os.kill(child.pid, signal.SIGKILL)
    decode.until(lambda: not decode.asked)
    (result,) = decode.results
    assert isinstance(result, Recompute)
    assert (result.code, "silent" in result.reason) == ("peer_gone", False), result.reason
    decode.ask("s", address, 400)
    assert not decode.asked, "at once, without asking a dead peer"
    assert decode.port.machine.refusal(address)[0] == "peer_gone"
    spawn("prefill", backend, address, "all")
    decode.until(lambda: decode.port.machine.refusal(address) == ("", ""))
    decode.ask("t", address, 400)
    decode.until(lambda: not decode.asked)
    assert isinstance(decode.results[-1], Landed)


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.proof)])
def test_a_killed_decode_engine_frees_everything_on_prefill(peers: Peers, spawn: Spawn, backend: str) -> None:
    prefill = peers.prefill(backend, everything=False)
    child, _ = spawn("decode", backend, prefill.address)
    prefill.until(lambda: bool(prefill.held))
    os.kill(child.pid, signal.SIGKILL)
    prefill.until(lambda: not prefill.held)
    (end,) = prefill.ended
    assert isinstance(end, AbortPrefill)
    assert (end.code, "silent" in end.reason) == ("peer_gone", False), end.reason
    assert prefill.port.machine.staged_count == 0
    assert not prefill.port.machine.clients
    prefill.everything = True
    spawn("decode", backend, prefill.address)
    prefill.until(lambda: any(isinstance(end, PrefillDrained) for end in prefill.ended))


def test_a_prefill_engine_serves_several_decode_engines_and_loses_only_the_killed_one(
    peers: Peers, spawn: Spawn
) -> None:
    prefill = peers.prefill("auto")
    first, _ = spawn("decode", "shm", prefill.address)
    spawn("decode", "tcp", prefill.address)
    drained: list[PrefillDrained] = []

    def many() -> bool:
        drained[:] = [end for end in prefill.ended if isinstance(end, PrefillDrained)]
        return len(drained) >= 20 and len(prefill.port.machine.clients) == 2

    prefill.until(many)
    assert {client.backend for client in prefill.port.machine.clients} == {"shm", "tcp"}
    os.kill(first.pid, signal.SIGKILL)
    prefill.until(lambda: len(prefill.port.machine.clients) == 1)
    count = len(prefill.ended)
    prefill.until(lambda: len(prefill.ended) > count + 5)
    assert prefill.port.machine.clients[0].backend == "tcp"


def test_engines_of_other_models_hear_why_they_are_refused(peers: Peers, spawn: Spawn) -> None:
    _, address = spawn("prefill", "tcp", "tcp://127.0.0.1:0", "all")
    decode = peers.decode("shm")
    decode.ask("r", address, 9)
    decode.until(lambda: not decode.asked)
    (result,) = decode.results
    assert isinstance(result, Recompute)
    assert result.code == "refused"
    assert "no common data backend" in result.reason
