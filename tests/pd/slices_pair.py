"""Engines of several ranks over cuda_ipc, on "GPUs" that are memory of this process: real ports, workers and pools,
the reference kernels, and gathers that run when they are told to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.clock import ManualClock
from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan, Part
from serinus.engine.peers import Peers
from serinus.kernels import load
from serinus.kernels.ref.pull_pages import pull_pages
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    DecodeSide,
    HandoffPort,
    Landed,
    PageWorker,
    PrefillDrained,
    PrefillSide,
    Quarantine,
    QuarantineOver,
    RankLayout,
    Recompute,
    StartHandoff,
)
from serinus.pd.backends import CudaIpcBackend, PageRows, Region, SharedAllocation
from serinus.pool import DevicePool, PoolSpec
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import LocalHub, Mailbox
from serinus.wire.messages import LayoutSignature
from tests.pd.gather import Gather
from tests.pd.tiny import first_token, make_request, make_settings

TOKENS, PAGE_SIZE = 20, 4
END = TOKENS // PAGE_SIZE
PATIENT: dict[str, object] = dict.fromkeys(("connect_s_max", "handoff_s_max", "silence_s_max", "lease_s"), 1e6)
HALF = LayoutSignature(
    model="m", kv_dtype="float16", page_size=PAGE_SIZE, layer_count=4, kv_head_count=4, head_size=2
)  # fmt: skip


def shaped(base: LayoutSignature = HALF, **changes: Any) -> RankLayout:
    return RankLayout(msgspec.structs.replace(base, **changes))


def lane(rows: PageRows) -> torch.Tensor:
    """Rows as the driver sees them, uint8 [P, S, R, W]."""
    shape, steps = (rows.page_count, *rows.shape), (rows.page_step, rows.strip_step, rows.row_step, 1)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(rows.address))
    return torch.from_numpy(memory).as_strided(shape, steps)


@dataclass(slots=True)
class HostIpc:
    """IpcLibrary of one rank."""

    process: str
    device: str
    reachable: tuple[str, ...]
    regions: Sequence[Region] = ()
    gathers: list[Gather] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)

    def mark(self) -> object:
        return self

    def is_idle(self) -> bool:
        return True

    def warm(self, regions: Sequence[Region]) -> None:
        """There is nothing to compile."""

    def share(self, address: int) -> SharedAllocation:
        region = next(each for each in self.regions if each.address == address)
        return SharedAllocation(handle=address.to_bytes(8, "little"), address=address, byte_count=region.byte_count)

    def open(self, memory: SharedAllocation) -> int:
        self.opened.append(memory.address)
        return memory.address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int, behind: object,
    ) -> Gather:  # fmt: skip
        def move() -> bytes:
            assert self.opened, "memory is read that was let go"
            ours, theirs = ([lane(rows) for rows in side] for side in zip(*pairs, strict=True))
            return pull_pages(ours, pages.astype(np.int64), seed, theirs, sources.astype(np.int64)).numpy().tobytes()

        self.gathers.append(Gather(move))
        return self.gathers[-1]

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        lanes, counts = [lane(each) for group in rows for each in group], [len(group) for group in rows]
        return pull_pages(lanes, pages.astype(np.int64), seed, (), None, counts).numpy().tobytes()


class Engine:
    """The ranks of one engine, their pools, their port."""

    def __init__(
        self, number: int, layout: RankLayout, hub: LocalHub, clock: ManualClock, page_first: bool, **settings: object
    ) -> None:
        self.layout, self.clock = layout, clock
        ranks = range(len(layout.shards))
        gpus = tuple(f"gpu-{rank}" for rank in range(8))
        self.libraries = [HostIpc(f"{number}.{rank}", gpus[rank], gpus) for rank in ranks]
        self.pools = [{part: make_pool(layout, rank, part, page_first) for part in layout.parts} for rank in ranks]
        self.backends = [CudaIpcBackend(library, shares=number == 0) for library in self.libraries]
        for library, pools in zip(self.libraries, self.pools, strict=True):
            library.regions = [
                Region(
                    part=part, address=each.address, lane_count=each.lane_count, lane_stride=each.lane_stride,
                    strip_bytes=each.strip_bytes, page_count=each.page_count,
                )
                for part, pool in pools.items()
                for each in pool.regions
            ]  # fmt: skip
        self.workers = [
            PageWorker(rank, layout=layout, stores=self.pools[rank], backends=[self.backends[rank]], clock=clock)
            for rank in ranks
        ]
        self.line = AnsweringLine(self.workers)
        made = make_settings(
            "pd"[number], number + 1, layout=layout.signature, backends=("cuda_ipc",),
            capabilities={"cuda_ipc": CudaIpcBackend.capabilities}, **{**PATIENT, **settings},
        )  # fmt: skip
        machine: Any = (PrefillSide, DecodeSide)[number]
        channel = hub.channel("local://p") if number == 0 else hub.channel()
        self.peers = Peers(Mailbox(channel, incarnation=number + 1, clock=clock))
        self.port: HandoffPort[Any] = HandoffPort(machine, made, line=self.line, backends=[self.backends[0]])

    def turn(self) -> list[Any]:
        self.line.pump()
        found = self.port.turn(self.clock.now(), self.peers.receive())
        self.peers.deliver(self.port.take_outgoing())
        return found


def make_pool(layout: RankLayout, rank: int, part: Part, page_first: bool) -> DevicePool:
    """The pool of one rank's part."""
    shard, signature = layout.shards[rank], layout.signature
    spec = PoolSpec(
        layer_count=len(shard.part_layers[part]), kv_head_count=len(shard.heads), head_size=signature.head_size,
        page_size=layout.page_size, page_count=24, dtype=torch.float16, halves=part.halves, page_first=page_first,
        stamped=bool(signature.stamp_bytes),
    )  # fmt: skip
    return DevicePool(spec, load("cpu", "ref"))


