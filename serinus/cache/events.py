"""What routers are told of the cache's content: blocks stored and removed, by tier, as plain data.

One block = one page of FULL. Collected only with `kv_events`; the publisher is elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serinus.cache.keys import HASH_BYTES, PageKeys
from serinus.cache.node import Node, Tier

EVENTS_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Consecutive blocks of one sequence are on a tier now."""

    block_hashes: tuple[int, ...]
    """64 bits each, unsigned, chained over the prefix."""
    parent_block_hash: int | None
    """Of the block before the first; None = they begin a sequence."""
    token_ids: tuple[int, ...]
    block_size: int
    medium: str
    """GPU, CPU or DISK, as the field calls device, host and storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks left a tier."""

    block_hashes: tuple[int, ...]
    medium: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Device and host are empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "DISK"}


class EventLog:
    """Events since they were last taken. Bounded: where they are not taken in time, AllBlocksCleared takes the place of
    those before, so that readers believe too little, not what is gone."""

    def __init__(self, keys: PageKeys, page_size: int) -> None:
        self._keys = keys
        self._size = page_size
        self._events: deque[KvEvent] = deque()

    def stored(self, node: Node, tier: Tier) -> None:
        """A node's FULL pages are on `tier` now."""
        parent = node.parent
        at_start = parent is None or parent.parent is None
        self._add(
            BlockStored(
                block_hashes=_blocks(self._keys.of(node)),
                parent_block_hash=None if at_start else _blocks(self._keys.before(node))[0],
                token_ids=tuple(node.token_ids().tolist()),
                block_size=self._size,
                medium=MEDIA[tier],
            )
        )

    def removed(self, hashes: bytes, tier: Tier) -> None:
        """The pages with these keys left `tier`."""
        if hashes:
            self._add(BlockRemoved(block_hashes=_blocks(hashes), medium=MEDIA[tier]))

    def cleared(self) -> None:
        """Device and host are empty, or what they lost was not told: readers know of nothing from here on."""
        self._events.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KvEvent]:
        """Everything since the last call, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _add(self, event: KvEvent) -> None:
        if len(self._events) >= EVENTS_MAX:
            self.cleared()
        self._events.append(event)


def _blocks(keys: bytes) -> tuple[int, ...]:
    """The first 64 bits of each key."""
    return tuple(int.from_bytes(keys[at : at + 8], "little") for at in range(0, len(keys), HASH_BYTES))
