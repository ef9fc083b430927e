"""The one-sided backends of all ranks together: endpoints, connections, operations that are polled, fences.

An operation carries a token of its caller, which is given back when the operation is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serinus.core.errors import ConfigError
from serinus.pd.backends import OneSided, OpResult, OpState, Region
from serinus.pd.stores import Stores

__all__ = ["Ended", "OneSidedOps"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[T]):
    """An operation that is over, or lost."""

    peer: str
    token: T
    result: OpResult


@dataclass(slots=True, kw_only=True)
class _Op(Generic[T]):
    backend: OneSided
    number: int
    peer: str
    token: T


@dataclass(slots=True)
class OneSidedOps(Generic[T]):
    """The one-sided backends of one engine: `by_rank[rank][name]`."""

    by_rank: Sequence[dict[str, OneSided]]
    endpoints: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Ours, by backend, one per rank."""
    _ops: list[_Op[T]] = field(default_factory=list)
    _joined: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Backend and ranks of each peer that we are connected to."""

    def register(self, stores: Stores) -> None:
        """Make all pages reachable. Raises ConfigError where a store cannot say where it lies."""
        names = list(self.by_rank[0]) if self.by_rank else []
        for name in names:
            texts = []
            for rank, backends in enumerate(self.by_rank):
                texts.append(backends[name].register(_regions(stores, rank, name)))
            self.endpoints[name] = tuple(texts)

    @property
    def refusals(self) -> dict[str, Callable[[Sequence[bytes]], str]]:
        """What each backend says to a peer's endpoints; that of the leader's rank."""
        return {name: backend.refusal for name, backend in (self.by_rank[0] if self.by_rank else {}).items()}

    def has(self, backend: str) -> bool:
        """Whether it is one of these."""
        return bool(self.by_rank) and backend in self.by_rank[0]

    def join(self, peer: str, backend: str, endpoints: Sequence[bytes]) -> None:
        """Connect every rank of ours to every rank of a peer. Raises TransferFailed."""
        self._joined[peer] = backend, len(endpoints)
        for backends in self.by_rank:
            for rank, endpoint in enumerate(endpoints):
                backends[backend].connect(f"{peer}/{rank}", endpoint)

    def leave(self, peer: str) -> None:
        """Undo it. Operations under way are still polled to their end."""
        backend, count = self._joined.pop(peer, ("", 0))
        for backends in self.by_rank:
            for rank in range(count):
                backends[backend].disconnect(f"{peer}/{rank}")

    def at(self, rank: int, backend: str) -> OneSided:
        """The backend of one of our ranks."""
        return self.by_rank[rank][backend]

    def watch(self, backend: OneSided, number: int, peer: str, token: T) -> None:
        """Poll this operation until it is over."""
        self._ops.append(_Op(backend=backend, number=number, peer=peer, token=token))

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._ops)

    @property
    def is_fast(self) -> bool:
        """Whether one is that takes less than a millisecond."""
        return any(op.backend.capabilities.whole_chunks for op in self._ops)

    def cancel(self, is_unwanted: Callable[[T], bool]) -> None:
        """Hint that these operations are of no use any more; each is still polled to its end."""
        for op in self._ops:
            if is_unwanted(op.token):
                op.backend.cancel(op.number)

    def poll(self) -> list[Ended[T]]:
        """Operations that have ended since the last poll, in any way."""
        ended: list[Ended[T]] = []
        left: list[_Op[T]] = []
        for op in self._ops:
            result = op.backend.poll(op.number)
            if result.state is OpState.PENDING:
                left.append(op)
            else:
                ended.append(Ended(peer=op.peer, token=op.token, result=result))
        self._ops = left
        return ended

    def fence(self, peer: str, backend: str, ranks: int) -> tuple[bool, tuple[bytes, ...] | None]:
        """Cut all ranks of a peer off from all of ours: (all_peers was, our new endpoints or None = the old ones)."""
        all_peers = False
        for index, backends in enumerate(self.by_rank):
            for rank in range(ranks):
                result = backends[backend].fence(f"{peer}/{rank}")
                if result.all_peers:
                    all_peers = True
                    texts = list(self.endpoints[backend])
                    texts[index] = result.endpoint
                    self.endpoints[backend] = tuple(texts)
                    break
        return all_peers, self.endpoints[backend] if all_peers else None

    def close(self) -> None:
        """End all connections and unregister all memory."""
        for backends in self.by_rank:
            for backend in backends.values():
                backend.close()


def _regions(stores: Stores, rank: int, name: str) -> list[Region]:
    found: list[Region] = []
    for part in stores.layout.parts:
        if not stores.layout.page_bytes(rank, part):
            continue
        store = stores.at(rank, part)
        regions = getattr(store, "regions", None) or [getattr(store, "region", None)]
        for region in regions:
            if region is None:
                raise ConfigError(
                    f"pd: backend {name} needs pages at a fixed address, the store of {part.name} names none"
                )
            found.append(
                Region(
                    part=part, address=region.address, lane_count=region.lane_count, lane_stride=region.lane_stride,
                    strip_bytes=region.strip_bytes, page_count=region.page_count,
                )
            )  # fmt: skip
    return found
