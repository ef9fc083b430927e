"""Pages through NIXL (the `nixl` wheel, over UCX): the decode engine reads prefill's pool (pull, mode C).

Why pull: with NIXL 1.5.1 neither deregistering nor removing a remote agent stops what that agent writes into our
memory; only destroying our own agent does. Reading, we know our own operations, and they are over when NIXL says so;
where it reports an error instead, some of their pieces may still be under way, so our agent is destroyed and made anew
before the failure is known to either side. Peers exchange plain addresses: NIXL's own pickled lists are never used.

Pools on a GPU are registered as its memory (VRAM). NIXL knows no streams of CUDA: a read is posted when what was queued
on own pages before it has run, and is over when sums over what it wrote were made on the device, which are compared
with the owner's. UCX copies by streams of its own, which an agent that ends may leave running, so the device is waited
for then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends.cuda_ipc import PageSums, Pull
from serinus.pd.backends.one_sided import (
    Endpoint,
    Fenced,
    OpResult,
    OpState,
    PageRows,
    Region,
    Strips,
    check_words,
    pack_endpoint,
    strips_into_rows,
    strips_of_part,
    unpack_endpoint,
    whole_pages,
)
from serinus.pd.modes import Capabilities, Mode

_PLACE: Final = struct.Struct("<i")
"""Before NIXL's own words in an endpoint: the owner's number of its GPU, or..."""
_HOST: Final = -1
_PENDING: Final = OpResult(state=OpState.PENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLibrary:
    """What is used of the package."""

    agent: Callable[[str, Any], Any]
    config: Callable[..., Any]
    errors: tuple[type[Exception], ...]
    """All that it raises."""


class PoolDevice(PageSums, Protocol):
    """What is used of CUDA, where pools are on a GPU."""

    index: int
    """Number of the GPU, as this process counts."""

    def behind_queue(self) -> Callable[[], bool]:
        """Asks, without waiting, whether all that is queued for the model now has run."""

    def begin_sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> Pull:
        """Queue: sums of own pages, which are whole. Beside what is queued for the model."""

    def settle(self) -> None:
        """Wait for all that this process has queued on the device, by any library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    remote: str
    """What NIXL calls it."""
    device: int
    """The GPU that its pages are on; _HOST = none."""
    endpoint: Endpoint


@dataclass(slots=True, kw_only=True)
class _Read:
    peer: str
    handle: Any
    """None = the bytes have come, or never will."""
    may_begin: Callable[[], bool]
    """Whether own pages are free of what was queued on them before."""
    begin_sums: Callable[[], Pull] | None
    """Of the pages that it writes, where they are on a GPU."""
    is_posted: bool = False
    sums: Pull | None = None
    """Under way when the bytes have come."""


