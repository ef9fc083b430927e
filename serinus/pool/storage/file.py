"""FileStorage: one file per page and part, in a folder that outlives the engine and that several engines may share.

A file is written under a temporary name and then renamed, so that a reader sees all of it or nothing; and because disks
fail, processes crash and people edit files, a page is believed only after its header and the digest of its bytes were
compared with what is expected: magic, version, namespace, key, part, size. Anything else is a miss and a line in the
log. Nothing is flushed to the disk: after a power cut a page may be torn, and then it is a miss.

    FOLDER/ab/abcdef...-0.page        header, payload
    FOLDER/ab/.abcdef...WRITER.tmp    being written by WRITER
    FOLDER/.writers/WRITER.lock       locked while WRITER is alive; temporary files of others are leftovers
    FOLDER/.removed/                  which pages were removed lately; see removals.py
    FOLDER/.secret                    names are digests of page keys under this: they tell no prompt

The index of names is in memory; it is made from a scan at start and again now and then, so that several processes keep
one size bound between them. What goes for room is the longest unused of the pages that no other one continues: without
a page, those that continue it are of no use. A page's time of last use is its file's mtime, to the hour: it tells
little of when a prompt was asked. Pages used in one hour by other processes count as equally old.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.pool.storage.disk import (
    BLOCK_BYTES,
    WRITERS,
    Disk,
    FileSystem,
    remove_leftovers,
    this_hour,
    write_and_rename,
)
from serinus.pool.storage.io import RareWarning, ShelfCounts
from serinus.pool.storage.listings import Listings
from serinus.pool.storage.removals import Notices
from serinus.pool.storage.uses import Uses

_log = get_logger("pool.storage")
_HEADER = struct.Struct("<8sHHBxxxQI4x16s16s16s16s32x")
_MAGIC, _VERSION = b"SERINUSP", 3
HEADER_BYTES = _HEADER.size
"""Magic, version, header size, part, payload bytes, bytes of stamps (none yet), namespace, key, digest, key of the
page before; 32 of room."""
_FIELDS = ("magic", "version", "header size", "part", "size", "stamps", "namespace", "key", "digest", "page before")
_KEY, _BEFORE = 7, 9
"""Of the header's fields."""
_UNKNOWN = bytes(16)
"""The key of a page before that the writer did not know."""
_PAGE = re.compile(r"[0-9a-f]{32}-[0-9]\.page")
_TEMP = re.compile(r"\.[0-9a-f]{32}-[0-9]\.([0-9a-f]+)-[0-9]+\.tmp")
_RESCAN_OF_BOUND = 16
"""The folder is scanned again after writing this fraction of the bound: by so much may each process overstep it."""


