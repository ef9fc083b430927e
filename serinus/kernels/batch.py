"""AttentionBatch: which tokens of a step belong to which sequence. Knows no requests, only rows and counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def slots_in(slots: Tensor, slot_count: int) -> Tensor:
    """int64 slots; 0 for each that is none of the pool's."""
    slots = slots.long()
    return torch.where((slots < 0) | (slots >= slot_count), 0, slots)


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

    @property
    def sequence_count(self) -> int:
        """B, the sequences of the step."""
        return int(self.rows_B.shape[0])
