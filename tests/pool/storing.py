"""What the storage tests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serinus.core.moves import StorageDone
from serinus.core.parts import Part
from serinus.pool import HostPool
from serinus.pool.storage import FileStorage, PageFiles, QueuedStorage
from serinus.pool.storage.file import header_room
from tests.pool.writers import SPEC, bytes_of, key_of

FULL, SWA = Part.FULL, Part.SWA
KEYS = [key_of(i) for i in range(6)]
ROOM = header_room(SPEC.page_bytes)
FILE_BYTES = ROOM + SPEC.page_bytes


def pages(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def only(done: list[StorageDone]) -> StorageDone:
    assert len(done) == 1, done
    return done[0]


def stored(storage: QueuedStorage, keys: Sequence[bytes] = KEYS, op: int = 1) -> None:
    storage.write(op, FULL, keys, pages(1, len(keys)))
    done = only(storage.wait())
    assert (done.good, done.error) == (len(keys), "")


def read(storage: QueuedStorage, host: HostPool, keys: Sequence[bytes] = KEYS, op: int = 900) -> int:
    """Leading pages that came; each of them is checked byte for byte."""
    host.data_PY[11:] = 0xEE
    storage.read(op, FULL, keys, pages(11, len(keys)))
    done = only(storage.wait())
    for i, key in enumerate(keys[: done.good]):
        assert np.array_equal(host.data_PY[11 + i], bytes_of(key)), f"page {i} came wrong"
    return done.good


def file_of(storage: FileStorage, key: bytes, part: Part = FULL) -> Path:
    assert isinstance(storage.shelf, PageFiles)
    return storage.shelf.path_of(part, key)


def moved(file: Path, target: Path) -> None:
    """A file under another page's name."""
    target.parent.mkdir(exist_ok=True)
    file.rename(target)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.page"))


def leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/.*"))
