"""The queue before a shelf: which task goes first, what is bounded, what ends how."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Collection

import numpy as np
import pytest

from serinus.core.clock import WallClock
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.pool import HostPool, ThreadWorkers
from serinus.pool.storage import QueuedStorage, ShelfCounts
from tests.pool.storing import FULL, KEYS, only, pages, stored
from tests.pool.writers import bytes_of


class PageDict:
    """A shelf in memory."""

    def __init__(self) -> None:
        self.pages: dict[tuple[Part, bytes], bytes] = {}

    def has(self, part: Part, key: bytes) -> bool:
        return (part, key) in self.pages

    def load(self, part: Part, key: bytes, into: np.ndarray) -> bool:
        data = self.pages.get((part, key))
        if data is not None:
            into[:] = np.frombuffer(data, np.uint8)
        return data is not None

    def save(self, part: Part, key: bytes, data: np.ndarray, before: bytes) -> None:
        self.pages[part, key] = data.tobytes()

    def remove(self, keys: Collection[bytes]) -> int:
        gone = [entry for entry in self.pages if entry[1] in keys]
        for entry in gone:
            del self.pages[entry]
        return len(gone)

    def recalled(self) -> list[bytes]:
        return []

    def counts(self) -> ShelfCounts:
        return ShelfCounts(pages=len(self.pages))

    def close(self) -> None:
        pass


class HeldShelf(PageDict):
    """A shelf of which each call waits for a permit of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.permits, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[str] = []
        self.fail_with: BaseException | None = None

    def _wait(self, what: str, key: bytes) -> None:
        self.calls.append(f"{what} {int.from_bytes(key[8:], 'big')}")
        self.arrived.release()
        assert self.permits.acquire(timeout=60), "the test forgot a permit"
        if self.fail_with is not None:
            raise self.fail_with

    def load(self, part: Part, key: bytes, into: np.ndarray) -> bool:
        self._wait("load", key)
        return super().load(part, key, into)

    def save(self, part: Part, key: bytes, data: np.ndarray, before: bytes) -> None:
        self._wait("save", key)
        super().save(part, key, data, before)


def held(host: HostPool, **more: int) -> tuple[HeldShelf, QueuedStorage]:
    shelf = HeldShelf()
    return shelf, QueuedStorage(shelf, host={FULL: host}, clock=WallClock(), workers=ThreadWorkers("test"), **more)


def test_reads_go_before_writes_that_wait(host: HostPool) -> None:
    shelf, storage = held(host)
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    assert shelf.arrived.acquire(timeout=60)
    storage.write(2, FULL, KEYS[1:2], pages(2, 1))
    storage.read(3, FULL, KEYS[:1], pages(11, 1))
    shelf.permits.release(3)
    assert {d.op: d.good for d in storage.wait()} == {1: 1, 2: 1, 3: 1}
    assert shelf.calls == ["save 0", "load 0", "save 1"]
    assert np.array_equal(host.data_PY[11], bytes_of(KEYS[0]))
    storage.close()


def test_a_cancelled_read_ends_after_the_page_it_is_at(host: HostPool) -> None:
    shelf, storage = held(host)
    shelf.permits.release(6)
    stored(storage)
    for _ in range(6):
        assert shelf.arrived.acquire(timeout=60)
    storage.read(2, FULL, KEYS, pages(11, 6))
    assert shelf.arrived.acquire(timeout=60)
    storage.cancel(2)
    storage.cancel(77)
    shelf.permits.release(1)
    assert only(storage.wait()).good == 1
    assert shelf.calls[6:] == ["load 0"]
    storage.close()