@dataclass(slots=True)
class _File:
    """What the index knows of a file."""

    size: int
    before: str | None = None
    """Digest in the names of the page before it; empty = it is no page of ours, None = not known yet."""


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
            byte_max: bytes of all files together; the longest unused go first, but what is continued after what
                continues it. None = no bound.
            clock: spaces warnings.
            disk: where the folder is; None = the operating system's.
        Raises:
            ConfigError: the folder cannot be used, others may look into it, or not one page fits the bound.
        Cost: a scan of the folder, about 3 us a file.
        """
        largest = max((size + header_room(size) for size in page_bytes.values()), default=0)
        if byte_max is not None and byte_max < largest:
            raise ConfigError(
                f"pool: storage of {byte_max} bytes, expected at least {largest}, one page and its header"
            )
        self._folder = str(folder)
        self._namespace = xxhash.xxh3_128_digest(namespace.encode())
        self._byte_max, self._disk = byte_max, disk or Disk()
        self._parts, self._clock = tuple(page_bytes), clock
        self._bad_warning = RareWarning(clock)
        self._lock, self._removing = threading.Lock(), threading.Lock()
        self._index: dict[str, _File] = {}
        self._uses = Uses()
        self._after: dict[str | None, dict[str, None]] = {}
        """Names of the index, in order, by what it knows of the page before them; and digests of pages in `_gone`."""
        self._gone: dict[str, str] = {}
        """Of pages that have no file any more and are continued by pages that have: the page before them."""
        self._bytes = self._written = self._removed = self._bad = self._temps = 0
        self._writer = f"{new_incarnation():x}"
        self._listings = Listings(self._disk, partial(self._disk.now_ns, self._folder, self._writer))
        try:
            self._secret = self._disk.open_folder(self._folder, self._writer)
            self._nothing = ("", self._digest(_UNKNOWN))
            self._notices = Notices(self._disk, self._folder, self._writer, self._secret, clock)
            self._scan()
            remove_leftovers(self._disk, self._folder, self._writer, _TEMP)
            self._keep_bound(0)
        except OSError as error:
            raise ConfigError(
                f"pool: storage folder {self._folder!r} cannot be used ({error}), expected one that can be "
                f"written and locked"
            ) from error

    # ---- one page -----------------------------------------------------------------------------------------------

    def has(self, part: Part, key: bytes) -> bool:
        name = self._name(part, key)
        if name in self._index:
            return True
        try:
            size = self._disk.byte_count(self._path(name))
        except OSError:
            return False
        self._note(name, size)
        return True

    def load(self, part: Part, key: bytes, into: NDArray[np.uint8]) -> bool:
        name = self._name(part, key)
        path, header = self._path(name), bytearray(header_room(into.nbytes))
        try:
            wrong = self._disk.read(path, header, into)
        except FileNotFoundError:
            self._forget(name)
            self._look_again(name)
            return False
        before: bytes = _HEADER.unpack_from(header)[_BEFORE]
        wrong = wrong or self._differs(header, self._header(part, key, into, before))
        if wrong:
            self._throw_away(name, wrong)
            return False
        with suppress(OSError):  # a folder that can only be read still serves pages
            self._disk.touch(path, this_hour(self._clock))
        self._note(name, len(header) + into.nbytes, self._digest(before))
        return True

    @staticmethod
    def _differs(header: bytearray, expected: bytes) -> str:
        """What is wrong with a header, or an empty text."""
        if header == expected:
            return ""
        theirs, ours = _HEADER.unpack_from(header), _HEADER.unpack_from(expected)
        differ = [name for name, a, b in zip(_FIELDS, theirs, ours, strict=True) if a != b]
        return f"another {', '.join(differ) or 'reserve'} than expected"

    def save(self, part: Part, key: bytes, data: NDArray[np.uint8], before: bytes = _UNKNOWN) -> None:
        if self.has(part, key):
            return
        name, size = self._name(part, key), header_room(data.nbytes) + data.nbytes
        self._keep_bound(size)
        with self._lock:
            self._temps += 1
            temp = f".{name.removesuffix('.page')}.{self._writer}-{self._temps}.tmp"
        header, hour = self._header(part, key, data, before), this_hour(self._clock)
        try:
            write_and_rename(self._disk, self._path(temp), self._path(name), header, data, hour)
        except FileNotFoundError:
            if not self._look_again(name):
                raise
            self.save(part, key, data, before)
            return
        self._note(name, size, self._digest(before))
        with self._lock:
            self._written += size

    def _header(self, part: Part, key: bytes, data: NDArray[np.uint8], before: bytes) -> bytes:
        digest = xxhash.xxh3_128_digest(data.data, xxhash.xxh3_64_intdigest(before))
        fields = (_MAGIC, _VERSION, HEADER_BYTES, int(part), data.nbytes, 0, self._namespace, key, digest, before)
        return _HEADER.pack(*fields).ljust(header_room(data.nbytes), b"\0")

    # ---- removal ------------------------------------------------------------------------------------------------

    def remove(self, keys: Collection[bytes]) -> int:
        """Delete pages, and all that continue them in this folder, also of other processes; then tell these.

        Returns how many files went. Cost: what is removed; where other processes came or went, or are there, a listing
        of those folders `ab/` that changed since the last removal; and a read of the header of each file that this
        process neither wrote nor read nor looked at before (about 15 us). Raises OSError: the medium fails; what was
        not told is told with the next removal, or when others are looked for.
        """
        named = {self._digest(key): key for key in keys}
        failure: OSError | None = None
        with self._removing:
            for learn in (self._note_new, self._look_up):
                try:
                    learn()
                except OSError as error:
                    failure = error
        count, undone = self._delete_pages(self._with_continuing(named), named)
        self._notices.put(named.values())
        if (failed := undone or failure) is not None:
            raise failed
        return count

    def recalled(self) -> Sequence[bytes]:
        """Keys of pages that other processes removed since the last call, from this folder, and of pages that continue
        them and went now: this process stored them when the others had looked, and they learn it. Raises OSError."""
        keys = self._notices.take()
        named = {self._digest(key): key for key in keys}
        behind = [digest for digest in self._with_continuing(named) if digest not in named]
        for name in (_file_name(digest, part) for digest in named for part in self._parts):
            self._forget(name)
        if self._delete_pages(behind, named)[0]:
            with suppress(OSError):  # told with the next removal
                self._notices.put(list(named.values())[len(keys) :])
        return list(named.values())

    def _delete_pages(self, digests: Iterable[str], named: dict[str, bytes]) -> tuple[int, OSError | None]:
        """Remove the files of pages: how many went, and why others did not. `named` gets the key of each that has none
        there and of which a file says it."""
        count, failure = 0, None
        for digest in digests:
            for name in (_file_name(digest, part) for part in self._parts):
                header = bytearray(HEADER_BYTES)
                with suppress(OSError):
                    if digest not in named and self._disk.head(self._path(name), header):
                        named[digest] = _HEADER.unpack(header)[_KEY]
                try:
                    count += self._delete(name)
                except OSError as error:
                    failure = error
        return count, failure

    def _note_new(self) -> None:
        """Note the files that other processes wrote: none while no writer comes or goes and there is no other one.
        Raises OSError: the next removal lists what this one could not."""
        others = self._listings.is_new(f"{self._folder}/{WRITERS}")
        alone = not others and list(self._disk.writers(self._folder)) == [self._writer]
        doubtful = cache(self._doubtful)
        for folder in (f"{self._folder}/{number:02x}" for number in range(256)):
            if not self._listings.is_new(folder, alone=alone):
                continue
            doubted = doubtful().get(folder, ())
            with self._lock:
                for name in doubted:
                    if name in self._index:
                        self._continues(name, None)
            try:
                names = [name for name in self._disk.names(folder) if name not in self._index]
                for name in sorted(filter(_PAGE.fullmatch, names)):
                    with suppress(FileNotFoundError):  # it is gone by now
                        self._note(name, self._disk.byte_count(self._path(name)))
            except OSError:
                self._listings.forget(folder)
                raise

    def _doubtful(self) -> Mapping[str, Sequence[str]]:
        """Names of the index of which no page before is known, by the folder they are in. Other processes may have
        removed the file and stored it again: what its first writer did not know, the second one may have known."""
        found: dict[str, list[str]] = {}
        with self._lock:
            for name in (name for before in self._nothing for name in self._after.get(before, ())):
                if name in self._index:
                    found.setdefault(self._folder_of(name), []).append(name)
        return found

    def _look_up(self) -> None:
        """Learn from their headers which pages the files continue of which that is not known yet. Raises OSError: some
        cannot be read, and are looked at again by the next removal."""
        with self._lock:
            names = list(self._after.get(None, ()))
        header, failure = bytearray(HEADER_BYTES), None
        for name in names:
            try:
                is_ours = self._disk.head(self._path(name), header) and header[:8] == _MAGIC
            except (FileNotFoundError, IsADirectoryError):
                self._forget(name)
                continue
            except OSError as error:
                failure = error
                continue
            before = self._digest(_HEADER.unpack(header)[_BEFORE]) if is_ours else ""
            with self._lock:
                if name in self._index:
                    self._continues(name, before)
        if failure is not None:
            raise failure

    def _with_continuing(self, digests: Iterable[str]) -> list[str]:
        """Digests in the names of these pages, and of all that come after them."""
        found = dict.fromkeys(digests)
        pending = list(found)
        with self._lock:
            while pending:
                after = dict.fromkeys(_digest_in(name) for name in self._after.get(pending.pop(), ()))
                pending += [digest for digest in after if digest not in found]
                found |= after
        return list(found)

    # ---- the index ----------------------------------------------------------------------------------------------

    def counts(self) -> ShelfCounts:
        with self._lock:
            return ShelfCounts(pages=len(self._index), byte_count=self._bytes, removed=self._removed, bad=self._bad)

    def close(self) -> None:
        """Give the lock back: temporary files of this process are leftovers from now on."""
        self._disk.close_folder(self._folder, self._writer)

    def path_of(self, part: Part, key: bytes) -> Path:
        """Where a page's file is, or would be."""
        return Path(self._path(self._name(part, key)))

    def _name(self, part: Part, key: bytes) -> str:
        return _file_name(self._digest(key), part)

    def _digest(self, key: bytes) -> str:
        """What stands for a page key in the names of this folder. Cost: about a microsecond."""
        assert len(key) == 16, f"pool: a storage key of {len(key)} bytes, expected 16"
        return blake2b(key, digest_size=16, key=self._secret).hexdigest()

    def _path(self, name: str) -> str:
        return f"{self._folder_of(name)}/{name}"

    def _folder_of(self, name: str) -> str:
        return f"{self._folder}/{name.lstrip('.')[:2]}"

    def _note(self, name: str, size: int, before: str | None = None) -> None:
        """It is there, and was used just now."""
        with self._lock:
            file = self._index.setdefault(name, _File(0))
            self._bytes += size - file.size
            file.size = size
            self._uses.note(name)
            self._continues(name, before or file.before)

    def _continues(self, name: str, before: str | None) -> None:
        """A file of the index continues this page. With the lock held."""
        file = self._index[name]
        self._after.setdefault(before, {})[name] = None
        if file.before != before:
            self._unlink(name, file.before)
        file.before = before

    def _unlink(self, name: str, before: str | None) -> None:
        """It continues this page no more; and where nothing does, pages that are gone need not be known. With the lock
        held."""
        row = self._after.get(before, {})
        row.pop(name, None)
        while before and not row and self._after.pop(before, None) is not None:
            if before not in self._gone:
                for part in self._parts:
                    self._uses.may_go(_file_name(before, part))
                return
            name, before = before, self._gone.pop(before)
            row = self._after[before]
            del row[name]

    def _take_out(self, name: str) -> bool:
        """Take a file from the index; whether it was there. With the lock held."""
        file, digest = self._index.pop(name, None), _digest_in(name)
        if file is None:
            return False
        self._bytes -= file.size
        self._uses.forget(name)
        if file.before and digest in self._after and digest not in self._gone:
            self._gone[digest] = file.before
            self._after[file.before][digest] = None
        self._unlink(name, file.before)
        return True

    def _forget(self, name: str) -> None:
        """It was not there. Another thread or process may have written it meanwhile: its folder is listed again."""
        with self._lock:
            if self._take_out(name):
                self._list_again(name)

    def _look_again(self, name: str) -> bool:
        """A file was not there. Where the folder was deleted it is made again, with its secret unless another process
        was there first; where its folder `ab/` was, what is there now is learned. Whether the whole folder was. Raises
        OSError."""
        with self._removing:
            was_open = self._disk.is_open(self._folder, self._writer)
            if not was_open:
                _log.warning("pool: storage folder %s was deleted, and is made again", self._folder)
                self._secret = self._disk.open_folder(self._folder, self._writer, self._secret)
                self._notices.secret, self._nothing = self._secret, ("", self._digest(_UNKNOWN))
            if not was_open or not self._disk.changed_ns(self._folder_of(name)):
                self._scan()
        return not was_open

    def _delete(self, name: str) -> bool:
        """Forget and remove a file; whether it was there. Raises OSError: it may be there still."""
        with self._lock:
            self._take_out(name)
        try:
            self._disk.remove(self._path(name))
        except FileNotFoundError:
            return False
        except OSError:
            self._list_again(name)
            raise
        return True

    def _list_again(self, name: str) -> None:
        """The folder of a file, by the next removal."""
        self._listings.forget(self._folder_of(name))

    def _throw_away(self, name: str, why: str) -> None:
        """A file that has our name and is no page of ours: remove it, so that the page can be stored again."""
        with self._lock:
            self._bad += 1
        with suppress(OSError):
            self._delete(name)
        self._bad_warning.say(f"pool: storage file {name} counts as missing: {why}")

    def _keep_bound(self, size: int) -> None:
        """Remove the longest unused files that no other one continues until `size` more bytes fit. Cost: beside what is
        removed, a read of the header of each file of which it is not known what it continues, once."""
        if self._byte_max is None:
            return
        with self._lock:
            again = self._written * _RESCAN_OF_BOUND >= self._byte_max
            if again:
                self._written = 0
        if again:
            self._scan()
        if self._bytes + size > self._byte_max:
            with self._removing, suppress(OSError):  # of what cannot be read it is as if it continued nothing
                self._look_up()
        while True:
            with self._lock:
                if self._bytes + size <= self._byte_max or not self._index:
                    return
                name = self._uses.longest_unused(self._is_continued)
                if name is None:  # by damaged headers they continue each other in a circle
                    name = next(iter(self._index))
                self._take_out(name)
                self._removed += 1
            self._delete(name)

    def _is_continued(self, name: str) -> bool:
        return _digest_in(name) in self._after

    def _scan(self) -> None:
        """Make the index from the folder. Of files used in the same hour, those that this process used last come last,
        in its order."""
        found = [entry for entry in self._disk.entries(self._folder) if _PAGE.fullmatch(entry.name)]
        with self._lock:
            found.sort(key=lambda entry: (entry.used_ns, self._uses.place(entry.name), entry.name))
            for name in self._index.keys() - {entry.name for entry in found}:
                self._take_out(name)
            for entry in found:
                file = self._index.setdefault(entry.name, _File(0))
                file.size = entry.byte_count
                self._continues(entry.name, file.before)
            self._uses.reset(entry.name for entry in found)
            self._bytes = sum(file.size for file in self._index.values())
            self._listings.clear()  # of what was noted since the scan began


def header_room(page_bytes: int) -> int:
    """Bytes of a file before its page: a whole block before a page of whole blocks, which then go past page cache."""
    return BLOCK_BYTES if page_bytes and page_bytes % BLOCK_BYTES == 0 else HEADER_BYTES


def _file_name(digest: str, part: Part) -> str:
    return f"{digest}-{int(part)}.page"


def _digest_in(name: str) -> str:
    """The first half of a file's name: of all parts of one page the same."""
    return name.partition("-")[0]
