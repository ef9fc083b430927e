"""ToyModel: a model that makes its next token a hash of the KV bytes it read back through the real pool and table.

Wrong KV (a stale page, a swapped one, one byte flipped, a hole) gives a wrong token and goes on giving wrong tokens,
so engine, cache and transfer tests need no trained weights and no tolerance. `testing.oracle` says what is right,
without a pool.

What it writes at position p of a sequence t_0, t_1, ...: the chain word c_p = sum over i <= p of mix(t_i * A + i + 1);
word 0 of the first layer's key row is c_p itself, every other word of every row is mix(c_p + its own number * B).
The next chunk continues from the c it reads there. What it reads: each row of 64-bit words is hashed to one word
(keyed by position, layer and lane) and the words of all rows up to p are added, in a sliding layer those of the last
`window` positions; their mix chooses the token.

One rank of several has some words of each row, of the layers of its stage: numbers of words and lanes are those of the
whole, so that every mesh writes the same words and gives the same tokens. The sums of words within a row are added over
the ranks of a stage, all lanes at once; between stages go the chain words and the sums.

Shapes: T = tokens, B = sequences, C = tokens of all sequences together that one part reads, S = slots,
J = 64-bit words of a row, L = lanes: halves of layers here, those of one part alone where they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.kernels import (
    GatheredRows,
    LayerDigest,
    LayersKv,
    digest_values,
    put_rows,
    rows_of,
    shift_right,
    slot_count,
    slots_in,
    splitmix,
)
from serinus.models.batch import ForwardBatch
from serinus.models.hooks import ForwardHook
from serinus.models.spec import ModelSpec
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm, SoloComm

_A = 0x2545F4914F6CDD1D
_B = 0x632BE59BD9B4E019
_C = 0xD6E8FEB86659FD93
_BONUS = 8.0
_SPREAD = 4.0


def _words(lane: torch.Tensor, slots_C: torch.Tensor) -> torch.Tensor:
    """The rows of these slots as words, [C, J]."""
    return rows_of(lane, slots_C).flatten(1).view(torch.int64)


def _wrap(number: int) -> int:
    """A number as the int64 it wraps to."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """What the tokens of a batch read in the layers of one part."""

    slots_C: torch.Tensor
    """Slots of the positions read, sequence after sequence."""
    position_C: torch.Tensor
    """Positions of these slots in their sequences."""
    first_B: torch.Tensor
    """The first position that each sequence reads, and..."""
    begins_B: torch.Tensor
    """...its place in C."""
    last_T: torch.Tensor
    """Place in C of each token itself."""
    before_T: torch.Tensor
    """Place in C before the first position that the token sees; -1 before all."""


class ToyModel:
    """The toy: any vocabulary, page size, layer and head count; deterministic to the bit on every machine."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, *, shard: Shard | None = None, comm: Comm | None = None
    ) -> None:
        """Raises ConfigError where a KV row is no whole number of 64-bit words."""
        self.has_kv_scales = False
        self.shard = shard or spec.shards(Mesh())[0]
        self.spec = spec.on(self.shard)
        row_bytes = self.spec.kv_head_count * spec.head_size * dtype.itemsize
        if row_bytes % 8:
            raise ConfigError(f"models: a toy KV row of {row_bytes} bytes, expected a multiple of 8")
        self.dtype = dtype
        self._comm = comm or SoloComm()
        words, share = row_bytes // 8, self.shard.tp_rank
        self._words = range(words) if spec.is_latent else range(share * words, (share + 1) * words)
        self._row_words = words if spec.is_latent else words * self.shard.tp
        self._own = slice(share, None, self.shard.tp) if spec.is_latent else slice(None)
        """Of the words here, those that this rank makes its part of sums of: of rows that all ranks have, a share."""

    def activation(self, token_count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what goes from stage to stage: chain word and sum of each token."""
        return (token_count, 2), torch.int64

    def forward(
        self,
        batch: ForwardBatch,
        kv: LayersKv,
        tables: Mapping[Part, torch.Tensor],
        hook: ForwardHook,
        inflow: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read all that each token may see, layer by layer, and write the step's KV, which is read back.

        Returns: int64 [W or T, 1], the hash that chooses the token after each row; before the last stage [T, 2].
        Cost: reads the KV of all sequences once, in sliding layers that of their windows.
        """
        hook.before(batch)
        parts = self.spec.layer_parts
        reaches: dict[Part, _Reach] = {}
        chain_T = sums_T = torch.zeros_like(batch.tokens_T)
        if inflow is not None:
            chain_T, sums_T = inflow.unbind(1)
        numbers = [range(2 * at, 2 * at + len(halves)) for at, halves in enumerate(kv, self.shard.layers.start)]
        lanes: dict[Part, list[int]] = {}
        read: dict[Part, list[torch.Tensor]] = {}
        values: Iterator[torch.Tensor] = iter(())
        for layer, halves in enumerate(kv):
            hook.before_layer(layer)
            part = parts[layer]
            if part not in reaches:
                reaches[part] = self._reach(batch, tables[part], part, slot_count(halves[0]))
            reach = reaches[part]
            read_2CJ = [_words(lane, reach.slots_C) for lane in halves]
            self._digest(hook.reads(layer, batch.attention), batch, tables[part], reach, halves, read_2CJ)
            if layer == 0:
                if inflow is None:
                    chain_T = self._continue(batch, read_2CJ[0], reach)
                values = iter(self._values(chain_T, list(chain(*numbers))))
            values_2TJ = [next(values) for _ in halves]
            written = hook.writes(layer)
            if written is not None:
                digest_values(written, *values_2TJ)
            for values_TJ, pool, read_CJ in zip(values_2TJ, halves, read_2CJ, strict=True):
                put_rows(pool, batch.slots_of(part), values_TJ.view(pool.dtype).view(-1, *pool.shape[-2:]))
                read_CJ[reach.last_T] = _words(pool, reach.slots_C[reach.last_T])
            read.setdefault(part, []).extend(read_2CJ)
            lanes.setdefault(part, []).extend(numbers[layer])
        hook.after(batch)
        rows = self._total([self._read(torch.stack(each)) for each in read.values()])
        for (part, lanes_L), rows_LC in zip(lanes.items(), rows, strict=True):
            sums_T = sums_T + self._sum(reaches[part], rows_LC, lanes_L)
        if not self.shard.is_last:
            return torch.stack((chain_T, sums_T), dim=1)
        return (sums_T if batch.wanted_W is None else sums_T.index_select(0, batch.wanted_W))[:, None]

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """fp32 [B, V]: the hash's token stands out by 8, the others are spread over [0, 4); reserved ids stay at 0.
        None but on slice 0 of a stage."""
        if self.shard.tp_rank:
            return None
        out_B1 = splitmix(hidden_BE)
        spec = self.spec
        ids_V = torch.arange(spec.vocab_size, device=hidden_BE.device)
        noise_BV = shift_right(splitmix(out_B1 + (ids_V + 1) * _B), 40).float() * (_SPREAD / (1 << 24))
        chosen_B1 = spec.reserved_ids + shift_right(out_B1, 1) % (spec.vocab_size - spec.reserved_ids)
        noise_BV.scatter_(1, chosen_B1, _BONUS)
        noise_BV[:, : spec.reserved_ids] = 0.0
        return noise_BV

    def final_hidden(self, hidden_BE: torch.Tensor) -> torch.Tensor | None:
        """None: hashes are no hidden states."""
        return None

    def _reach(self, batch: ForwardBatch, table_RC: torch.Tensor, part: Part, pool_slots: int) -> _Reach:
        counts_B = batch.attention.q_starts_B1.diff()
        context_B = batch.attention.context_B
        window = self.spec.window if part is Part.SWA and self.spec.window is not None else int(table_RC.shape[1]) + 1
        first_B = (context_B - counts_B - max(window - 1, 1)).clamp_min(0)  # the chain word before them is read too
        read_B = context_B - first_B
        begins_B = read_B.cumsum(0) - read_B
        sequence_C = torch.arange(len(read_B), device=read_B.device).repeat_interleave(read_B)
        position_C = torch.arange(len(sequence_C), device=read_B.device) + (first_B - begins_B)[sequence_C]
        owner_T = torch.arange(len(counts_B), device=counts_B.device).repeat_interleave(counts_B)
        base_T = (begins_B - first_B)[owner_T]
        slots_C = table_RC[batch.attention.rows_B[sequence_C], position_C]
        return _Reach(
            slots_C=slots_in(slots_C, pool_slots) if batch.attention.is_watched else slots_C.long(),
            position_C=position_C,
            first_B=first_B,
            begins_B=begins_B,
            last_T=base_T + batch.positions_T,
            before_T=base_T + (batch.positions_T + 1 - window).clamp_min(0) - 1,
        )

    def _continue(self, batch: ForwardBatch, read_CJ: torch.Tensor, reach: _Reach) -> torch.Tensor:
        """The chain words of the step's tokens, from those that the first layer holds."""
        starts_B = batch.attention.q_starts_B1[:-1]
        counts_B = batch.attention.q_starts_B1.diff()
        first_B = batch.attention.context_B - counts_B
        before_B = reach.last_T[starts_B] - 1
        carried_B = self._comm.broadcast(torch.where(first_B > 0, read_CJ[before_B, 0], 0))  # slice 0 has word 0
        links_T = splitmix(batch.tokens_T * _A + batch.positions_T + 1)
        sums_T = links_T.cumsum(0)
        base_B = sums_T[starts_B] - links_T[starts_B] - carried_B
        return sums_T - base_B.repeat_interleave(counts_B)

    def _digest(
        self, digest: LayerDigest | None, batch: ForwardBatch, table_RC: torch.Tensor, reach: _Reach,
        halves: tuple[torch.Tensor, ...], read_2CJ: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Digest what was read of the positions before the step; what is due before a window is read for that alone."""
        if digest is None:
            return
        rows = GatheredRows(digest, batch.attention.sequence_count)
        counts = batch.attention.q_starts_B1.diff().tolist()
        seen_2CHD = [
            read_CJ.view(self.dtype).view(-1, *lane.shape[-2:]) for read_CJ, lane in zip(read_2CJ, halves, strict=True)
        ]
        for b, (row, first, begin, end) in enumerate(
            zip(
                batch.attention.rows_B.tolist(), reach.first_B.tolist(), reach.begins_B.tolist(),
                batch.attention.context_B.tolist(), strict=True,
            )
        ):  # fmt: skip
            low = rows.low(b)
            if low < first:
                slots = slots_in(table_RC[row, low:first], slot_count(halves[0]))
                rows.add(b, low, *(rows_of(lane, slots) for lane in halves))
            count = end - counts[b] - first
            if count:
                rows.add(b, first, *(seen_CHD[begin : begin + count] for seen_CHD in seen_2CHD))

    def _values(self, chain_T: torch.Tensor, lanes: Sequence[int]) -> torch.Tensor:
        """The rows of these lanes of the step's tokens, [L, T, J]."""
        lanes_L = torch.tensor(lanes, device=chain_T.device)
        numbers_LJ = lanes_L[:, None] * self._row_words + self._words_J(chain_T.device) + 1
        values_LTJ = splitmix(chain_T[:, None] + (numbers_LJ * _B)[:, None])
        if lanes[0] == 0 and not self._words.start:
            values_LTJ[0, :, 0] = chain_T
        return values_LTJ

    def _read(self, read_LCJ: torch.Tensor) -> torch.Tensor:
        """What this rank makes of each row of these lanes, [L, C]."""
        return splitmix(read_LCJ + (self._words_J(read_LCJ.device) + 1) * _B)[..., self._own].sum(2)

    def _total(self, read: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same of all ranks of the stage."""
        if self.shard.tp == 1:
            return read
        sums = self._comm.all_reduce(torch.cat([rows_LC.flatten() for rows_LC in read]))
        found = torch.split_with_sizes(sums, [rows_LC.numel() for rows_LC in read])
        return [each.view_as(rows_LC) for each, rows_LC in zip(found, read, strict=True)]

    def _sum(self, reach: _Reach, rows_LC: torch.Tensor, lanes: Sequence[int]) -> torch.Tensor:
        """What each token makes of these lanes of its positions, [T]."""
        keys_L = torch.tensor([_wrap(lane * _C) for lane in lanes], device=rows_LC.device)
        sums_C = splitmix(rows_LC + reach.position_C * _A + keys_L[:, None]).sum(0).cumsum(0)
        before_T = torch.where(reach.before_T < 0, 0, sums_C[reach.before_T.clamp_min(0)])
        return sums_C[reach.last_T] - before_T

    def _words_J(self, device: torch.device) -> torch.Tensor:
        """Numbers of this rank's words within a row."""
        return torch.arange(self._words.start, self._words.stop, device=device)
