"""The storage tier: pages that outlive the engine, and everything that can happen to a file."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.moves import StorageDone
from serinus.core.parts import Part
from serinus.pool import HostPool
from serinus.pool.storage import FileStorage, MemoryStorage, PageDict, QueuedStorage, ShelfCounts
from serinus.pool.storage.file import HEADER_BYTES
from tests.pool.writers import KEY_COUNT, SPEC, bytes_of, key_of, storage_of

FULL, SWA = Part.FULL, Part.SWA
KEYS = [key_of(i) for i in range(6)]
FILE_BYTES = HEADER_BYTES + SPEC.page_bytes


@pytest.fixture
def host() -> HostPool:
    """Host pages 1 .. 6 hold the bytes of KEYS, 11 .. 16 are where reads go."""
    pool = HostPool(SPEC, 20)
    for i, key in enumerate(KEYS):
        pool.data_PY[i + 1] = bytes_of(key)
    return pool


def pages(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def only(done: list[StorageDone]) -> StorageDone:
    assert len(done) == 1, done
    return done[0]


def stored(storage: QueuedStorage, keys: Sequence[bytes] = KEYS, op: int = 1) -> None:
    storage.write(op, FULL, keys, pages(1, len(keys)))
    done = only(storage.wait())
    assert (done.good, done.error) == (len(keys), "")


def read(storage: QueuedStorage, host: HostPool, keys: Sequence[bytes] = KEYS, op: int = 900) -> int:
    """Leading pages that came; each of them is checked byte for byte."""
    host.data_PY[11:] = 0xEE
    storage.read(op, FULL, keys, pages(11, len(keys)))
    done = only(storage.wait())
    for i, key in enumerate(keys[: done.good]):
        assert np.array_equal(host.data_PY[11 + i], bytes_of(key)), f"page {i} came wrong"
    return done.good


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.page"))


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/.*"))


def test_what_one_engine_stored_the_next_one_reads(tmp_path: Path, host: HostPool) -> None:
    first = storage_of(tmp_path, host)
    stored(first)
    assert len(files(tmp_path)) == 6
    assert {f.stat().st_size for f in files(tmp_path)} == {FILE_BYTES}
    assert {oct(f.stat().st_mode & 0o777) for f in files(tmp_path)} == {"0o600"}
    first.close()
    second = storage_of(tmp_path, host)
    second.query(1, [*KEYS, key_of(99)], [FULL])
    (present,) = only(second.wait()).present
    assert present.tolist() == [True] * 6 + [False]
    assert read(second, host) == 6
    assert second.shelf.counts() == ShelfCounts(pages=6, byte_count=6 * FILE_BYTES)
    second.close()
    assert not list((tmp_path / ".writers").iterdir())


def test_reading_stops_at_the_first_page_that_is_missing(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage, KEYS[:3])
    assert read(storage, host, [*KEYS[:2], key_of(77), KEYS[2]]) == 2
    assert read(storage, host, [key_of(77)], op=901) == 0
    storage.close()


def test_what_is_stored_already_is_not_written_again(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage)
    before = [f.stat().st_ino for f in files(tmp_path)]
    stored(storage, op=2)
    assert [f.stat().st_ino for f in files(tmp_path)] == before
    storage.close()


def test_parts_of_one_key_are_pages_of_their_own(tmp_path: Path, host: HostPool) -> None:
    other = HostPool(SPEC, 4)
    other.data_PY[1] = 9
    storage = FileStorage(
        tmp_path, host={FULL: host, SWA: other}, namespace="n", byte_max=None, clock=WallClock()
    )  # fmt: skip
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    storage.write(2, SWA, [*KEYS[:1], key_of(50)], np.array([1, 1], np.int32))
    storage.wait()
    storage.query(3, [KEYS[0], key_of(50)], [FULL, SWA])
    assert [p.tolist() for p in only(storage.wait()).present] == [[True, False], [True, True]]
    storage.read(4, SWA, KEYS[:1], pages(3, 1))
    assert only(storage.wait()).good == 1
    assert set(other.data_PY[3].tolist()) == {9}
    storage.close()


def test_a_part_without_bytes_is_stored_by_name_alone(tmp_path: Path) -> None:
    bare = HostPool(dataclasses.replace(SPEC, layer_count=0), 4)
    storage = storage_of(tmp_path, bare)
    storage.write(1, FULL, KEYS[:2], pages(1, 2))
    assert only(storage.wait()).good == 2
    storage.read(2, FULL, KEYS[:3], pages(1, 3))
    assert only(storage.wait()).good == 2
    storage.close()


@pytest.mark.parametrize(
    "size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, FILE_BYTES // 2, FILE_BYTES - 1, FILE_BYTES + 1]
)
def test_a_file_of_another_length_is_a_miss_and_makes_room_for_the_right_one(
    tmp_path: Path, host: HostPool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = storage_of(tmp_path, host)
    stored(first)
    os.truncate(files(tmp_path)[1], size)
    first.close()
    second = storage_of(tmp_path, host)
    with caplog.at_level(logging.WARNING, "serinus"):
        assert read(second, host) == 1
    assert f"counts as missing: {size} bytes, expected {FILE_BYTES}" in caplog.text
    assert second.shelf.counts().bad == 1
    stored(second, op=2)
    assert read(second, host, op=902) == 6
    second.close()


def test_any_byte_that_changed_makes_a_page_a_miss(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    spots = [*range(HEADER_BYTES), HEADER_BYTES, FILE_BYTES // 2, FILE_BYTES - 1]
    for op, spot in enumerate(spots):
        stored(storage, KEYS[:1], op=2 * op + 1)
        (file,) = files(tmp_path)
        data = bytearray(file.read_bytes())
        data[spot] ^= 1 << op % 8
        file.write_bytes(data)
        assert read(storage, host, KEYS[:1], op=2 * op + 2) == 0, f"byte {spot}"
        assert not files(tmp_path), f"byte {spot}"
    assert storage.shelf.counts().bad == len(spots)
    storage.close()


def test_pages_of_another_model_another_key_or_another_part_are_never_believed(
    tmp_path: Path, host: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = storage_of(tmp_path, host, namespace="model at another revision")
    stored(theirs, KEYS[:1])
    theirs.close()
    ours = storage_of(tmp_path, host)
    with caplog.at_level(logging.WARNING, "serinus"):
        assert read(ours, host, KEYS[:1]) == 0
    assert "another namespace than expected" in caplog.text
    stored(ours, KEYS[:1], op=2)
    (file,) = files(tmp_path)
    file.rename(file.with_name(f"{key_of(5).hex()}-0.page"))
    assert read(ours, host, [key_of(5)], op=903) == 0
    stored(ours, KEYS[1:2], op=3)
    (file,) = files(tmp_path)
    file.rename(file.with_name(file.name.replace("-0.page", "-1.page")))
    both = FileStorage(
        tmp_path, host={FULL: host, SWA: host}, namespace="model at revision, fp32", byte_max=None, clock=WallClock()
    )
    both.read(1, SWA, KEYS[1:2], pages(11, 1))
    assert only(both.wait()).good == 0
    ours.close()
    both.close()


def test_files_of_other_people_are_left_alone(tmp_path: Path, host: HostPool) -> None:
    (tmp_path / "ab").mkdir()
    strangers = [tmp_path / "README", tmp_path / "ab" / "notes.txt", tmp_path / "ab" / ".hidden.tmp"]
    for file in strangers:
        file.write_text("not yours")
    storage = storage_of(tmp_path, host, byte_max=2 * FILE_BYTES)
    stored(storage, KEYS[:5])
    assert storage.shelf.counts() == ShelfCounts(pages=2, byte_count=2 * FILE_BYTES, removed=3)
    assert [file.read_text() for file in strangers] == ["not yours"] * 3
    storage.close()


def test_a_pipe_a_folder_or_a_link_in_place_of_a_page_holds_nobody_up(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage, KEYS[:3])
    for file, make in zip(files(tmp_path), (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)), strict=True):
        file.unlink()
        make(file)
    for op, key in enumerate(KEYS[:3]):
        assert read(storage, host, [key], op=10 + op) == 0
    storage.close()


def test_the_longest_unused_pages_go_first_also_after_a_restart(tmp_path: Path, host: HostPool) -> None:
    first = storage_of(tmp_path, host, byte_max=4 * FILE_BYTES)
    stored(first, KEYS[:4])
    for age, file in enumerate(files(tmp_path)):
        os.utime(file, (1000 + age, 1000 + age))
    assert read(first, host, KEYS[:1]) == 1  # used: now the youngest
    first.close()
    second = storage_of(tmp_path, host, byte_max=4 * FILE_BYTES)
    stored(second, KEYS[4:], op=1)
    second.query(2, KEYS, [FULL])
    assert only(second.wait()).present[0].tolist() == [True, False, False, True, True, True]
    assert second.shelf.counts().byte_count == 4 * FILE_BYTES
    second.close()
    third = storage_of(tmp_path, host, byte_max=2 * FILE_BYTES)
    assert len(files(tmp_path)) == third.shelf.counts().pages == 2
    third.close()


def test_a_full_disk_costs_a_warning_and_the_engine_goes_on(
    tmp_path: Path, host: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    full = [False]

    def create(path: str) -> int:
        return os.open("/dev/full" if full[0] else path, os.O_WRONLY | os.O_CREAT, 0o600)

    clock = ManualClock()
    storage = FileStorage(
        tmp_path, host={FULL: host}, namespace="n", byte_max=None, clock=clock, threads=1, create=create
    )
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    assert only(storage.wait()).good == 1
    full[0] = True
    with caplog.at_level(logging.WARNING, "serinus"):
        for op in range(2, 12):
            storage.write(op, FULL, KEYS[:3], pages(1, 3))
            done = only(storage.wait())
            assert done.good == 1
            assert f"[Errno {errno.ENOSPC}]" in done.error
        clock.advance(31)
        storage.write(12, FULL, KEYS[:3], pages(1, 3))
        storage.wait()
    said = [r.message for r in caplog.records]
    assert len(said) == 2, "a warning for every failed page fills another disk"
    assert "9 more since" in said[1]
    full[0] = False
    storage.write(13, FULL, KEYS[:3], pages(1, 3))
    assert only(storage.wait()).good == 3
    assert not leftovers(tmp_path)
    storage.close()


def test_a_write_that_fails_midway_leaves_no_file(tmp_path: Path, host: HostPool) -> None:
    def create(path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)  # EBADF at the first byte

    storage = storage_of(tmp_path, host, create=create)
    storage.write(1, FULL, KEYS[:2], pages(1, 2))
    assert only(storage.wait()).good == 0
    assert not files(tmp_path)
    assert not leftovers(tmp_path)
    storage.close()


def test_folders_that_cannot_be_used_are_a_wrong_setting(tmp_path: Path, host: HostPool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file' cannot be used"):
        storage_of(tmp_path / "file", host)
    with pytest.raises(ConfigError, match=f"storage of 5 bytes, expected at least {FILE_BYTES}"):
        storage_of(tmp_path, host, byte_max=5)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, host: HostPool) -> None:
    gone = tmp_path / "00" / f".{'0' * 32}-0.deadbeef-7.tmp"
    gone.parent.mkdir()
    gone.write_bytes(b"half a page")
    holds, goes_on = threading.Event(), threading.Event()

    def create(path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        holds.set()
        assert goes_on.wait(20)
        return fd

    alive = storage_of(tmp_path, host, create=create)
    assert not gone.exists()
    alive.write(1, FULL, KEYS[:1], pages(1, 1))
    assert holds.wait(20)
    (unfinished,) = leftovers(tmp_path)
    second = storage_of(tmp_path, host)
    assert unfinished.exists(), "a living writer's file was taken for a leftover"
    goes_on.set()
    assert only(alive.wait()).good == 1
    assert read(second, host, KEYS[:1]) == 1
    alive.close()
    second.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """See tests/pool/writers.py."""
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


def lines(nursery: subprocess.Popen[str], seed: int) -> Iterator[list[str]]:
    """What the child of this seed says, as it says it."""
    assert nursery.stdout is not None
    while True:
        line = nursery.stdout.readline()
        assert line, "the nursery died"
        own, *words = line.split()
        if int(own) == seed:
            yield words


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
    for round_ in range(25):
        folder = tmp_path / str(round_)
        born(nursery, folder, round_)
        until, pid = rng.randrange(1, KEY_COUNT * 3 // 4), 0
        told: set[int] = set()
        for words in lines(nursery, round_):
            assert words[0] != "all", f"seed {seed}, round {round_}: the child was too fast to be killed"
            if words[0] == "pid":
                pid = int(words[1])
            else:
                told.add(int(words[1]))
            if pid and len(told) >= until:
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
    bound = 300 * FILE_BYTES
    storage = storage_of(tmp_path, host, byte_max=bound)
    for i in range(KEY_COUNT):
        host.data_PY[1 + i] = bytes_of(key_of(i, 100))
        storage.write(i + 1, FULL, [key_of(i, 100)], pages(1 + i, 1))
        if i % 50 == 49:
            assert all(done.good == 1 for done in storage.wait())
            assert readable(storage, host, 101) is not None
    for seed in (101, 102):
        for words in lines(nursery, seed):
            if words[0] == "all":
                break
    counts = storage.shelf.counts()
    assert counts.removed > 0
    assert counts.bad == 0
    storage.close()
    last = storage_of(tmp_path, host, byte_max=bound)
    assert len(files(tmp_path)) * FILE_BYTES <= bound
    assert sum(len(readable(last, host, seed)) for seed in (100, 101, 102)) == len(files(tmp_path)) > 0
    last.close()


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(50))
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
        assert storage.open_count == 0
        assert storage.shelf.counts().bad == 0
        storage.close()
    assert not leftovers(tmp_path)


def check(done: StorageDone, asked: list[tuple[QueuedStorage, HostPool, int, list[int], np.ndarray]]) -> None:
    assert not done.error, done
    for _, pool, op, chosen, target in asked:
        if op == done.op:
            for i, page in zip(chosen[: done.good], target, strict=False):
                assert np.array_equal(pool.data_PY[page], bytes_of(key_of(i)))


# ---- the queue ---------------------------------------------------------------------------------------------------


class HeldShelf(PageDict):
    """A shelf whose calls wait for the test's word."""

    def __init__(self) -> None:
        super().__init__({})
        self.permits, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[str] = []
        self.fail_with: BaseException | None = None

    def _wait(self, what: str, key: bytes) -> None:
        self.calls.append(f"{what} {int.from_bytes(key[8:], 'big')}")
        self.arrived.release()
        assert self.permits.acquire(timeout=20), "the test forgot a permit"
        if self.fail_with is not None:
            raise self.fail_with

    def load(self, part: Part, key: bytes, into: np.ndarray) -> bool:
        self._wait("load", key)
        return super().load(part, key, into)

    def save(self, part: Part, key: bytes, data: np.ndarray) -> None:
        self._wait("save", key)
        super().save(part, key, data)


