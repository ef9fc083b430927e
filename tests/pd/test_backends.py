"""Backends: bytes staged are bytes fetched, and what a message says of memory is checked before it is believed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import ConfigError, DigestMismatch, InvariantError, TransferFailed
from serinus.pd import (
    Backend,
    LocalBackend,
    ShmBackend,
    TcpBackend,
    digest_pages,
    digest_seed,
    host_identity,
    make_backends,
)
from serinus.pd.backends import Staged
from serinus.pd.backends.base import SpanAllocator
from serinus.pd.backends.shm import _MAPPED_MAX
from serinus.pd.integrity import check_digests
from serinus.wire.messages import Data
from tests.pd.tiny import segment_count

AREA = 1 << 16


def backend_of(name: str) -> Backend:
    made: dict[str, Backend] = {"local": LocalBackend(AREA), "shm": ShmBackend(AREA), "tcp": TcpBackend(AREA)}
    return made[name]


def data_of(staged: Staged, **changes: object) -> Data:
    values: dict[str, object] = {
        "xid": "x",
        "grant": 1,
        "piece": 0,
        "first": 0,
        "digests": b"",
        "byte_count": staged.room.nbytes,
        "shm_name": staged.shm_name,
        "shm_offset": staged.shm_offset,
    }
    return Data(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_bytes_staged_are_bytes_fetched(name: str) -> None:
    backend = backend_of(name)
    sender, receiver = backend.sender(), backend.receiver()
    for value in range(50):
        staged = sender.stage(1000 + value)
        assert staged is not None
        staged.room[:] = value
        found = receiver.fetch(data_of(staged), staged.room.data if staged.inline else b"")
        assert found.shape == (1000 + value,)
        assert (found == value).all()
        sender.release(staged.key)
    receiver.close()
    sender.close()


def test_segments_of_several_ranks_stay_mapped_and_the_oldest_make_room() -> None:
    backend = ShmBackend(AREA)
    senders, receiver = [backend.sender() for _ in range(_MAPPED_MAX + 2)], backend.receiver()
    for turn in range(2):
        for value, sender in enumerate(senders):
            staged = sender.stage(100)
            assert staged is not None
            staged.room[:] = value + turn
            assert (receiver.fetch(data_of(staged), b"") == value + turn).all()
            assert len(receiver._areas) <= _MAPPED_MAX  # type: ignore[attr-defined]
            sender.release(staged.key)
    receiver.close()
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_a_full_area_says_so_and_has_room_again_after_a_release(name: str) -> None:
    sender = backend_of(name).sender()
    first, second = sender.stage(AREA // 2), sender.stage(AREA // 2)
    assert first is not None
    assert second is not None
    assert sender.stage(64) is None
    sender.release(first.key)
    third = sender.stage(AREA // 2)
    assert third is not None
    third.room[:] = 3
    second.room[:] = 2
    assert (third.room == 3).all()
    sender.close()


def test_no_segment_has_a_name_that_could_be_left_behind() -> None:
    def mapped() -> Counter[str]:
        """Shared memory of this process, by name: other processes make and remove theirs meanwhile."""
        rows = (row.split(maxsplit=5) for row in Path("/proc/self/maps").read_text().splitlines())
        return Counter(row[5] for row in rows if len(row) > 5 and row[5].startswith(("/dev/shm/", "/memfd:")))

    before = mapped()
    sender = ShmBackend(AREA).sender()
    assert sender.stage(100) is not None
    assert mapped() - before == {"/memfd:serinus-kv (deleted)": 1}
    sender.close()


def test_a_receiver_can_read_on_after_the_sender_has_closed() -> None:
    backend = ShmBackend(AREA)
    sender, receiver = backend.sender(), backend.receiver()
    staged = sender.stage(64)
    assert staged is not None
    staged.room[:] = 7
    found = receiver.fetch(data_of(staged), b"")
    sender.close()
    assert (found == 7).all()


def test_closed_senders_and_receivers_leave_no_descriptor_open() -> None:
    before = segment_count()
    for _ in range(5):
        backend = ShmBackend(AREA)
        sender, receiver = backend.sender(), backend.receiver()
        staged = sender.stage(64)
        assert staged is not None
        receiver.fetch(data_of(staged), b"")
        receiver.close()
        sender.close()
        del staged, sender, receiver
    assert segment_count() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"shm_offset": AREA},
        {"shm_offset": (1 << 63) - 1},
        {"byte_count": AREA + 1},
        {"shm_name": ""},
        {"shm_name": "../../etc/passwd"},
        {"shm_name": "1:2:3"},
        {"shm_name": "99999999999:1:1"},
        {"shm_name": f"{os.getpid()}:0:0"},
        {"shm_name": f"{os.getpid()}:99999:1"},
    ],
    ids=[
        "offset at the end", "offset far away", "too many bytes", "no name", "a path", "no such descriptor",
        "no such process", "a descriptor that is no segment", "a descriptor that is not open",
    ],
)  # fmt: skip
def test_what_data_says_of_a_segment_is_checked(changes: dict[str, object]) -> None:
    backend = ShmBackend(AREA)
    sender, receiver = backend.sender(), backend.receiver()
    staged = sender.stage(64)
    assert staged is not None
    with pytest.raises(TransferFailed):
        receiver.fetch(data_of(staged, **changes), b"")
    sender.close()


def test_a_descriptor_that_is_another_file_or_another_segment_is_not_mapped(tmp_path: Path) -> None:
    receiver = ShmBackend(AREA).receiver()
    sender = ShmBackend(AREA).sender()
    staged = sender.stage(64)
    assert staged is not None
    pid, fd, inode = staged.shm_name.split(":")
    with pytest.raises(TransferFailed, match="another one"):
        receiver.fetch(data_of(staged, shm_name=f"{pid}:{fd}:{int(inode) + 1}"), b"")
    with (tmp_path / "f").open("wb") as file:
        file.truncate(AREA)
        name = f"{pid}:{file.fileno()}:{os.fstat(file.fileno()).st_ino}"
        with pytest.raises(TransferFailed, match="no segment"):
            receiver.fetch(data_of(staged, shm_name=name), b"")
    unsealed = os.memfd_create("serinus-kv")
    os.ftruncate(unsealed, AREA)
    with pytest.raises(TransferFailed, match="sealed"):
        receiver.fetch(data_of(staged, shm_name=f"{pid}:{unsealed}:{os.fstat(unsealed).st_ino}"), b"")
    os.close(unsealed)
    sender.close()


@pytest.mark.parametrize("payload", [b"", b"x" * 63, b"x" * 65])
def test_a_payload_of_another_size_is_not_taken(payload: bytes) -> None:
    sender = TcpBackend(AREA).sender()
    staged = sender.stage(64)
    assert staged is not None
    with pytest.raises(TransferFailed):
        TcpBackend(AREA).receiver().fetch(data_of(staged), payload)


def test_a_choice_is_a_list_of_backends() -> None:
    assert [backend.name for backend in make_backends("auto")] == ["shm", "tcp"]
    assert [backend.name for backend in make_backends("tcp")] == ["tcp"]
    assert [backend.name for backend in make_backends("shm")] == ["shm"]
    with pytest.raises(ConfigError, match="expected auto, shm or tcp"):
        make_backends("nixl")
    with pytest.raises(ConfigError, match="staging area"):
        TcpBackend(0).sender()


def test_a_machine_knows_itself() -> None:
    assert host_identity() == host_identity()
    assert host_identity().count("/") == 2


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400)), max_size=60))
def test_spans_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    spans = SpanAllocator(1024)
    held: dict[int, tuple[int, int]] = {}
    for which, size in steps:
        if which < 5 and held:
            key = list(held)[which % len(held)]
            spans.give(key)
            del held[key]
        else:
            taken = spans.take(size)
            if taken is not None:
                key, start = taken
                assert start % 64 == 0
                assert start + size <= 1024
                for other, length in held.values():
                    assert start + size <= other or other + length <= start
                held[key] = (start, size)
    for key in held:
        spans.give(key)
    assert spans.take(1024) is not None, "in one piece"
    with pytest.raises(InvariantError, match="not handed out"):
        spans.give(10_000)


def test_digests_name_the_first_page_that_differs() -> None:
    pages = np.arange(4 * 96, dtype=np.uint8).reshape(4, 96)
    digests = digest_pages(pages, 5)
    assert len(digests) == 32
    check_digests(digest_pages(pages, 5), digests, first=10)
    changed = pages.copy()
    changed[2, 50] ^= 1
    with pytest.raises(DigestMismatch, match="page 12 of"):
        check_digests(digest_pages(changed, 5), digests, first=10)
    with pytest.raises(DigestMismatch, match="page 10 of"):  # another handoff's digests do not pass
        check_digests(digest_pages(pages, 6), digests, first=10)


def test_no_two_grants_have_the_same_seed() -> None:
    seeds = {digest_seed(incarnation, grant) for incarnation in range(1, 50) for grant in range(1, 50)}
    assert len(seeds) == 49 * 49
    assert all(0 <= seed < 1 << 63 for seed in seeds)
