"""Backend nixl on a GPU, read by read: bytes and sums of scattered pages, and an owner that is killed in mid-read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.pd.backends import NixlBackend, OpResult, OpState
from tests.children import children
from tests.pd.nixl_owner import SEED, backend_over, made
from tests.pd.test_gpu import QUIET

pytestmark = [pytest.mark.gpu, pytest.mark.nixl]

PROGRAM = str(Path(__file__).with_name("nixl_owner.py"))
PAGES, STRIP = 768, 1 << 20
"""Two lanes: 1.6 GB, less than 2**31 elements."""
CLOCK = WallClock()
Owner = Callable[[], tuple[subprocess.Popen[str], bytes, bytes]]


@pytest.fixture(params=["same", pytest.param("other", marks=pytest.mark.gpus(2))])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    """Starts a process with pages, on our GPU or on another one: the process, its endpoint and its sums."""
    where = {"CUDA_VISIBLE_DEVICES": "1,0"} if request.param == "other" else {}

    with children() as start:

        def started() -> tuple[subprocess.Popen[str], bytes, bytes]:
            child, line = start(PROGRAM, str(PAGES), str(STRIP), **QUIET, **where)
            endpoint, sums = map(bytes.fromhex, line.split())
            return child, endpoint, sums

        yield started


@pytest.fixture
def pool() -> Tensor:
    return torch.zeros((2, PAGES, STRIP), dtype=torch.uint8, device="cuda")


@pytest.fixture
def reader(pool: Tensor) -> Iterator[NixlBackend]:
    backend = backend_over(pool)
    yield backend
    backend.close()


def ended(backend: NixlBackend, op: int) -> OpResult:
    start = CLOCK.now()
    while (result := backend.poll(op)).state is OpState.PENDING:
        assert CLOCK.now() - start < 60, "a read does not end"
    return result


def test_scattered_pages_come_with_their_bytes_and_sums(reader: NixlBackend, owner: Owner, pool: Tensor) -> None:
    _, endpoint, sums = owner()
    reader.connect("far", endpoint)
    rng = np.random.default_rng(3)
    pages, sources = (rng.permutation(np.arange(1, PAGES, dtype=np.int32))[:300] for _ in range(2))
    own_G, source_G = (torch.from_numpy(each.astype(np.int64)).cuda() for each in (pages, sources))
    expected = pool.clone()
    expected[:, own_G] = made(PAGES, STRIP)[:, source_G]
    torch.cuda._sleep(1 << 28)  # work of ours that the read waits for
    pool.index_fill_(1, own_G, 0xEE)
    result = ended(reader, reader.read("far", Part.FULL, pages, sources, SEED))
    assert result.state is OpState.DONE, result.error
    assert torch.equal(pool, expected)
    assert result.digests == b"".join(sums[8 * (page - 1) : 8 * page] for page in sources.tolist())


def test_nothing_comes_any_more_when_a_read_from_an_owner_that_was_killed_is_over(
    reader: NixlBackend, owner: Owner, pool: Tensor
) -> None:
    pages = np.arange(1, PAGES, dtype=np.int32)
    for turn in range(3):
        child, endpoint, sums = owner()
        reader.connect("far", endpoint)
        if turn:  # else the connection is made by the read that is broken off
            assert ended(reader, reader.read("far", Part.FULL, pages[:1], pages[:1], SEED)).digests == sums[:8]
        op = reader.read("far", Part.FULL, pages, pages, SEED)
        result = reader.poll(op)
        while result.state is OpState.PENDING and not reader._ops[op].is_posted:
            result = reader.poll(op)
        child.kill()
        child.wait()
        reader.disconnect("far")
        if result.state is OpState.PENDING:
            result = ended(reader, op)
        assert result.state in (OpState.DONE, OpState.FAILED)
        if result.state is OpState.DONE:
            assert result.digests == sums, "whole, or not at all"
        pool.fill_(0x55)
        torch.cuda._sleep(1 << 29)
        torch.cuda.synchronize()
        assert bool((pool == 0x55).all()), f"bytes came after the end of a read: {result}"