def held(host: HostPool, **more: int) -> tuple[HeldShelf, QueuedStorage]:
    shelf = HeldShelf()
    return shelf, QueuedStorage(shelf, host={FULL: host}, clock=WallClock(), threads=1, **more)


def test_reads_go_before_writes_that_wait(host: HostPool) -> None:
    shelf, storage = held(host)
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    assert shelf.arrived.acquire(timeout=20)
    storage.write(2, FULL, KEYS[1:2], pages(2, 1))
    storage.read(3, FULL, KEYS[:1], pages(11, 1))
    shelf.permits.release(3)
    assert {d.op: d.good for d in storage.wait()} == {1: 1, 2: 1, 3: 1}
    assert shelf.calls == ["save 0", "load 0", "save 1"]
    assert np.array_equal(host.data_PY[11], bytes_of(KEYS[0]))
    storage.close()


def test_a_cancelled_read_ends_after_the_page_it_is_at(host: HostPool) -> None:
    shelf, storage = held(host)
    shelf.permits.release(6)
    stored(storage)
    for _ in range(6):
        assert shelf.arrived.acquire(timeout=20)
    storage.read(2, FULL, KEYS, pages(11, 6))
    assert shelf.arrived.acquire(timeout=20)
    storage.cancel(2)
    storage.cancel(77)
    shelf.permits.release(1)
    assert only(storage.wait()).good == 1
    assert shelf.calls[6:] == ["load 0"]
    storage.close()


