"""ToyModel: a model whose next token is a hash of the KV bytes it read back through the real pool and table.

Wrong KV (a stale page, a swapped one, one byte flipped, a hole) gives a wrong token and goes on giving wrong tokens,
so engine, cache and transfer tests need no trained weights and no tolerance. `testing.oracle` says what is right,
without a pool.

What it writes at position p of a sequence t_0, t_1, ...: the chain word c_p = sum over i <= p of mix(t_i * A + i + 1);
word 0 of the first layer's key row is c_p itself, every other word of every row is mix(c_p + its own number * B).
The next chunk continues from the c it reads there. What it reads: each row of 64-bit words is hashed to one word
(keyed by position, layer and lane) and the words of all rows up to p are added; their mix chooses the token.

Shapes: T = tokens, B = sequences, C = context tokens of all sequences together, S = slots, J = 64-bit words of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serinus.core.errors import ConfigError
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.spec import ModelSpec

__all__ = ["ToyModel"]

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_A = 0x2545F4914F6CDD1D
_B = 0x632BE59BD9B4E019
_C = 0xD6E8FEB86659FD93
_BONUS = 8.0
_SPREAD = 4.0


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of 64-bit words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 of int64 words, which wrap."""
    x = x + _GAMMA
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _wrap(number: int) -> int:
    """A number as the int64 it wraps to."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class ToyModel:
    """The toy: any vocabulary, page size, layer and head count; deterministic to the bit on every machine."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Raises ConfigError where a KV row is no whole number of 64-bit words."""
        row_bytes = spec.kv_head_count * spec.head_size * dtype.itemsize
        if row_bytes % 8:
            raise ConfigError(f"models: a toy KV row of {row_bytes} bytes, expected a multiple of 8")
        self.spec = spec
        self.dtype = dtype
        self._words = row_bytes // 8

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        table_RC: torch.Tensor,
        hook: ForwardHook,
    ) -> torch.Tensor:
        """Write the step's KV, read back everything each token may see.

        Returns: int64 [W or T, 1], the hash that chooses the token after each row.
        Cost: reads the KV of all sequences once.
        """
        hook.before(batch)
        lanes = [lane.view(len(lane), -1).view(torch.int64) for pair in kv for lane in pair]
        self._write(batch, lanes, table_RC)
        sums_T1 = self._read(batch, lanes, table_RC)
        hook.after(batch)
        return sums_T1 if batch.wanted_W is None else sums_T1.index_select(0, batch.wanted_W)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """fp32 [B, V]: the hash's token stands out by 8, the others are spread over [0, 4); reserved ids stay at 0."""
        out_B1 = _mix(hidden_BE)
        spec = self.spec
        ids_V = torch.arange(spec.vocab_size, device=hidden_BE.device)
        noise_BV = _shift(_mix(out_B1 + (ids_V + 1) * _B), 40).float() * (_SPREAD / (1 << 24))
        chosen_B1 = spec.reserved_ids + _shift(out_B1, 1) % (spec.vocab_size - spec.reserved_ids)
        noise_BV.scatter_(1, chosen_B1, _BONUS)
        noise_BV[:, : spec.reserved_ids] = 0.0
        return noise_BV

    def _write(self, batch: ForwardBatch, lanes: list[torch.Tensor], table_RC: torch.Tensor) -> None:
        starts_B = batch.attention.q_starts_B1[:-1]
        counts_B = batch.attention.q_starts_B1.diff()
        first_B = batch.attention.context_B - counts_B
        before_B = table_RC[batch.attention.rows_B, (first_B - 1).clamp_min(0)].long()
        carried_B = torch.where(first_B > 0, lanes[0][before_B, 0], 0)
        links_T = _mix(batch.tokens_T * _A + batch.positions_T + 1)
        sums_T = links_T.cumsum(0)
        base_B = sums_T[starts_B] - links_T[starts_B] - carried_B
        chain_T = sums_T - base_B.repeat_interleave(counts_B)
        words_J = torch.arange(self._words, device=chain_T.device)
        for lane, rows_SJ in enumerate(lanes):
            values_TJ = _mix(chain_T[:, None] + (lane * self._words + words_J + 1) * _B)
            if lane == 0:
                values_TJ[:, 0] = chain_T
            rows_SJ[batch.slots_T] = values_TJ

    def _read(self, batch: ForwardBatch, lanes: list[torch.Tensor], table_RC: torch.Tensor) -> torch.Tensor:
        counts_B = batch.attention.q_starts_B1.diff()
        context_B = batch.attention.context_B
        ends_B = context_B.cumsum(0)
        begins_B = ends_B - context_B
        sequence_C = torch.arange(len(context_B), device=context_B.device).repeat_interleave(context_B)
        position_C = torch.arange(len(sequence_C), device=context_B.device) - begins_B[sequence_C]
        slots_C = table_RC[batch.attention.rows_B[sequence_C], position_C].long()
        words_J = torch.arange(self._words, device=slots_C.device)
        rows_C = torch.zeros_like(slots_C)
        for lane, rows_SJ in enumerate(lanes):
            row_C = _mix(rows_SJ[slots_C] + (words_J + 1) * _B).sum(1)
            rows_C += _mix(row_C + position_C * _A + _wrap(lane * _C))
        sums_C = rows_C.cumsum(0)
        owner_T = torch.arange(len(counts_B), device=counts_B.device).repeat_interleave(counts_B)
        seen_T = sums_C[begins_B[owner_T] + batch.positions_T]
        before_B = sums_C[begins_B] - rows_C[begins_B]
        return (seen_T - before_B[owner_T])[:, None]
