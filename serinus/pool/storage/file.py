"""FileStorage: one file per page and part, in a folder that outlives the engine and that several engines may share.

A file is written under a temporary name and then renamed, so that a reader sees all of it or nothing; and because disks
fail, processes crash and people edit files, a page is believed only after its header and the digest of its bytes were
compared with what is expected: magic, version, namespace, key, part, size. Anything else is a miss and a line in the
log. Nothing is flushed to the disk: after a power cut a page may be torn, and then it is a miss.

    FOLDER/ab/abcdef...-0.page        header, payload
    FOLDER/ab/.abcdef...WRITER.tmp    being written by WRITER
    FOLDER/.writers/WRITER.lock       locked while WRITER is alive; temporary files of others are leftovers

The index of names is in memory, oldest use first; it is made from a scan at start and again now and then, so that
several processes keep one size bound between them. A page's time of last use is its file's mtime.
"""

from __future__ import annotations

import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.pool.host import HostPool
from serinus.pool.storage.disk import Disk, FileSystem
from serinus.pool.storage.io import QueuedStorage, RareWarning, ShelfCounts
from serinus.pool.workers import Workers

__all__ = ["HEADER_BYTES", "FileStorage", "PageFiles"]

_log = get_logger("pool.storage")
_HEADER = struct.Struct("<8sHHBxxxQI4x16s16s16s48x")
_MAGIC, _VERSION = b"SERINUSP", 1
HEADER_BYTES = _HEADER.size
"""Magic, version, header size, part, payload bytes, bytes of stamps (none yet), namespace, key, digest; 48 of room."""
_FIELDS = ("magic", "version", "header size", "part", "size", "stamps", "namespace", "key", "digest")
_PAGE = re.compile(r"[0-9a-f]{32}-[0-9]\.page")
_TEMP = re.compile(r"\.[0-9a-f]{32}-[0-9]\.([0-9a-f]+)-[0-9]+\.tmp")
_RESCAN_OF_BOUND = 16
"""The folder is scanned again after writing this fraction of the bound: by so much may each process overstep it."""