def test_what_does_not_fit_the_queue_ends_at_once_as_not_done(host: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    shelf, storage = held(host, queued_pages_max=4)
    storage.write(1, FULL, KEYS[:3], pages(1, 3))
    with caplog.at_level(logging.WARNING, "serinus"):
        storage.write(2, FULL, KEYS[:2], pages(1, 2))
    done = only(storage.poll())
    assert (done.op, done.good, done.error) == (2, 0, "3 keys wait for a write already")
    assert "dropped a storage write of 2 keys" in caplog.text
    shelf.permits.release(5)
    storage.wait()
    storage.write(3, FULL, KEYS[:2], pages(1, 2))
    assert only(storage.wait()).good == 2
    storage.close()


def test_a_medium_that_fails_while_reading_is_a_miss(host: HostPool) -> None:
    shelf, storage = held(host)
    shelf.fail_with = OSError(errno.EIO, "Input/output error")
    shelf.permits.release(1)
    storage.read(1, FULL, KEYS, pages(11, 6))
    done = only(storage.wait())
    assert done.good == 0
    assert "Input/output error" in done.error
    storage.close()


def test_closing_writes_what_is_queued_as_far_as_time_allows(host: HostPool) -> None:
    kept: dict[tuple[Part, bytes], bytes] = {}
    storage = MemoryStorage(kept, host={FULL: host}, clock=WallClock())
    storage.write(1, FULL, KEYS, pages(1, 6))
    storage.close()
    assert len(kept) == 6
    shelf, stuck = held(host)
    stuck.write(1, FULL, KEYS[:1], pages(1, 1))
    assert shelf.arrived.acquire(timeout=20)
    stuck.write(2, FULL, KEYS[1:2], pages(2, 1))
    closing = threading.Thread(target=stuck.close, kwargs={"drain_s_max": 0.01})
    closing.start()
    with pytest.raises(InvariantError, match="after close"):
        for op in range(3, 1 << 30):
            stuck.query(op, [], [FULL])
    shelf.permits.release()
    closing.join(20)
    assert shelf.calls == ["save 0"]


def test_operations_that_make_no_sense_break_a_promise(host: HostPool) -> None:
    shelf, storage = held(host)
    with pytest.raises(InvariantError, match="2 keys and 1 host pages"):
        storage.read(1, FULL, KEYS[:2], pages(1, 1))
    with pytest.raises(InvariantError, match="inside of its pool"):
        storage.write(1, FULL, KEYS[:1], pages(0, 1))
    with pytest.raises(InvariantError, match="inside of its pool"):
        storage.write(1, FULL, KEYS[:1], pages(20, 1))
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    with pytest.raises(InvariantError, match="operation 1 submitted twice"):
        storage.write(1, FULL, KEYS[:1], pages(1, 1))
    shelf.permits.release(1)
    storage.wait()
    storage.read(2, FULL, [], pages(1, 0))
    assert only(storage.poll()).op == 2
    storage.close()
