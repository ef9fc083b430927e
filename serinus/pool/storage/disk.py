"""Disk: what `PageFiles` asks of a file system, and the answer of the operating system.

A simulation has a file system of its own in its place. Knows nothing of pages: a file is a header and data.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Disk", "FileEntry", "FileSystem"]

_WRITERS = ".writers"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a storage folder."""

    name: str
    path: str
    byte_count: int
    used_ns: int
    """When it was used last."""


class FileSystem(Protocol):
    """Files in folders `FOLDER/ab/`, and writers that are alive as long as they hold a lock. Every method may raise
    OSError, and may be called from several threads at once."""

    def open_folder(self, folder: str, writer: str) -> None:
        """Make the folder where it is not there, and hold the lock of a new writer in it."""
        ...

    def close_folder(self, folder: str, writer: str) -> None:
        """Give this writer's lock back. May be called again."""
        ...

    def is_writing(self, folder: str, writer: str) -> bool:
        """Whether a living process holds this writer's lock; where none does, the lock is removed."""
        ...

    def writers(self, folder: str) -> Sequence[str]:
        """All writers whose locks are there, dead or alive."""
        ...

    def entries(self, folder: str) -> Iterator[FileEntry]:
        """What lies in the folders `ab/` of a storage folder."""
        ...

    def byte_count(self, path: str) -> int:
        """Size of a file. Raises FileNotFoundError."""
        ...

    def read(self, path: str, header: bytearray, into: NDArray[np.uint8]) -> str:
        """Fill both from a file of exactly their size; what is wrong with it, or an empty text. Raises
        FileNotFoundError."""
        ...

    def touch(self, path: str) -> None:
        """It was used just now."""
        ...

    def write(self, path: str, header: bytes, data: NDArray[np.uint8]) -> None:
        """Make a new file, and its folder where that is missing. Where it raises, part of the file may be there."""
        ...

    def rename(self, path: str, target: str) -> None:
        """Put a file in the place of another one, or of none, at once."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file. Raises FileNotFoundError: it is not there."""
        ...


class Disk:
    """The file system of the operating system."""

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}

    def create(self, path: str) -> int:
        """A descriptor of a new file; only its owner may read it (KV tells what was in the prompt)."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open_folder(self, folder: str, writer: str) -> None:
        Path(folder, _WRITERS).mkdir(parents=True, exist_ok=True)
        path = _lock_path(folder, writer)
        self._locks[path] = _locked(path)

    def close_folder(self, folder: str, writer: str) -> None:
        path = _lock_path(folder, writer)
        fd = self._locks.pop(path, None)
        if fd is not None:
            with suppress(OSError):
                os.unlink(path)
            os.close(fd)

    def is_writing(self, folder: str, writer: str) -> bool:
        path = _lock_path(folder, writer)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                os.unlink(path)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def writers(self, folder: str) -> list[str]:
        return [path.stem for path in Path(folder, _WRITERS).glob("*.lock")]

    def entries(self, folder: str) -> Iterator[FileEntry]:
        with os.scandir(folder) as tops:
            names = [top.path for top in tops if len(top.name) == 2 and top.is_dir(follow_symlinks=False)]
        for name in names:
            with suppress(FileNotFoundError), os.scandir(name) as inside:
                for entry in inside:
                    with suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        yield FileEntry(
                            name=entry.name, path=entry.path, byte_count=about.st_size, used_ns=about.st_mtime_ns
                        )

    def byte_count(self, path: str) -> int:
        return os.stat(path).st_size

    def read(self, path: str, header: bytearray, into: NDArray[np.uint8]) -> str:
        # O_NONBLOCK: a pipe of this name must not hold the reader up.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found, expected = os.fstat(fd), len(header) + into.nbytes
            if not stat.S_ISREG(found.st_mode):
                return "no regular file"
            if found.st_size != expected:
                return f"{found.st_size} bytes, expected {expected}"
            if _read_all(fd, header, into) != expected:
                return "it became shorter while it was read"
        finally:
            os.close(fd)
        return ""

    def touch(self, path: str) -> None:
        os.utime(path)

    def write(self, path: str, header: bytes, data: NDArray[np.uint8]) -> None:
        try:
            fd = self.create(path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = self.create(path)
        try:
            views = _views(header, data)
            while views:
                views = _after(views, os.writev(fd, views))
        finally:
            os.close(fd)

    def rename(self, path: str, target: str) -> None:
        os.replace(path, target)

    def remove(self, path: str) -> None:
        os.unlink(path)


def _lock_path(folder: str, writer: str) -> str:
    return f"{folder}/{_WRITERS}/{writer}.lock"


def _locked(path: str) -> int:
    """A descriptor that holds the lock of a new writer until it is closed, by whatever ends this process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass  # another process took it for a dead writer's between open and lock
        os.close(fd)


def _read_all(fd: int, header: bytearray, data: NDArray[np.uint8]) -> int:
    """Fill both, as far as the file goes; bytes read."""
    views, done = _views(header, data), 0
    while views and (count := os.readv(fd, views)):
        done += count
        views = _after(views, count)
    return done


def _views(header: bytes | bytearray, data: NDArray[np.uint8]) -> list[memoryview]:
    return [memoryview(header), data.data] if data.nbytes else [memoryview(header)]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What remains of the buffers after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []
