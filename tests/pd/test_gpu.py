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

import msgspec
import numpy as np
import pytest
import torch

from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import load
from serinus.pd import Landed, RankLayout, Recompute, cut, recut
from serinus.pd.backends import CudaDriver, CudaIpcBackend, NixlBackend, Region, rows_of, whole_rows
from serinus.pd.slices import slices
from serinus.pd.stamps import StampOutlet
from serinus.pool import DevicePool, PoolSpec
from serinus.wire.messages import LayoutSignature
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
    decode: DecodePeer, spawn: Spawn, backend: str
) -> None:
    child, address = spawn()
    begin_to_read(decode, address)
    os.kill(child.pid, signal.SIGSTOP)
    decode.until(lambda: not decode.asked)
    result = decode.results[-1]
    if isinstance(result, Landed):  # all was offered before, and the hold says that it is there still
        assert backend == "cuda_ipc"
    else:
        assert result.code == "peer_gone", "what is missing is the owner's word, or pages that it had not offered"
    decode.until(lambda: decode.port.machine.refusal(address)[0] == "peer_gone")
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
    assert "one process" in owner.refusal([owner.endpoint], [reader.register(regions)], [(0, 0)])
    with pytest.raises(TransferFailed, match="not connected"):
        reader.read("p", Part.FULL, np.array([1], np.int32), np.array([1], np.int32))


@pytest.mark.parametrize(("ours", "theirs"), [({"tp": 2}, {}), ({}, {"tp": 2}), ({"pp": 2}, {"tp": 2})], ids=str)
def test_slices_of_pages_on_a_gpu_land_where_they_belong_with_the_sums_of_their_owner(ours: Any, theirs: Any) -> None:
    """Pools of both engines in this process: what is read in place, its stamps, and what owners take off of them."""
    base = LayoutSignature(
        model="m", kv_dtype="float16", page_size=16, layer_count=4, kv_head_count=4, head_size=64, stamp_bytes=128,
        stamp_data="all",
    )  # fmt: skip
    source, target = (RankLayout(msgspec.structs.replace(base, **changes)) for changes in (ours, theirs))
    pools = [[pool_of(layout, shard.rank) for shard in layout.shards] for layout in (source, target)]
    driver, pages = CudaDriver(), np.array([3, 9, 4], np.int32)
    for pool in pools[0]:
        rows = torch.randint(0, 256, (3, pool.page_bytes), dtype=torch.uint8).numpy()
        pool.write_pages(pages + 1, rows)
    driver.warm([region_of(pools[0][0])])
    wanted = [np.zeros((3, pool.page_bytes), np.uint8) for pool in pools[1]]
    for item in cut(source, target):
        own, other = pools[1][item.target_rank], pools[0][item.source_rank]
        there, here = slices(source, target, item)
        pair = rows_of(region_of(own), here), rows_of(region_of(other), there)
        both = driver.sums(((pair[1],), (whole_rows(region_of(other)),)), pages + 1, 7)
        read = driver.pull([pair], pages, pages + 1, 7, driver.mark()).sums()
        assert read == both[:8] + both[16:24] + both[32:40], "a sum of each slice, page by page"
        recut(item, source, target, other.read_pages(pages + 1), 0, wanted[item.target_rank], 0)
        stamps = StampOutlet(source, [item]).cut(other, pages + 1)[0]
        plain = StampOutlet(source, [item]).cut(on_host(source, item.source_rank, other), pages + 1)[0]
        assert np.array_equal(stamps, plain), "as a pool of the host says"
        own.write_stamps(pages, stamps)
        assert np.array_equal(own.read_stamps(pages), stamps)
    for pool, rows in zip(pools[1], wanted, strict=True):
        kv_bytes = pool.spec.kv_bytes
        assert np.array_equal(pool.read_pages(pages)[:, :kv_bytes], rows[:, :kv_bytes])


def pool_of(layout: RankLayout, rank: int, device: str = "cuda") -> DevicePool:
    shard, signature = layout.shards[rank], layout.signature
    spec = PoolSpec(
        layer_count=len(shard.layers), kv_head_count=len(shard.heads), head_size=signature.head_size,
        page_size=layout.page_size, page_count=12, dtype=torch.float16, device=device, stamped=True,
    )  # fmt: skip
    return DevicePool(spec, load(device))


def on_host(layout: RankLayout, rank: int, pool: DevicePool) -> DevicePool:
    copy, pages = pool_of(layout, rank, "cpu"), np.arange(12)
    copy.write_pages(pages, pool.read_pages(pages))
    return copy


def region_of(pool: DevicePool) -> Region:
    each = pool.regions[0]
    return Region(
        part=Part.FULL, address=each.address, lane_count=each.lane_count, lane_stride=each.lane_stride,
        strip_bytes=each.strip_bytes, page_count=each.page_count,
    )  # fmt: skip


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
