"""Notices: which pages were removed from a storage folder lately, for the processes that share it.

A page that was removed may have been read by another engine before; a removal is therefore noted in the folder, and the
others look there. Knows no files of pages.

    FOLDER/.removed/00/WRITER-N.removed     what WRITER removed at once: a header, then 32 bytes a page

A notice is deleted hours later, by the first process that looks then: an engine that did not look for so long has
missed it. What stands in it are page keys under a mask made of the folder's secret: without that they tell nothing.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np
import xxhash

from serinus.core.clock import Clock
from serinus.core.log import get_logger
from serinus.pool.storage.disk import REMOVED, FileSystem, this_hour, write_and_rename
from serinus.pool.storage.listings import Listings

_log = get_logger("pool.storage")
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"SERINUSR"
_NAME = re.compile(r"([0-9a-f]+)-[0-9]+\.removed")
_KEY_BYTES = 16
_RECORD_BYTES = 2 * _KEY_BYTES
_KEPT_S = 4 * 3600


class Notices:
    """The notices of one folder, as one process writes and reads them. Safe to call from several threads."""

    def __init__(self, disk: FileSystem, folder: str, writer: str, secret: bytes, clock: Clock) -> None:
        """What is there already is old: nothing that this process has read was removed by it. Raises OSError."""
        self._disk, self._folder, self._writer = disk, f"{folder}/{REMOVED}", writer
        self.secret, self._clock = secret, clock
        self._count = 0
        self._lock = threading.Lock()
        self._untold: dict[bytes, None] = {}
        self._listings, self._hour = Listings(disk, partial(disk.now_ns, folder, writer)), 0
        self._seen = set(disk.names(f"{self._folder}/00"))

    def put(self, keys: Iterable[bytes]) -> None:
        """Tell the others that these pages were removed. Raises OSError: they are told by the next call."""
        with self._lock:
            self._untold.update(dict.fromkeys(keys))
            self._tell()

    def take(self) -> list[bytes]:
        """Keys of the pages that others removed since the last call, also where nothing can be written. Raises OSError:
        some are told by the next call, or there are none and this process could not write.
        Cost: a look at the folder where nothing changed; a listing of it once in an hour."""
        failure = None
        with self._lock:
            for write in (self._tell, self._drop_old):
                try:
                    write()
                except OSError as error:
                    failure = error
            found = self._take()
        if failure is not None and not found:
            raise failure
        return found

    def _tell(self) -> None:
        if not self._untold:
            return
        body = b"".join(record for key in self._untold for record in self._masked(key))
        self._count += 1
        name = f"{self._writer}-{self._count}.removed"
        temp, path = f"{self._folder}/00/.{name}", f"{self._folder}/00/{name}"
        header = _HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(body))
        data = np.frombuffer(body, np.uint8)
        write_and_rename(self._disk, temp, path, header, data, this_hour(self._clock))
        self._untold.clear()

    def _drop_old(self) -> None:
        """Once in an hour."""
        if self._hour == (hour := this_hour(self._clock)):
            return
        entries = list(self._disk.entries(self._folder))
        for entry in entries:
            if entry.used_ns < hour - _KEPT_S * 10**9:
                with suppress(FileNotFoundError):
                    self._disk.remove(entry.path)
        self._seen &= {entry.name for entry in entries}
        self._hour = hour

    def _take(self) -> list[bytes]:
        folder = f"{self._folder}/00"
        if not self._listings.is_new(folder):
            return []
        found: dict[bytes, None] = {}
        try:
            names = set(self._disk.names(folder)) - self._seen
            for name in sorted(names):
                match = _NAME.fullmatch(name)
                if match is not None and match[1] != self._writer:
                    found.update(dict.fromkeys(self._read(f"{folder}/{name}")))
        except OSError:
            self._listings.forget(folder)
            raise
        self._seen |= names
        return list(found)

    def _read(self, path: str) -> list[bytes]:
        header = bytearray(_HEADER.size)
        try:
            body = np.empty(max(0, self._disk.byte_count(path) - _HEADER.size), np.uint8)
            wrong = self._disk.read(path, header, body)
        except FileNotFoundError:  # it was old
            return []
        magic, digest = _HEADER.unpack(header)
        if wrong or magic != _MAGIC or digest != xxhash.xxh3_64_intdigest(body.data) or len(body) % _RECORD_BYTES:
            _log.warning("pool: %s tells of removed pages and cannot be read: %s", path, wrong or "it is damaged")
            return []
        rows = body.reshape(-1, _RECORD_BYTES)
        return [_xor(row[_KEY_BYTES:].tobytes(), self._mask(row[:_KEY_BYTES].tobytes())) for row in rows]

    def _masked(self, key: bytes) -> tuple[bytes, bytes]:
        """A digest of the key, and the key under the mask that belongs to it."""
        name = blake2b(key, digest_size=_KEY_BYTES, key=self.secret, person=b"removed").digest()
        return name, _xor(key, self._mask(name))

    def _mask(self, name: bytes) -> bytes:
        return blake2b(name, digest_size=_KEY_BYTES, key=self.secret, person=b"mask").digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
