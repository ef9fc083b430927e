"""One-sided backends over arrays of this process: an operation moves its bytes when the test says so, however late.

A `Bus` knows what each engine can reach. A fence makes a new address; what was begun for an old one then fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.core.parts import Part
from serinus.pd import Capabilities, Fence, Fenced, Mode, OpResult, OpState, Region
from tests.pd.tiny import PAGE_BYTES

PUSH = Capabilities(mode=Mode.PUSH, fence=Fence.CLOSE)
PULL = Capabilities(mode=Mode.PULL)


class SharedStore:
    """Pages in an array that others can reach."""

    page_bytes = PAGE_BYTES

    def __init__(self, count: int = 64) -> None:
        self.data = np.full((count, PAGE_BYTES), 0xEE, dtype=np.uint8)
        self.region = Region(
            part=Part.FULL, address=0, lane_count=1, lane_stride=0, strip_bytes=PAGE_BYTES, page_count=count
        )  # fmt: skip

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        out[:] = self.data[pages]

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.data[pages] = data


@dataclass(slots=True, kw_only=True)
class Op:
    """A copy that has been asked for."""

    number: int
    source: SharedStore
    sources: NDArray[np.int32]
    target: SharedStore
    targets: NDArray[np.int32]
    reached: bytes
    """Address that it goes through."""
    state: OpState = OpState.PENDING


@dataclass(slots=True)
class Bus:
    """All memory that can be reached, by address, and all operations."""

    memory: dict[bytes, SharedStore] = field(default_factory=dict)
    ops: dict[int, Op] = field(default_factory=dict)
    is_prompt: bool = True
    """Operations are over at the first poll; else when `land` is called."""
    addresses: int = 0
    fences: int = 0

    def register(self, store: SharedStore) -> bytes:
        """Register memory under a new address."""
        self.addresses += 1
        name = f"memory-{self.addresses}".encode()
        self.memory[name] = store
        return name

    def land(self) -> int:
        """All bytes under way arrive now (or meet a fence); how many operations that were."""
        pending = [op for op in self.ops.values() if op.state is OpState.PENDING]
        for op in pending:
            if op.reached in self.memory:
                op.target.data[op.targets] = op.source.data[op.sources]
                op.state = OpState.DONE
            else:
                op.state = OpState.FAILED
        return len(pending)


class SharedBackend:
    """One engine's end of the bus."""

    def __init__(self, bus: Bus, store: SharedStore, capabilities: Capabilities) -> None:
        self.name = "shared"
        self.bus, self.store, self.capabilities = bus, store, capabilities
        self.address = b""
        self.peers: dict[str, bytes] = {}
        self.cancelled: list[int] = []

    def register(self, regions: Sequence[Region]) -> bytes:
        assert [region.part for region in regions] == [Part.FULL]
        self.address = self.bus.register(self.store)
        return self.address

    def connect(self, peer: str, endpoint: bytes) -> None:
        if endpoint not in self.bus.memory:
            raise TransferFailed(f"pd: no engine is at {endpoint!r}")
        self.peers[peer] = endpoint

    def disconnect(self, peer: str) -> None:
        self.peers.pop(peer, None)

    def fence(self, peer: str) -> Fenced:
        del self.bus.memory[self.address]
        self.address = self.bus.register(self.store)
        self.bus.fences += 1
        return Fenced(all_peers=True, endpoint=self.address)

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        reached = self._reached(peer)
        return self._begin(self.store, pages, self.bus.memory[reached], targets, reached)

    def read(self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32]) -> int:
        reached = self._reached(peer)
        return self._begin(self.bus.memory[reached], sources, self.store, pages, reached)

    def _reached(self, peer: str) -> bytes:
        reached = self.peers.get(peer, b"")
        if reached not in self.bus.memory:
            raise TransferFailed(f"pd: {peer} is not connected")
        return reached

    def _begin(
        self, source: SharedStore, sources: NDArray[np.int32], target: SharedStore, targets: NDArray[np.int32],
        reached: bytes,
    ) -> int:  # fmt: skip
        number = len(self.bus.ops) + 1
        self.bus.ops[number] = Op(
            number=number, source=source, sources=sources, target=target, targets=targets, reached=reached
        )
        return number

    def poll(self, op: int) -> OpResult:
        if self.bus.is_prompt:
            self.bus.land()
        return OpResult(state=self.bus.ops[op].state, error="refused" * (self.bus.ops[op].state is OpState.FAILED))

    def cancel(self, op: int) -> None:
        self.cancelled.append(op)

    def close(self) -> None:
        self.bus.memory.pop(self.address, None)
