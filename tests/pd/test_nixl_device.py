"""Backend nixl over pools on a GPU, simulated: what is registered, what is posted when, what is over when, and faults.

The library keeps memory by type and device, as NIXL does, and an agent lives as long as a handle of its is referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.clock import ManualClock
from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.parts import Part
from serinus.pd import AttachPeer, Mode, MovePiece, PageWorker, PieceMoved, RankLayout
from serinus.pd.backends import NixlBackend, OpResult, OpState, PageRows, Region, make_one_sided, pack_endpoint
from serinus.pd.backends.nixl import NixlLibrary
from tests.pd.gather import Gather, sums_of
from tests.pd.tiny import LAYOUT, Store

PAGES, STRIP, LANES = 20, 32, 2
BYTES = PAGES * STRIP * LANES
SOME = np.array([3, 9, 4], np.int32)
OTHERS = np.array([17, 1, 8], np.int32)


def region(address: int, *, strip: int = STRIP, part: Part = Part.FULL) -> Region:
    return Region(
        part=part, address=address, lane_count=LANES, lane_stride=strip * PAGES, strip_bytes=strip, page_count=PAGES
    )


class FakeError(Exception):
    """All that the library raises."""


@dataclass(slots=True, eq=False)
class Machine:
    """Its GPUs' memory, its agents, and what happened, in order."""

    memory: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    cores: WeakValueDictionary[str, Core] = field(default_factory=WeakValueDictionary)
    log: list[str] = field(default_factory=list)
    fails: set[str] = field(default_factory=set)
    """Agents from which reads fail."""

    def add(self, fill: int) -> int:
        """A pool; returns where it is."""
        address = (len(self.memory) + 1) << 20
        self.memory[address] = ((np.arange(BYTES) * 31 + fill) % 251).astype(np.uint8)
        return address

    def at(self, address: int, count: int) -> NDArray[np.uint8]:
        """The bytes at an address."""
        base = max(each for each in self.memory if each <= address)
        return self.memory[base][address - base : address - base + count]


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way."""

    machine: Machine
    remote: str
    local: NDArray[np.uint64]
    distant: NDArray[np.uint64]
    state: str = "PROC"

    def move(self) -> None:
        """All of them arrive."""
        for (to, count, _), (start, _, _) in zip(self.local.tolist(), self.distant.tolist(), strict=True):
            self.machine.at(to, count)[:] = self.machine.at(start, count)
        self.state = "DONE"
        self.machine.log.append("moved")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Core:
    """The agent's own half, to which handles refer: it ends with the last reference to it."""

    machine: Machine
    name: str
    registered: list[tuple[str, int, range]] = field(default_factory=list)
    moves: list[Transfer] = field(default_factory=list)
    """Posted, and not yet moved."""

    def __del__(self) -> None:
        self.machine.log.append(f"end {self.name}")

    def check(self, memory: str, rows: NDArray[np.uint64]) -> None:
        for address, count, device in rows.tolist():
            spans = [span for kind, where, span in self.registered if (kind, where) == (memory, device)]
            if not any(address in span and address + count - 1 in span for span in spans):
                raise FakeError(f"{memory} of device {device} at {address:#x} is not registered with {self.name}")


@dataclass(slots=True, eq=False)
class Handle:
    """An agent's handle of one transfer."""

    core: Core
    transfer: Transfer
    _released: bool = False

    def release(self) -> None:
        assert self.transfer.state != "PROC", "a transfer under way is released"
        self._released = True


