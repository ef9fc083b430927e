"""Engines on one storage folder, in any order of events, held against a look at all files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.pool.storage import FileSystem, PageFiles
from serinus.pool.storage.file import HEADER_BYTES
from serinus.sim.disk import Folders, SimDisk
from tests.pool.storing import FULL, SWA
from tests.pool.writers import key_of

UNKNOWN = bytes(16)
DATA = np.arange(64, dtype=np.uint8)
SIZE = HEADER_BYTES + len(DATA)
"""Of a file with its header."""


def files_on(folder: str, disk: FileSystem | None = None, byte_max: int | None = None) -> PageFiles:
    return PageFiles(
        folder, namespace="n", page_bytes={FULL: 64, SWA: 64}, byte_max=byte_max, clock=WallClock(), disk=disk
    )


def sim_folders() -> Folders:
    return Folders(lambda: 0.0, Rng(1))


def sim_disk(folders: Folders) -> SimDisk:
    return SimDisk(folders, lambda: False)


class World:
    """Engines on one folder, and what pages they stored: by place, the keys of the page before as they were told with
    each file there was, the last as it is in the folder."""

    def __init__(self, folder: str, disk: Callable[[], FileSystem], rng: Random) -> None:
        self.folder, self.disk, self.rng = folder, disk, rng
        self.size, self.unknown = rng.choice([4, 8, 30]), rng.choice([0.1, 0.5])
        """Pages of the tree, and the share of writers that do not know what a page continues."""
        self.engines: list[PageFiles] = []
        self.before: dict[tuple[Part, bytes], list[bytes]] = {}
        self.removals = 0
        self.open()
        tree = [(part, key_of(1000 + index)) for part in (FULL, SWA) for index in range(self.size)]
        self.places = {str(self.engines[0].path_of(*place)): place for place in tree}
        """Of the pages of the tree, by path: the same for every engine."""

    def open(self) -> None:
        if len(self.engines) < 3:
            byte_max = self.rng.choice([None, None, 12 * SIZE])
            self.engines.append(files_on(self.folder, self.disk(), byte_max))

    def close(self) -> None:
        if len(self.engines) > 1:
            self.engines.pop(self.rng.randrange(len(self.engines))).close()

    def save(self) -> None:
        """A page of the tree: its place is its key, but a writer may not know it."""
        index, part, engine = self.rng.randrange(self.size), self.rng.choice((FULL, SWA)), self.rng.choice(self.engines)
        before = UNKNOWN if self.rng.random() < self.unknown else key_of(1000 + (index - 1) // 2)
        place, stored = (part, key_of(1000 + index)), self.stored()
        known = {each for each in stored if engine._name(*each) in engine._index}
        engine.save(*place, DATA, before)
        left = self.stored().keys()
        self.check_room({key for _, key in stored.keys() - left}, left & known)
        if place in left - stored.keys():
            self.before.setdefault(place, []).append(before)

    def check_room(self, gone: set[bytes], left: Set[tuple[Part, bytes]]) -> None:
        """For room no page went that is continued by one that was known and stays, as all its writers said."""
        needed = {self.before[place][0] for place in left if len(set(self.before[place])) == 1}
        assert gone.isdisjoint(needed), f"{gone} went for room, and what continues it stayed"

    def use(self) -> None:
        key, part, engine = self.key(), self.rng.choice((FULL, SWA)), self.rng.choice(self.engines)
        engine.has(part, key) if self.rng.random() < 0.5 else engine.load(part, key, np.empty(64, np.uint8))

    def spoil(self) -> None:
        """A byte of a stored page changes: the next engine that reads it throws it away."""
        stored = self.stored()
        if stored:
            path, disk = str(self.rng.choice([*stored.values()])), self.disk()
            header, data = bytearray(HEADER_BYTES), np.empty(64, np.uint8)
            assert not disk.read(path, header, data)
            data[0] ^= 1
            disk.remove(path)
            disk.write(f"{path}.spoilt", bytes(header), data, 0)
            disk.rename(f"{path}.spoilt", path)

    def learn(self) -> None:
        self.rng.choice(self.engines).recalled()

    def remove(self) -> None:
        keys = {self.key() for _ in range(self.rng.randrange(1, 3))}
        stored = self.stored()
        count = self.rng.choice(self.engines).remove(sorted(keys))
        self.removals += 1
        left = self.stored()
        in_folder = {place: self.before[place][-1:] for place in stored}
        assert not left.keys() & self.behind(keys, in_folder), f"removed {keys}"
        assert stored.keys() - left.keys() <= self.behind(keys, self.before), f"removed {keys}"
        assert count == len(stored) - len(left)

    def behind(self, keys: set[bytes], before: Mapping[tuple[Part, bytes], Sequence[bytes]]) -> set[tuple[Part, bytes]]:
        """Which of these are pages of these keys, or continue one that is: over all of them again and again. A removal
        may know of pages between that are not stored any more, and what was told of a page with an earlier file."""
        gone, count = set(keys), 0
        while count < len(gone):
            count = len(gone)
            gone |= {key for (_, key), told in before.items() if not gone.isdisjoint(told)}
        return {place for place in before if place[1] in gone}

    def key(self) -> bytes:
        return key_of(1000 + self.rng.randrange(self.size))

    def stored(self) -> dict[tuple[Part, bytes], Path]:
        """What is in the folder, looked at from outside of the engines."""
        paths = self.paths()
        return {place: Path(path) for path, place in self.places.items() if path in paths}

    def paths(self) -> set[str]:
        disk = self.disk()
        return {entry.path for entry in disk.entries(self.folder)}

    def settle(self) -> None:
        """Time passes: nothing changed lately."""

    def run(self, steps: int) -> int:
        rules = [self.save] * 8 + [self.use] * 2 + [self.remove] * 2
        rules += [self.spoil, self.learn, self.open, self.close, self.settle]
        for _ in range(steps):
            self.rng.choice(rules)()
            for engine in self.engines:
                known = [name for row in engine._after.values() for name in row]
                assert sorted(known) == sorted([*engine._index, *engine._gone])
                assert engine._gone.keys() <= engine._after.keys(), "gone, and continued by none"
                free = {name for name in engine._index if not engine._is_continued(name)}
                assert engine._uses._entries.keys() >= free, "it never goes for room"
                assert engine._uses._used.keys() == engine._index.keys()
        for engine in self.engines:
            engine.close()
        return self.removals


class DiskWorld(World):
    """On the operating system's disk; what is old was made so. The secret decides which pages go first for room."""

    ages = 0

    def __init__(self, folder: str, disk: Callable[[], FileSystem], rng: Random) -> None:
        os.mkdir(folder, 0o700)
        with open(os.open(f"{folder}/.secret", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(bytes(32))
        super().__init__(folder, disk, rng)

    def settle(self) -> None:
        """Folders that changed in the last minute changed long ago, each at another time."""
        for path in (*Path(self.folder).glob("??"), Path(self.folder, ".writers")):
            if path.stat().st_mtime > time.time() - 60:
                self.ages += 1
                os.utime(path, (10_000 + self.ages, 10_000 + self.ages))


def explore(world: Callable[[Random], World], examples: int, removals: int) -> None:
    ran = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(chance=st.randoms(use_true_random=False), steps=st.integers(10, 80))
    def run(chance: Random, steps: int) -> None:
        nonlocal ran
        ran += world(chance).run(steps)

    while ran < removals:
        run()


def sim_world(rng: Random) -> World:
    folders = sim_folders()
    return World("/d0", lambda: sim_disk(folders), rng)
