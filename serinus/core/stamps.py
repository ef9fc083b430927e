"""What a stamp of the canary is, in numbers: fields, lanes, and the coefficients of its digest. No torch.

A stamp is four int64 per slot and lane: token, position, hash of all before it, digest of its KV; lanes of one part:
HEAD_K, HEAD_V, TAIL_K, TAIL_V; latent rows have HEAD_K and TAIL_K alone. The digest: two sums over all 16-bit lanes
of (lane * odd coefficient) modulo 2**32, packed as low | high << 32. It is linear: digests of disjoint layers and
heads add up, and what goes elsewhere can be taken off. The hash is a chain: that of the next position is
mix(hash, token, position), so the hash behind the last slot of a sequence names all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

STAMP_FIELDS: Final = 4
"""int64 of one stamp."""
STAMP_BYTES: Final = 2 * STAMP_FIELDS * 8
"""Of one slot and half (k, v or latent row): the stamps before and after the forward pass."""
PARTIAL_LANES: Final = 8
"""16-bit lanes of a row that a partial digest sees."""

CHAIN_ANCHOR: Final = 0x5E41
"""The hash of no tokens: what the stamp of position 0 has."""
ChainHashes = Callable[[NDArray[np.int32], int, int], NDArray[np.int64]]
"""The signature of chain_hashes; the cpu column of the kernels has it compiled."""

_MASK64: Final = (1 << 64) - 1
_MASK32 = np.uint64((1 << 32) - 1)
_HIGH = np.uint64(32)
Digests = NDArray[np.uint64]


def chain_next(chain: int, token: int, position: int) -> int:
    """The chain hash with one more token, int64: splitmix64(chain ^ splitmix64(token ^ position << 32)).

    Cost: 0.7 us.
    """
    # core.rng.splitmix64 written out twice: calls would cost as much as the work, and it runs once a token and request.
    x = ((token ^ position << 32) + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK64
    x = ((chain ^ x ^ x >> 31) + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def chain_hashes(tokens_N: NDArray[np.int32], position: int = 0, chain: int = CHAIN_ANCHOR) -> NDArray[np.int64]:
    """The chain hash behind each of some tokens, [N]: the first stands at `position`, `chain` is the hash of all before
    it. This is what the words mean; kernels.chain_hashes is the same, compiled. Cost: 0.7 us a token."""
    hashes = np.empty(len(tokens_N), np.int64)
    for at, token in enumerate(tokens_N.tolist()):
        hashes[at] = chain = chain_next(chain, token, position + at)
    return hashes


def digest_sum(one: Digests, other: Digests) -> Digests:
    """The digest of all that either covers (disjoint layers or heads)."""
    return (one + other) & _MASK32 | ((one >> _HIGH) + (other >> _HIGH)) << _HIGH


def digest_difference(whole: Digests, part: Digests) -> Digests:
    """The digest of what is left of the whole without a part of it."""
    return (whole - part) & _MASK32 | ((whole >> _HIGH) - (part >> _HIGH)) << _HIGH


def digest_coefficients(
    layer_ids: Sequence[int], head_ids: Sequence[int], head_size: int, itemsize: int, *, partial: bool,
    halves: int = 2,
) -> NDArray[np.int32]:  # fmt: skip
    """Odd coefficients [L, halves, 2 sums, W] for the layers and KV heads that a rank holds, by their global numbers.

    Each is a function of (layer, half, head, lane within the head, sum) alone, so that shards add up. `partial`: W is
    8, the first 16 bytes of a row, and all are zero where that is not global head 0.
    """
    lanes = head_size * itemsize // 2
    if partial:
        lanes, head_ids = min(lanes, PARTIAL_LANES), head_ids[:1]
    layer, half, which, head, lane = np.meshgrid(
        np.asarray(layer_ids, np.uint64),
        np.arange(halves, dtype=np.uint64),
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
    return np.ascontiguousarray(odd.reshape(len(layer_ids), halves, 2, -1)).view(np.int32)