class Agent:
    """Stands for the class nixl_agent."""

    def __init__(self, machine: Machine, name: str, backends: list[str]) -> None:
        assert name not in machine.cores, "two agents of one name"
        self.core = machine.cores[name] = Core(machine, name)
        self.backends = dict.fromkeys(backends)
        machine.log.append(f"start {name}")

    def register_memory(self, rows: Sequence[tuple[int, int, int, str]], memory: str, backends: list[str]) -> None:
        for address, count, device, _ in rows:
            if memory == "VRAM" and device > 1:
                raise FakeError("no such GPU")
            self.core.registered.append((memory, device, range(address, address + count)))

    def get_agent_metadata(self) -> bytes:
        return self.core.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.core.machine.cores:
            raise FakeError(f"nothing is at {metadata!r}")
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        assert not any(transfer.remote == name for transfer in self.core.moves), "reads from it are under way"

    def get_xfer_descs(self, rows: NDArray[np.uint64], memory: str) -> tuple[str, NDArray[np.uint64]]:
        return memory, rows

    def initialize_xfer(self, operation: str, local: Any, distant: Any, name: str, backends: list[str]) -> Handle:
        assert operation == "READ"
        machine = self.core.machine
        if name not in machine.cores:
            raise FakeError(f"{name} is gone")
        self.core.check(*local)
        machine.cores[name].check(*distant)
        return Handle(self.core, Transfer(machine, name, local[1], distant[1]))

    def transfer(self, handle: Handle) -> str:
        machine = self.core.machine
        machine.log.append("post")
        if handle.transfer.remote in machine.fails:
            raise FakeError("it broke")
        self.core.moves.append(handle.transfer)
        return handle.transfer.state

    def check_xfer_state(self, handle: Handle) -> str:
        return "ERR" if handle.transfer.remote in self.core.machine.fails else handle.transfer.state


@dataclass(slots=True)
class Device:
    """PoolDevice of one process."""

    machine: Machine
    index: int = 0
    queued: int = 0
    """Steps that were given to it, and..."""
    run: int = 0
    """...those that have run."""
    under_way: list[Gather] = field(default_factory=list)

    def warm(self, regions: Sequence[Region]) -> None:
        self.machine.log.append("warm")

    def behind_queue(self) -> Callable[[], bool]:
        behind = self.queued
        return lambda: self.run >= behind

    def begin_sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> Gather:
        self.machine.log.append("sums")
        self.under_way.append(Gather(lambda: self._sums(rows, pages, seed)))
        return self.under_way[-1]

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        self.run = self.queued
        return self._sums(rows, pages, seed)

    def settle(self) -> None:
        self.run = self.queued
        for sums in self.under_way:
            sums.sums()
        self.machine.log.append("settle")

    def _sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        return sums_of(self.machine.at, rows, pages, seed)


def library(machine: Machine) -> NixlLibrary:
    return NixlLibrary(
        agent=lambda name, backends: Agent(machine, name, backends), config=lambda backends: backends,
        errors=(FakeError,),
    )  # fmt: skip


@dataclass(slots=True)
class Two:
    """An owner on GPU 1 and a reader on GPU 0, as each counts its own."""

    machine: Machine
    source: int
    target: int
    owner: NixlBackend
    reader: NixlBackend
    device: Device
    """That the reader's pool is on."""

    @classmethod
    def made(cls) -> Two:
        machine = Machine()
        source, target = machine.add(5), machine.add(77)
        owner = NixlBackend("p", library(machine), Device(machine, index=1))
        device = Device(machine)
        reader = NixlBackend("d", library(machine), device)
        owner.register([region(source)])
        reader.register([region(target)])
        reader.connect("p/0", owner.endpoint)
        machine.log.clear()
        return cls(machine, source, target, owner, reader, device)

    def lanes(self, address: int) -> NDArray[np.uint8]:
        return self.machine.memory[address].reshape(LANES, PAGES, STRIP)

    @property
    def moves(self) -> list[Transfer]:
        """Posted by the reader."""
        return next(core for name, core in self.machine.cores.items() if name.startswith("d.")).moves

    def move(self) -> None:
        for transfer in self.moves:
            transfer.move()
        self.moves.clear()

    def ended(self, op: int) -> OpResult:
        """Let everything of a read happen."""
        self.device.run = self.device.queued
        while (result := self.reader.poll(op)).state is OpState.PENDING:
            self.move()
            for sums in self.device.under_way:
                sums.sums()
        return result


