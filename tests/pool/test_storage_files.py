"""The storage tier: pages that outlive the engine, and everything that can happen to a file."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import logging
import mmap
import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import ConfigError
from serinus.pool import HostPool
from serinus.pool.storage import Disk, FileStorage, ShelfCounts
from serinus.pool.storage.file import HEADER_BYTES
from tests.pool.storage_world import DATA, SIZE, files_on, sim_disk, sim_folders
from tests.pool.storing import (
    FILE_BYTES,
    FULL,
    KEYS,
    ROOM,
    SWA,
    file_of,
    files,
    leftovers,
    moved,
    only,
    pages,
    read,
    stored,
)
from tests.pool.writers import SPEC, key_of, storage_of


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


@pytest.mark.parametrize("noticed_by", ["read", "write"])
def test_a_folder_that_was_deleted_is_made_again_as_it_was(tmp_path: Path, host: HostPool, noticed_by: str) -> None:
    folder = tmp_path / "kv"
    first = storage_of(folder, host)
    stored(first, KEYS[:1])
    secret = (folder / ".secret").read_bytes()
    shutil.rmtree(folder)
    if noticed_by == "read":
        assert read(first, host) == 0
    stored(first, op=2)
    assert (folder / ".secret").read_bytes() == secret
    assert {oct(path.stat().st_mode & 0o777) for path in (folder, *folder.glob("*/"))} <= {"0o700", "0o600"}
    second = storage_of(folder, host)
    assert read(second, host, KEYS[1:]) == 5
    assert len(list((folder / ".writers").iterdir())) == 2
    second.close()
    first.close()


def test_a_deleted_folder_that_another_engine_made_again_is_shared_with_it(tmp_path: Path, host: HostPool) -> None:
    folder = tmp_path / "kv"
    first = storage_of(folder, host)
    stored(first)
    shutil.rmtree(folder)
    second = storage_of(folder, host)
    stored(second, KEYS[:3])
    assert read(first, host) == 0
    assert read(first, host, KEYS[:3], op=901) == 3
    second.close()
    first.close()


def test_pages_deleted_by_hand_are_forgotten_with_the_first_that_is_missed(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage)
    for top in {file.parent for file in files(tmp_path)}:
        shutil.rmtree(top)
    assert read(storage, host) == 0
    assert storage.shelf.counts().pages == 0
    stored(storage, op=2)
    assert read(storage, host, op=901) == 6
    storage.close()


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
    storage.query(3, [KEYS[0], key_of(50)], [SWA, FULL])
    assert [p.tolist() for p in only(storage.wait()).present] == [[True, True], [True, False]]
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
    "size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, ROOM - 1, ROOM, FILE_BYTES // 2, FILE_BYTES - 1, FILE_BYTES + 1]
)
def test_a_file_of_another_length_is_a_miss_and_makes_room_for_the_right_one(
    tmp_path: Path, host: HostPool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = storage_of(tmp_path, host)
    stored(first)
    os.truncate(file_of(first, KEYS[1]), size)
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
    spots = [*range(HEADER_BYTES), HEADER_BYTES, ROOM - 1, ROOM, FILE_BYTES // 2, FILE_BYTES - 1]
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
    moved(file, file_of(ours, key_of(5)))
    assert read(ours, host, [key_of(5)], op=903) == 0
    stored(ours, KEYS[1:2], op=3)
    (file,) = files(tmp_path)
    moved(file, file_of(ours, KEYS[1], SWA))
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


def test_a_pipe_a_folder_or_a_link_in_place_of_a_page_blocks_no_reader(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage, KEYS[:3])
    paths = [file_of(storage, key) for key in KEYS[:3]]
    for file, make in zip(paths, (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)), strict=True):
        file.unlink()
        make(file)
    for op, key in enumerate(KEYS[:3]):
        assert read(storage, host, [key], op=10 + op) == 0
    storage.close()


def test_the_longest_unused_pages_go_first_also_after_a_restart(tmp_path: Path, host: HostPool) -> None:
    first = storage_of(tmp_path, host, byte_max=4 * FILE_BYTES)
    stored(first, KEYS[:4])
    for age, key in enumerate(KEYS[:4]):
        os.utime(file_of(first, key), (1000 + age, 1000 + age))
    assert read(first, host, KEYS[:1]) == 1  # used: now the youngest
    first.close()
    second = storage_of(tmp_path, host, byte_max=4 * FILE_BYTES)
    stored(second, KEYS[4:], op=1)
    assert [second.shelf.has(FULL, key) for key in KEYS] == [True, False, False, True, True, True]
    assert second.shelf.counts().byte_count == 4 * FILE_BYTES
    second.close()
    third = storage_of(tmp_path, host, byte_max=2 * FILE_BYTES)
    assert len(files(tmp_path)) == third.shelf.counts().pages == 2
    third.close()


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "after a restart"])
def test_what_many_prompts_share_goes_for_room_after_all_that_continues_it(restarts: bool) -> None:
    folders = sim_folders()
    shelf = files_on("/d0", sim_disk(folders), byte_max=8 * SIZE)
    shared, users = KEYS[:3], [key_of(20 + i) for i in range(10)]
    for before, key in pairwise([bytes(16), *shared]):
        shelf.save(FULL, key, DATA, before)
    for user in users:
        if restarts:
            shelf.close()
            shelf = files_on("/d0", sim_disk(folders), byte_max=8 * SIZE)
        shelf.save(FULL, user, DATA, shared[-1])
    found = {key for key in (*shared, *users) if str(shelf.path_of(FULL, key)) in folders.files}
    assert found >= {*shared, users[-1]}
    assert len(found) == 8
    if not restarts:
        assert found == {*shared, *users[-5:]}, "the longest unused first"
    shelf.close()


def test_a_full_disk_costs_a_warning_and_the_engine_goes_on(
    tmp_path: Path, host: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    full = [False]

    class FullDisk(Disk):
        def create(self, path: str, flags: int = 0) -> int:
            return os.open("/dev/full" if full[0] else path, os.O_WRONLY | os.O_CREAT, 0o600)

    clock = ManualClock()
    storage = FileStorage(tmp_path, host={FULL: host}, namespace="n", byte_max=None, clock=clock, disk=FullDisk())
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


def _is_cached(file: Path) -> bool:
    """Whether the system has the first page of a file in memory. By mincore: a read, be it one that does not wait
    (RWF_NOWAIT), begins to read ahead, and a fast disk is done before that looks again."""
    fd = os.open(file, os.O_RDWR)
    try:
        mapped = np.frombuffer(mmap.mmap(fd, 4096), np.uint8)
        resident = np.zeros(1, np.uint8)
        address, pointer = mapped.ctypes.data, ctypes.c_void_p
        assert not ctypes.CDLL(None).mincore(pointer(address), ctypes.c_size_t(4096), pointer(resident.ctypes.data))
        return bool(resident[0] & 1)
    finally:
        os.close(fd)


def _direct(folder: Path) -> int:
    try:
        os.close(os.open(folder / ".secret", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


def test_pages_of_whole_blocks_go_past_the_page_cache(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage)
    assert read(storage, host) == 6
    probe = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | _direct(tmp_path))
    os.writev(probe, [host.data_PY[1].data])
    os.close(probe)
    assert [_is_cached(file) for file in files(tmp_path)] == [_is_cached(tmp_path / "probe")] * 6
    storage.close()


def test_without_o_direct_pages_go_through_the_page_cache(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *more)

    stored(with_direct := storage_of(tmp_path, host), KEYS[:2])
    with_direct.close()
    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.INFO, "serinus"):
        storage = storage_of(tmp_path, host)
    assert "go through the page cache" in caplog.text
    stored(storage, op=2)
    assert read(storage, host) == 6
    assert {f.stat().st_size for f in files(tmp_path)} == {FILE_BYTES}
    storage.close()


def test_a_write_that_fails_midway_leaves_no_file(tmp_path: Path, host: HostPool) -> None:
    class BrokenDisk(Disk):
        def create(self, path: str, flags: int = 0) -> int:
            return os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)  # EBADF at the first byte

    storage = storage_of(tmp_path, host, disk=BrokenDisk())
    storage.write(1, FULL, KEYS[:2], pages(1, 2))
    assert only(storage.wait()).good == 0
    assert not files(tmp_path)
    assert not leftovers(tmp_path)
    storage.close()


@pytest.mark.parametrize(
    ("error", "is_lost"), [(errno.EIO, True), (errno.ENODATA, True), (errno.EMFILE, False), (errno.ESTALE, False)]
)
def test_a_page_that_the_medium_has_lost_is_stored_again(
    tmp_path: Path, host: HostPool, monkeypatch: pytest.MonkeyPatch, error: int, is_lost: bool
) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage)
    bad, readv = file_of(storage, KEYS[2]), os.readv
    os.link(bad, tmp_path / "its inode stays taken")
    inode = bad.stat().st_ino

    def with_bad_sector(fd: int, views: list[memoryview]) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(error, os.strerror(error))
        return readv(fd, views)

    monkeypatch.setattr(os, "readv", with_bad_sector)
    assert read(storage, host) == 2
    assert bad.exists() is not is_lost
    stored(storage, op=2)
    assert (read(storage, host) == 6) is is_lost
    monkeypatch.undo()
    assert read(storage, host) == 6, "another error passes"
    storage.close()


def test_folders_that_cannot_be_used_are_a_wrong_setting(tmp_path: Path, host: HostPool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file' cannot be used"):
        storage_of(tmp_path / "file", host)
    stuck = tmp_path / "stuck"
    storage = storage_of(stuck, host)
    storage.write(1, FULL, KEYS[:2], pages(1, 2))
    storage.wait()
    storage.close()

    class Stuck(Disk):
        def remove(self, path: str) -> None:
            raise PermissionError(errno.EPERM, "not to be removed", path)

    with pytest.raises(ConfigError, match=r"stuck' cannot be used .*not to be removed"):
        storage_of(stuck, host, byte_max=FILE_BYTES, disk=Stuck())
    with pytest.raises(ConfigError, match=f"storage of 5 bytes, expected at least {FILE_BYTES}"):
        storage_of(tmp_path, host, byte_max=5)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, host: HostPool) -> None:
    gone = tmp_path / "00" / f".{'0' * 32}-0.deadbeef-7.tmp"
    gone.parent.mkdir()
    gone.write_bytes(b"half a page")
    holds, goes_on = threading.Event(), threading.Event()

    class HeldDisk(Disk):
        def create(self, path: str, flags: int = 0) -> int:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            holds.set()
            assert goes_on.wait(60)
            return fd

    alive = storage_of(tmp_path, host, disk=HeldDisk())
    assert not gone.exists()
    alive.write(1, FULL, KEYS[:1], pages(1, 1))
    assert holds.wait(60)
    (unfinished,) = leftovers(tmp_path)
    second = storage_of(tmp_path, host)
    assert unfinished.exists(), "a living writer's file was taken for a leftover"
    goes_on.set()
    assert only(alive.wait()).good == 1
    assert read(second, host, KEYS[:1]) == 1
    alive.close()
    second.close()
