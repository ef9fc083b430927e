"""Digests of pages: what left is what arrived. xxh3-64 per page, seeded per handoff so that old bytes cannot pass.

Bytes of a peer may change while they are read. So what is digested is what was written into own memory, never the
peer's memory a second time: `copy_in` and `take`. Stores that hash while they copy (pool.DevicePool) are asked to.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from serinus.core.errors import DigestMismatch

_MASK_63 = (1 << 63) - 1


def digest_seed(incarnation: int, grant: int) -> int:
    """A seed that differs between any two grants of any two processes; 63 bits."""
    return xxhash.xxh3_64_intdigest(incarnation.to_bytes(8, "little") + grant.to_bytes(8, "little")) & _MASK_63


def digest_pages(pages: NDArray[np.uint8], seed: int) -> bytes:
    """One little-endian u64 per row of pages[G, Y]. Cost: reads the bytes once, above 10 GB/s."""
    return b"".join(xxhash.xxh3_64_intdigest(row, seed).to_bytes(8, "little") for row in pages)


def check_digests(found: bytes, digests: bytes, first: int) -> None:
    """Raises DigestMismatch where these are not what was announced; `first` = index of the first in the prompt."""
    if found != digests:
        pages = range(min(len(found), len(digests)) // 8)
        bad = next((i for i in pages if found[8 * i : 8 * i + 8] != digests[8 * i : 8 * i + 8]), len(pages))
        raise DigestMismatch(f"pd: page {first + bad} of the prompt is not what was sent (digest differs)")


def with_rows(digests: bytes, rows: NDArray[np.uint8], seed: int) -> bytes:
    """Digests of other bytes, each with that of a row added: both are what was sent, or the sum differs."""
    others: NDArray[np.uint64] = np.frombuffer(digest_pages(rows, seed), "<u8")
    return (np.frombuffer(digests, "<u8") + others).tobytes()


class Pages(Protocol):
    """What is needed of a PageStore here."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        """Copy pages into out[G, page_bytes]."""

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill pages from data[G, page_bytes]."""


class Digesting(Protocol):
    """A store that digests in the pass that copies."""

    def hashed_pages(
        self, pages: NDArray[np.integer], rows: NDArray[np.uint8] | None, seed: int, inward: bool = False
    ) -> bytes:
        """`digest_pages` of the pages, copied into rows (from them where `inward`; nowhere where there are none)."""


def copy_out(store: Pages, pages: NDArray[np.integer], rows: NDArray[np.uint8], seed: int) -> bytes:
    """Copy pages into rows[G, Y]; their digests. Cost: one copy, where the store digests."""
    if digesting := _digesting(store):
        return digesting.hashed_pages(pages, rows, seed)
    store.read_pages(pages, rows)
    return digest_pages(rows, seed)


def copy_in(store: Pages, pages: NDArray[np.integer], rows: NDArray[np.uint8], seed: int) -> bytes:
    """Fill pages from rows[G, Y], which may change meanwhile; digests of what is in the pages now. Cost: as above."""
    if digesting := _digesting(store):
        return digesting.hashed_pages(pages, rows, seed, True)
    kept, digests = take(rows, seed)
    store.write_pages(pages, kept)
    return digests


def digest_stored(store: Pages, pages: NDArray[np.integer], seed: int) -> bytes:
    """Digests of pages where they lie. Cost: reads them once, where the store digests."""
    if digesting := _digesting(store):
        return digesting.hashed_pages(pages, None, seed)
    return copy_out(store, pages, np.empty((len(pages), store.page_bytes), dtype=np.uint8), seed)


def take(rows: NDArray[np.uint8], seed: int) -> tuple[NDArray[np.uint8], bytes]:
    """A copy of rows[G, Y], which may change meanwhile, and its digests. Cost: one copy, read from the cache."""
    kept = np.empty_like(rows)
    digests = []
    for source, own in zip(rows, kept, strict=True):
        own[:] = source
        digests.append(xxhash.xxh3_64_intdigest(own, seed).to_bytes(8, "little"))
    return kept, b"".join(digests)


def _digesting(store: object) -> Digesting | None:
    found: Digesting | None = store if hasattr(store, "hashed_pages") else None
    return found
