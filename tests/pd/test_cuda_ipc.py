"""Backend cuda_ipc over memory of this process: what is read, how long it stays open, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends import (
    CudaIpcBackend,
    OpState,
    PageRows,
    Region,
    SharedAllocation,
    pack_endpoint,
    strips_between_rows,
    unpack_endpoint,
)
from tests.pd.gather import Gather, sums_of

PAGES, STRIP, LANES = 20, 32, 2
BYTES = PAGES * STRIP * LANES
SOME = np.array([3, 9, 4], np.int32)
OTHERS = np.array([17, 1, 8], np.int32)


def region(address: int, *, strip: int = STRIP, pages: int = PAGES, part: Part = Part.FULL) -> Region:
    return Region(
        part=part, address=address, lane_count=LANES, lane_stride=strip * pages, strip_bytes=strip, page_count=pages
    )


@dataclass(slots=True)
class Device:
    """Its memory: allocations by where they are; processes see the same addresses, and others where they open them."""

    memory: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    """Allocations that are open now."""
    opens: int = 0

    def add(self, fill: int) -> int:
        """A pool; returns where it is."""
        address = (len(self.memory) + 1) << 20
        self.memory[address] = ((np.arange(BYTES) * 31 + fill) % 251).astype(np.uint8)
        return address

    def at(self, address: int, count: int) -> NDArray[np.uint8]:
        """Bytes there, seen from any process."""
        start = address & ((1 << 40) - 1)
        base = max(each for each in self.memory if each <= start)
        return self.memory[base][start - base : start - base + count]


@dataclass(slots=True)
class Library:
    """IpcLibrary of one process."""

    machine: Device
    process: str
    device: str = "gpu-0"
    reachable: tuple[str, ...] = ("gpu-0",)
    gathers: list[Gather] = field(default_factory=list)

    def mark(self) -> object:
        return self

    def is_idle(self) -> bool:
        return True

    def warm(self, regions: Sequence[Region]) -> None:
        """There is nothing to compile."""

    def share(self, address: int) -> SharedAllocation:
        base = max(each for each in self.machine.memory if each <= address)
        return SharedAllocation(handle=base.to_bytes(8, "little"), address=base, byte_count=BYTES)

    def open(self, memory: SharedAllocation) -> int:
        base = int.from_bytes(memory.handle, "little")
        if base not in self.machine.memory:
            raise TransferFailed("no such memory")
        self.machine.opened.append(base)
        self.machine.opens += 1
        return base + (1 << 40)

    def close(self, address: int) -> None:
        self.machine.opened.remove(address - (1 << 40))

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int, behind: object,
    ) -> Gather:  # fmt: skip
        def move() -> bytes:
            for own, theirs in pairs:
                strips = strips_between_rows(own, theirs, pages, sources)
                moves = np.stack((strips.local, strips.remote, strips.byte_counts), 1).tolist()
                for to, start, count in moves:
                    assert start - (1 << 40) >= min(self.machine.opened), "memory that is not open is read"
                    self.machine.at(to, count)[:] = self.machine.at(start, count)
            return self.sums([[own for own, _ in pairs]], pages, seed)

        self.gathers.append(Gather(move))
        return self.gathers[-1]

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        return sums_of(self.machine.at, rows, pages, seed)


@dataclass(slots=True)
class Two:
    """An owner and a reader on one device."""

    device: Device
    source: int
    target: int
    owner: CudaIpcBackend
    reader: CudaIpcBackend
    library: Library

    @classmethod
    def made(cls) -> Two:
        device = Device()
        source, target = device.add(5), device.add(77)
        owner = CudaIpcBackend(Library(device, "owner"), shares=True)
        library = Library(device, "reader")
        reader = CudaIpcBackend(library, shares=False)
        owner.register([region(source)])
        reader.register([region(target)])
        return cls(device, source, target, owner, reader, library)

    def lanes(self, address: int) -> NDArray[np.uint8]:
        return self.device.memory[address].reshape(LANES, PAGES, STRIP)


def test_a_read_moves_the_pages_that_were_asked_for_and_says_what_it_wrote() -> None:
    two = Two.made()
    before = two.lanes(two.target).copy()
    two.reader.connect("p", two.owner.endpoint)
    op = two.reader.read("p", Part.FULL, SOME, OTHERS, 99)
    assert two.reader.poll(op).state is OpState.PENDING
    two.library.gathers[0].sums()
    result = two.reader.poll(op)
    assert (result.state, result.seconds) == (OpState.DONE, 0.25)
    assert result.digests == two.owner.digests(Part.FULL, OTHERS, 99)
    assert result.digests != two.owner.digests(Part.FULL, OTHERS, 98), "the seed is in it"
    before[:, SOME] = two.lanes(two.source)[:, OTHERS]
    assert np.array_equal(two.lanes(two.target), before)
    with pytest.raises(InvariantError, match="not under way"):
        two.reader.poll(op)


def test_memory_stays_open_until_its_peer_is_gone_and_the_last_read_is_over() -> None:
    two = Two.made()
    two.reader.connect("p#1/0", two.owner.endpoint)
    op = two.reader.read("p#1/0", Part.FULL, SOME, OTHERS)
    two.reader.disconnect("p#1/0")
    assert two.device.opened == [two.source], "a read is under way"
    two.reader.connect("p#2/0", two.owner.endpoint)
    assert two.device.opens == 1, "the same memory, greeted anew"
    two.reader.disconnect("p#2/0")
    assert two.device.opened == [two.source]
    two.library.gathers[0].sums()
    assert two.reader.poll(op).state is OpState.DONE
    assert not two.device.opened
    two.reader.disconnect("p#2/0")
    with pytest.raises(TransferFailed, match="not connected"):
        two.reader.read("p#2/0", Part.FULL, SOME, OTHERS)


def test_an_end_waits_for_reads_and_lets_everything_go() -> None:
    two = Two.made()
    two.reader.connect("p", two.owner.endpoint)
    two.reader.read("p", Part.FULL, SOME, OTHERS)
    two.reader.close()
    assert np.array_equal(two.lanes(two.target)[:, SOME], two.lanes(two.source)[:, OTHERS])
    assert not two.device.opened


def test_an_owner_does_not_open_the_memory_of_its_reader() -> None:
    two = Two.made()
    two.owner.connect("d", two.reader.endpoint)
    assert not two.device.opens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({}, "", id="the same device"),
        pytest.param({"device": "gpu-1", "reachable": ("gpu-1", "gpu-0")}, "", id="peer access"),
        pytest.param({"device": "gpu-1", "reachable": ("gpu-1",)}, "gpu-1 does not read memory of gpu-0", id="none"),
        pytest.param({"process": "owner"}, "one process", id="one process"),
    ],
)
def test_what_a_device_cannot_read_is_said_in_words(changes: dict[str, object], words: str) -> None:
    two = Two.made()
    other = CudaIpcBackend(replace(two.library, **changes), shares=False)  # type: ignore[arg-type]
    ours, theirs = two.owner.endpoint, other.register([region(two.target)])
    found = two.owner.refusal([ours], [theirs], [(0, 0)])
    assert words in found
    assert bool(found) == bool(words)
    assert "GPUs of 0 ranks, expected 1" in two.owner.refusal([ours], [], [(0, 0)])
    assert "no endpoint" in two.owner.refusal([ours], [b"?"], [(0, 0)])


def test_each_rank_must_read_the_memory_of_the_rank_of_its_number_and_of_no_other() -> None:
    def endpoints(engine: str, devices: Sequence[str]) -> list[bytes]:
        libraries = [Library(Device(), f"{engine}.{i}", device, (device,)) for i, device in enumerate(devices)]
        return [CudaIpcBackend(library, shares=False).endpoint for library in libraries]

    leader = Two.made().owner
    owners, pairs = endpoints("p", ("gpu-0", "gpu-1")), [(0, 0), (1, 1)]
    assert leader.refusal(owners, endpoints("d", ("gpu-0", "gpu-1")), pairs) == ""
    found = leader.refusal(owners, endpoints("d", ("gpu-0", "gpu-0")), pairs)
    assert "its device gpu-0 does not read memory of gpu-1 (of rank 1)" in found
    assert "GPUs of 1 ranks, expected 2" in leader.refusal(owners, endpoints("d", ("gpu-0",)), pairs)


def test_pages_that_do_not_fit_are_refused_before_anything_moves() -> None:
    two = Two.made()
    two.reader.connect("p", two.owner.endpoint)
    with pytest.raises(TransferFailed, match=r"the peer has 1 \.\. 19"):
        two.reader.read("p", Part.FULL, SOME, np.array([1, 2, 20], np.int32))
    with pytest.raises(TransferFailed, match="part SWA"):
        two.reader.read("p", Part.SWA, SOME, OTHERS)
    with pytest.raises(InvariantError, match="read only"):
        two.reader.write("p", Part.FULL, SOME, OTHERS)
    odd = CudaIpcBackend(Library(two.device, "odd"), shares=True)
    with pytest.raises(ConfigError, match="words of 8 bytes"):
        odd.register([region(two.source, strip=36)])
    assert not two.library.gathers


@given(session=st.binary(max_size=80) | st.dictionaries(st.sampled_from(["process", "shared"]), st.text()).map(
    lambda given: json.dumps(given).encode()
))  # fmt: skip
def test_whatever_is_no_session_is_refused(session: bytes) -> None:
    two = Two.made()
    with pytest.raises(TransferFailed):
        two.reader.connect("p", pack_endpoint(session, [region(two.source)]))
    assert not two.device.opened


def test_a_region_outside_of_what_a_peer_shares_is_refused_and_nothing_stays_open() -> None:
    two = Two.made()
    session = unpack_endpoint(two.owner.endpoint).session
    for wrong in (region(two.source + 64), region(two.source - 8), region(two.target)):
        with pytest.raises(TransferFailed, match="outside"):
            two.reader.connect("p", pack_endpoint(session, [wrong]))
        assert not two.device.opened
