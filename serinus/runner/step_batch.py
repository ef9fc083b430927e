"""From the work of a plan to the tensors of its forward pass.

Shapes: T = tokens of the step, B = sequences, W = rows of which the hidden state is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.plan import SeqWork
from serinus.kernels import AttentionBatch, find_chunks
from serinus.models import ForwardBatch, HostBatch, Put

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's batch, on both sides."""

    batch: ForwardBatch
    host: HostBatch
    ends_B: Words
    """The end of each sequence's tokens in T."""


def put_batch(
    work: Sequence[SeqWork], parts: Sequence[Part], put: Put, *, is_watched: bool, room: int | None = None
) -> StepBatch:
    """The tensors of a step.

    Args:
        work: what is computed, each with slots of `parts`.
        put: brings an array to the device.
        is_watched: as AttentionBatch has it.
        room: fill up with padding to so many sequences; all have one token each then.
    Raises InvariantError: slots of a part are missing.
    """
    counts = np.fromiter((len(w.tokens) for w in work), dtype=np.int64, count=len(work))
    firsts = np.fromiter((w.start for w in work), dtype=np.int64, count=len(work))
    rows = np.fromiter((w.row for w in work), dtype=np.int64, count=len(work))
    offsets = np.zeros(len(work) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(firsts - offsets[:-1], counts)
    missing = 0 if room is None else room - len(work)

    def padded(values: Words, value: int = 0) -> torch.Tensor:
        return put(np.concatenate((values, np.full(missing, value, np.int64))) if missing else values)

    own_slots = {part: _slots(work, part) for part in parts}
    slots = {part: padded(each) for part, each in own_slots.items()}
    tokens_T = padded(np.concatenate([w.tokens for w in work]).astype(np.int64) if work else offsets[1:])
    rows_B, context_B = padded(rows), padded(firsts + counts, 1)
    attention = AttentionBatch(
        rows_B=rows_B,
        q_starts_B1=put(offsets if room is None else np.arange(room + 1, dtype=np.int64)),
        context_B=context_B,
        is_watched=is_watched,
        chunks=None if room is not None else find_chunks(offsets, firsts + counts, put),
    )
    positions_T, chosen, wanted, wanted_attention = padded(positions), None, None, None
    if len(positions) > len(work) and not any(w.asks_each for w in work):
        chosen = np.flatnonzero([w.sample is not None for w in work])
        wanted = put(offsets[1:][chosen] - 1)
        wanted_attention = AttentionBatch(
            rows_B=put(rows[chosen]),
            q_starts_B1=put(np.arange(len(chosen) + 1, dtype=np.int64)),
            context_B=put((firsts + counts)[chosen]),
            is_watched=is_watched,
        )
    batch = ForwardBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots.pop(Part.FULL),
        other_slots=slots,
        attention=attention,
        wanted_W=wanted,
        wanted_attention=wanted_attention,
    )
    host = HostBatch(rows_B=rows, counts_B=counts, slots=own_slots, chosen_W=chosen, room=room)
    return StepBatch(batch=batch, host=host, ends_B=offsets[1:])


def _slots(work: Sequence[SeqWork], part: Part) -> Words:
    """Where the tokens' KV of a part goes."""
    slots = [w.slots[part] for w in work if part in w.slots and len(w.slots[part]) == len(w.tokens)]
    if len(slots) != len(work):
        raise InvariantError(f"runner: work without a {part.name} slot for each token, expected them")
    return np.concatenate(slots) if slots else np.zeros(0, np.int64)
