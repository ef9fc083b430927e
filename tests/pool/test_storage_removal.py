"""Pages that were condemned leave the storage, with all that continues them, and engines that share it learn it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import ConfigError
from serinus.core.moves import PageOrigin
from serinus.pool import HostPool
from serinus.pool.storage import Disk, FileStorage, QueuedStorage
from tests.pool.storage_world import files_on
from tests.pool.storing import FULL, KEYS, SWA, file_of, files, only, pages, read, stored
from tests.pool.test_storage_queue import PageDict
from tests.pool.writers import key_of, storage_of

ROOT = b"r" * 16


def written(storage: FileStorage, op: int, keys: list[bytes], before: bytes = ROOT) -> None:
    """Store pages that continue each other."""
    storage.write(op, FULL, keys, pages(1, len(keys)), PageOrigin(before=before, start=0, tokens=np.zeros(0, np.int32)))
    assert only(storage.wait()).good == len(keys)


def removed(storage: QueuedStorage, op: int, keys: list[bytes]) -> int:
    storage.remove(op, keys)
    done = only(storage.wait())
    assert not done.error
    return done.good


def test_what_continues_a_removed_page_goes_too_also_what_an_earlier_engine_wrote(
    tmp_path: Path, host: HostPool
) -> None:
    one, two = (storage_of(tmp_path, host) for _ in range(2))
    written(one, 1, KEYS[:2])
    written(two, 1, KEYS[2:4], before=KEYS[1])
    written(one, 2, KEYS[4:5], before=KEYS[0])  # another continuation of the first page
    written(two, 2, KEYS[5:])
    two.close()
    late = storage_of(tmp_path, host)
    assert removed(late, 7, KEYS[1:2]) == 3
    assert [late.shelf.has(FULL, key) for key in KEYS] == [True, False, False, False, True, True]
    assert read(one, host, KEYS[1:2]) == 0, "its index still has the name"
    assert removed(late, 8, [KEYS[0], KEYS[5], key_of(99)]) == 3
    assert not files(tmp_path)
    written(late, 9, KEYS[:2])
    assert read(one, host, KEYS[:2], op=901) == 2, "what was computed again is stored again"
    one.close()
    late.close()


def test_every_part_of_a_removed_page_goes(tmp_path: Path, host: HostPool) -> None:
    both = FileStorage(tmp_path, host={FULL: host, SWA: host}, namespace="n", byte_max=None, clock=WallClock())
    for op, part in enumerate((FULL, SWA), 1):
        both.write(op, part, KEYS[:3], pages(1, 3), PageOrigin(before=ROOT, start=0, tokens=np.zeros(0, np.int32)))
        both.wait()
    assert removed(both, 3, KEYS[1:2]) == 4
    assert len(files(tmp_path)) == 2
    both.close()


def test_other_engines_on_the_folder_learn_what_was_removed_before_their_next_question_is_answered(
    tmp_path: Path, host: HostPool
) -> None:
    one, two, three = (storage_of(tmp_path, host) for _ in range(3))
    written(one, 1, KEYS[:4])
    assert removed(two, 1, KEYS[2:3]) == 2
    for op in (1, 2):
        assert (
            removed(two, op + 1, [key_of(50 + op)]) == 0
        )  # not stored now, but another engine may have read it earlier
    for other in (one, three):
        other.query(5, KEYS, [FULL])
        (present,) = only(other.wait()).present
        assert present.tolist() == [True, True, False, False, False, False]
        assert set(other.recalled()) == {KEYS[2], KEYS[3], key_of(51), key_of(52)}
        assert other.recalled() == [], "told twice"
    assert two.recalled() == []
    late = storage_of(tmp_path, host)
    late.query(1, KEYS, [FULL])
    late.wait()
    assert late.recalled() == [], "it has read nothing that was removed"
    for each in (one, two, three, late):
        each.close()


def test_what_an_engine_stored_behind_a_page_before_it_learned_that_it_was_removed_goes_when_it_learns(
    tmp_path: Path, host: HostPool
) -> None:
    one, two, three = (storage_of(tmp_path, host) for _ in range(3))
    written(one, 1, KEYS[:2])
    two.query(1, KEYS[:2], [FULL])
    two.wait()
    assert removed(one, 2, KEYS[1:2]) == 1
    written(two, 2, KEYS[2:4], before=KEYS[1])  # computed from the page that was removed
    written(one, 3, KEYS[1:2], before=KEYS[0])  # computed again
    two.query(3, KEYS, [FULL])
    two.wait()
    assert set(two.recalled()) == set(KEYS[1:4])
    assert [two.shelf.has(FULL, key) for key in KEYS] == [True, True, False, False, False, False]
    for other, keys in ((one, KEYS[2:4]), (three, KEYS[1:4])):
        other.query(4, KEYS, [FULL])
        other.wait()
        assert set(other.recalled()) == set(keys)
    two.query(5, KEYS, [FULL])
    two.wait()
    assert two.recalled() == [], "told back"
    for each in (one, two, three):
        each.close()


def test_an_engine_that_asks_nothing_looks_once_in_a_second(tmp_path: Path, host: HostPool) -> None:
    clock = ManualClock(1e6)
    idle = FileStorage(tmp_path, host={FULL: host}, namespace="n", byte_max=None, clock=clock)
    other = storage_of(tmp_path, host)
    assert removed(other, 1, KEYS[:1]) == 0
    assert idle.recalled() == []
    clock.advance(1.1)
    found: list[bytes] = []
    for _ in range(2000):
        found += idle.recalled()
        if found:
            break
        threading.Event().wait(0.005)
    assert found == KEYS[:1]
    idle.close()
    other.close()


def test_a_notice_tells_no_key_without_the_secret_and_a_damaged_one_is_said(
    tmp_path: Path, host: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (storage_of(tmp_path, host) for _ in range(2))
    assert removed(one, 1, KEYS) == 0
    (notice,) = (tmp_path / ".removed" / "00").iterdir()
    assert not any(key in notice.read_bytes() for key in KEYS)
    assert stat.S_IMODE(notice.stat().st_mode) == 0o600
    data = bytearray(notice.read_bytes())
    data[-1] ^= 1
    notice.write_bytes(data)
    two.query(1, KEYS, [FULL])
    two.wait()
    assert two.recalled() == []
    assert "tells of removed pages and cannot be read: it is damaged" in caplog.text
    one.close()
    two.close()


def test_an_engine_that_cannot_write_learns_what_others_removed_all_the_same(tmp_path: Path) -> None:
    """And leaves no files behind, however often it tries to tell what it removed itself."""
    full = [False]

    class FullDisk(Disk):
        def create(self, path: str, flags: int = 0) -> int:
            number = super().create(path, flags)
            if not full[0]:
                return number
            os.close(number)
            return os.open("/dev/full", os.O_WRONLY)

    one, two = files_on(str(tmp_path), FullDisk()), files_on(str(tmp_path))
    folder = tmp_path / ".removed" / "00"
    full[0] = True
    with pytest.raises(OSError, match="No space left"):
        one.remove(KEYS[:1])
    two.remove(KEYS[1:2])
    assert one.recalled() == KEYS[1:2]
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            one.recalled()
    assert len(list(folder.iterdir())) == 1
    assert two.recalled() == []
    full[0] = False
    assert one.recalled() == []
    assert two.recalled() == KEYS[:1]
    for each in (one, two):
        each.close()


def test_old_notices_go(tmp_path: Path, host: HostPool) -> None:
    one, two = (storage_of(tmp_path, host) for _ in range(2))
    assert removed(one, 1, KEYS[:1]) == 0
    (notice,) = (tmp_path / ".removed" / "00").iterdir()
    os.utime(notice, (1000, 1000))
    two.query(1, KEYS, [FULL])
    two.wait()
    assert not notice.exists()
    one.close()
    two.close()


class SlowShelf(PageDict):
    """A save ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.removals: list[int] = []

    def save(self, part: object, key: bytes, data: np.ndarray, before: bytes) -> None:
        self.begun.release()
        assert self.permits.acquire(timeout=60)
        super().save(part, key, data, before)  # type: ignore[arg-type]

    def remove(self, keys: Collection[bytes]) -> int:
        self.removals.append(super().remove(keys))
        return self.removals[-1]


