"""Pages through NIXL (the `nixl` wheel, over UCX): the decode engine reads prefill's pool (pull, mode C).

Why pull: with NIXL 1.5.1 neither deregistering nor removing a remote agent stops what that agent writes into our
memory; only destroying our own agent does. Reading, we know our own operations, and they are over when NIXL says so;
where it reports an error instead, some of their pieces may still be under way, so our agent is destroyed and made anew
before the failure is known to either side. Peers exchange plain addresses: NIXL's own pickled lists are never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends.one_sided import (
    Endpoint,
    Fenced,
    OpResult,
    OpState,
    Region,
    Strips,
    pack_endpoint,
    strips_into_rows,
    strips_of_part,
    unpack_endpoint,
)
from serinus.pd.modes import Capabilities, Mode

_MEMORY: Final = "DRAM"
_PENDING: Final = OpResult(state=OpState.PENDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLibrary:
    """What is used of the package."""

    agent: Callable[[str, Any], Any]
    config: Callable[..., Any]
    errors: tuple[type[Exception], ...]
    """All that it raises."""


@dataclass(slots=True, kw_only=True)
class _Read:
    handle: Any
    peer: str


class NixlBackend:
    """One NIXL agent. Its progress runs in a thread of its own, so a peer can read while we compute."""

    name = "nixl"
    capabilities = Capabilities(mode=Mode.PULL, recut=Mode.PULL)

    def __init__(self, agent_name: str, library: NixlLibrary | None = None) -> None:
        """`agent_name`: differs between any two processes, restarts included; `library`: None = the package.

        Raises ConfigError where the package is missing or has no UCX.
        """
        self._library = _installed() if library is None else library
        self._errors = self._library.errors
        self._agent_name = agent_name
        self._lives = 0
        self._agent: Any = None
        self._regions: tuple[Region, ...] = ()
        self._lent: list[NDArray[np.uint8]] = []
        self._peers: dict[str, tuple[str, Endpoint]] = {}
        """Name of a peer -> what NIXL calls it, and its memory."""
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
            ConfigError: NIXL cannot register it.
            InvariantError: memory is registered already.
        """
        if self._regions:
            raise InvariantError("pd: memory is registered already, expected one call")
        self._regions = tuple(regions)
        self._register()
        return self.endpoint

    def lend(self, rows: NDArray[np.uint8]) -> None:
        """Make own memory ready for `read_rows`. Raises TransferFailed: NIXL cannot register it."""
        try:
            self._agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], _MEMORY, backends=["UCX"])
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL cannot register {rows.nbytes} bytes to read into: {error!r}") from None
        self._lent.append(rows)

    def _register(self) -> None:
        spans = [(region.address, region.byte_count) for region in self._regions if region.byte_count]
        spans += [(rows.ctypes.data, rows.nbytes) for rows in self._lent]
        try:
            self._agent.register_memory([(*span, 0, "") for span in spans], _MEMORY, backends=["UCX"])
        except self._errors as error:
            raise ConfigError(f"pd: NIXL cannot register {len(spans)} pieces of memory: {error!r}") from None

    @property
    def endpoint(self) -> bytes:
        """Ours, for the peers; it changes when the agent is made anew."""
        return pack_endpoint(self._agent.get_agent_metadata(), self._regions)

    # ---- peers --------------------------------------------------------------------------------------------------

    def refusal(self, ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
        """Nothing: whether the peer can be reached is seen at `connect`."""
        return ""

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> bytes | None:
        """None: XXH3, by the page workers."""
        return None

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Add one rank of a peer to our agent, under a name of our choice; a known name is taken anew.

        Raises TransferFailed: the endpoint makes no sense to us or to NIXL.
        """
        self.disconnect(peer)
        found = unpack_endpoint(endpoint)
        try:
            remote = self._agent.add_remote_agent(found.session)
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL does not know what to make of {peer}: {error!r}") from None
        self._peers[peer] = (remote.decode() if isinstance(remote, bytes) else remote, found)
        self._endpoints[peer] = endpoint

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not; while reads from it are under way the agent is made anew, and all reads fail."""
        self._endpoints.pop(peer, None)
        known = self._peers.pop(peer, None)
        if known is None or any(name == known[0] for name, _endpoint in self._peers.values()):
            return
        if any(read.peer == peer for read in self._ops.values()):
            self._renew(f"{peer} was disconnected")
            return
        try:
            self._agent.remove_remote_agent(known[0])
        except self._errors:
            return  # it is gone already

    def fence(self, peer: str) -> Fenced:
        """Our agent ends, and with it every operation that peers began on our memory."""
        self.disconnect(peer)
        self._renew("our agent was made anew")
        return Fenced(all_peers=True, endpoint=self.endpoint)

    def _renew(self, reason: str) -> None:
        """End the agent, so that all reads are over; fail them; start again with the same memory and peers."""
        for op, read in self._ops.items():
            read.handle._released = True  # the agent frees its handles when it ends; they must not outlive it
            self._ended[op] = OpResult(state=OpState.FAILED, error=reason)
        self._ops.clear()
        self._agent = None
        self._start()
        self._register()
        endpoints, self._peers = dict(self._endpoints), {}
        for peer, endpoint in endpoints.items():
            try:
                self.connect(peer, endpoint)
            except TransferFailed:
                self._endpoints.pop(peer, None)  # its next read says that it is not connected

    # ---- operations ---------------------------------------------------------------------------------------------

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        """Not used: a write could not be called back (see above). Raises InvariantError: always."""
        raise InvariantError("pd: nixl is used to read only, expected no write")

    def read(
        self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32], digest_seed: int = 0
    ) -> int:
        """Begin to fill own pages from the peer's; returns the operation's number.

        Raises TransferFailed: the peer is not connected, its pages differ in shape from ours, or NIXL refuses the read.
        """
        endpoint = self._endpoint_of(peer)
        return self._begin(peer, strips_of_part(self._regions, endpoint.regions, part, pages, sources))

    def read_rows(self, peer: str, part: Part, rows: NDArray[np.uint8], sources: NDArray[np.int32]) -> int:
        """Begin to fill rows, lent before, from the peer's pages; as `read`."""
        return self._begin(peer, strips_into_rows(rows, self._endpoint_of(peer).regions, part, sources))

    def _endpoint_of(self, peer: str) -> Endpoint:
        if peer not in self._peers:
            raise TransferFailed(f"pd: {peer} is not connected")
        return self._peers[peer][1]

    def _begin(self, peer: str, strips: Strips) -> int:
        remote = self._peers[peer][0]
        zeros = np.zeros_like(strips.local)
        try:
            local = self._agent.get_xfer_descs(
                np.stack((strips.local, strips.byte_counts, zeros), 1).astype(np.uint64), _MEMORY
            )
            distant = self._agent.get_xfer_descs(
                np.stack((strips.remote, strips.byte_counts, zeros), 1).astype(np.uint64), _MEMORY
            )
            handle = self._agent.initialize_xfer("READ", local, distant, remote, backends=["UCX"])
        except self._errors as error:
            raise TransferFailed(f"pd: NIXL cannot read from {peer}: {error!r}") from None
        self._last_op += 1
        self._ops[self._last_op] = _Read(handle=handle, peer=peer)
        try:
            state = self._agent.transfer(handle)
        except self._errors as error:
            state = f"ERR: {error!r}"
        self._settle(self._last_op, state)
        return self._last_op

    def poll(self, op: int) -> OpResult:
        """How a read is, without waiting. Raises InvariantError: an operation of that number is not known."""
        read = self._ops.get(op)
        if read is not None:
            try:
                state = self._agent.check_xfer_state(read.handle)
            except self._errors as error:
                state = f"ERR: {error!r}"
            self._settle(op, state)
        if op in self._ended:
            return self._ended.pop(op)
        if op not in self._ops:
            raise InvariantError(f"pd: operation {op} is not under way, expected one that is")
        return _PENDING

    def _settle(self, op: int, state: str) -> None:
        """Take an operation's state; an error ends all of them (see above)."""
        if state == "PROC":
            return
        if state == "DONE":
            self._ops.pop(op).handle.release()
            self._ended[op] = OpResult(state=OpState.DONE)
            return
        self._renew(f"pd: NIXL failed to read from {self._ops[op].peer} ({state})")

    def cancel(self, op: int) -> None:
        """Changes nothing. Letting a handle go is not its end, so it is kept until it ends by itself."""

    def close(self) -> None:
        """End the agent: our reads are over, and no peer reaches our memory any more."""
        for read in self._ops.values():
            read.handle._released = True
        self._ops.clear()
        self._peers.clear()
        self._endpoints.clear()
        self._agent = None


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
