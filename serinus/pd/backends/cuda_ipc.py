"""Pages of another process on a GPU, through memory that it shares (CUDA IPC): the decode engine reads (pull, mode C).

The owner's memory is opened once; a kernel gathers scattered pages from it straight into own pages, and sums over what
it writes, which is compared with the owner's sums of the same bytes: nothing passes through the host. Between ranks of
unequal layouts the bytes are layers and heads of pages, by the same kernel; the owner then makes a sum for each rank
that reads of a page. What makes mode C
necessary: a read never fails. Memory of an owner that was killed stays readable until we let it go, that of one which
has given its pages to others is read as it is. So what the owner still
holds (pd.settings Holds, or CONFIRM) and the sums decide, never the read itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends.holds import SharedHolds
from serinus.pd.backends.one_sided import (
    Endpoint,
    Fenced,
    OpResult,
    OpState,
    PageRows,
    Region,
    check_pages,
    check_shapes,
    check_words,
    pack_endpoint,
    pairs_of_part,
    rows_of,
    unpack_endpoint,
    whole_pages,
    whole_rows,
)
from serinus.pd.backends.shm import Segments
from serinus.pd.modes import Capabilities, Mode
from serinus.pd.slices import Slice

_SHARED_MAX: Final = 8
"""Allocations of one rank."""
_PENDING: Final = OpResult(state=OpState.PENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAllocation:
    """An allocation that other processes can open."""

    handle: bytes
    """What they open it with."""
    address: int
    """Where it begins, in its owner."""
    byte_count: int


class Pull(Protocol):
    """A gather that was queued on the device."""

    def done(self) -> bool:
        """Whether nothing of it is read or written any more. Never waits."""

    def sums(self) -> bytes:
        """Of what was written of each page (kernels pull_pages), a little-endian u64. Waits until it is done."""

    @property
    def seconds(self) -> float:
        """From its begin to its end on the device; only when it is done."""


class PageSums(Protocol):
    """Sums of own pages on a device."""

    def warm(self, regions: Sequence[Region]) -> None:
        """Make ready for own pages, which are all of these. Raises ConfigError: the device does not do it right."""

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        """Of own pages where they lie, which are whole when what is queued for the model now has run: of each a
        little-endian u64 over each of `rows`. Waits for the device."""


class IpcLibrary(PageSums, Protocol):
    """What is used of CUDA, by one rank on its device."""

    device: str
    """Identity of the device."""
    reachable: tuple[str, ...]
    """Devices of which this process can read memory, its own among them."""
    process: str
    """Identity of the process, the same in no other one of this machine."""

    def share(self, address: int) -> SharedAllocation:
        """The allocation that an address lies in. Raises ConfigError: it cannot be shared."""

    def open(self, memory: SharedAllocation) -> int:
        """Where memory of another process lies from now on, until `close`. Raises TransferFailed. Cost: below 5 ms."""

    def close(self, address: int) -> None:
        """Let memory go that was opened; nothing may read it any more."""

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int, behind: Any,
    ) -> Pull:  # fmt: skip
        """Queue: rows of own pages are filled from those of opened memory. `pairs`: own rows and source, in the order
        of a page's bytes. It begins behind a mark, beside what was queued for the model later, and gives way to it."""

    def mark(self) -> object:
        """What is queued for the model now."""

    def is_idle(self) -> bool:
        """Whether all that was queued for the model has run. Never waits."""


@dataclass(slots=True, kw_only=True)
class _Mapped:
    """An allocation of a peer, as it is opened here."""

    address: int
    users: int = 0
    """Peers that are connected, and reads under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    process: str
    regions: tuple[Region, ...]
    """At the addresses that they have here."""
    handles: tuple[bytes, ...]
    rows: dict[Part, list[tuple[PageRows, PageRows]]] = field(default_factory=dict)
    """Own pages and those of the peer, of the parts that were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    pull: Pull
    peer: _Peer