def test_a_write_that_is_under_way_does_not_bring_a_removed_page_back(host: HostPool) -> None:
    shelf = SlowShelf()
    storage = QueuedStorage(shelf, host={FULL: host}, clock=WallClock())
    storage.write(1, FULL, KEYS[:2], pages(1, 2))
    assert shelf.begun.acquire(timeout=60)
    storage.write(2, FULL, KEYS[4:5], pages(5, 1))
    assert shelf.begun.acquire(timeout=60)  # both threads are in a save: the removal waits behind them
    storage.remove(3, KEYS[:1])
    storage.write(4, FULL, KEYS[5:6], pages(6, 1))
    for _ in range(3):
        shelf.permits.release()
    done = {each.op: each for each in storage.wait()}
    assert {op: each.good for op, each in done.items()} == {1: 1, 2: 1, 3: 1, 4: 1}
    assert {key for _, key in shelf.pages} == {KEYS[4], KEYS[5]}
    assert sum(shelf.removals) == 1
    storage.close()


def test_pages_whose_check_fails_are_not_stored_and_not_read_and_what_was_stored_of_them_goes(
    tmp_path: Path, host: HostPool
) -> None:
    storage = storage_of(tmp_path, host)
    wrong: set[int] = {3}
    asked: list[tuple[list[int], int]] = []

    def check(part: object, found: np.ndarray, origin: PageOrigin | None, first: int) -> np.ndarray:
        asked.append((found.tolist(), first))
        return np.array([page not in wrong for page in found.tolist()])

    storage.check = check
    storage.write(1, FULL, KEYS[:4], pages(1, 4))
    done = only(storage.wait())
    assert (done.good, done.bad) == (2, (2,))
    assert len(files(tmp_path)) == 2
    assert asked == [([1, 2, 3, 4], 0)]
    wrong.clear()
    written(storage, 2, KEYS[:4])
    wrong.add(12)
    storage.read(3, FULL, KEYS[:4], pages(11, 4))
    done = only(storage.wait())
    assert (done.good, done.bad) == (1, (1,))
    wrong.clear()
    assert read(storage, host, KEYS[:4]) == 1
    assert len(files(tmp_path)) < 4, "the page that failed is stored still"
    storage.close()