class NixlBackend:
    """One NIXL agent. Its progress runs in a thread of its own, so a peer can read while we compute."""

    name = "nixl"
    capabilities = Capabilities(mode=Mode.PULL, recut=Mode.PULL)
    holds = None

    def __init__(self, agent_name: str, library: NixlLibrary | None = None, device: PoolDevice | None = None) -> None:
        """`agent_name`: differs between any two processes, restarts included; `library`: None = the package; `device`:
        that the pools are on, None = memory of the host. From a GPU pages only go whole.

        Raises ConfigError where the package is missing or has no UCX.
        """
        self._device = device
        self._memory, self._index = ("DRAM", 0) if device is None else ("VRAM", device.index)
        if device is not None:
            self.capabilities = Capabilities(mode=Mode.PULL, whole_chunks=True)
        self._library = _installed() if library is None else library
        self._errors = self._library.errors
        self._agent_name = agent_name
        self._lives = 0
        self._agent: Any = None
        self._regions: tuple[Region, ...] = ()
        self._lent: list[NDArray[np.uint8]] = []
        self._peers: dict[str, _Peer] = {}
        self._endpoints: dict[str, bytes] = {}
        self._ops: dict[int, _Read] = {}
        self._ended: dict[int, OpResult] = {}
        self._last_op = 0
        self._start()

    def _start(self) -> None:
        self._lives += 1
        name = f"{self._agent_name}.{self._lives}"
        try:
            self._agent = self._library.agent(name, self._library.config(backends=["UCX"]))
        except self._errors as error:
            raise ConfigError(f"pd: NIXL does not start: {error!r}, expected a working UCX") from None
        if "UCX" not in self._agent.backends:
            raise ConfigError("pd: this NIXL has no UCX plugin, expected one")

    # ---- our memory ---------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> bytes:
        """Make memory readable for peers, once; returns our endpoint.

        Raises:
            ConfigError: NIXL cannot register it, or strips on a GPU are no multiple of 8 bytes.
            InvariantError: memory is registered already.
        """
        if self._regions:
            raise InvariantError("pd: memory is registered already, expected one call")
        if self._device is not None:
            check_words(self.name, regions)
            self._device.warm(regions)
        self._regions = tuple(regions)
        self._register()
        return self.endpoint

    def lend(self, rows: NDArray[np.uint8]) -> None:
        """Make own memory ready for `read_rows`. Raises TransferFailed: NIXL cannot register it."""
        try:
            self._agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], self._memory, backends=["UCX"])
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL cannot register {rows.nbytes} bytes to read into: {error!r}") from None
        self._lent.append(rows)

    def _register(self) -> None:
        spans = [(region.address, region.byte_count) for region in self._regions if region.byte_count]
        spans += [(rows.ctypes.data, rows.nbytes) for rows in self._lent]
        try:
            self._agent.register_memory([(*span, self._index, "") for span in spans], self._memory, backends=["UCX"])
        except self._errors as error:
            hint = "" if self._device is None else "; expected a UCX that finds its modules of CUDA (UCX_MODULE_DIR)"
            raise ConfigError(
                f"pd: NIXL cannot register {len(spans)} pieces of memory ({self._memory}): {error!r}{hint}"
            ) from None

    @property
    def endpoint(self) -> bytes:
        """Ours, for the peers; it changes when the agent is made anew."""
        place = _PLACE.pack(_HOST if self._device is None else self._index)
        return pack_endpoint(place + self._agent.get_agent_metadata(), self._regions)

    # ---- peers --------------------------------------------------------------------------------------------------

    def refusal(self, ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
        """That one side's pages are on a GPU and the other's are not: each has digests of its own. Whether the peer
        can be reached is seen at `connect`."""
        try:
            here, there = (all(_place(unpack_endpoint(each))[0] == _HOST for each in ends) for ends in (ours, theirs))
        except TransferFailed as error:
            return str(error)
        if here == there:
            return ""
        return (
            "pages are on a GPU on one side and in memory of the host on the other, expected both alike (or shm, tcp)"
        )

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> bytes | None:
        """Sums of own pages on a GPU; waits for the device. None = on the host: XXH3, by the page workers."""
        return None if self._device is None else self._device.sums((whole_pages(self._regions, part),), pages, seed)

    def digests_beside(self) -> bool:
        """No: digests are made before a peer is told of pages."""
        return False

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Add one rank of a peer to our agent, under a name of our choice; a known name is taken anew.

        Raises TransferFailed: the endpoint makes no sense to us or to NIXL.
        """
        self.disconnect(peer)
        found = unpack_endpoint(endpoint)
        device, session = _place(found)
        try:
            remote = self._agent.add_remote_agent(session)
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL does not know what to make of {peer}: {error!r}") from None
        remote = remote.decode() if isinstance(remote, bytes) else remote
        self._peers[peer] = _Peer(remote=remote, device=device, endpoint=found)
        self._endpoints[peer] = endpoint

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not; while reads from it are under way the agent is made anew, and all reads fail."""
        self._endpoints.pop(peer, None)
        known = self._peers.pop(peer, None)
        if known is None or any(other.remote == known.remote for other in self._peers.values()):
            return
        if any(read.peer == peer and read.handle is not None for read in self._ops.values()):
            self._renew(f"{peer} was disconnected")
            return
        try:
            self._agent.remove_remote_agent(known.remote)
        except self._errors:
            return  # it is gone already

    def fence(self, peer: str) -> Fenced:
        """Our agent ends, and with it every operation that peers began on our memory."""
        self.disconnect(peer)
        self._renew("our agent was made anew")
        return Fenced(all_peers=True, endpoint=self.endpoint)

    def _renew(self, reason: str) -> None:
        """End the agent, so that all reads are over; fail them; start again with the same memory and peers.
        Reads that only have to be summed go on."""
        for op in self._end():
            del self._ops[op]
            self._ended[op] = OpResult(state=OpState.FAILED, error=reason)
        self._start()
        self._register()
        endpoints, self._peers = dict(self._endpoints), {}
        for peer, endpoint in endpoints.items():
            try:
                self.connect(peer, endpoint)
            except TransferFailed:
                self._endpoints.pop(peer, None)  # its next read says that it is not connected

    def _end(self) -> list[int]:
        """End the agent; returns the reads that it had not ended. Nothing refers to it or to a handle of its then.

        On a GPU copies that were queued are waited for before, as the agent unmaps what they read, and after.
        """
        self._settle()
        left = [op for op, read in self._ops.items() if read.handle is not None]
        for op in left:
            self._ops[op].handle._released = True  # the agent frees its handles when it ends
            self._ops[op].handle = None
        self._agent = None
        self._settle()
        return left

    def _settle(self) -> None:
        if self._device is not None:
            self._device.settle()

    # ---- operations ---------------------------------------------------------------------------------------------

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        """Not used: a write could not be called back (see above). Raises InvariantError: always."""
        raise InvariantError("pd: nixl is used to read only, expected no write")

    def mark(self) -> Callable[[], bool] | None:
        """What is queued on the device now, as OneSided says."""
        return None if self._device is None else self._device.behind_queue()

    def read(
        self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32], digest_seed: int = 0,
        behind: Callable[[], bool] | None = None,
    ) -> int:  # fmt: skip
        """Begin to fill own pages from the peer's; returns the operation's number.

        Raises TransferFailed: the peer is not connected, its pages differ in shape from ours, or NIXL refuses the read.
        """
        strips = strips_of_part(self._regions, self._at(peer).endpoint.regions, part, pages, sources)
        if self._device is None:
            return self._begin(peer, strips)
        rows = (whole_pages(self._regions, part),)
        return self._begin(peer, strips, partial(self._device.begin_sums, rows, pages, digest_seed), behind)

    def read_rows(self, peer: str, part: Part, rows: NDArray[np.uint8], sources: NDArray[np.int32]) -> int:
        """Begin to fill rows, lent before, from the peer's pages; as `read`."""
        return self._begin(peer, strips_into_rows(rows, self._at(peer).endpoint.regions, part, sources))

    def _at(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferFailed(f"pd: {peer} is not connected")
        return self._peers[peer]

    def _begin(
        self, peer: str, strips: Strips, begin_sums: Callable[[], Pull] | None = None,
        behind: Callable[[], bool] | None = None,
    ) -> int:  # fmt: skip
        known = self._peers[peer]
        try:
            local = self._pieces(strips.local, strips, self._index)
            distant = self._pieces(strips.remote, strips, max(known.device, 0))
            handle = self._agent.initialize_xfer("READ", local, distant, known.remote, backends=["UCX"])
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL cannot read from {peer}: {error!r}") from None
        may_begin = behind or self.mark() or _at_once
        self._last_op += 1
        self._ops[self._last_op] = _Read(peer=peer, handle=handle, may_begin=may_begin, begin_sums=begin_sums)
        del handle  # none but the read refers to it: it must not outlive its agent
        self._go_on(self._last_op)
        return self._last_op

    def _pieces(self, addresses: NDArray[np.int64], strips: Strips, device: int) -> Any:
        """As NIXL takes them: address, bytes, device."""
        devices = np.full_like(addresses, device)
        return self._agent.get_xfer_descs(
            np.stack((addresses, strips.byte_counts, devices), 1).astype(np.uint64), self._memory
        )

    def poll(self, op: int) -> OpResult:
        """How a read is, without waiting. Raises InvariantError: an operation of that number is not known."""
        if op in self._ops:
            self._go_on(op)
        if op in self._ended:
            return self._ended.pop(op)
        if op not in self._ops:
            raise InvariantError(f"pd: operation {op} is not under way, expected one that is")
        return _PENDING

    def _go_on(self, op: int) -> None:
        """Take a read as far as it comes now: posted, moved, summed, ended. An error ends all of them (see above)."""
        read = self._ops[op]
        if read.handle is not None:
            if not read.is_posted and not read.may_begin():
                return
            state = self._state(read)
            if state == "PROC":
                return
            if state != "DONE":
                self._renew(f"pd: NIXL failed to read from {read.peer} ({state})")
                return
            read.handle.release()
            read.handle = None
            read.sums = read.begin_sums() if read.begin_sums is not None else None
        if read.sums is None or read.sums.done():
            del self._ops[op]
            digests = b"" if read.sums is None else read.sums.sums()
            self._ended[op] = OpResult(state=OpState.DONE, digests=digests)

    def _state(self, read: _Read) -> str:
        """Post it, or ask for it, in NIXL's words. When it returns no frame refers to the agent."""
        call = self._agent.check_xfer_state if read.is_posted else self._agent.transfer
        read.is_posted = True
        try:
            return str(call(read.handle))
        except self._errors as error:
            return f"ERR: {error!r}"

    def cancel(self, op: int) -> None:
        """Changes nothing. Letting a handle go is not its end, so it is kept until it ends by itself."""

    def close(self) -> None:
        """End the agent: our reads are over, and no peer reaches our memory any more."""
        self._end()
        self._ops.clear()
        self._peers.clear()
        self._endpoints.clear()


def _at_once() -> bool:
    """Memory of the host is written in order by this process itself."""
    return True


def _place(endpoint: Endpoint) -> tuple[int, bytes]:
    """The GPU that a peer's pages are on, and NIXL's words. Raises TransferFailed: it is no endpoint of nixl."""
    if len(endpoint.session) < _PLACE.size:
        raise TransferFailed(f"pd: {len(endpoint.session)} bytes are no session of nixl")
    (device,) = _PLACE.unpack_from(endpoint.session)
    return device, endpoint.session[_PLACE.size :]


def _installed() -> NixlLibrary:
    """The package. Raises ConfigError: it is missing."""
    try:
        from nixl import _bindings as bindings
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(
            f"pd: data backend nixl needs the package nixl ({error}), expected: pip install -e '.[nixl]'"
        ) from None
    errors = tuple(
        value for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )  # fmt: skip
    return NixlLibrary(agent=nixl_agent, config=nixl_agent_config, errors=errors)