def test_pools_are_registered_as_memory_of_their_gpu_and_read_by_its_number_at_the_owner() -> None:
    two = Two.made()
    registered = {name: core.registered for name, core in two.machine.cores.items()}
    assert registered == {
        "p.1": [("VRAM", 1, range(two.source, two.source + BYTES))],
        "d.1": [("VRAM", 0, range(two.target, two.target + BYTES))],
    }
    before = two.lanes(two.target).copy()
    result = two.ended(two.reader.read("p/0", Part.FULL, SOME, OTHERS, 99))
    assert result.state is OpState.DONE
    assert result.digests == two.owner.digests(Part.FULL, OTHERS, 99)
    assert result.digests != two.owner.digests(Part.FULL, OTHERS, 98), "the seed is in it"
    before[:, SOME] = two.lanes(two.source)[:, OTHERS]
    assert np.array_equal(two.lanes(two.target), before)


def test_nothing_is_posted_before_what_was_queued_on_own_pages_has_run() -> None:
    two = Two.made()
    two.device.queued = 3
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.device.queued = 5  # steps that come later do not hold it up
    for run in (0, 1, 2):
        two.device.run = run
        assert two.reader.poll(op).state is OpState.PENDING
        assert two.machine.log == []
    two.device.run = 3
    assert two.reader.poll(op).state is OpState.PENDING
    assert two.machine.log == ["post"]
    assert two.ended(op).state is OpState.DONE
    assert two.machine.log == ["post", "moved", "sums"]


def test_a_read_is_over_when_its_bytes_have_come_and_were_summed() -> None:
    two = Two.made()
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS, 7)
    assert two.machine.log == ["post"]
    assert two.reader.poll(op).state is OpState.PENDING
    two.move()
    assert two.reader.poll(op).state is OpState.PENDING, "they are not summed"
    two.device.under_way[0].sums()
    assert two.reader.poll(op).state is OpState.DONE


def test_pages_that_have_another_owner_when_they_are_read_are_found_by_their_sums() -> None:
    two = Two.made()
    told = two.owner.digests(Part.FULL, OTHERS, 5)
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS, 5)
    two.lanes(two.source)[1, 8, 3] ^= 1
    found = two.ended(op).digests
    assert told is not None
    assert [found[i : i + 8] == told[i : i + 8] for i in (0, 8, 16)] == [True, True, False]


@pytest.mark.parametrize("when", ["posted", "asked for"])
def test_a_read_that_fails_ends_the_agent_and_waits_for_the_device_before_it_is_told(when: str) -> None:
    two = Two.made()
    two.machine.fails |= {"p.1"} if when == "posted" else set()
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.machine.fails.add("p.1")
    result = two.reader.poll(op)
    assert result.state is OpState.FAILED
    assert two.machine.log == ["post", "settle", "end d.1", "settle", "start d.2"], (
        "nothing of the old agent can write any more"
    )
    assert two.machine.cores["d.2"].registered == [("VRAM", 0, range(two.target, two.target + BYTES))]
    two.machine.fails.clear()
    assert two.ended(two.reader.read("p/0", Part.FULL, SOME, OTHERS)).state is OpState.DONE


def test_an_agent_that_ends_takes_reads_along_whose_bytes_have_not_come_and_no_others() -> None:
    two = Two.made()
    other = two.machine.add(140)
    broken = NixlBackend("q", library(two.machine), Device(two.machine))
    broken.register([region(other)])
    two.reader.connect("q/0", broken.endpoint)
    there = two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.move()
    assert two.reader.poll(there).state is OpState.PENDING
    two.device.queued = 1
    waits = two.reader.read("p/0", Part.FULL, np.array([5], np.int32), np.array([6], np.int32))
    two.device.run = 1
    fails = two.reader.read("q/0", Part.FULL, np.array([7], np.int32), np.array([6], np.int32))
    two.machine.fails.add("q.1")
    assert two.reader.poll(fails).state is OpState.FAILED
    assert [two.reader.poll(op).state for op in (waits, there)] == [OpState.FAILED, OpState.DONE]


