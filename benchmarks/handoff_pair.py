"""Two processes with real ports and pools, for benchmarks of the handoff: one computes nothing and sends, one asks.

The prompt's KV is there beforehand, so what is left is the handoff: gather, digest, move, scatter, digest again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.clock import WallClock
from serinus.core.handoff import ChunkReady
from serinus.core.ids import new_incarnation
from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.engine.peers import Peers
from serinus.kernels import load
from serinus.pd import (
    AddPrefill,
    CancelHandoff,
    DecodeResult,
    DecodeSide,
    HandoffPort,
    HandoffSettings,
    Landed,
    PageWorker,
    PrefillSide,
    RankLayout,
    StartHandoff,
    host_identity,
    make_backends,
)
from serinus.pd.backends import Backend, CudaDriver, CudaIpcBackend, OneSided, make_one_sided
from serinus.pd.layout import STAMP_BYTES
from serinus.pool import DevicePool, PoolSpec
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import Arrived, ChannelEvent, Mailbox, ZmqChannel
from serinus.wire.codec import Parts
from serinus.wire.messages import LayoutSignature

__all__ = ["CLOCK", "Pair", "Shape", "prefill_process", "stamped"]

CLOCK = WallClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the KV."""

    layers: int
    heads: int
    head_size: int
    page_size: int = 16
    device: str = "cpu"

    @property
    def page_bytes(self) -> int:
        """bfloat16, k and v."""
        return self.layers * 2 * self.page_size * self.heads * self.head_size * 2

    def pool(self, pages: int) -> DevicePool:
        """A pool for so many pages, every one touched."""
        spec = PoolSpec(
            layer_count=self.layers, kv_head_count=self.heads, head_size=self.head_size, page_size=self.page_size,
            page_count=pages + 1, dtype=torch.bfloat16, device=self.device,
        )  # fmt: skip
        pool = DevicePool(spec, load(self.device))
        if self.device != "cpu":
            for lane in (*pool.k, *pool.v):
                lane.normal_()
            return pool
        rows = np.random.default_rng(1).integers(0, 256, (pages, pool.page_bytes), dtype=np.uint8)
        pool.write_pages(np.arange(1, pages + 1), rows)
        return pool

    def settings(self, name: str, incarnation: int, backend: Backend | OneSided) -> HandoffSettings:
        """Equal on both sides but for the name."""
        layout = LayoutSignature(
            model="bench", kv_dtype="bfloat16", page_size=self.page_size, layer_count=self.layers,
            kv_head_count=self.heads, head_size=self.head_size,
        )  # fmt: skip
        return HandoffSettings(
            engine=name, incarnation=incarnation, layout=layout, vocab_size=32_000, backends=(backend.name,),
            capabilities={backend.name: backend.capabilities}, host=host_identity(),
        )  # fmt: skip


def stamped(shape: Shape, tp: int, pp: int) -> LayoutSignature:
    """The same on some ranks, with stamps of all bytes."""
    return LayoutSignature(
        model="bench", kv_dtype="bfloat16", page_size=shape.page_size, layer_count=shape.layers,
        kv_head_count=shape.heads, head_size=shape.head_size, tp=tp, pp=pp, stamp_bytes=2 * STAMP_BYTES,
        stamp_data="all",
    )  # fmt: skip


def backends_of(name: str, incarnation: int, *, device: str, shares: bool) -> Sequence[Backend | OneSided]:
    """The one that is measured, for pools on `device`; `shares`: of the sending side."""
    if name == "cuda_ipc":
        return (CudaIpcBackend(CudaDriver(), shares=shares),)
    one_sided = make_one_sided(name, tag=f"bench-{incarnation}", device=device)
    return (one_sided,) if one_sided is not None else make_backends(name)


def spans_of(pages: NDArray[np.int32]) -> tuple[PageSpan, ...]:
    """The pages of a whole prompt."""
    return (PageSpan(part=Part.FULL, first=0, pages=pages),)


