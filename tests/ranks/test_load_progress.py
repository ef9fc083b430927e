"""What is told of a start: weights that are read for long, and where the memory of a GPU went."""

from __future__ import annotations

import logging

import pytest
import torch

from serinus.core.clock import ManualClock
from serinus.ranks import memory_account
from serinus.ranks.load_progress import LoadProgress
from serinus.ranks.memory_account import MemoryAccount

GB = 10**9


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("serinus").propagate = True
    caplog.set_level(logging.INFO, logger="serinus")


def test_a_long_load_is_told_every_five_seconds_and_a_short_one_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    progress = LoadProgress(clock)
    for second in range(12):
        progress(second * GB, 16 * GB)
        clock.advance(1.0)
    assert lines(caplog) == [
        "loading weights: 31 %, 5.0 of 16.0 GB, 1.0 GB/s",
        "loading weights: 62 %, 10.0 of 16.0 GB, 1.0 GB/s",
    ]
    progress.end()
    assert lines(caplog) == ["weights: 11.00 GB in 12.0 s, 0.9 GB/s"]
    small = LoadProgress(clock)
    small(4_100_000, 4_100_000)
    clock.advance(0.5)
    small.end()
    assert lines(caplog) == ["weights: 4.1 MB in 0.5 s"]
    slow = LoadProgress(clock)
    clock.advance(6.0)
    slow(400_000, 4_100_000)
    assert lines(caplog) == ["loading weights: 9 %, 0.4 of 4.1 MB"]
    LoadProgress(clock).end()
    assert not lines(caplog), "dummy weights were not read"


def test_all_memory_of_a_gpu_is_accounted_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: taken)
    monkeypatch.setattr(memory_account, "available_bytes", lambda device: 10 * GB)
    monkeypatch.setattr(memory_account, "total_bytes", lambda device: 80 * GB)
    account = MemoryAccount("cuda")
    for name, count in (("weights", 16), ("KV", 50), ("canary", 1)):
        taken += count * GB
        account.mark(name)
    account.put("largest step", 4 * GB)
    account.put("graphs", 2 * GB)
    account.tell()
    said = (
        "weights 16.00, KV 50.00, canary 1.00, largest step 4.00, graphs 2.00, CUDA and other processes 1.00, free 6.00"
    )
    assert lines(caplog) == [f"memory of cuda, 80.00 GB: {said}"]
    assert sum(account.bytes.values()) == 80 * GB


def test_of_a_cpu_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    account = MemoryAccount("cpu")
    account.mark("weights")
    account.put("graphs", 1)
    account.tell()
    assert (account.bytes, account.own_bytes, lines(caplog)) == ({}, 0, [])