# ---- what a folder tells --------------------------------------------------------------------------------------------


def test_names_are_the_folders_own_and_times_tell_the_hour_at_most(tmp_path: Path, host: HostPool) -> None:
    clock = ManualClock(1234.0)
    hour, names = clock.unix() // 3600 * 3600, []
    for folder in ("one", "two"):
        first = FileStorage(tmp_path / folder, host={FULL: host}, namespace="n", byte_max=None, clock=clock)
        stored(first, KEYS[:1])
        (file,) = files(tmp_path / folder)
        names.append(file.name)
        assert KEYS[0].hex() not in file.name
        assert (file.stat().st_mtime, file.stat().st_atime) == (hour, hour)
        clock.advance(100)
        assert read(first, host, KEYS[:1]) == 1
        assert (file.stat().st_mtime, file.stat().st_atime) == (hour, hour)
        second = storage_of(tmp_path / folder, host, namespace="n")
        assert read(second, host, KEYS[:1]) == 1, "engines that share a folder share its names"
        first.close()
        second.close()
        secret = tmp_path / folder / ".secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert len(secret.read_bytes()) == 32
    assert names[0] != names[1]


def test_a_folder_is_its_owners_alone(tmp_path: Path, host: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    storage = storage_of(tmp_path / "a" / "b", host)
    stored(storage, KEYS[:1])
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*") if path.is_dir()} == {0o700}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    storage.close()
    (tmp_path / "a" / "b").chmod(0o755)
    storage = storage_of(tmp_path / "a" / "b", host)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert "was 0755, is 0700 now" in caplog.text
    assert read(storage, host, KEYS[:1]) == 1
    storage.close()


def test_a_folder_of_other_things_is_not_taken_and_its_mode_not_changed(tmp_path: Path, host: HostPool) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"mode is 0755, expected 0700, .*'thesis.txt': name a folder of its own"):
        storage_of(home, host)
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("damage", ["size", "mode"])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, host: HostPool, damage: str) -> None:
    storage_of(tmp_path, host).close()
    secret = tmp_path / ".secret"
    secret.write_bytes(b"short") if damage == "size" else secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"\.secret has mode 06[04][04] and \d+ bytes, expected 0600 and 32"):
        storage_of(tmp_path, host)


def test_a_file_under_another_pages_name_is_no_page(tmp_path: Path, host: HostPool) -> None:
    storage = storage_of(tmp_path, host)
    stored(storage, KEYS[:2])
    os.replace(file_of(storage, KEYS[0]), file_of(storage, KEYS[1]))
    assert read(storage, host, KEYS[1:2]) == 0
    storage.close()
