"""What a stamp of the canary is, in numbers: fields, lanes, and the coefficients of its digest. No torch.

A stamp is four int64 per slot and lane: token, position, hash of all before it, digest of its KV; lanes of one part:
HEAD_K, HEAD_V, TAIL_K, TAIL_V. The digest: two sums over all 16-bit lanes of (lane * odd coefficient) modulo 2**32,
packed as low | high << 32. It is linear: digests of disjoint layers and heads add up, and what goes elsewhere can be
taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PARTIAL_LANES",
    "STAMP_FIELDS",
    "STAMP_LANES",
    "digest_coefficients",
    "digest_difference",
    "digest_sum",
]

STAMP_LANES: Final = 4
"""Of one part: before and after the forward pass, for k and v."""
STAMP_FIELDS: Final = 4
"""int64 of one stamp."""
PARTIAL_LANES: Final = 8
"""16-bit lanes of a row that a partial digest sees."""

_MASK32 = np.uint64((1 << 32) - 1)
_HIGH = np.uint64(32)
Digests = NDArray[np.uint64]


def digest_sum(one: Digests, other: Digests) -> Digests:
    """The digest of all that either covers (disjoint layers or heads)."""
    return (one + other) & _MASK32 | ((one >> _HIGH) + (other >> _HIGH)) << _HIGH


def digest_difference(whole: Digests, part: Digests) -> Digests:
    """The digest of what is left of the whole without a part of it."""
    return (whole - part) & _MASK32 | ((whole >> _HIGH) - (part >> _HIGH)) << _HIGH


def digest_coefficients(
    layer_ids: Sequence[int], head_ids: Sequence[int], head_size: int, itemsize: int, *, partial: bool
) -> NDArray[np.int32]:
    """Odd coefficients [L, 2 halves, 2 sums, W] for the layers and KV heads that a rank holds, by their global numbers.

    Each is a function of (layer, half, head, lane within the head, sum) alone, so that shards add up. `partial`: W is
    8, the first 16 bytes of a row, and all are zero where that is not global head 0.
    """
    lanes = head_size * itemsize // 2
    if partial:
        lanes, head_ids = min(lanes, PARTIAL_LANES), head_ids[:1]
    layer, half, which, head, lane = np.meshgrid(
        np.asarray(layer_ids, np.uint64),
        np.arange(2, dtype=np.uint64),
        np.arange(2, dtype=np.uint64),
        np.asarray(head_ids, np.uint64),
        np.arange(lanes, dtype=np.uint64),
        indexing="ij",
    )
    word = (((layer * np.uint64(2) + half) * np.uint64(2) + which) << np.uint64(32)) | head << np.uint64(16) | lane
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = word + np.uint64(0x9E3779B97F4A7C15) if shift == 30 else word
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    odd = (word | np.uint64(1)).astype(np.uint32)
    if partial:
        odd = np.where(head == 0, odd, np.uint32(0))
    return np.ascontiguousarray(odd.reshape(len(layer_ids), 2, 2, -1)).view(np.int32)
