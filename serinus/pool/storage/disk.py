"""Disk: what `PageFiles` asks of a file system, and the answer of the operating system.

A simulation has a file system of its own in its place. Knows nothing of pages: a file is a header and data.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.log import get_logger

_log = get_logger("pool.storage")
WRITERS, REMOVED, _SECRET = ".writers", ".removed", ".secret"
SECRET_BYTES = 32
"""Of a folder's secret."""
_OURS = re.compile(r"\.(writers|removed|secret)|[0-9a-f]{2}|tp[0-9]+-pp[0-9]+-.*")
"""What a storage folder may hold that engines have used before."""
BLOCK_BYTES = 4096
"""What header and data are multiples of, in a file and in memory, where they may go past the page cache."""
_NO_ATIME, _DIRECT = getattr(os, "O_NOATIME", 0), getattr(os, "O_DIRECT", 0)
_LOST = {getattr(errno, name, None) for name in ("EIO", "ENODATA", "EUCLEAN", "EBADMSG")}
"""What a read says of a bad sector, and where a file system finds bytes that are not what it wrote. Other errors pass:
the file is good."""
_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a storage folder."""

    name: str
    path: str
    byte_count: int
    used_ns: int
    """When it was used last, as told by its writer or by `touch`; unix time."""


class FileSystem(Protocol):
    """Files in folders `FOLDER/ab/`, and writers that are alive as long as they hold a lock. Every method may raise
    OSError, and may be called from several threads at once."""

    def open_folder(self, folder: str, writer: str, secret: bytes = b"") -> bytes:
        """Make the folder where it is not there, for its owner alone, and hold the lock of a new writer in it.

        `secret`: what its secret was, of a folder that was deleted while this writer had it open; its lock was lost.
        Returns the folder's secret, SECRET_BYTES that its first writer made: random ones, or these. Raises OSError:
        others than the owner may look into the folder, and that cannot or must not be changed.
        """

    def is_open(self, folder: str, writer: str) -> bool:
        """Whether this writer's lock is where `open_folder` made it: else the folder was deleted."""

    def close_folder(self, folder: str, writer: str) -> None:
        """Give this writer's lock back. May be called again."""

    def is_writing(self, folder: str, writer: str) -> bool:
        """Whether a living process holds this writer's lock; where none does, the lock is removed."""

    def writers(self, folder: str) -> Sequence[str]:
        """All writers whose locks are there, dead or alive."""

    def entries(self, folder: str) -> Iterator[FileEntry]:
        """What lies in the folders `ab/` of a storage folder; nothing where the folder is not there."""

    def names(self, folder: str) -> Sequence[str]:
        """The names in one folder `FOLDER/ab`; none where it is not there. Cost: a tenth of what `entries` takes."""

    def changed_ns(self, folder: str) -> int:
        """When a name came to one folder or left it, unix time, 0 where it is not there. Of FOLDER/.writers (WRITERS):
        when a writer came or went."""

    def now_ns(self, folder: str, writer: str) -> int:
        """What `changed_ns` would be of a folder that changed now, by the file system's clock and as coarse as that."""

    def byte_count(self, path: str) -> int:
        """Size of a file. Raises FileNotFoundError."""

    def read(self, path: str, header: bytearray, into: NDArray[np.uint8]) -> str:
        """Fill both from a file of exactly their size; what is wrong with it, or an empty text. Raises
        FileNotFoundError."""

    def head(self, path: str, header: bytearray) -> bool:
        """Fill a header from the first bytes of a file; False: there are not so many. Raises FileNotFoundError."""

    def touch(self, path: str, used_ns: int) -> None:
        """It was used at this time."""

    def write(self, path: str, header: bytes, data: NDArray[np.uint8], used_ns: int) -> None:
        """Make a new file, and its folder `ab/` where that is missing, used at this time. Where it raises, part of the
        file may be there; FileNotFoundError: FOLDER was deleted."""

    def rename(self, path: str, target: str) -> None:
        """Put a file in the place of another one, or of none, at once."""

    def remove(self, path: str) -> None:
        """Delete a file. Raises FileNotFoundError: it is not there."""