class SlicesPair:
    """A prefill and a decode engine, one prompt, and its KV."""

    def __init__(
        self, source: RankLayout, target: RankLayout, pages_of: Callable[..., NDArray[np.uint8]], *,
        page_first: tuple[bool, bool] = (True, True), **settings: object,
    ) -> None:  # fmt: skip
        """`pages_of`: (layout, rank, part) -> all pages of the prompt as that rank holds them."""
        hub, self.clock = LocalHub(), ManualClock(10.0)
        self.p, self.d = (
            Engine(number, layout, hub, self.clock, page_first[number], **settings)
            for number, layout in enumerate((source, target))
        )
        self.request, self.ends = make_request("r", TOKENS), list[Any]()
        self.orders: list[AddPrefill] = []
        rng = np.random.default_rng(4)
        self.first = {part: self._needed(part) for part in source.parts}
        self.sources, self.targets = (
            {part: rng.permutation(np.arange(1, 24, dtype=np.int32))[:END] for part in Part} for _ in range(2)
        )
        for rank, pools in enumerate(self.p.pools):
            for part, pool in pools.items():
                if pool.page_bytes:
                    pool.write_pages(self.sources[part], pages_of(source, rank, part))
        for pools in self.d.pools:
            for pool in pools.values():
                pool.write_pages(np.arange(24), np.full((24, pool.page_bytes), 0xEE, np.uint8))

    def _needed(self, part: Part) -> int:
        return self.p.port.settings.first_needed(part, 0, TOKENS) // PAGE_SIZE

    def begin(self, chunks: int = 2) -> None:
        """Ask for the prompt, and compute it, in so many chunks."""
        spans = tuple(
            PageSpan(part=part, first=first, pages=self.targets[part][first:])
            for part, first in {Part.FULL: 0, **self.first}.items()
        )
        start = StartHandoff(rid="r", request=self.request, address="local://p", held=0, spans=spans)
        self._act(self.d.port.handle(start, self.clock.now()))
        for _ in range(10):
            self.turn()
        if not self.orders:
            return
        due = {Part.FULL: 0, **self.first}
        for at in range(chunks):
            end = END * (at + 1) // chunks
            spans = tuple(
                PageSpan(part=part, first=first, pages=self.sources[part][first:end])
                for part, first in due.items()
                if first < end
            )
            due = {part: max(first, end) for part, first in due.items()}
            last = at == chunks - 1
            chunk = ChunkReady(
                xid=self.orders[0].xid, spans=spans, last=last,
                token=first_token(self.request.prompt) if last else None,
            )  # fmt: skip
            self._act(self.p.port.handle(chunk, self.clock.now()))

    def turn(self) -> None:
        self.clock.advance(0.1)
        for engine in (self.d, self.p):
            self._act(engine.turn())

    @property
    def gathers(self) -> list[Gather]:
        """Those that have not run."""
        return [each for library in self.d.libraries for each in library.gathers if not each.found]

    def settle(self, turns: int = 30) -> None:
        """Turn, and let what is gathered run."""
        for _ in range(turns):
            self.turn()
            for gather in self.gathers:
                gather.sums()

    def ended(self, kind: type) -> list[Any]:
        return [end for end in self.ends if isinstance(end, kind)]

    def landed(self, rank: int, part: Part) -> NDArray[np.uint8]:
        """Pages of the prompt as they are in a decode rank."""
        return self.d.pools[rank][part].read_pages(self.targets[part])

    def _act(self, results: Sequence[object]) -> None:
        for result in results:
            if isinstance(result, AddPrefill):
                self.orders.append(result)
            elif isinstance(result, (Landed, Recompute, Quarantine, QuarantineOver, PrefillDrained, AbortPrefill)):
                self.ends.append(result)
