"""A small engine around a port, for tests with real processes; also the program of the other process.

python peer.py prefill BACKEND ADDRESS all|some|spoilt   prints its address; computes all pages asked for, only some, or
                                                     all, which are another owner's as soon as their sums are made
python peer.py decode BACKEND ADDRESS                asks ADDRESS for one prompt, again and again
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serinus.core.clock import WallClock
from serinus.core.handoff import ChunkReady
from serinus.core.ids import new_incarnation
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.engine.peers import Peers
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    AnyBackend,
    CancelHandoff,
    DecodeSide,
    HandoffPort,
    HandoffSettings,
    Landed,
    PageWorker,
    PrefillDrained,
    PrefillSide,
    RankLayout,
    Recompute,
    ReleaseChunk,
    StartHandoff,
    host_identity,
    make_backends,
)
from serinus.pd.backends import CudaDriver, CudaIpcBackend, NixlBackend, Region
from serinus.testing.answering_line import AnsweringLine
from serinus.wire import Mailbox, ZmqChannel
from serinus.wire.messages import LayoutSignature
from tests.pd.tiny import PAGE_SIZE, Store, first_token, full, make_request, make_settings, page_content

PAGE_BYTES = 64 << 10
BIG = LayoutSignature(
    model="m",
    kv_dtype="float16",
    page_size=PAGE_SIZE,
    layer_count=1,
    kv_head_count=1,
    head_size=PAGE_BYTES // (4 * PAGE_SIZE),
)

CLOCK = WallClock()


def full_page(prompt: NDArray[np.int32], index: int) -> NDArray[np.uint8]:
    """The KV of a page, at the size of a real one."""
    return np.tile(page_content(prompt, index), PAGE_BYTES // 16)


class HostStore(Store):
    """Pages in an array."""

    def __init__(self, count: int = 512) -> None:
        super().__init__(PAGE_BYTES, count)

    def page(self, page: int) -> NDArray[np.uint8]:
        """What is in a page."""
        return self.data[page]

    def spoil(self, pages: Sequence[int]) -> None:
        """They are another owner's."""
        self.data[pages] = 0xDD


