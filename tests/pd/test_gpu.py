"""Two real processes on one GPU, pages in its memory, and an owner that is killed, stopped, or lies; by cuda_ipc and,
where its package is installed, by nixl."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.pd import Landed, Recompute
from serinus.pd.backends import CudaDriver, CudaIpcBackend, NixlBackend, Region
from tests.children import Spawn, children
from tests.pd.peer import DecodePeer, DeviceStore

pytestmark = pytest.mark.gpu

PROGRAM = str(Path(__file__).with_name("peer.py"))
SILENT_S = 3.0
"""After which a stopped owner is given up here."""
LONG = 1 << 30
"""Cycles of the device that a read is held up for: half a second."""
QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_FILE": "stderr"}
"""Both write to standard output otherwise."""


@pytest.fixture(params=["cuda_ipc", pytest.param("nixl", marks=pytest.mark.nixl)])
def backend(request: pytest.FixtureRequest) -> str:
    """The way that pages travel."""
    return str(request.param)


@pytest.fixture(params=["same", pytest.param("other", marks=pytest.mark.gpus(2))])
def spawn(request: pytest.FixtureRequest, backend: str) -> Iterator[Spawn]:
    """Start a prefill engine in a process of its own, on our GPU or on another one; returns it and its address."""
    where = {"CUDA_VISIBLE_DEVICES": "1,0"} if request.param == "other" else {}
    with children() as start:
        yield lambda how="all", address="tcp://127.0.0.1:0": start(
            PROGRAM, "prefill", backend, address, how, **where, **QUIET
        )


@pytest.fixture
def decode(backend: str) -> Iterator[DecodePeer]:
    peer = DecodePeer(backend, silence_s_max=SILENT_S, keepalive_s=0.2, retry_s_min=0.1, retry_s_max=0.5)
    yield peer
    peer.close()


def under_way(decode: DecodePeer) -> dict[int, Any]:
    """Reads that its backend has not ended."""
    one: Any = decode.backends[0]
    found: dict[int, Any] = one._ops if isinstance(one, NixlBackend) else one._reads
    return found


def is_open(decode: DecodePeer) -> bool:
    """Whether memory of others is open in this process, as far as the backend itself opens it."""
    return bool(getattr(decode.backends[0], "_mapped", ()))


def hold_up(decode: DecodePeer) -> None:
    """The next reads begin after a while."""
    torch.cuda._sleep(LONG)


def begin_to_read(decode: DecodePeer, address: str) -> None:
    """Ask for prompts until one is being read."""
    for attempt in range(50):
        hold_up(decode)
        decode.ask(f"read-{attempt}", address, 400)
        decode.until(lambda: bool(under_way(decode)) or not decode.asked)
        if decode.asked:
            return
    raise AssertionError("no read was seen under way")


def welcome(decode: DecodePeer, address: str) -> None:
    """Turn until an engine there may be asked."""
    decode.until(lambda: decode.port.machine.refusal(address) == ("", ""))


def let_go(decode: DecodePeer) -> None:
    """Nothing is left of any peer: no handoff, no page in quarantine, no read, no memory that is open."""
    decode.until(lambda: not is_open(decode) and not decode.port.machine.quarantined_pages)
    assert not decode.port.machine.handoff_count
    assert not under_way(decode)


def test_prompts_land_from_another_process_in_pages_of_any_order(
    decode: DecodePeer, spawn: Spawn, backend: str
) -> None:
    _, address = spawn()
    for i, (length, held_pages) in enumerate([(400, 0), (9, 1), (401, 50), (3, 0), (1600, 0)]):
        decode.ask(f"r{i}", address, length, held_pages=held_pages)
        decode.until(lambda: not decode.asked)
    assert [type(result) for result in decode.results] == [Landed] * 5
    (peer,) = decode.port.machine.peers
    assert peer.backend == backend


def test_an_owner_that_is_killed_in_mid_read_is_a_recompute_and_its_memory_is_let_go(
    decode: DecodePeer, spawn: Spawn
) -> None:
    child, address = spawn()
    for _ in range(3):
        welcome(decode, address)
        begin_to_read(decode, address)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        decode.until(lambda: not decode.asked)
        result = decode.results[-1]
        assert isinstance(result, Recompute)
        assert result.code == "peer_gone"
        let_go(decode)
        child, address = spawn(address=address)
    welcome(decode, address)
    decode.ask("last", address, 400)
    decode.until(lambda: not decode.asked)
    assert isinstance(decode.results[-1], Landed)


def test_an_owner_that_is_stopped_in_mid_read_is_given_up_and_welcome_when_it_goes_on(
    decode: DecodePeer, spawn: Spawn
) -> None:
    child, address = spawn()
    begin_to_read(decode, address)
    os.kill(child.pid, signal.SIGSTOP)
    decode.until(lambda: not decode.asked)
    result = decode.results[-1]
    assert isinstance(result, Recompute), "all pages were read; what is missing is the owner's word"
    assert result.code == "peer_gone"
    let_go(decode)
    os.kill(child.pid, signal.SIGCONT)
    welcome(decode, address)
    decode.ask("s", address, 400)
    decode.until(lambda: not decode.asked)
    assert isinstance(decode.results[-1], Landed)


def test_pages_that_have_another_owner_when_they_are_read_are_found_by_their_sums(
    decode: DecodePeer, spawn: Spawn
) -> None:
    _, address = spawn("spoilt")
    for i in range(3):
        decode.ask(f"r{i}", address, 400)
        decode.until(lambda: not decode.asked)
    assert [(type(result), getattr(result, "code", "")) for result in decode.results] == [(Recompute, "digest")] * 3


def test_a_storm_of_aborts_leaves_nothing(decode: DecodePeer, spawn: Spawn) -> None:
    child, address = spawn()
    rng = Rng(7)
    for i in range(100):
        if i % 10 == 0:
            hold_up(decode)
        decode.ask(f"r{i}", address, rng.randrange(4, 400))
        for _ in range(rng.randrange(12)):
            decode.turn(0.01)
        decode.cancel(f"r{i}")
        # pages of this small engine are the same for every prompt: what is in quarantine is not granted
        decode.until(lambda: not decode.port.machine.quarantined_pages)
    assert not decode.port.machine.handoff_count
    decode.ask("all", address, 2040)
    decode.until(lambda: not decode.asked)
    assert isinstance(decode.results[-1], Landed), "the owner has nearly all of its pages back"
    child.kill()
    let_go(decode)


def test_engines_of_one_process_refuse_each_other_in_words() -> None:
    store = DeviceStore(8)
    owner, reader = (CudaIpcBackend(CudaDriver(), shares=shares) for shares in (True, False))
    regions = [
        Region(
            part=Part.FULL, address=each.address, lane_count=each.lane_count, lane_stride=each.lane_stride,
            strip_bytes=each.strip_bytes, page_count=each.page_count,
        )
        for each in store.regions
    ]  # fmt: skip
    owner.register(regions)
    assert "one process" in owner.refusal([owner.endpoint], [reader.register(regions)])
    with pytest.raises(TransferFailed, match="not connected"):
        reader.read("p", Part.FULL, np.array([1], np.int32), np.array([1], np.int32))


def test_memory_of_expandable_segments_is_refused_in_words() -> None:
    code = (
        "from tests.pd.peer import DeviceStore\n"
        "from serinus.pd.backends import CudaDriver\n"
        "from serinus.core.errors import ConfigError\n"
        "try: CudaDriver().share(DeviceStore(1024).memory.data_ptr())\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    assert "without expandable_segments" in done.stdout, done.stderr


def test_a_pool_of_the_host_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="the pools are on 'cpu'"):
        CudaDriver("cpu")
