"""Pages through Mooncake's transfer engine over TCP: the prefill engine writes into decode's pool (push, mode B).

Between unequal layouts decode reads them instead (pull), into memory that is no pool, and cuts them there.

What makes it safe, measured with mooncake-transfer-engine-non-cuda 0.3.13: memory that was unregistered refuses *new*
writes, but a write under way goes on into it; destroying the engine, which closes its sockets, ends those too. So the
fence is to destroy our engine and make another one, at another port: all peers are cut off, and greet again. A write
that failed may still have bytes on their way: it is LOST, never reported as over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.addresses import bare_host, host_port
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
from serinus.pd.modes import Capabilities, Fence, Mode

_PENDING = OpResult(state=OpState.PENDING)


class Write(Protocol):
    """A write, or a read, that was handed to a writer, as concurrent.futures.Future says it."""

    def done(self) -> bool:
        """Whether the call of the engine has returned, or will never be made."""

    def cancel(self) -> bool:
        """Take it back, if it has not begun."""

    def cancelled(self) -> bool:
        """Whether it was taken back."""

    def result(self) -> int:
        """The code that the engine returned; 0 = all bytes are there."""


class Writer(Protocol):
    """Writes to one peer, or reads from it, one after the other. The engine's calls wait: a peer that does not take its
    bytes does not hold up those of others."""

    def submit(self, engine: Any, session: str, strips: Strips, *, reads: bool = False) -> Write:
        """Write (or read) these as soon as those before them are written."""

    def end(self, *, wait: bool) -> None:
        """Take no more; `wait` until those that were submitted are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeLibrary:
    """What is used of the package, and what calls it."""

    engine: Callable[[], Any]
    writer: Callable[[], Writer]
    collect: Callable[[], object] = gc.collect
    """Finds what only garbage refers to."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    session: str
    endpoint: Endpoint
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    peer: str
    call: Write
    reads: bool


class MooncakeBackend:
    """A backend over one mooncake transfer engine."""

    name = "mooncake"
    capabilities = Capabilities(mode=Mode.PUSH, fence=Fence.CLOSE, recut=Mode.PULL)
    holds = None

    def __init__(self, host: str = "127.0.0.1", library: MooncakeLibrary | None = None) -> None:
        """`host`: where peers reach this process. The engine listens on all interfaces, whatever this says. `library`:
        None = the package.

        Raises ConfigError where the package or a library of its is missing.
        """
        self._library = _installed() if library is None else library
        self._host = bare_host(host)
        self._regions: tuple[Region, ...] = ()
        self._lent: list[NDArray[np.uint8]] = []
        self._peers: dict[str, _Peer] = {}
        self._ops: dict[int, _Op] = {}
        self._last_op = 0
        self._engine: Any = None
        self._start()

    def _start(self) -> None:
        self._engine = self._library.engine()
        code = self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise ConfigError(f"pd: Mooncake does not start at {self._host} (code {code}), expected an address of ours")

    # ---- our memory ---------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> bytes:
        """Make memory writable for peers, once; returns our endpoint.

        Raises:
            ConfigError: Mooncake cannot register a region.
            InvariantError: memory is registered already.
        """
        if self._regions:
            raise InvariantError("pd: memory is registered already, expected one call")
        self._regions = tuple(regions)
        self._register()
        return self.endpoint

    def _register(self) -> None:
        for region in self._regions:
            if region.byte_count and self._engine.register_memory(region.address, region.byte_count):
                raise ConfigError(f"pd: Mooncake cannot register {region.byte_count} bytes of part {region.part.name}")
        for rows in self._lent:
            if self._engine.register_memory(rows.ctypes.data, rows.nbytes):
                raise ConfigError(f"pd: Mooncake cannot register {rows.nbytes} bytes to read into")

    def lend(self, rows: NDArray[np.uint8]) -> None:
        """Make own memory ready for `read_rows`. Raises TransferFailed: Mooncake cannot register it."""
        if self._engine.register_memory(rows.ctypes.data, rows.nbytes):
            raise TransferFailed(f"pd: Mooncake cannot register {rows.nbytes} bytes to read into")
        self._lent.append(rows)

    @property
    def endpoint(self) -> bytes:
        """Ours, for the peers; another one after each fence."""
        return pack_endpoint(host_port(self._host, self._engine.get_rpc_port()).encode(), self._regions)

    # ---- peers --------------------------------------------------------------------------------------------------

    def refusal(self, ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
        """Nothing: whether the peer can be reached is seen at `connect`."""
        return ""

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> bytes | None:
        """None: XXH3, by the page workers."""
        return None

    def digests_beside(self) -> bool:
        """No: digests are made before a peer is told of pages."""
        return False

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Keep where one rank of a peer is; nothing is sent yet. Raises TransferFailed: its endpoint makes no sense."""
        self.disconnect(peer)
        found = unpack_endpoint(endpoint)
        try:
            session = found.session.decode("ascii")
        except UnicodeDecodeError as error:
            raise TransferFailed(f"pd: {peer} is at no address of Mooncake: {error}") from None
        self._peers[peer] = _Peer(session=session, endpoint=found, writer=self._library.writer())

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not; its writes under way, and those that wait for their turn, go on."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.writer.end(wait=False)

    def fence(self, peer: str) -> Fenced:
        """Cut all peers off from our memory: the engine is destroyed and made anew. Cost: most of a second.

        Raises ConfigError: Mooncake does not start again.
        """
        self.disconnect(peer)
        self._end()
        self._start()
        self._register()
        return Fenced(all_peers=True, endpoint=self.endpoint)

    def _end(self) -> None:
        """Destroy the engine. No other reference may be kept: its sockets are closed when the last reference goes."""
        for known in self._peers.values():
            known.writer.end(wait=True)
        for op in self._ops.values():
            op.call.cancel()
        self._peers.clear()
        self._engine = None
        self._library.collect()

    # ---- operations ---------------------------------------------------------------------------------------------

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        """Begin to write own pages into the peer's, by the peer's writer; returns the operation's number.

        Raises TransferFailed: the peer is not connected, or its pages differ in shape from ours.
        """
        strips = strips_of_part(self._regions, self._at(peer).endpoint.regions, part, pages, targets)
        return self._begin(peer, strips, reads=False)

    def read_rows(self, peer: str, part: Part, rows: NDArray[np.uint8], sources: NDArray[np.int32]) -> int:
        """Begin to fill rows, lent before, from the peer's pages; as `write`."""
        strips = strips_into_rows(rows, self._at(peer).endpoint.regions, part, sources)
        return self._begin(peer, strips, reads=True)

    def _at(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferFailed(f"pd: {peer} is not connected")
        return self._peers[peer]

    def _begin(self, peer: str, strips: Strips, *, reads: bool) -> int:
        known = self._peers[peer]
        self._last_op += 1
        call = known.writer.submit(self._engine, known.session, strips, reads=reads)
        self._ops[self._last_op] = _Op(peer=peer, call=call, reads=reads)
        return self._last_op

    def mark(self) -> None:
        """Our pages are on the host."""

    def read(
        self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32], digest_seed: int = 0,
        behind: Any = None,
    ) -> int:  # fmt: skip
        """Not used: where pages go whole prefill writes. Raises InvariantError: always."""
        raise InvariantError("pd: mooncake reads no pages into a pool, expected none to be asked for")

    def poll(self, op: int) -> OpResult:
        """How it is, without waiting; a write that Mooncake failed is LOST. Raises InvariantError: unknown number."""
        if op not in self._ops:
            raise InvariantError(f"pd: operation {op} is not under way, expected one that is")
        found = self._ops[op]
        if not found.call.done():
            return _PENDING
        del self._ops[op]
        did = f"read from {found.peer}" if found.reads else f"write to {found.peer}"
        if found.call.cancelled():
            return OpResult(state=OpState.FAILED, error=f"pd: the {did} was not begun")
        code = found.call.result()
        if code:
            state = OpState.FAILED if found.reads else OpState.LOST
            return OpResult(state=state, error=f"pd: Mooncake failed to {did} (code {code})")
        return OpResult(state=OpState.DONE)

    def cancel(self, op: int) -> None:
        """One that waits for its turn is taken back; it ends as FAILED."""
        if op in self._ops:
            self._ops[op].call.cancel()

    def close(self) -> None:
        """Wait for our writes under way, then destroy the engine: no peer reaches our memory any more."""
        self._end()
        self._ops.clear()


class _Thread:
    """A Writer in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mooncake")

    def submit(self, engine: Any, session: str, strips: Strips, *, reads: bool = False) -> Future[int]:
        return self._pool.submit(_move, engine, session, strips, reads)

    def end(self, *, wait: bool) -> None:
        self._pool.shutdown(wait=wait)


def _installed() -> MooncakeLibrary:
    """The package. Raises ConfigError: it is missing, or a library of its."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"pd: data backend mooncake does not load ({error}), expected: pip install -e '.[mooncake]', and"
            " the library libibverbs (Debian: apt-get install libibverbs1)"
        ) from None
    return MooncakeLibrary(engine=TransferEngine, writer=_Thread)


def _move(engine: Any, session: str, strips: Strips, reads: bool) -> int:
    """Write, or read, and wait; 0 = all bytes are there."""
    call = engine.batch_transfer_sync_read if reads else engine.batch_transfer_sync_write
    return int(call(session, strips.local.tolist(), strips.remote.tolist(), strips.byte_counts.tolist()))
