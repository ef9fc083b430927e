"""What the canary's ops and the readers of their ring share: lanes of stamps, reasons and their comparison, sizes."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.parts import Part
from serinus.core.stamps import CHAIN_ANCHOR

ANCHOR = CHAIN_ANCHOR
"""The previous hash of position 0."""
UNKNOWN = -1
"""A previous slot, or a token, that is not known here and so not checked."""
RING_FIELDS = 12
"""lane, reasons, slot, position, stored position, stored token, expected token, stored hash, expected hash, stored
digest, found digest, sequence."""

SEQUENCES = 1 << 16
"""The number of a sequence, in counts by sequence, is its name modulo this."""


class DuePages(NamedTuple):
    """What a step verifies of one part (`canary_due`)."""

    columns_7B: NDArray[np.int64]
    """As `canary_plan` takes it, without sequences that have nothing due."""
    entry_count: int
    """Slots of all pages due."""
    slot_count: int
    """Those of them that are verified: what the device must report as checked, beside each sequence's last slot."""
    bound_5B: NDArray[np.int64]
    """Of each sequence that reads anything its name, row, first and last position read and expected chain hash: the
    stamp of the last slot must be of this request, and the row must be as the leader wrote it."""


class StampLane(IntEnum):
    """A lane of stamps of one part. HEAD is checked and written before a forward pass, TAIL after it; only TAIL has
    digests."""

    HEAD_K = 0
    HEAD_V = 1
    TAIL_K = 2
    TAIL_V = 3


@cache
def stamp_lanes(part: Part) -> tuple[StampLane, ...]:
    """The lanes that slots of a part have."""
    return tuple(lane for lane in StampLane if lane % 2 < part.halves)


class Reason(IntFlag):
    """What differed; a violation may have several."""

    VERIFY_CHAIN_HASH = 1
    """The stamp's previous hash is not that of the slot that the row names before it (not known: of its twin); or the
    hash behind the last slot that a request reads is not that of the request's own tokens: its KV is another's."""
    VERIFY_POSITION = 2
    """The stamp's position is not the one the row has this slot at."""
    VERIFY_TOKEN = 4
    """The stamp's token is not the request's own (not known: not that of its twin, the stamp of K or V beside it)."""
    VERIFY_REAL_KV_HASH = 8
    """The KV bytes are not those that were stamped; or a stamp that has no digest (HEAD) has one."""
    WRITE_TOKEN = 16
    """The token computed in this step is not the one expected."""
    WRITE_POSITION = 32
    """Its position is not the one expected."""


def first_lane(stamps_LS4: Tensor, lane: int) -> tuple[int, int]:
    """Where the stamps of HEAD_K or TAIL_K lie in a tensor of a part, and how many halves are stamped: 2, K and V, or
    1, the latent row. The twin of a lane, with which it must agree, is beside it (index ^ 1): V of K; of a latent row
    TAIL of HEAD."""
    halves = len(stamps_LS4) // 2
    return lane // 2 * halves, halves


def differing(  # type: ignore[no-untyped-def]  # Triton would read annotations as code
    token, position, chain_hash, digest, wanted_token, wanted_position, wanted_hash, wanted_digest
):
    """The verify reasons of a stamp beside what it should be, as the sum of their numbers.

    Every column runs this very source: `ref` calls it with int64 tensors, numba and Triton compile it (`cpu` with
    numbers, `triton` with blocks). So it has comparisons, sums and plain numbers only.
    """
    return (
        (chain_hash != wanted_hash) * 1
        + (position != wanted_position) * 2
        + (token != wanted_token) * 4
        + (digest != wanted_digest) * 8
    )


def packed_sums(sums_P22E: Tensor) -> Tensor:
    """Digests [E, 2] as `canary_digest` gives them, of the sums that `watched_attention` has added up."""
    low, high = (sums_P22E[:, :, i].long().sum(0) & 0xFFFFFFFF for i in range(2))
    return (low | high << 32).T.contiguous()
