"""A removal finds all pages that continue a removed one, of every writer, without looking at what is stored."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from serinus.core.clock import ManualClock
from serinus.pool.storage import Disk, FileEntry, PageFiles
from serinus.pool.storage.listings import Listings
from serinus.sim.disk import Folders, SimDisk
from tests.pool.storage_world import DATA, SIZE, UNKNOWN, DiskWorld, explore, files_on, sim_disk, sim_folders, sim_world
from tests.pool.storing import FULL
from tests.pool.writers import key_of

P, Q, R, S = KEYS = [key_of(100 + i) for i in range(4)]


def chain(files: PageFiles, keys: Sequence[bytes] = KEYS, before: bytes = UNKNOWN) -> None:
    for last, key in zip([before, *keys], keys, strict=False):
        files.save(FULL, key, DATA, last)


# ---- any order of events, held against a look at all files -----------------------------------------------------------


@pytest.mark.slow
def test_removals_in_any_order_of_events_take_what_a_look_at_all_files_takes() -> None:
    explore(sim_world, 60, 300)


@pytest.mark.proof
def test_removals_in_many_more_orders_of_events_take_what_a_look_at_all_files_takes() -> None:
    explore(sim_world, 600, 5_000)


@pytest.mark.slow
def test_removals_on_a_real_disk_take_what_a_look_at_all_files_takes(tmp_path: Path) -> None:
    count = iter(range(1 << 30))
    explore(lambda rng: DiskWorld(str(tmp_path / str(next(count))), Disk, rng), 20, 100)


# ---- what a removal looks at -----------------------------------------------------------------------------------------


class Counting(SimDisk):
    """Counts what it is asked."""

    def __init__(self, folders: Folders) -> None:
        super().__init__(folders, lambda: False)
        self.asked: list[str] = []

    def names(self, folder: str) -> list[str]:
        self.asked.append(f"names {folder}")
        return super().names(folder)

    def changed_ns(self, folder: str) -> int:
        self.asked.append(f"changed {folder}")
        return super().changed_ns(folder)

    def byte_count(self, path: str) -> int:
        self.asked.append("size")
        return super().byte_count(path)

    def head(self, path: str, header: bytearray) -> bool:
        self.asked.append("head")
        return super().head(path, header)


@pytest.mark.parametrize("stored", [10, 1000])
def test_an_engine_alone_on_a_folder_looks_at_what_it_removes_only(stored: int) -> None:
    disk = Counting(sim_folders())
    files = files_on("/d0", disk)
    chain(files, [key_of(i, 7) for i in range(stored)])
    for _ in range(2):
        chain(files)
        disk.asked.clear()
        assert files.remove([Q]) == 3
    assert disk.asked == ["changed /d0/.writers", "head", "head"]


def test_of_several_engines_only_folders_that_changed_are_listed() -> None:
    folders = sim_folders()
    disk = Counting(folders)
    one, two = files_on("/d0", disk), files_on("/d0", sim_disk(folders))
    chain(one, [key_of(i, 7) for i in range(1000)])
    one.remove([S])
    disk.asked.clear()
    chain(two, KEYS[1:], before=P)
    one.remove([P])
    assert not {path for path in folders.files if path.endswith(".page")} & {str(one.path_of(FULL, k)) for k in KEYS}
    assert {line for line in disk.asked if line.startswith("names")} <= {
        f"names {one.path_of(FULL, key).parent}" for key in KEYS[1:]
    }


def test_nothing_is_listed_to_learn_that_nothing_was_removed() -> None:
    folders = sim_folders()
    disk = Counting(folders)
    one, two = files_on("/d0", disk), files_on("/d0", sim_disk(folders))
    for key in KEYS:
        two.remove([key])
    assert one.recalled() == KEYS
    disk.asked.clear()
    assert one.recalled() == []
    assert disk.asked == ["changed /d0/.removed/00"]


def test_on_a_disk_that_was_quiet_nothing_is_listed_whatever_the_engines_clock_says(tmp_path: Path) -> None:
    class Quiet(Disk):
        listed = 0

        def names(self, folder: str) -> list[str]:
            self.listed += 1
            return super().names(folder)

    disk = Quiet()
    files = PageFiles(tmp_path, namespace="n", page_bytes={FULL: 64}, byte_max=None, clock=ManualClock(), disk=disk)
    chain(files)
    for path in (*tmp_path.glob("??"), tmp_path / ".writers"):
        os.utime(path, (10_000, 10_000))
    files.remove([key_of(9)])
    assert disk.listed > 0
    disk.listed = 0
    chain(files, KEYS[2:], before=key_of(9))
    assert files.remove([Q]) == 3
    assert disk.listed == 0
    files.close()


@pytest.mark.parametrize("goes", ["as torn", "by another engine"])
def test_what_lies_behind_a_page_that_is_gone_is_removed_too(goes: str) -> None:
    folders = sim_folders()
    one, two = (files_on("/d0", sim_disk(folders)) for _ in range(2))
    chain(one)
    match goes:
        case "as torn":
            folders.files[str(one.path_of(FULL, Q))].data = b"torn"
            assert not one.load(FULL, Q, np.empty(64, np.uint8))
        case _:
            folders.files.pop(str(one.path_of(FULL, Q)))
            one._scan()
    assert str(one.path_of(FULL, Q)) not in folders.files
    assert one.remove([P]) == 3
    assert not one._index
    assert not one._gone
    two.close()


# ---- what must not be missed -----------------------------------------------------------------------------------------


def test_an_engine_that_came_and_went_between_two_removals_left_no_page_that_stays() -> None:
    folders = sim_folders()
    one = files_on("/d0", sim_disk(folders))
    for _ in range(2):
        one.remove([S])  # it is alone
    two = files_on("/d0", sim_disk(folders))
    chain(two, KEYS[1:], before=P)
    two.close()
    assert one.remove([P]) == 3


def test_a_page_that_another_engine_removed_and_stored_again_is_found() -> None:
    folders = sim_folders()
    one, two = (files_on("/d0", sim_disk(folders)) for _ in range(2))
    chain(one)
    two.remove([S])
    two.save(FULL, S, DATA, R)
    one.remove([key_of(9)])  # lists the folder of S
    assert one.recalled() == [S]
    assert one.remove([P]) == 4


def test_a_page_that_another_engine_stored_again_with_what_it_continues_is_found() -> None:
    folders = sim_folders()
    one, two = (files_on("/d0", sim_disk(folders)) for _ in range(2))
    two.save(FULL, Q, DATA)
    one.remove([key_of(9)])  # learns that the writer of Q did not know what it continues
    two.remove([Q])
    two.save(FULL, Q, DATA, P)
    assert one.remove([P]) == 1


def test_a_page_that_was_stored_while_a_read_missed_it_is_found() -> None:
    class Late(SimDisk):
        then: Callable[[], object] | None = None

        def read(self, path: str, header: bytearray, into: np.ndarray) -> str:
            try:
                return super().read(path, header, into)
            finally:
                if self.then is not None:
                    self.then()

    disk = Late(sim_folders(), lambda: False)
    files = files_on("/d0", disk)
    chain(files, KEYS[:1])
    for _ in range(2):
        files.remove([S])
    disk.then = lambda: files.save(FULL, Q, DATA, P)
    assert not files.load(FULL, Q, np.empty(64, np.uint8))
    assert files.remove([P]) == 2


def test_a_page_that_was_stored_while_the_folder_was_scanned_is_found() -> None:
    class Slow(SimDisk):
        then: Callable[[], object] | None = None

        def entries(self, folder: str) -> Iterator[FileEntry]:
            yield from super().entries(folder)
            then, self.then = self.then, None
            if then is not None:
                then()

    disk = Slow(sim_folders(), lambda: False)
    files = files_on("/d0", disk, byte_max=16 * SIZE)
    chain(files, KEYS[:2])
    for _ in range(2):
        files.remove([key_of(9)])
    disk.then = lambda: files.save(FULL, R, DATA, Q)
    files.save(FULL, key_of(9), DATA)  # scans: more than a sixteenth of the bound was written
    assert disk.then is None
    assert files.remove([P]) == 3


@pytest.mark.parametrize("what", ["remove", "byte_count", "head", "names"])
def test_what_a_removal_could_not_do_the_next_one_does(what: str) -> None:
    class Failing(SimDisk):
        """A disk of which one call fails."""

        failing = ""

        def _fail(self, *call: str) -> None:
            if self.failing == " ".join(call):
                self.failing = ""
                raise OSError("the medium fails")

        def remove(self, path: str) -> None:
            self._fail("remove", path)
            super().remove(path)

        def byte_count(self, path: str) -> int:
            self._fail("byte_count", path)
            return super().byte_count(path)

        def head(self, path: str, header: bytearray) -> bool:
            self._fail("head", path)
            return super().head(path, header)

        def names(self, folder: str) -> list[str]:
            self._fail("names", folder)
            return super().names(folder)

    folders = sim_folders()
    disk = Failing(folders, lambda: False)
    one, two = files_on("/d0", disk), files_on("/d0", sim_disk(folders))
    chain(two)
    path = one.path_of(FULL, R)
    disk.failing = f"{what} {path.parent if what == 'names' else path}"
    with pytest.raises(OSError, match="the medium fails"):
        one.remove([Q])
    assert not disk.failing
    assert two.recalled()[0] == Q, "what went was not told"
    one.remove([Q])
    left = {str(one.path_of(FULL, key)): key for key in KEYS}
    assert [left[path] for path in folders.files if path in left] == [P]


class Timed(Disk):
    """Tells of its folders when they changed as the test has it."""

    changed, now = 0, 10**18

    def changed_ns(self, folder: str) -> int:
        return self.changed


def test_a_folder_is_new_when_it_changed_or_had_changed_a_moment_before() -> None:
    disk = Timed()
    listings = Listings(disk, lambda: disk.now)
    disk.changed = disk.now
    assert [listings.is_new("f") for _ in range(2)] == [True, True], "what comes now may have the same time"
    disk.now += 1_900_000_000
    assert listings.is_new("f")
    disk.now += 200_000_000
    assert [listings.is_new("f") for _ in range(3)] == [True, False, False]
    disk.changed += 1
    assert [listings.is_new("f") for _ in range(2)] == [True, False]
    listings.forget("f")
    assert [listings.is_new("f") for _ in range(2)] == [True, False]
    listings.clear()
    assert [listings.is_new("f") for _ in range(2)] == [True, False]


def test_what_was_new_to_a_process_alone_is_new_again_when_others_are_there() -> None:
    disk = Timed()
    listings = Listings(disk, lambda: disk.now)
    disk.changed = disk.now
    assert [listings.is_new("f", alone=True) for _ in range(2)] == [True, False]
    disk.now += 60_000_000_000
    assert [listings.is_new("f") for _ in range(2)] == [True, False], "another one may have written at that time"
    disk.changed += 1
    assert not listings.is_new("f", alone=True), "it was this process"
    assert [listings.is_new("f") for _ in range(2)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_two_engines_that_store_and_remove_at_once_leave_nothing_of_a_removed_page(tmp_path: Path, seed: int) -> None:
    """Threads of two engines, each its own chain of the same page; in the end that is removed."""
    engines = [files_on(str(tmp_path)) for _ in range(2)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        rng, engine = Random(10 * seed + number), engines[number % 2]
        try:
            for _ in range(60):
                at = rng.randrange(8)
                keys = [P, *(key_of(i, number) for i in range(8))]
                match rng.randrange(4):
                    case 0:
                        engine.remove([keys[1 + at]])
                    case 1:
                        engine.recalled()
                    case _:
                        chain(engine, keys[1 : 2 + at], before=P)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    engines[seed % 2].remove([P])
    left = [path.name for path in tmp_path.glob("??/*.page")]
    reachable = {engines[0].path_of(FULL, key_of(0, number)).name for number in range(4)}
    assert not reachable & set(left)
    engines[seed % 2].remove([P, *(key_of(i, number) for number in range(4) for i in range(8))])
    assert not list(tmp_path.glob("??/*.page"))
    for engine in engines:
        engine.close()