class Disk:
    """The file system of the operating system. Header and data of whole blocks go past the page cache (O_DIRECT) where
    the folder's file system can do that: a copy into page cache that grows costs 5 times the CPU of the write itself,
    and what is read often is in the host tier already."""

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}
        self._direct = 0

    def create(self, path: str, flags: int = 0) -> int:
        """A descriptor of a new file; only its owner may read it (KV tells what was in the prompt)."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)

    def open_folder(self, folder: str, writer: str, secret: bytes = b"") -> bytes:
        _make_private(Path(folder))
        for name in (WRITERS, REMOVED):
            Path(folder, name).mkdir(mode=0o700, exist_ok=True)
        path = _lock_path(folder, writer)
        lost = self._locks.get(path)
        self._locks[path] = _locked(path)
        if lost is not None:
            os.close(lost)
        secret = _secret_of(folder, secret)
        self._direct = _direct_flag(folder)
        return secret

    def is_open(self, folder: str, writer: str) -> bool:
        return os.path.exists(_lock_path(folder, writer))

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
        return [path.stem for path in Path(folder, WRITERS).glob("*.lock")]

    def entries(self, folder: str) -> Iterator[FileEntry]:
        for top in _tops(folder):
            with suppress(FileNotFoundError), os.scandir(top) as inside:
                for entry in inside:
                    with suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        yield FileEntry(
                            name=entry.name, path=entry.path, byte_count=about.st_size, used_ns=about.st_mtime_ns
                        )

    def names(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(folder)
        return []

    def changed_ns(self, folder: str) -> int:
        with suppress(FileNotFoundError):
            return os.stat(folder).st_mtime_ns
        return 0

    def now_ns(self, folder: str, writer: str) -> int:
        fd = self._locks[_lock_path(folder, writer)]
        os.utime(fd)
        return os.fstat(fd).st_mtime_ns

    def byte_count(self, path: str) -> int:
        return os.stat(path).st_size

    def read(self, path: str, header: bytearray, into: NDArray[np.uint8]) -> str:
        fd = _opened(path, self._direct if _is_whole(header, into) else 0)
        try:
            found, expected = os.fstat(fd), len(header) + into.nbytes
            if not stat.S_ISREG(found.st_mode):
                return "no regular file"
            if found.st_size != expected:
                return f"{found.st_size} bytes, expected {expected}"
            head = _aligned(len(header))
            if _read_all(fd, head, into) != expected:
                return "it became shorter while it was read"
            header[:] = head
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return f"the medium has lost its bytes: {error}"
        finally:
            os.close(fd)
        return ""

    def head(self, path: str, header: bytearray) -> bool:
        fd = _opened(path)
        try:
            return _read_all(fd, memoryview(header), np.empty(0, np.uint8)) == len(header)
        finally:
            os.close(fd)

    def touch(self, path: str, used_ns: int) -> None:
        os.utime(path, ns=(used_ns, used_ns))

    def write(self, path: str, header: bytes, data: NDArray[np.uint8], used_ns: int) -> None:
        flags, head = self._direct if _is_whole(header, data) else 0, _aligned(len(header))
        head[:] = header
        try:
            fd = self.create(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), mode=0o700)
            fd = self.create(path, flags)
        try:
            views = _views(head, data)
            while views:
                views = _after(views, os.writev(fd, views))
            os.utime(fd, ns=(used_ns, used_ns))
        finally:
            os.close(fd)

    def rename(self, path: str, target: str) -> None:
        os.replace(path, target)

    def remove(self, path: str) -> None:
        os.unlink(path)


def _tops(folder: str) -> list[str]:
    """The folders `ab/` of a storage folder."""
    with suppress(FileNotFoundError), os.scandir(folder) as tops:
        return [top.path for top in tops if len(top.name) == 2 and top.is_dir(follow_symlinks=False)]
    return []


def this_hour(clock: Clock) -> int:
    """The beginning of this hour, unix time in ns: all that the times of files tell."""
    return int(clock.unix()) // _HOUR_S * _HOUR_S * 10**9


def write_and_rename(
    disk: FileSystem, temp: str, path: str, header: bytes, data: NDArray[np.uint8], used_ns: int
) -> None:  # fmt: skip
    """Write a file that is there whole or not at all, under another name first. Raises OSError: none is left."""
    try:
        disk.write(temp, header, data, used_ns)
        disk.rename(temp, path)
    except OSError:
        with suppress(OSError):
            disk.remove(temp)
        raise


def remove_leftovers(disk: FileSystem, folder: str, writer: str, names: re.Pattern[str]) -> None:
    """Remove files of writers that are dead, and their locks. names: matches such a file, its group the writer's name.
    Raises OSError: the folder cannot be read."""
    alive: dict[str, bool] = {writer: True}
    count = 0
    for entry in disk.entries(folder):
        match = names.fullmatch(entry.name)
        if match is None:
            continue
        owner = match[1]
        if owner not in alive:  # its lock is older than its files: this order cannot take a living one for dead
            alive[owner] = disk.is_writing(folder, owner)
        if not alive[owner]:
            with suppress(OSError):
                disk.remove(entry.path)
                count += 1
    for other in disk.writers(folder):
        disk.is_writing(folder, other)
    if count:
        _log.info("pool: removed %d unfinished files of dead writers from %s", count, folder)


def _opened(path: str, flags: int = 0) -> int:
    """A descriptor that reads. O_NONBLOCK: a pipe of this name must not hold the reader up."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _NO_ATIME | flags)


