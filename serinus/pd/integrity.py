"""Digests of pages: what left is what arrived. xxh3-64 per page, seeded per handoff so that old bytes cannot pass."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from serinus.core.errors import DigestMismatch

__all__ = ["check_pages", "digest_pages", "digest_seed", "first_bad_page"]

_MASK_63 = (1 << 63) - 1


def digest_seed(incarnation: int, grant: int) -> int:
    """A seed that differs between any two grants of any two processes; 63 bits."""
    return xxhash.xxh3_64_intdigest(incarnation.to_bytes(8, "little") + grant.to_bytes(8, "little")) & _MASK_63


def digest_pages(pages: NDArray[np.uint8], seed: int) -> bytes:
    """One little-endian u64 per row of pages[G, Y]. Cost: reads the bytes once, above 10 GB/s."""
    return b"".join(xxhash.xxh3_64_intdigest(row, seed).to_bytes(8, "little") for row in pages)


def first_bad_page(pages: NDArray[np.uint8], seed: int, digests: bytes) -> int | None:
    """Index of the first row that has another digest than announced; None = all are what was sent."""
    found = digest_pages(pages, seed)
    if found == digests:
        return None
    return next(i for i in range(len(pages)) if found[8 * i : 8 * i + 8] != digests[8 * i : 8 * i + 8])


def check_pages(pages: NDArray[np.uint8], seed: int, digests: bytes, first: int) -> None:
    """Raises DigestMismatch where a row is not what was announced; `first` = index of the first in the prompt."""
    bad = first_bad_page(pages, seed, digests)
    if bad is not None:
        raise DigestMismatch(f"pd: page {first + bad} of the prompt is not what was sent (digest differs)")
