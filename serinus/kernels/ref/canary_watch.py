"""The canary's watch, put together of the canary's ops: the specification, and what serves on every device that has
no watch of its own.

B = sequences, T = tokens of the step, E = slots verified, L = layers, W = 16-bit lanes digested of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch, slots_in
from serinus.kernels.canary import UNKNOWN, DuePages, StampLane, packed_sums
from serinus.kernels.contracts import (
    CanaryOps,
    LayerDigest,
    LayerDigests,
    LayersKv,
    RingTensors,
    Watch,
    WatchPlan,
    WrittenRows,
)
from serinus.kernels.due import match_columns
from serinus.kernels.packed import PackedFactors

__all__ = ["OpsWatch", "canary_watch"]

_COMPARED = 8192
"""Entries of a row that are compared at a time."""


def canary_watch(
    ops: CanaryOps, table_RC: Tensor, written_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
    coefficients_L22W: Tensor | None, ring: RingTensors, stored: RingTensors,
    page_size: int,
) -> Watch:  # fmt: skip
    """A watch over one part.

    Args:
        ops: the ops that it calls; their column is that of the device of the tensors.
        table_RC: req_to_token of the part, int32.
        written_RC: the same as the leader wrote it, kept beside: no kernel finds KV by it, what rows name is held
            against it.
        stamps_LS4: its stamps, int64.
        layers_kv: its pools, in the order of the coefficients.
        coefficients_L22W: of `digest_coefficients`; None = no KV is digested.
        ring: rows, count and checked of `canary_verify`, and what of a pass it counts by sequence, where asked for;
            stored: the same of what is read back after it was stored.
        page_size: that for which `canary_due` made the plans.
    All tensors stay where they are as long as the watch is used.
    Raises:
        ValueError: the coefficients are not those of these pools (here or at the first digest).
    """
    return OpsWatch(ops, table_RC, written_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored, page_size)


class OpsWatch:
    """A call of an op for each piece of the plan."""

    def __init__(
        self, ops: CanaryOps, table_RC: Tensor, written_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
        coefficients_L22W: Tensor | None, ring: RingTensors,
        stored: RingTensors, page_size: int,
    ) -> None:  # fmt: skip
        self._ops, self._table_RC, self._written_RC, self._stamps_LS4 = ops, table_RC, written_RC, stamps_LS4
        self._layers_kv, self._coefficients_L22W, self._ring, self._stored, self._page_size = (
            layers_kv, coefficients_L22W, ring, stored, page_size,
        )  # fmt: skip
        self._to_bind = torch.zeros((5, 0), dtype=torch.int64)
        self._width = 0
        """Positions that are compared of each row that is read."""
        self._pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._columns_7C = np.empty((7, 0), np.int64)
        self._sums_P22E = torch.zeros((1, 2, 2, 0), dtype=torch.int32)
        self._digested = 0
        """Layers of this pass that are."""
        self._reading: tuple[AttentionBatch, Tensor, Tensor] | None = None
        """The batch that was asked about last, what of it is due, the entries that are of none of its sequences."""
        self._factors = [
            PackedFactors(factors=each, bias=None, plain_22W=each)  # plain: the attention of every column takes them
            for each in (() if coefficients_L22W is None else coefficients_L22W)
        ]
        self._bound: tuple[Tensor, ...] | None = None
        """Slots, positions, hashes and names of `canary_bind`."""
        self._batch: tuple[Tensor, ...] | None = None
        self._names_T = self._rows_T = self._written_T2 = torch.zeros(0)
        self.entry_count = 0

    is_staged = False

    def due(self, reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
        return self._ops.canary_due(reads_6B, page_size)

    def has_room(self, room: int, entry_count: int) -> bool:
        return True

    def stage(self, plan: WatchPlan, put: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """All is done in `expand`."""

    def expand(self, due: Sequence[tuple[NDArray[np.int64], int]], bound_5B: NDArray[np.int64]) -> None:
        device, table_RC = self._table_RC.device, self._table_RC
        self.entry_count, self._pieces, columns = 0, [], []
        sizes = {"page_size": self._page_size, "slot_count": self._stamps_LS4.shape[1]}
        for piece, count in due:
            due_7B = torch.from_numpy(piece).to(device)
            self._pieces.append(self._ops.canary_plan(table_RC, due_7B, count, **sizes))
            columns.append(piece + np.array([[0]] * 6 + [[self.entry_count]]))
            self.entry_count += count
        self._begin_counts()
        self._to_bind = torch.from_numpy(bound_5B).to(device)
        self._width = 1 + int((bound_5B[3] - bound_5B[2]).max(initial=0))
        self._look_up()
        self._columns_7C = np.concatenate(columns, axis=1) if columns else np.empty((7, 0), np.int64)
        self.drop_digests()

    def _begin_counts(self) -> None:
        """Nothing of this pass is counted by sequence yet."""
        for by_sequence_N4 in self._ring[3:]:
            by_sequence_N4.zero_()

    def _look_up(self) -> None:
        """The last slots that sequences read, and all that they read beside what the leader wrote: the first entry that
        differs is looked up instead, with a hash that no slot has."""
        names_B, rows_B, low_B, last_B, chains_B = self._to_bind
        if not len(names_B):
            self._bound = None
            return
        positions_B, is_bad_B = last_B, torch.zeros_like(last_B, dtype=torch.bool)
        for begin in reversed(range(0, self._width, _COMPARED)):  # of all that differ the first one stays
            at_BW = low_B[:, None] + torch.arange(begin, min(begin + _COMPARED, self._width), device=low_B.device)
            at_BW = torch.minimum(at_BW, last_B[:, None])
            differs_BW = self._table_RC[rows_B[:, None], at_BW] != self._written_RC[rows_B[:, None], at_BW]
            differs_B = differs_BW.any(1)
            first_B = at_BW.gather(1, differs_BW.int().argmax(1, keepdim=True))[:, 0]
            positions_B, is_bad_B = torch.where(differs_B, first_B, positions_B), is_bad_B | differs_B
        slots_B = self._table_RC[rows_B, positions_B].long()
        self._bound = slots_B, positions_B, torch.where(is_bad_B, ~chains_B, chains_B), names_B

    def look_again(self) -> None:
        self._look_up()

    def reads(self, layer: int, batch: AttentionBatch) -> LayerDigest | None:
        if not self._factors or not self.entry_count:
            return None
        self._digest_to(layer)
        if self._reading is None or self._reading[0] is not batch:
            due_7D, left_C = match_columns(self._columns_7C, batch.rows_B.cpu().numpy(), len(self._table_RC))
            begins, ends = self._columns_7C[6, left_C], np.append(self._columns_7C[6, 1:], self.entry_count)[left_C]
            left = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
            left_E = torch.from_numpy(np.concatenate(left) if left else np.empty(0, np.int64))
            device = self._table_RC.device
            self._reading = batch, torch.from_numpy(due_7D).to(device), left_E.to(device)
        _, due, left_E = self._reading
        self._digest_entries(layer, left_E)
        return self._digest_of(layer, due)

    def layer_digests(self, batch: AttentionBatch) -> Sequence[LayerDigests]:
        if self._coefficients_L22W is None:
            return ()
        return [(self.writes(layer), self.reads(layer, batch)) for layer in range(len(self._layers_kv))]

    def _digest_of(self, layer: int, due_7D: Tensor) -> LayerDigest:
        """What attention is told of a layer, which is digested then."""
        self._digested = layer + 1
        return LayerDigest(
            factors=self._factors[layer], due_7B=due_7D, sums_P22E=self._sums_P22E, page_size=self._page_size,
            canary_digest=self._ops.canary_digest,
        )  # fmt: skip

    def drop_digests(self) -> None:
        self._digested, self._reading = 0, None
        shape = (1, 2, 2, self.entry_count)
        self._sums_P22E = torch.zeros(shape, dtype=torch.int32, device=self._table_RC.device)

    def verify(self, lane: int) -> None:
        digests: Sequence[Tensor | None] = [None] * len(self._pieces)
        if lane >= StampLane.TAIL_K and self._coefficients_L22W is not None:
            self._digest_to(len(self._layers_kv))
            sums_E2 = packed_sums(self._sums_P22E)
            digests = torch.split_with_sizes(sums_E2, [len(piece[0]) for piece in self._pieces])
        for (slots_E, positions_E, previous_E, names_E), found_E2 in zip(self._pieces, digests, strict=True):
            self._ops.canary_verify(
                self._stamps_LS4, lane, slots_E, positions_E, previous_E, None, found_E2, names_E, *self._ring
            )
        if self._bound is not None:
            self._ops.canary_bind(self._stamps_LS4, lane, *self._bound, *self._ring)

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor,
        first_name: int,
    ) -> None:  # fmt: skip
        self._batch = (slots_T, positions_T, tokens_T, q_starts_B1, self._table_RC, rows_B)
        at_T = torch.arange(len(slots_T), device=slots_T.device)
        self._names_T = torch.bucketize(at_T, q_starts_B1[1:], right=True) + first_name
        self._rows_T = rows_B.repeat_interleave(q_starts_B1.diff())
        self._written_T2 = torch.zeros((len(slots_T), 2), dtype=torch.int64, device=slots_T.device)

    def writes(self, layer: int) -> WrittenRows | None:
        if self._coefficients_L22W is None:
            return None
        return WrittenRows(coefficients_22W=self._coefficients_L22W[layer], sums_T2=self._written_T2)

    def write(self, lane: int) -> None:
        assert self._batch is not None, "kernels: a watch writes stamps of tokens that stand() has not named"
        if lane < StampLane.TAIL_K or self._coefficients_L22W is None:
            self._ops.canary_write(self._stamps_LS4, lane, *self._batch, None)
            return
        self._ops.canary_write(self._stamps_LS4, lane, *self._batch, self._written_T2)
        slots_T, positions_T, tokens_T = self._batch[:3]
        # Where the rows say that they are: attention has read them there.
        positions_T = torch.where(slots_T == 0, -1, positions_T)  # padding
        slots_T = slots_in(self._table_RC[self._rows_T, positions_T.clamp_min(0)], self._stamps_LS4.shape[1])
        found_T2 = self._ops.canary_digest(self._layers_kv, slots_T, self._coefficients_L22W)
        unknown_T = torch.full_like(slots_T, UNKNOWN)
        self._ops.canary_verify(
            self._stamps_LS4, lane, slots_T, positions_T, unknown_T, tokens_T, found_T2, self._names_T, *self._stored
        )

    def verify_and_write(self, lane: int) -> None:
        self.verify(lane)
        self.write(lane)

    def _digest_to(self, end: int) -> None:
        """By a pass of its own, what no attention digests of the layers before `end`."""
        if self._digested < end:
            every_E = torch.arange(self.entry_count, device=self._table_RC.device)
            for layer in range(self._digested, end):
                self._digest_entries(layer, every_E)
            self._digested = end

    def _slots_of(self, entries_E: Tensor) -> Tensor:
        return torch.cat([piece[0] for piece in self._pieces])[entries_E]

    def _digest_entries(self, layer: int, entries_E: Tensor) -> None:
        if not len(entries_E) or self._coefficients_L22W is None:
            return
        slots_E = self._slots_of(entries_E)
        factors = self._coefficients_L22W[layer : layer + 1]
        found_E2 = self._ops.canary_digest(self._layers_kv[layer : layer + 1], slots_E, factors)
        words_22E = found_E2.view(torch.int32).view(len(entries_E), 2, 2).permute(1, 2, 0).contiguous()
        self._sums_P22E[0].index_add_(2, entries_E, words_22E)