class DeviceStore(HostStore):
    """Pages on a GPU."""

    def __init__(self, count: int = 512) -> None:
        super().__init__(count)
        self.memory = torch.zeros((count, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        self.regions = (
            Region(
                part=Part.FULL, address=self.memory.data_ptr(), lane_count=1, lane_stride=0, strip_bytes=PAGE_BYTES,
                page_count=count,
            ),
        )  # fmt: skip

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        out[:] = self.memory[torch.from_numpy(pages.astype(np.int64)).cuda()].cpu().numpy()

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.memory[torch.from_numpy(np.asarray(pages, np.int64)).cuda()] = torch.from_numpy(data).cuda()
        torch.cuda.synchronize()

    def page(self, page: int) -> NDArray[np.uint8]:
        return self.memory[page].cpu().numpy()

    def spoil(self, pages: Sequence[int]) -> None:
        self.memory[pages] = 0xDD
        torch.cuda.synchronize()


class Spoiling:
    """A one-sided backend by which pages that were summed are another owner's at once."""

    def __init__(self, backend: Any, store: HostStore) -> None:
        self._backend, self._store = backend, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def digests_beside(self) -> bool:
        return False

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> Any:
        made = self._backend.digests(part, pages, seed)
        self._store.spoil(pages.tolist())
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """An engine's pages, and how they travel."""

    store: HostStore
    backends: Sequence[AnyBackend]

    @classmethod
    def of(cls, backend: str, *, shares: bool) -> Ends:
        """`shares`: of a prefill engine."""
        if backend == "cuda_ipc":
            return cls(store=DeviceStore(), backends=(CudaIpcBackend(CudaDriver(), shares=shares),))
        if backend == "nixl":
            return cls(store=DeviceStore(), backends=(NixlBackend(f"peer-{new_incarnation()}", device=CudaDriver()),))
        return cls(store=HostStore(), backends=make_backends(backend, 64 << 20))

    def settings(self, engine: str, incarnation: int, **changes: object) -> HandoffSettings:
        """Of the engine's port."""
        return make_settings(
            engine, incarnation, backends=tuple(each.name for each in self.backends), host=host_identity(), layout=BIG,
            capabilities={each.name: each.capabilities for each in self.backends}, piece_bytes_max=1 << 20, **changes,
        )  # fmt: skip


def line_to(store: HostStore, backends: Sequence[AnyBackend]) -> AnsweringLine:
    worker = PageWorker(0, layout=RankLayout(BIG), stores={Part.FULL: store}, backends=backends, clock=CLOCK)
    return AnsweringLine([worker])


class Peer:
    """What both roles have."""

    port: HandoffPort[Any]
    line: AnsweringLine
    peers: Peers

    def until(self, happened: Callable[[], bool], seconds: float = 60.0) -> float:
        """Run the loop until something is so; returns how long it took."""
        start = CLOCK.now()
        while not happened():
            assert CLOCK.now() - start < seconds, f"did not happen within {seconds} s"
            self.turn(0.05)
        return CLOCK.now() - start

    def turn(self, timeout_s: float) -> None:
        """One turn of its loop; waits so long for a message."""
        messages = self.peers.receive(min(timeout_s, self.port.wait_s))
        self.line.pump()
        self._act(self.port.turn(CLOCK.now(), messages))
        self.peers.deliver(self.port.take_outgoing())

    def close(self) -> None:
        """End the rank, close the port and end all connections."""
        self.line.ranks[0].close()
        self.port.close()
        self.peers.close()

    def _act(self, results: Sequence[object]) -> None:
        raise AssertionError("each role has its own")


class PrefillPeer(Peer):
    """Computes what it is asked for: all of it, or all but the end."""

    def __init__(
        self, backend: str, address: str = "tcp://127.0.0.1:0", *, everything: bool = True, spoils: bool = False
    ) -> None:
        """`spoils`: pages are another owner's as soon as their sums are made."""
        incarnation = new_incarnation()
        ends = Ends.of(backend, shares=True)
        if spoils:
            ends = replace(ends, backends=[Spoiling(each, ends.store) for each in ends.backends])
        channel = ZmqChannel(address)
        self.address = channel.address
        self.everything = everything
        self.store = ends.store
        self.free = set(range(1, len(self.store.data)))
        self.held: dict[str, set[int]] = {}
        """Pages that must stay as they are, by handoff."""
        self.ended: list[PrefillDrained | AbortPrefill] = []
        self.peers = Peers(Mailbox(channel, incarnation=incarnation, clock=CLOCK))
        self.line = line_to(self.store, ends.backends)
        self.port = HandoffPort(PrefillSide, ends.settings("p", incarnation), line=self.line, backends=ends.backends)

    def _act(self, results: Sequence[object]) -> None:
        for result in results:
            match result:
                case AddPrefill():
                    self.held[result.xid] = set()
                    self._compute(result.xid, result.request, result.held // PAGE_SIZE)
                case ReleaseChunk():
                    self._free(result.xid, set(result.spans[0].pages.tolist()))
                case PrefillDrained() | AbortPrefill():
                    self._free(result.xid, set(self.held[result.xid]))
                    del self.held[result.xid]
                    self.ended.append(result)

    def _free(self, xid: str, pages: set[int]) -> None:
        self.held[xid] -= pages
        self.free |= pages
        self.store.spoil(sorted(pages))

    def _compute(self, xid: str, request: Request, skip: int) -> None:
        total = -(-len(request.prompt) // PAGE_SIZE) - skip
        for first in range(0, total, 20):
            count = min(20, total - first)
            last = first + count == total
            if last and not self.everything:
                return
            pages = np.array(sorted(self.free)[:count], dtype=np.int32)
            self.free -= set(pages.tolist())
            self.held[xid] |= set(pages.tolist())
            rows = [full_page(request.prompt, skip + first + i) for i in range(count)]
            self.store.write_pages(pages, np.stack(rows))
            token = first_token(request.prompt) if last else None
            chunk = ChunkReady(xid=xid, spans=full(skip + first, pages), last=last, token=token)
            self._act(self.port.handle(chunk, CLOCK.now()))


class DecodePeer(Peer):
    """Asks for prompts and checks what lands."""

    def __init__(self, backend: str, **changes: object) -> None:
        """`changes`: of its settings."""
        incarnation = new_incarnation()
        ends = Ends.of(backend, shares=False)
        self.store = ends.store
        self.asked: dict[str, StartHandoff] = {}
        self.results: list[Landed | Recompute] = []
        self.peers = Peers(Mailbox(ZmqChannel(), incarnation=incarnation, clock=CLOCK))
        self.line = line_to(self.store, ends.backends)
        self.backends = ends.backends
        self.port = HandoffPort(
            DecodeSide, ends.settings("d", incarnation, **changes), line=self.line, backends=ends.backends
        )  # fmt: skip

    def ask(self, rid: str, address: str, length: int, *, held_pages: int = 0) -> None:
        request = make_request(rid, length, len(self.results))
        pages = np.arange(1 + held_pages, 1 + -(-length // PAGE_SIZE), dtype=np.int32)
        event = StartHandoff(
            rid=rid, request=request, address=address, held=held_pages * PAGE_SIZE, spans=full(held_pages, pages)
        )
        self.asked[rid] = event
        self._act(self.port.handle(event, CLOCK.now()))
        self.peers.deliver(self.port.take_outgoing())

    def cancel(self, rid: str) -> None:
        self._act(self.port.handle(CancelHandoff(rid=rid), CLOCK.now()))
        self.asked.pop(rid, None)
        self.peers.deliver(self.port.take_outgoing())

    def _act(self, results: Sequence[object]) -> None:
        for result in results:
            if isinstance(result, Landed):
                self._check(self.asked[result.rid], result)
            if isinstance(result, (Landed, Recompute)):
                del self.asked[result.rid]
                self.results.append(result)

    def _check(self, asked: StartHandoff, landed: Landed) -> None:
        assert landed.token == first_token(asked.request.prompt)
        for i, page in enumerate(asked.spans[0].pages.tolist()):
            wanted = full_page(asked.request.prompt, asked.held // PAGE_SIZE + i)
            assert np.array_equal(self.store.page(page), wanted), f"page {i} holds other bytes"


def main(role: str, backend: str, address: str, how: str = "all") -> None:
    """The other process; lives until it is killed."""
    if role == "prefill":
        prefill = PrefillPeer(backend, address, everything=how != "some", spoils=how == "spoilt")
        print(prefill.address, flush=True)
        while True:
            prefill.turn(0.1)
    decode = DecodePeer(backend)
    print("asks", flush=True)
    while True:
        if not decode.asked:
            decode.ask("r", address, 400)
        decode.turn(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
