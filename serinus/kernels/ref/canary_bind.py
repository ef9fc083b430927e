"""Whether the last slots that sequences read are of the requests themselves, and the chain hashes of requests. The
specification; lanes, stamps and chain are those of canary.py. S = slots, B = sequences, N = tokens, Q = ring rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core import stamps
from serinus.kernels.batch import slots_in
from serinus.kernels.canary import ANCHOR, Reason, first_lane
from serinus.kernels.ref.canary import count_by_sequence, mix, note

__all__ = ["canary_bind", "chain_hashes"]


def canary_bind(
    stamps_LS4: Tensor,
    lane: int,
    slots_B: Tensor,
    positions_B: Tensor,
    chains_B: Tensor,
    sequences_B: Tensor,
    ring_QF: Tensor,
    count_1: Tensor,
    checked_L: Tensor,
    by_sequence_N4: Tensor | None = None,
) -> None:
    """Hold the last slot that each sequence reads against the request itself: the hash behind it, in lanes `lane` (K)
    and `lane` + 1 (V), must be that of the request's own tokens. What differs is noted in the ring: VERIFY_CHAIN_HASH,
    with these two as stored and expected hash, and VERIFY_POSITION where the stamp has another position.

    Args:
        stamps_LS4, ring_QF, count_1, checked_L, by_sequence_N4: as canary_verify takes them; each sequence counts as
            one entry.
        slots_B: whatever the row says, slot 0 included. One outside of the pool is slot 0.
        positions_B: of these slots; a sequence with one below 0 is skipped: it is padding.
        chains_B: chain hashes of the requests' tokens up to and with these positions.
        sequences_B: their names.
    Cost: 64 bytes read a sequence; no host wait.
    """
    live_B = positions_B >= 0
    slots_B, positions_B, chains_B = (
        slots_in(slots_B, stamps_LS4.shape[1])[live_B],
        positions_B[live_B],
        chains_B[live_B],
    )
    sequences_B = sequences_B[live_B]
    first, halves = first_lane(stamps_LS4, lane)
    for half in range(halves):
        stored_B4 = stamps_LS4[first + half, slots_B]
        token_B, position_B, hash_B, digest_B = stored_B4.unbind(1)
        behind_B = mix(hash_B, token_B, position_B)
        reasons_B = int(Reason.VERIFY_CHAIN_HASH) + (position_B != positions_B) * int(Reason.VERIFY_POSITION)
        checked_L[lane + half] += len(slots_B)
        count_by_sequence(by_sequence_N4, lane + half, sequences_B)
        bad_V = torch.nonzero(behind_B != chains_B).flatten()
        fields = (
            torch.full_like(slots_B, lane + half), reasons_B, slots_B, positions_B, position_B, token_B, token_B,
            behind_B, chains_B, digest_B, digest_B, sequences_B,
        )  # fmt: skip
        note(torch.stack(fields, dim=1)[bad_V], ring_QF, count_1)


def chain_hashes(tokens_N: NDArray[np.int32], position: int = 0, chain: int = ANCHOR) -> NDArray[np.int64]:
    """The chain hash behind each of some tokens: see core.stamps. On the host, for every column."""
    return stamps.chain_hashes(tokens_N, position, chain)