class PageFiles:
    """Pages in files (a PageShelf). Safe to call from several threads, and from several processes on one folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        namespace: str,
        page_bytes: Mapping[Part, int],
        byte_max: int | None,
        clock: Clock,
        disk: FileSystem | None = None,
    ) -> None:
        """
        Args:
            folder: made where it is not there.
            namespace: what shapes the bytes; pages of another one are never believed.
            page_bytes: of each part.
            byte_max: bytes of all files together; the longest unused go first. None = no bound.
            clock: spaces warnings.
            disk: where the folder is; None = the operating system's.
        Raises:
            ConfigError: the folder cannot be used, or not one page fits the bound.
        Cost: a scan of the folder, about 3 us a file.
        """
        largest = max(page_bytes.values(), default=0) + HEADER_BYTES
        if byte_max is not None and byte_max < largest:
            raise ConfigError(
                f"pool: storage of {byte_max} bytes, expected at least {largest}, one page and its header"
            )
        self._folder = str(folder)
        self._namespace = xxhash.xxh3_128_digest(namespace.encode())
        self._byte_max, self._disk = byte_max, disk or Disk()
        self._bad_warning = RareWarning(clock)
        self._lock = threading.Lock()
        self._index: OrderedDict[str, int] = OrderedDict()
        self._bytes = self._written = self._removed = self._bad = self._temps = 0
        self._writer = f"{new_incarnation():x}"
        try:
            self._disk.open_folder(self._folder, self._writer)
            self._scan()
            self._remove_leftovers()
        except OSError as error:
            raise ConfigError(
                f"pool: storage folder {self._folder!r} cannot be used ({error}), expected one that can be "
                f"written and locked"
            ) from error
        self._keep_bound(0)

    # ---- one page -----------------------------------------------------------------------------------------------

    def has(self, part: Part, key: bytes) -> bool:
        name = _name(part, key)
        if name in self._index:
            return True
        try:
            size = self._disk.byte_count(self._path(name))
        except OSError:
            return False
        self._note(name, size)
        return True

    def load(self, part: Part, key: bytes, into: NDArray[np.uint8]) -> bool:
        name = _name(part, key)
        path, header = self._path(name), bytearray(HEADER_BYTES)
        try:
            wrong = self._disk.read(path, header, into)
        except FileNotFoundError:
            self._forget(name)
            return False
        wrong = wrong or self._differs(header, self._header(part, key, into))
        if wrong:
            self._throw_away(name, wrong)
            return False
        with suppress(OSError):  # a folder that can only be read still serves pages
            self._disk.touch(path)
        self._note(name, HEADER_BYTES + into.nbytes)
        return True

    @staticmethod
    def _differs(header: bytearray, expected: bytes) -> str:
        """What is wrong with a header, or an empty text."""
        if header == expected:
            return ""
        theirs, ours = _HEADER.unpack(header), _HEADER.unpack(expected)
        differ = [name for name, a, b in zip(_FIELDS, theirs, ours, strict=True) if a != b]
        return f"another {', '.join(differ) or 'reserve'} than expected"

    def save(self, part: Part, key: bytes, data: NDArray[np.uint8]) -> None:
        if self.has(part, key):
            return
        name, size = _name(part, key), HEADER_BYTES + data.nbytes
        self._keep_bound(size)
        with self._lock:
            self._temps += 1
            temp = f".{name.removesuffix('.page')}.{self._writer}-{self._temps}.tmp"
        path, temp_path = self._path(name), self._path(temp)
        try:
            self._disk.write(temp_path, self._header(part, key, data), data)
            self._disk.rename(temp_path, path)
        except OSError:
            with suppress(OSError):
                self._disk.remove(temp_path)
            raise
        self._note(name, size)
        with self._lock:
            self._written += size

    def _header(self, part: Part, key: bytes, data: NDArray[np.uint8]) -> bytes:
        digest = xxhash.xxh3_128_digest(data.data)
        return _HEADER.pack(
            _MAGIC, _VERSION, HEADER_BYTES, int(part), data.nbytes, 0, self._namespace, key, digest
        )  # fmt: skip

    # ---- the index ----------------------------------------------------------------------------------------------

    def counts(self) -> ShelfCounts:
        with self._lock:
            return ShelfCounts(
                pages=len(self._index), byte_count=self._bytes, removed=self._removed, bad=self._bad
            )  # fmt: skip

    def close(self) -> None:
        """Give the lock back: temporary files of this process are leftovers from now on."""
        self._disk.close_folder(self._folder, self._writer)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name.lstrip('.')[:2]}/{name}"

    def _note(self, name: str, size: int) -> None:
        """It is there, and was used just now."""
        with self._lock:
            self._bytes += size - self._index.get(name, 0)
            self._index[name] = size
            self._index.move_to_end(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._index.pop(name, 0)

    def _throw_away(self, name: str, why: str) -> None:
        """A file that has our name and is no page of ours: remove it, so that the page can be stored again."""
        with self._lock:
            self._bad += 1
        self._forget(name)
        with suppress(OSError):
            self._disk.remove(self._path(name))
        self._bad_warning.say(f"pool: storage file {name} counts as missing: {why}")

    def _keep_bound(self, size: int) -> None:
        """Remove the longest unused files until `size` more bytes fit."""
        if self._byte_max is None:
            return
        with self._lock:
            again = self._written * _RESCAN_OF_BOUND >= self._byte_max
            if again:
                self._written = 0
        if again:
            self._scan()
        while True:
            with self._lock:
                if self._bytes + size <= self._byte_max or not self._index:
                    return
                name, gone = self._index.popitem(last=False)
                self._bytes -= gone
                self._removed += 1
            with suppress(FileNotFoundError):
                self._disk.remove(self._path(name))

    def _scan(self) -> None:
        """Make the index from the folder."""
        found = [
            (entry.used_ns, entry.name, entry.byte_count)
            for entry in self._disk.entries(self._folder)
            if _PAGE.fullmatch(entry.name)
        ]
        found.sort()
        with self._lock:
            self._index = OrderedDict((name, size) for _, name, size in found)
            self._bytes = sum(self._index.values())

    def _remove_leftovers(self) -> None:
        """Temporary files of writers that are dead, and their locks."""
        alive: dict[str, bool] = {self._writer: True}
        count = 0
        for entry in self._disk.entries(self._folder):
            match = _TEMP.fullmatch(entry.name)
            if match is None:
                continue
            writer = match[1]
            if writer not in alive:  # its lock is older than its files: this order cannot take a living one for dead
                alive[writer] = self._disk.is_writing(self._folder, writer)
            if not alive[writer]:
                with suppress(OSError):
                    self._disk.remove(entry.path)
                    count += 1
        for writer in self._disk.writers(self._folder):
            self._disk.is_writing(self._folder, writer)
        if count:
            _log.info("pool: removed %d unfinished files of dead writers from %s", count, self._folder)


class FileStorage(QueuedStorage):
    """A PageStorage over a folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        host: Mapping[Part, HostPool],
        namespace: str,
        byte_max: int | None,
        clock: Clock,
        disk: FileSystem | None = None,
        workers: Workers | None = None,
    ) -> None:
        """See PageFiles and QueuedStorage. Raises ConfigError: the folder cannot be used."""
        page_bytes = {part: pool.page_bytes for part, pool in host.items()}
        files = PageFiles(folder, namespace=namespace, page_bytes=page_bytes, byte_max=byte_max, clock=clock, disk=disk)
        super().__init__(files, host=host, clock=clock, workers=workers)


def _name(part: Part, key: bytes) -> str:
    assert len(key) == 16, f"pool: a storage key of {len(key)} bytes, expected 16"
    return f"{key.hex()}-{int(part)}.page"