class CudaIpcBackend:
    """One rank's memory, and what it has opened of others."""

    name = "cuda_ipc"
    capabilities = Capabilities(mode=Mode.PULL, recut=Mode.PULL, same_host=True, whole_chunks=True, slices=True)

    def __init__(self, library: IpcLibrary, *, shares: bool, segments: Segments | None = None) -> None:
        """`shares`: whether peers read our memory (prefill); else we only read theirs (decode), and name none.
        `segments`: in which holds lie; None = those of the operating system."""
        self._library = library
        self.holds = SharedHolds(segments)
        self._shares = shares
        self._regions: tuple[Region, ...] = ()
        self._shared: tuple[SharedAllocation, ...] = ()
        self._mapped: dict[tuple[str, bytes], _Mapped] = {}
        """By process and handle: of a peer that greets again, while reads go on, it is open already."""
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._last_op = 0

    # ---- our memory -------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> bytes:
        """Learn where our pages are, once, and share them; returns our endpoint. Cost: the kernels are made ready.

        Raises:
            ConfigError: it cannot be shared, or strips are no multiple of 8 bytes.
            InvariantError: memory is registered already.
        """
        if self._regions:
            raise InvariantError("pd: memory is registered already, expected one call")
        check_words(self.name, regions)
        shared: list[SharedAllocation] = []
        for region in regions if self._shares else ():
            if not any(_holds(memory, region) for memory in shared):
                shared.append(self._library.share(region.address))
            if not any(_holds(memory, region) for memory in shared):
                raise ConfigError(f"pd: part {region.part.name} lies in several allocations, expected one")
        self._regions, self._shared = tuple(regions), tuple(shared)
        self._library.warm(regions)
        return self.endpoint

    @property
    def endpoint(self) -> bytes:
        """Ours, for the peers."""
        session = {
            "process": self._library.process,
            "device": self._library.device,
            "reachable": list(self._library.reachable),
            "shared": [[memory.handle.hex(), memory.address, memory.byte_count] for memory in self._shared],
        }
        return pack_endpoint(json.dumps(session).encode(), self._regions if self._shares else ())

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> bytes | None:
        """Sums of own pages. Cost: reads them once, and waits for that."""
        return self._library.sums((whole_pages(self._regions, part),), pages, seed)

    def digests_beside(self) -> bool:
        """Whether nothing is queued for the model now: own pages are whole."""
        return self._library.is_idle()

    def slice_digests(self, part: Part, slices: Sequence[Slice], pages: NDArray[np.int32], seed: int) -> bytes:
        """See SliceReader. Cost: reads what is in slices once for each, and waits for that."""
        region = _kv_region(self._regions, part)
        return self._library.sums([(rows_of(region, each),) for each in slices], pages, seed)

    # ---- peers ------------------------------------------------------------------------------------------------------

    def refusal(self, ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
        """Why a rank of a peer cannot read the memory of a rank of ours that has bytes for it, in words; empty = all
        may."""
        try:
            owners, readers = ([_session(unpack_endpoint(each)) for each in ends] for ends in (ours, theirs))
        except TransferFailed as error:
            return str(error)
        expected = 1 + max(reader for _, reader in pairs)
        if len(readers) != expected:
            return f"it names GPUs of {len(readers)} ranks, expected {expected}"
        for rank, reader_rank in pairs:
            owner, reader = owners[rank], readers[reader_rank]
            if owner.process == reader.process:
                return "both engines are in one process, which cannot open its own memory"
            if owner.device not in reader.reachable:
                return (
                    f"its device {reader.device} does not read memory of {owner.device} (of rank {rank}), expected the"
                    " same device, or one with peer access that its process sees"
                )
        return ""

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Open the memory of one rank of a peer; a known name is taken anew.

        Raises TransferFailed: the endpoint makes no sense, or its memory cannot be opened.
        """
        self.disconnect(peer)
        found = unpack_endpoint(endpoint)
        session = _session(found)
        opened: list[bytes] = []
        try:
            for memory in session.shared:
                key = session.process, memory.handle
                if key not in self._mapped:
                    self._mapped[key] = _Mapped(address=self._library.open(memory))
                self._mapped[key].users += 1
                opened.append(memory.handle)
            regions = tuple(self._placed(session, region) for region in found.regions)
        except TransferFailed:
            self._let_go(session.process, opened)
            raise
        self._peers[peer] = _Peer(process=session.process, regions=regions, handles=tuple(opened))

    def _placed(self, session: _Session, region: Region) -> Region:
        """A region of a peer at its address here. Raises TransferFailed: it is outside of what it shares, or not of
        whole words."""
        if any(number % 8 for number in (region.address, region.lane_stride, region.strip_bytes)):
            raise TransferFailed(f"pd: pages of part {region.part.name} lie at no multiple of 8 bytes in the peer")
        for memory in session.shared:
            if _holds(memory, region):
                start = self._mapped[session.process, memory.handle].address
                return replace(region, address=start + region.address - memory.address)
        raise TransferFailed(f"pd: pages of part {region.part.name} lie outside of the memory that the peer shares")

    def _let_go(self, process: str, handles: Sequence[bytes]) -> None:
        for handle in handles:
            mapped = self._mapped[process, handle]
            mapped.users -= 1
            if not mapped.users:
                del self._mapped[process, handle]
                self._library.close(mapped.address)

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not; its memory is let go when the last read from it is over."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._let_go(known.process, known.handles)

    def fence(self, peer: str) -> Fenced:
        """Peers only read our memory: nothing is to be kept out of it."""
        self.disconnect(peer)
        return Fenced(all_peers=False, endpoint=self.endpoint)

    # ---- operations -------------------------------------------------------------------------------------------------

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        """Not used: nothing could keep a peer from writing. Raises InvariantError: always."""
        raise InvariantError("pd: cuda_ipc is used to read only, expected no write")

    def mark(self) -> object:
        """What is queued on the device now, as OneSided says."""
        return self._library.mark()

    def read(
        self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32], digest_seed: int = 0,
        behind: Any = None,
    ) -> int:  # fmt: skip
        """Begin to fill own pages from the peer's; returns the operation's number.

        Raises TransferFailed: the peer is not connected, or its pages differ in shape from ours.
        """
        known = self._known(peer)
        if part not in known.rows:
            pairs = pairs_of_part(self._regions, known.regions, part)
            for ours, theirs in pairs:
                check_shapes(ours, theirs)
            known.rows[part] = [(whole_rows(ours), whole_rows(theirs)) for ours, theirs in pairs]
        for own, other in known.rows[part]:
            check_pages(own.page_count, other.page_count, pages, sources)
        return self._begin(known, known.rows[part], pages, sources, digest_seed, behind)

    def read_slice(
        self, peer: str, part: Part, between: tuple[Slice, Slice], pages: NDArray[np.int32],
        sources: NDArray[np.int32], digest_seed: int, behind: Any = None,
    ) -> int:  # fmt: skip
        """See SliceReader. Raises as `read`."""
        known = self._known(peer)
        theirs, ours = (
            rows_of(_kv_region(regions, part), each)
            for regions, each in zip((known.regions, self._regions), between, strict=True)
        )
        check_pages(ours.page_count, theirs.page_count, pages, sources)
        return self._begin(known, [(ours, theirs)], pages, sources, digest_seed, behind)

    def _known(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferFailed(f"pd: {peer} is not connected")
        return known

    def _begin(
        self, known: _Peer, rows: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32],
        sources: NDArray[np.int32], digest_seed: int, behind: Any,
    ) -> int:  # fmt: skip
        behind = self._library.mark() if behind is None else behind
        pull = self._library.pull(rows, pages, sources, digest_seed, behind)
        for handle in known.handles:
            self._mapped[known.process, handle].users += 1
        self._last_op += 1
        self._reads[self._last_op] = _Read(pull=pull, peer=known)
        return self._last_op

    def poll(self, op: int) -> OpResult:
        """How a read is, without waiting. Raises InvariantError: an operation of that number is not known."""
        read = self._reads.get(op)
        if read is None:
            raise InvariantError(f"pd: operation {op} is not under way, expected one that is")
        if not read.pull.done():
            return _PENDING
        del self._reads[op]
        self._let_go(read.peer.process, read.peer.handles)
        return OpResult(state=OpState.DONE, digests=read.pull.sums(), seconds=read.pull.seconds)

    def cancel(self, op: int) -> None:
        """Changes nothing: what was queued on the device runs."""

    def close(self) -> None:
        """Wait for own reads, which may not outlive the memory; let everything go."""
        for read in self._reads.values():
            read.pull.sums()
        self._reads.clear()
        self._peers.clear()
        for mapped in self._mapped.values():
            self._library.close(mapped.address)
        self._mapped.clear()
        self.holds.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What an endpoint says beside its regions."""

    process: str
    device: str
    reachable: tuple[str, ...]
    shared: tuple[SharedAllocation, ...]


def _session(endpoint: Endpoint) -> _Session:
    """Raises TransferFailed: it makes no sense."""
    try:
        found = json.loads(endpoint.session)
        shared = tuple(
            SharedAllocation(handle=bytes.fromhex(handle), address=int(address), byte_count=int(count))
            for handle, address, count in found["shared"]
        )
        session = _Session(
            process=str(found["process"]), device=str(found["device"]),
            reachable=tuple(str(each) for each in found["reachable"]), shared=shared,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise TransferFailed(f"pd: {len(endpoint.session)} bytes are no session of cuda_ipc: {error!r}") from None
    if len(shared) > _SHARED_MAX or any(not 0 <= memory.byte_count < 1 << 63 for memory in shared):
        raise TransferFailed(f"pd: {len(shared)} allocations of cuda_ipc, expected up to {_SHARED_MAX} of sound sizes")
    return session


def _kv_region(regions: Sequence[Region], part: Part) -> Region:
    """Where the KV of a part lies, before its stamps. Raises TransferFailed: nowhere."""
    found = next((region for region in regions if region.part is part), None)
    if found is None:
        raise TransferFailed(f"pd: part {part.name} lies in no region")
    return found


def _holds(memory: SharedAllocation, region: Region) -> bool:
    return memory.address <= region.address <= region.address + region.byte_count <= memory.address + memory.byte_count
