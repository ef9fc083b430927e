"""ForwardBatch: the tensors of one forward pass, as the runner builds them and models and hooks read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """What the host knows of a batch before its tensors are on the device."""

    rows_B: NDArray[np.int64]
    """Row of each sequence, without padding. None at all: the pass is recorded, of padding alone."""
    counts_B: NDArray[np.int64]
    """The number of tokens of each."""
    slots: Mapping[Part, NDArray[np.int64]]
    """Where the tokens go in each part, without padding."""
    chosen_W: NDArray[np.int64] | None = None
    """The sequences of `wanted_attention`, where the batch has one."""
    room: int | None = None
    """Sequences of the tensors, of one token each, those of padding included; None = those of `rows_B`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of B sequences, packed one sequence after the other. W = rows of which the hidden state is wanted.

    All index tensors are int64 on the model's device.
    """

    tokens_T: torch.Tensor
    """Token ids of all sequences, end to end."""
    positions_T: torch.Tensor
    """Position of each token in its sequence."""
    slots_T: torch.Tensor
    """Where each token's KV goes in the pool of part FULL; slot 0 for padding rows."""
    attention: AttentionBatch
    """Which tokens belong to which row of req_to_token; every part's table has the same rows."""
    other_slots: Mapping[Part, torch.Tensor] = field(default_factory=dict)
    """Where it goes in the pools of the model's other parts."""
    wanted_W: torch.Tensor | None = None
    """Rows of T of which the caller reads the hidden state, ascending; None = all. Only the last rows of sequences."""
    wanted_attention: AttentionBatch | None = None
    """With wanted_W: the same W queries as an attention batch of one query per sequence."""

    def slots_of(self, part: Part) -> torch.Tensor:
        """The slots of a part, [T]. Raises ValueError where the batch has none."""
        slots_T = self.slots_T if part is Part.FULL else self.other_slots.get(part)
        if slots_T is None:
            raise ValueError(
                f"models: a batch without slots of part {part.name}, expected them for a model that has it"
            )
        return slots_T
