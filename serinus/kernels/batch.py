"""AttentionBatch: which tokens of a step belong to which sequence. Knows no requests, only rows and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_ROWS = 128
"""Contexts that are laid side by side begin at multiples of this: no block of such rows belongs to two of them."""


def slots_in(slots: Tensor, slot_count: int) -> Tensor:
    """int64 slots; 0 for each that is none of the pool's."""
    slots = slots.long()
    return torch.where((slots < 0) | (slots >= slot_count), 0, slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChunk:
    """A sequence with several tokens in a step, as the host knows it."""

    sequence: int
    """Its number in the batch."""
    first: int
    """The first of its tokens in the step."""
    count: int
    """Its tokens in the step."""
    context: int
    """Its tokens after the step."""
    place: int
    """The first row of its context, where those of all chunks lie side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChunks:
    """All sequences of a batch that have several tokens."""

    each: tuple[HostChunk, ...]
    """In the order of the batch."""
    places_B: Tensor
    """int64, where the batch is: the place of each, and of a sequence with one token that of the chunk behind it."""


def find_chunks(
    q_starts_B1: NDArray[np.int64], context_B: NDArray[np.int64], put: Callable[[NDArray[np.int64]], Tensor]
) -> HostChunks | None:
    """Those of a batch with these offsets and contexts; `put` brings an array to where the batch is. None: there are
    none."""
    counts = np.diff(q_starts_B1)
    several = np.flatnonzero(counts > 1)
    if not len(several):
        return None
    rows = np.where(counts > 1, -(-context_B // CHUNK_ROWS) * CHUNK_ROWS, 0)
    places = np.cumsum(rows) - rows
    columns = (several, q_starts_B1[several], counts[several], context_B[several], places[several])
    each = tuple(
        HostChunk(sequence=sequence, first=first, count=count, context=context, place=place)
        for sequence, first, count, context, place in zip(*(column.tolist() for column in columns), strict=True)
    )
    return HostChunks(each=each, places_B=put(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The B sequences of one step, laid end to end over its T tokens. All tensors int64, on the host or the device.

    Sequence b owns the tokens q_starts_B1[b] .. q_starts_B1[b + 1] - 1; the last of them is at position
    context_B[b] - 1 of the sequence, so it sees context_B[b] tokens, itself included. The tensors do not
    change once the batch is made: a column may work out once what all layers of a step share.
    """

    rows_B: Tensor
    """Row of req_to_token for each sequence."""
    q_starts_B1: Tensor
    """B + 1 offsets into the step's tokens: ascending, from 0 to T; every sequence has at least one token."""
    context_B: Tensor
    """Tokens of each sequence after this step; at least its number of tokens in this step."""
    is_watched: bool = False
    """A canary looks the rows up again after the pass: an entry that names no slot of the pool, which attention refuses
    otherwise, is read as slot 0 then."""
    chunks: HostChunks | None = None
    """The sequences with several tokens, where the host knows them: a column may attend in other ways then."""

    @property
    def sequence_count(self) -> int:
        """B, the sequences of the step."""
        return int(self.rows_B.shape[0])

    def part(self, first: int, end: int) -> AttentionBatch:
        """These sequences as a batch of their own, of which the host knows nothing. Cost: one subtraction where the
        tensors are, but for the whole batch."""
        if not first and end == self.sequence_count:
            return self
        starts_B1 = self.q_starts_B1[first : end + 1]
        return replace(
            self, rows_B=self.rows_B[first:end], q_starts_B1=starts_B1 - starts_B1[:1],
            context_B=self.context_B[first:end], chunks=None,
        )  # fmt: skip
