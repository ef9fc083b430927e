"""One small fp32 checkpoint for all end-to-end stories, and what `transformers` says about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from serinus.models.small_checkpoints import make_checkpoint
from serinus.testing.servers import Server

from .cluster import Reference

CONTEXT = 512


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(folder, "qwen3", dtype="float32", context=CONTEXT, layers=3, seed=11)
    return folder


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def unified(checkpoint: Path) -> Iterator[Server]:
    """One engine that does both, with small pages and a pool that 64 requests do not fit at once."""
    with Server("serve", str(checkpoint), *small()) as server:
        yield server


@pytest.fixture(scope="package")
def cluster(checkpoint: Path) -> Iterator[Server]:
    """Router, one prefill and one decode engine, over shared memory. Tests kill its engines; it starts them again."""
    with Server("up", str(checkpoint), "--prefill", "1", "--decode", "1", *HANDS_OVER, *small()) as server:
        yield server


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.proof)])
def pair(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Server]:
    """The same over each data backend that joins processes."""
    if request.param == "shm":
        yield request.getfixturevalue("cluster")
        return
    words = ["up", str(checkpoint), "--prefill", "1", "--decode", "1", *HANDS_OVER, *small()]
    with Server(*words, "--disaggregation-transfer-backend", request.param) as server:
        yield server


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


HANDS_OVER = ("--disaggregation-min-tokens", "16")
"""Of decode engines, and of `up`."""


def small() -> Sequence[str]:
    """Settings under which pages, chunks and queues all matter."""
    return (
        "--dtype", "float32", "--max-total-tokens", "4096", "--page-size", "8", "--chunked-prefill-size", "64",
        "--max-running-requests", "24",
    )  # fmt: skip
