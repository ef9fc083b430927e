"""Storage under several processes and threads, and under kill -9."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from serinus.core.moves import StorageDone
from serinus.pool import HostPool
from serinus.pool.storage import QueuedStorage
from tests.pool.storing import FILE_BYTES, FULL, files, leftovers, pages
from tests.pool.writers import KEY_COUNT, SPEC, bytes_of, key_of, storage_of


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process that forks writers (tests/pool/writers.py)."""
    words = [sys.executable, "-m", "tests.pool.writers"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def born(nursery: subprocess.Popen[str], folder: Path, seed: int) -> None:
    assert nursery.stdin is not None
    nursery.stdin.write(f"{folder} {seed}\n")
    nursery.stdin.flush()


def said(nursery: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The next line of any child: its seed, and what it said."""
    assert nursery.stdout is not None
    line = nursery.stdout.readline()
    assert line, "the nursery died"
    own, *words = line.split()
    return int(own), words


def end_of_writer(folder: Path) -> None:
    """Returns when the killed writer is gone: its lock is free then."""
    for lock in (folder / ".writers").iterdir():
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.slow
def test_after_a_kill_in_the_midst_of_writing_every_page_is_whole_or_missing(
    tmp_path: Path, nursery: subprocess.Popen[str]
) -> None:
    seed = 20260
    rng = random.Random(seed)
    host = HostPool(SPEC, KEY_COUNT + 1)
    half_written = 0
    for round_ in range(60):
        if round_ >= 7 and half_written:
            break  # on a busy machine a kill seldom comes in the midst of a write
        folder = tmp_path / str(round_)
        born(nursery, folder, round_)
        until, pid = rng.randrange(1, KEY_COUNT * 3 // 4), 0
        told: set[int] = set()
        while True:
            child, words = said(nursery)
            if child != round_:
                continue  # output of a child that was killed
            assert words[0] != "all", f"seed {seed}, round {round_}: the child was too fast to be killed"
            if words[0] == "pid":
                pid = int(words[1])
            else:
                told.add(int(words[1]))
            if pid and len(told) >= until:
                with suppress(ProcessLookupError):  # on a busy machine it may have written all and ended meanwhile
                    os.kill(pid, signal.SIGKILL)
                break
        end_of_writer(folder)
        half_written += len(leftovers(folder))
        storage = storage_of(folder, host)
        assert not leftovers(folder), f"seed {seed}, round {round_}"
        good = readable(storage, host, round_)
        assert told <= good, f"seed {seed}, round {round_}: told stored, but missing {told - good}"
        assert storage.shelf.counts().bad == 0
        storage.close()
    assert half_written, "no kill came in the midst of a write: this test shows nothing"


def readable(storage: QueuedStorage, host: HostPool, seed: int) -> set[int]:
    """Which pages of a child can be read; their bytes are checked."""
    keys = [key_of(i, seed) for i in range(KEY_COUNT)]
    for i, key in enumerate(keys):
        storage.read(i + 1, FULL, [key], pages(1 + i, 1))
    good = {done.op - 1 for done in storage.wait() if done.good}
    for i in good:
        assert np.array_equal(host.data_PY[1 + i], bytes_of(keys[i])), f"page {i} of child {seed} came wrong"
    return good


@pytest.mark.slow
def test_three_processes_on_one_folder_keep_its_bound_and_each_others_pages(
    tmp_path: Path, nursery: subprocess.Popen[str]
) -> None:
    for seed in (101, 102):
        born(nursery, tmp_path, seed)
    host = HostPool(SPEC, KEY_COUNT + 1)
    bound = 120 * FILE_BYTES
    storage = storage_of(tmp_path, host, byte_max=bound)
    for i in range(KEY_COUNT):
        host.data_PY[1 + i] = bytes_of(key_of(i, 100))
        storage.write(i + 1, FULL, [key_of(i, 100)], pages(1 + i, 1))
        if i % 50 == 49:
            assert all(done.good == 1 for done in storage.wait())
            assert readable(storage, host, 101) is not None
    writing = {101, 102}
    while writing:
        seed, words = said(nursery)
        if words[0] == "all":
            writing.discard(seed)
    counts = storage.shelf.counts()
    assert counts.removed > 0
    assert counts.bad == 0
    storage.close()
    last = storage_of(tmp_path, host, byte_max=bound)
    assert len(files(tmp_path)) * FILE_BYTES <= bound
    assert sum(len(readable(last, host, seed)) for seed in (100, 101, 102)) == len(files(tmp_path)) > 0
    last.close()


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(10))
def test_writers_and_readers_of_the_same_pages_at_once(tmp_path: Path, round_: int) -> None:
    """Two storages with two threads each, as two engines on one folder; a bound that removes pages all the time."""
    rng = random.Random(round_)
    ends = []
    for _ in range(2):
        pool = HostPool(SPEC, 41)
        for i in range(12):
            pool.data_PY[1 + i] = bytes_of(key_of(i))
        ends.append((storage_of(tmp_path, pool, byte_max=8 * FILE_BYTES), pool))
    asked: list[tuple[QueuedStorage, HostPool, int, list[int], np.ndarray]] = []
    for op in range(1, 25):
        storage, pool = rng.choice(ends)
        chosen = rng.sample(range(12), rng.randrange(1, 6))
        if rng.random() < 0.5:
            storage.write(op, FULL, [key_of(i) for i in chosen], np.array(chosen, np.int32) + 1)
        else:
            for done in storage.wait():
                check(done, asked)
            target = pages(20, len(chosen))
            asked.append((storage, pool, op, chosen, target))
            storage.read(op, FULL, [key_of(i) for i in chosen], target)
            if rng.random() < 0.3:
                storage.cancel(op)
    for storage, _ in ends:
        for done in storage.wait():
            check(done, asked)
        assert not storage._open
        assert storage.shelf.counts().bad == 0
        storage.close()
    assert not leftovers(tmp_path)


def check(done: StorageDone, asked: list[tuple[QueuedStorage, HostPool, int, list[int], np.ndarray]]) -> None:
    assert not done.error, done
    for _, pool, op, chosen, target in asked:
        if op == done.op:
            for i, page in zip(chosen[: done.good], target, strict=False):
                assert np.array_equal(pool.data_PY[page], bytes_of(key_of(i)))