class CountingShelf(PageDict):
    """A shelf that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def has(self, part: Part, key: bytes) -> bool:
        self.asked += 1
        return super().has(part, key)


def test_a_question_ends_at_the_first_key_that_its_first_part_lacks(host: HostPool) -> None:
    shelf = CountingShelf()
    storage = QueuedStorage(shelf, host={FULL: host}, clock=WallClock())
    for part, indices in {FULL: (0, 1, 3), Part.SWA: (1, 2, 3)}.items():
        shelf.pages |= {(part, KEYS[index]): b"" for index in indices}
    storage.query(1, KEYS[:4], [FULL, Part.SWA])
    found = [part.tolist() for part in only(storage.wait()).present]
    assert found == [[True, True, False, False], [False, True, False, False]]
    assert shelf.asked == 5
    shelf.asked = 0
    storage.query(2, [b"%016d" % index for index in range(60_000)], [FULL, Part.SWA])  # shares of 512, two workers
    done = only(storage.wait())
    assert not any(part.any() for part in done.present)
    assert shelf.asked <= 2, "no more than one key of each worker"
    storage.close()


def test_what_does_not_fit_the_queue_ends_at_once_as_not_done(host: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    shelf, storage = held(host, queued_pages_max=4)
    storage.write(1, FULL, KEYS[:3], pages(1, 3))
    with caplog.at_level(logging.WARNING, "serinus"):
        storage.write(2, FULL, KEYS[:2], pages(1, 2))
    done = only(storage.poll())
    assert (done.op, done.good, done.error) == (2, 0, "3 keys wait for a write already")
    assert "dropped a storage write of 2 keys" in caplog.text
    shelf.permits.release(5)
    storage.wait()
    storage.write(3, FULL, KEYS[:2], pages(1, 2))
    assert only(storage.wait()).good == 2
    storage.close()


def test_a_medium_that_fails_while_reading_is_a_miss(host: HostPool) -> None:
    shelf, storage = held(host)
    shelf.fail_with = OSError(errno.EIO, "Input/output error")
    shelf.permits.release(1)
    storage.read(1, FULL, KEYS, pages(11, 6))
    done = only(storage.wait())
    assert done.good == 0
    assert "Input/output error" in done.error
    storage.close()


def test_closing_writes_what_is_queued_as_far_as_time_allows(host: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = PageDict()
    storage = QueuedStorage(shelf, host={FULL: host}, clock=WallClock())
    storage.write(1, FULL, KEYS, pages(1, 6))
    storage.close()
    assert len(shelf.pages) == 6
    held_shelf, stuck = held(host)
    stuck.write(1, FULL, KEYS[:1], pages(1, 1))
    assert held_shelf.arrived.acquire(timeout=60)
    stuck.write(2, FULL, KEYS[1:2], pages(2, 1))
    monkeypatch.setattr("serinus.pool.storage.io._DRAIN_S_MAX", 0.01)
    closing = threading.Thread(target=stuck.close)
    closing.start()

    def ask_on() -> None:
        for op in range(3, 1 << 30):
            stuck.query(op, [], [FULL])

    with pytest.raises(InvariantError, match="after close"):
        ask_on()
    held_shelf.permits.release()
    closing.join(60)
    assert held_shelf.calls == ["save 0"]


def test_operations_that_make_no_sense_break_a_promise(host: HostPool) -> None:
    shelf, storage = held(host)
    with pytest.raises(InvariantError, match="2 keys and 1 host pages"):
        storage.read(1, FULL, KEYS[:2], pages(1, 1))
    with pytest.raises(InvariantError, match="inside of its pool"):
        storage.write(1, FULL, KEYS[:1], pages(0, 1))
    with pytest.raises(InvariantError, match="inside of its pool"):
        storage.write(1, FULL, KEYS[:1], pages(20, 1))
    storage.write(1, FULL, KEYS[:1], pages(1, 1))
    with pytest.raises(InvariantError, match="operation 1 submitted twice"):
        storage.write(1, FULL, KEYS[:1], pages(1, 1))
    shelf.permits.release(1)
    storage.wait()
    storage.read(2, FULL, [], pages(1, 0))
    assert only(storage.poll()).op == 2
    storage.close()