def prefill_process(words: Sequence[str]) -> None:
    """Serves prompts whose KV is there already, until it is killed: BACKEND DEVICE BUSY PAGES LAYERS HEADS HEAD_SIZE
    PAGE_SIZE. BUSY 1: it keeps its device busy with products meanwhile."""
    backend, device, (busy, pages, layers, heads, head_size, page_size) = words[0], words[1], map(int, words[2:])
    torch.set_num_threads(1)
    shape = Shape(layers=layers, heads=heads, head_size=head_size, page_size=page_size, device=device)
    products = Products() if busy else None
    pool, incarnation, channel = shape.pool(pages), new_incarnation(), ZmqChannel("tcp://127.0.0.1:0")
    backends = backends_of(backend, incarnation, device=device, shares=True)
    peers = Peers(Mailbox(channel, incarnation=incarnation, clock=CLOCK))
    port, line = make_port(PrefillSide, shape.settings("prefill", incarnation, backends[0]), pool, backends)
    print(f"\nADDRESS {channel.address}", flush=True)
    while True:
        messages = peers.receive(min(0.001 if products else 0.1, port.wait_s))
        if products is not None:
            products.go_on()
        line.pump()
        for result in port.turn(CLOCK.now(), messages):
            if isinstance(result, AddPrefill):
                count = -(-len(result.request.prompt) // page_size)
                ids = np.arange(1, count + 1, dtype=np.int32)
                port.handle(ChunkReady(xid=result.xid, spans=spans_of(ids), last=True, token=7), CLOCK.now())
        peers.deliver(port.take_outgoing())


class Products:
    """Matrix products, which keep a GPU busy."""

    def __init__(self) -> None:
        self._a, self._b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._ends: deque[torch.cuda.Event] = deque()

    def go_on(self) -> None:
        """Queue more, where less than some 10 ms are queued."""
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        while len(self._ends) < 8:
            torch.matmul(self._a, self._b)
            self._ends.append(torch.cuda.Event())
            self._ends[-1].record()


def make_port(
    machine: type[Any], settings: HandoffSettings, pool: DevicePool, backends: Sequence[Backend | OneSided]
) -> tuple[HandoffPort[Any], AnsweringLine]:  # fmt: skip
    """The port of an engine of one rank, and its line: to be pumped before each turn."""
    worker = PageWorker(
        0, layout=RankLayout(settings.layout), stores={Part.FULL: pool}, backends=backends, clock=CLOCK
    )  # fmt: skip
    line = AnsweringLine([worker])
    return HandoffPort(machine, settings, line=line, backends=backends), line


class CountingChannel(ZmqChannel):
    """Counts frames, both ways."""

    frames = 0

    def send(self, peer: str, parts: Parts) -> None:
        self.frames += 1
        super().send(peer, parts)

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        events = super().poll(timeout_s)
        self.frames += sum(isinstance(event, Arrived) for event in events)
        return events


class Pair:
    """The asking side, and the process of the other one."""

    def __init__(
        self, backend: str, shape: Shape, pages: int, *, script: Sequence[str], busy: bool = False, **more: str
    ) -> None:
        """`script`: what calls `prefill_process` with the words after --prefill-process. `busy`: it keeps its device
        busy meanwhile. `more`: of that process's environment."""
        sizes = (int(busy), pages, shape.layers, shape.heads, shape.head_size, shape.page_size)
        words = ["--prefill-process", backend, shape.device, *map(str, sizes)]
        self.child = subprocess.Popen(
            [sys.executable, *script, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
        )
        assert self.child.stdout is not None
        self.shape, self.pages = shape, pages
        self.address = next(line for line in self.child.stdout if line.startswith("ADDRESS ")).split()[1]
        incarnation = new_incarnation()
        self.channel = CountingChannel()
        backends = self.backends = backends_of(backend, incarnation, device=shape.device, shares=False)
        self.peers = Peers(Mailbox(self.channel, incarnation=incarnation, clock=CLOCK))
        settings = shape.settings("decode", incarnation, backends[0])
        self.port, self.line = make_port(DecodeSide, settings, shape.pool(pages), backends)
        self.copy_seconds = 0.0

    def start(self, rid: str, pages: NDArray[np.int32]) -> None:
        """Ask for a prompt that fills these pages."""
        prompt = np.zeros(len(pages) * self.shape.page_size, dtype=np.int32)
        request = Request(rid=rid, prompt=prompt, sampling=SamplingParams(), seed=0)
        start = StartHandoff(rid=rid, request=request, address=self.address, held=0, spans=spans_of(pages))
        self.port.handle(start, CLOCK.now())
        self.peers.deliver(self.port.take_outgoing())

    def turn(self, timeout_s: float) -> list[DecodeResult]:
        """One turn of the loop, which waits so long for a message."""
        messages = self.peers.receive(min(timeout_s, self.port.wait_s))
        self.line.pump()
        results = self.port.turn(CLOCK.now(), messages)
        self.peers.deliver(self.port.take_outgoing())
        return results

    def landed(self, timeout_s: float) -> int:
        """Handoffs that landed within one turn. A failed one raises."""
        count = 0
        for result in self.turn(timeout_s):
            if isinstance(result, Landed):
                self.copy_seconds = result.copy_seconds
                count += 1
            elif hasattr(result, "code"):
                raise AssertionError(f"the handoff failed: {result}")
        return count

    def handoff(self, count: int = 0) -> float:
        """Seconds of one handoff of so many pages; 0 = of all."""
        begin = CLOCK.now()
        self.start("r", np.arange(1, (count or self.pages) + 1, dtype=np.int32))
        while not self.landed(1.0):
            pass
        return CLOCK.now() - begin

    def messages(self, rounds: int) -> float:
        """Frames of all kinds for one handoff of one page, both ways together, acknowledgements included."""
        page = np.array([1], dtype=np.int32)
        begin = self.channel.frames
        for number in range(rounds):
            self.start(f"m{number}", page)
            while not self.landed(1.0):
                pass
        return (self.channel.frames - begin) / rounds

    def rate(self, seconds: float, in_flight: int = 64) -> float:
        """Handoffs of one page in a second, with so many under way."""
        begin, done, asked = CLOCK.now(), 0, 0
        while CLOCK.now() - begin < seconds:
            while asked - done < in_flight:
                asked += 1
                self.start(f"q{asked}", np.array([1 + asked % self.pages], dtype=np.int32))
            done += self.landed(1.0)
        rate = done / (CLOCK.now() - begin)
        while done < asked:
            done += self.landed(1.0)
        return rate

    def abort(self) -> float:
        """Seconds from the wish to abort a handoff whose pages are being filled until all of them are free."""
        self.start("a", np.arange(1, self.pages + 1, dtype=np.int32))
        before = self.channel.frames
        while self.channel.frames < before + 2:  # something of it has come
            self.turn(1.0)
        begin = CLOCK.now()
        self.port.handle(CancelHandoff(rid="a"), CLOCK.now())
        seconds = CLOCK.now() - begin
        assert not self.port.machine.handoff_count, "the pages are not free"
        return seconds

    def close(self) -> None:
        """End both."""
        self.port.close()
        self.peers.close()
        self.child.kill()
        self.child.wait()