def _direct_flag(folder: str) -> int:
    """O_DIRECT where files of this folder can be opened with it; a file in memory (tmpfs), for one, often cannot."""
    try:
        os.close(_opened(f"{folder}/{_SECRET}", _DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.info("pool: files in %s go through the page cache: its file system has no O_DIRECT", folder)
        return 0
    return _DIRECT


def _is_whole(header: bytes | bytearray, data: NDArray[np.uint8]) -> bool:
    """Whether both are blocks, and the data begins at one."""
    return not (len(header) % BLOCK_BYTES or data.nbytes % BLOCK_BYTES or data.ctypes.data % BLOCK_BYTES)


def _aligned(byte_count: int) -> memoryview:
    """Memory of its own that begins at a block."""
    memory = np.empty(byte_count + BLOCK_BYTES, np.uint8)
    begin = -memory.ctypes.data % BLOCK_BYTES
    return memory[begin : begin + byte_count].data


def _make_private(folder: Path) -> None:
    """Make a folder that its owner alone may look into. One that is there and wider becomes so where nothing but pages
    lies in it; a folder of other things (a home, /tmp) is refused. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {about.st_uid}, not to {os.geteuid()}, who runs this engine")
    if not about.st_mode & 0o077:
        return
    mode = f"{stat.S_IMODE(about.st_mode):04o}"
    strangers = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if strangers:
        raise PermissionError(
            f"its mode is {mode}, expected 0700, and it holds other things than pages, e.g. {strangers[0]!r}: name a"
            f" folder of its own"
        )
    folder.chmod(0o700)
    if folder.stat().st_mode & 0o077:
        raise PermissionError(f"its mode is {mode} and the file system keeps it so, expected 0700")
    _log.warning("pool: mode of storage folder %s was %s, is 0700 now: KV tells what was in prompts", folder, mode)


def _secret_of(folder: str, former: bytes) -> bytes:
    """The folder's secret; where there is none the former one, or a new one if that is empty. Raises OSError: what is
    there is no secret, or no secret one."""
    fd = os.open(f"{folder}/{_SECRET}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        about = os.fstat(fd)
        if about.st_mode & 0o077 or about.st_size not in (0, SECRET_BYTES):
            raise PermissionError(
                f"{_SECRET} has mode {stat.S_IMODE(about.st_mode):04o} and {about.st_size} bytes, expected 0600 and"
                f" {SECRET_BYTES}: remove the folder"
            )
        if not about.st_size:
            os.pwrite(fd, former or os.urandom(SECRET_BYTES), 0)
        return os.pread(fd, SECRET_BYTES, 0)
    finally:
        os.close(fd)


def _lock_path(folder: str, writer: str) -> str:
    return f"{folder}/{WRITERS}/{writer}.lock"


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


def _read_all(fd: int, header: memoryview, data: NDArray[np.uint8]) -> int:
    """Fill both, as far as the file goes; bytes read."""
    views, done = _views(header, data), 0
    while views and (count := os.readv(fd, views)):
        done += count
        views = _after(views, count)
    return done


def _views(header: memoryview, data: NDArray[np.uint8]) -> list[memoryview]:
    return [header, data.data] if data.nbytes else [header]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What remains of the buffers after `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views else []
