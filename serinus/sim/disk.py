"""SimDisk: the file system of the simulation (pool.storage.FileSystem), with folders that outlive their engines.

A process that is killed leaves temporary files and its lock's name behind. What it wrote in the last moments may be
torn or gone when it comes back, as nothing was flushed; and a medium fails now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serinus.core.rng import Rng
from serinus.pool.storage import SECRET_BYTES, WRITERS, FileEntry

_RECENT_S = 0.5
"""What was written later than this before a crash is not on the medium yet."""


@dataclass(slots=True)
class _File:
    data: bytes
    writer: SimDisk
    written_at: float
    used_ns: int
    torn: bool = False


class Folders:
    """All files of a cluster, by path, and the writers that are alive."""

    def __init__(self, now: Callable[[], float], rng: Rng) -> None:
        self._now, self._rng = now, rng
        self.files: dict[str, _File] = {}
        self.locks: dict[str, bool] = {}
        """Names of locks, and whether a living process holds each."""
        self.changed: Counter[str] = Counter()
        """How often a name came to a folder or left it, which stands for the time when one did last."""
        self.torn_count = 0
        """Files that crashes tore, or took away."""

    def put(self, path: str, data: bytes, writer: SimDisk, used_ns: int) -> None:
        """A file is there."""
        self.files[path] = _File(data, writer, self._now(), used_ns)
        self.change(path)

    def change(self, path: str) -> None:
        """This name comes or goes."""
        self.changed[path.rpartition("/")[0]] += 1

    def tear(self, writer: SimDisk, torn: float) -> None:
        """This process was killed. With this probability, for each file that it wrote a moment ago, that is gone, cut
        short, partly zero, or not renamed yet."""
        for path in list(self.files) if torn else ():
            file = self.files[path]
            recent = file.writer is writer and self._now() - file.written_at <= _RECENT_S
            if not recent or file.torn or self._rng.random() >= torn:
                continue
            self.torn_count += 1
            self.change(path)
            file.torn = True
            keep = self._rng.randrange(len(file.data) + 1)
            match self._rng.randrange(4):
                case 0:
                    del self.files[path]
                case 3:  # killed before it was renamed
                    where, _, name = path.rpartition("/")
                    self.files[f"{where}/.{name.removesuffix('.page')}.dead-1.tmp"] = self.files.pop(path)
                case 1:
                    file.data = file.data[:keep]
                case _:
                    file.data = file.data[:keep] + bytes(len(file.data) - keep)


class SimDisk:
    """What one process of the simulation sees of the folders."""

    def __init__(self, folders: Folders, fails: Callable[[], bool]) -> None:
        """`fails`: whether the next read or write fails midway."""
        self._folders, self._fails = folders, fails
        self._held: set[str] = set()

    def kill(self, torn: float) -> None:
        """The process ends, its locks with it; see Folders.tear."""
        for name in self._held:
            self._folders.locks[name] = False
        self._folders.tear(self, torn)

    def open_folder(self, folder: str, writer: str, secret: bytes = b"") -> bytes:
        self._held.add(f"{folder}/{writer}")
        self._folders.locks[f"{folder}/{writer}"] = True
        self._folders.change(f"{folder}/{WRITERS}/{writer}")
        return folder.encode().ljust(SECRET_BYTES)[:SECRET_BYTES]

    def is_open(self, folder: str, writer: str) -> bool:
        return f"{folder}/{writer}" in self._held

    def close_folder(self, folder: str, writer: str) -> None:
        self._held.discard(f"{folder}/{writer}")
        self._folders.locks.pop(f"{folder}/{writer}", None)
        self._folders.change(f"{folder}/{WRITERS}/{writer}")

    def is_writing(self, folder: str, writer: str) -> bool:
        alive = self._folders.locks.get(f"{folder}/{writer}", False)
        if not alive:
            self._folders.locks.pop(f"{folder}/{writer}", None)
            self._folders.change(f"{folder}/{WRITERS}/{writer}")
        return alive

    def writers(self, folder: str) -> list[str]:
        return [name.removeprefix(f"{folder}/") for name in self._folders.locks if name.startswith(f"{folder}/")]

    def entries(self, folder: str) -> Iterator[FileEntry]:
        for path, file in list(self._folders.files.items()):
            if path.startswith(f"{folder}/"):
                name = path.rpartition("/")[2]
                yield FileEntry(name=name, path=path, byte_count=len(file.data), used_ns=file.used_ns)

    def names(self, folder: str) -> list[str]:
        return [entry.name for entry in self.entries(folder)]

    def changed_ns(self, folder: str) -> int:
        return self._folders.changed[folder]

    def now_ns(self, folder: str, writer: str) -> int:
        return 1 << 62

    def byte_count(self, path: str) -> int:
        return len(self._file(path).data)

    def read(self, path: str, header: bytearray, into: NDArray[np.uint8]) -> str:
        """See FileSystem. Raises OSError: the medium fails."""
        data = self._file(path).data
        expected = len(header) + into.nbytes
        if len(data) != expected:
            return f"{len(data)} bytes, expected {expected}"
        header[:] = data[: len(header)]
        if self._fails():
            into[: into.nbytes // 2] = 0xBB
            raise OSError("sim: the medium cannot be read")
        into[:] = np.frombuffer(data, np.uint8, offset=len(header))
        return ""

    def head(self, path: str, header: bytearray) -> bool:
        data = self._file(path).data[: len(header)]
        header[: len(data)] = data
        return len(data) == len(header)

    def touch(self, path: str, used_ns: int) -> None:
        self._file(path).used_ns = used_ns

    def write(self, path: str, header: bytes, data: NDArray[np.uint8], used_ns: int) -> None:
        """See FileSystem. Raises OSError: the medium fails."""
        whole = header + data.tobytes()
        if self._fails():
            self._folders.put(path, whole[: len(whole) // 2], self, used_ns)
            raise OSError("sim: the medium cannot be written")
        self._folders.put(path, whole, self, used_ns)

    def rename(self, path: str, target: str) -> None:
        """See FileSystem. Raises OSError: the process cannot put it there, and the temporary file stays."""
        if self._fails():
            raise OSError("sim: the file cannot be renamed")
        file, before = self._folders.files.pop(path), self._folders.files.get(target)
        assert before is None or before.torn or before.data == file.data, f"sim: I6: {target} stands for two contents"
        self._folders.files[target] = file
        self._folders.change(path)
        self._folders.change(target)

    def remove(self, path: str) -> None:
        self._file(path)
        del self._folders.files[path]
        self._folders.change(path)

    def _file(self, path: str) -> _File:
        file = self._folders.files.get(path)
        if file is None:
            raise FileNotFoundError(path)
        return file