def test_an_owner_that_is_gone_fails_its_reads_also_before_they_were_posted() -> None:
    two = Two.made()
    two.device.queued = 1
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.owner.close()
    before = two.lanes(two.target).copy()
    two.reader.disconnect("p/0")
    assert two.reader.poll(op).state is OpState.FAILED
    assert "post" not in two.machine.log
    assert np.array_equal(two.lanes(two.target), before)
    with pytest.raises(TransferFailed, match="not connected"):
        two.reader.read("p/0", Part.FULL, SOME, OTHERS)


def test_a_peer_whose_bytes_have_come_is_forgotten_without_an_end_of_the_agent() -> None:
    two = Two.made()
    op = two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.move()
    assert two.reader.poll(op).state is OpState.PENDING
    two.reader.disconnect("p/0")
    assert two.ended(op).state is OpState.DONE
    assert "end d.1" not in two.machine.log


def test_an_owner_takes_a_reader_whose_agent_was_made_anew_since_it_named_it() -> None:
    two = Two.made()
    stale = two.reader.endpoint
    two.reader.fence("nobody")
    with pytest.raises(TransferFailed, match="does not know what to make of"):
        two.owner.connect("d", stale)
    layout = msgspec.structs.replace(LAYOUT, tp=1, pp=1)
    owner = PageWorker(
        0, layout=RankLayout(layout), stores={Part.FULL: Store(16)}, backends=[two.owner], clock=ManualClock()
    )  # fmt: skip
    assert owner.obey(AttachPeer(peer="d", backend="nixl", layout=layout, endpoints=(stale,))) is None
    move = MovePiece(
        peer="d", xid="x", piece=0, rank=0, mode=Mode.PULL, part=Part.FULL, pages=OTHERS, digest_seed=5
    )  # fmt: skip
    told = owner.obey(move)
    assert isinstance(told, PieceMoved)
    assert told.digests == two.owner.digests(Part.FULL, OTHERS, 5)


def test_an_end_waits_for_the_device() -> None:
    two = Two.made()
    two.reader.read("p/0", Part.FULL, SOME, OTHERS)
    two.reader.close()
    assert two.machine.log == ["post", "settle", "end d.1", "settle"]


def test_from_a_gpu_pages_only_go_whole_and_to_a_gpu() -> None:
    two = Two.made()
    host = NixlBackend("h", library(two.machine))
    host.register([region(two.machine.add(1))])
    assert (host.capabilities.recut, two.reader.capabilities.recut) == (Mode.PULL, None)
    assert two.owner.refusal([two.owner.endpoint], [two.reader.endpoint], [(0, 0)]) == ""
    assert host.refusal([host.endpoint], [host.endpoint], [(0, 0)]) == ""
    assert "on a GPU on one side" in two.owner.refusal([two.owner.endpoint], [host.endpoint], [(0, 0)])
    assert "on a GPU on one side" in host.refusal([host.endpoint], [two.reader.endpoint], [(0, 0)])
    assert "no endpoint" in host.refusal([host.endpoint], [b"?"], [(0, 0)])
    with pytest.raises(TransferFailed, match="no session"):
        two.reader.connect("odd", pack_endpoint(b"abc", [region(two.source)]))


def test_memory_that_cannot_be_registered_or_summed_is_refused_in_words() -> None:
    machine = Machine()
    away = NixlBackend("a", library(machine), Device(machine, index=2))
    with pytest.raises(ConfigError, match=r"\(VRAM\).*UCX_MODULE_DIR"):
        away.register([region(machine.add(1))])
    odd = NixlBackend("o", library(machine), Device(machine))
    with pytest.raises(ConfigError, match="nixl sums words of 8 bytes"):
        odd.register([region(machine.add(1), strip=36)])
    with pytest.raises(ConfigError, match=r"mooncake writes .* no fence is known"):
        make_one_sided("mooncake", tag="t", device="cuda:0")
