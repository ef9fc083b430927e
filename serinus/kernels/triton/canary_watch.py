"""The canary's watch on a GPU: what differs from pass to pass is data that `stage` brings, so that a pass can be
recorded and replayed. No call waits for the device.

A recorded pass has room for more than it verifies: columns without entries, entries at position -1, sequences that
read up to position -1. All of these are passed over by the kernels.

B = sequences, T = tokens of the step, E = slots verified, L = layers, W = 16-bit lanes digested of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.canary import UNKNOWN, StampLane
from serinus.kernels.contracts import CanaryOps, LayerDigest, LayersKv, RingTensors, Watch, WatchPlan
from serinus.kernels.due import match_columns
from serinus.kernels.ref.canary_watch import OpsWatch
from serinus.kernels.triton.canary import digest_into, plan_into, verify_entries

_ENTRIES_MAX: Final = 1 << 19
"""Slots that a recorded pass verifies at most, of 64 bytes each."""
_BLOCK: Final = 1024
Words = NDArray[np.int64]
Put = Callable[[Words], Tensor]


def canary_watch(
    ops: CanaryOps, table_RC: Tensor, written_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
    coefficients_L22W: Tensor | None, ring: RingTensors, stored: RingTensors,
    page_size: int,
) -> Watch:  # fmt: skip
    """A watch over one part; see the reference."""
    return _DeviceWatch(ops, table_RC, written_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored, page_size)


@dataclass(slots=True, kw_only=True)
class _Staged:
    """What one pass reads, on the device."""

    sequence_count: int
    """Of the whole pass. Attention over fewer is that above the last layer, be it the only one of its part here."""
    pieces: list[tuple[Tensor, int]]
    """Columns of a plan, the last of which has no entries and begins behind all others; and the entries that there is
    room for."""
    bound_5B: Tensor
    names_T: Tensor
    rows_T: Tensor
    due_7D: Tensor
    """The columns in the order of the batch."""
    chosen: tuple[Tensor, Tensor] | None
    """Those of the second batch, and the entries that are of none of its sequences."""


class _DeviceWatch(OpsWatch):
    """A launch or two for each step of the protocol, whatever the batch is."""

    is_staged = True
    _staged: _Staged | None = None

    def has_room(self, room: int, entry_count: int) -> bool:
        return entry_count <= self._room_of(room)

    def _room_of(self, room: int) -> int:
        """Entries of a recorded pass of so many sequences: whole rows, with the last page of each once more."""
        pages = -(-self._table_RC.shape[1] // self._page_size) + 1
        return min(room * pages * self._page_size, _ENTRIES_MAX)

    # ---- on the host ---------------------------------------------------------------------------------------------

    def stage(self, plan: WatchPlan, put: Put) -> None:
        columns_7C, begin = _joined(plan.due)
        room, rows_B, bound_5B = plan.room, plan.rows_B, plan.bound_5B
        pieces = [(_filled(piece, piece.shape[1] + 1, 6, count), count) for piece, count in plan.due]
        self.entry_count = begin
        if room is None:
            names_T = np.repeat(np.arange(len(rows_B), dtype=np.int64) + plan.first_name, plan.counts_B)
            rows_T = np.repeat(rows_B, plan.counts_B)
        else:
            self.entry_count = self._room_of(room)
            names_T, rows_T = np.arange(plan.first_name, plan.first_name + room), np.zeros(room, np.int64)
            rows_T[: len(rows_B)] = rows_B
            rows_B = rows_T
            bound_5B = _filled(bound_5B, room, 3, -1)
            pieces = [(_filled(columns_7C, plan.sets * room + 1, 6, begin), self.entry_count)]
        due_7D, _ = match_columns(columns_7C, rows_B, len(self._table_RC))
        if room is not None and due_7D.shape[1] < plan.sets * room:
            due_7D = _filled(due_7D, plan.sets * room, 5, 1)
        np.maximum(due_7D[5], 1, out=due_7D[5])  # a kernel may divide by the stride of a column without pages
        self._staged = _Staged(
            sequence_count=len(rows_B),
            pieces=[(put(columns_7B), count) for columns_7B, count in pieces],
            bound_5B=put(bound_5B),
            names_T=put(names_T),
            rows_T=put(rows_T),
            due_7D=put(due_7D),
            chosen=None if plan.chosen_W is None else self._chosen(columns_7C, rows_B[plan.chosen_W], put),
        )

    def _chosen(self, columns_7C: Words, rows_W: Words, put: Put) -> tuple[Tensor, Tensor]:
        due_7D, left_C = match_columns(columns_7C, rows_W, len(self._table_RC))
        due_7D[5] = np.maximum(due_7D[5], 1)
        begins, ends = columns_7C[6, left_C], np.append(columns_7C[6, 1:], self.entry_count)[left_C]
        left = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        return put(due_7D), put(np.concatenate(left) if left else np.empty(0, np.int64))

    # ---- on the device -------------------------------------------------------------------------------------------

    def _now(self) -> _Staged:
        assert self._staged is not None, "kernels: a watch of a pass that was not staged"
        return self._staged

    def expand(self, due: Sequence[tuple[Words, int]], bound_5B: Words) -> None:
        device, begin = self._table_RC.device, 0
        self._begin_counts()
        self._digested, self._reading, self._pieces = 0, None, []
        self._sums_P22E = torch.empty((1, 2, 2, self.entry_count), dtype=torch.int32, device=device)
        for columns_7B, count in self._now().pieces:
            out_4E = torch.empty((4, count), dtype=torch.int64, device=device)
            plan_into(
                out_4E, self._table_RC, columns_7B, page_size=self._page_size, slot_count=self._stamps_LS4.shape[1],
                sums_22E=self._sums_P22E[0, :, :, begin:],
            )  # fmt: skip
            self._pieces.append((out_4E[0], out_4E[1], out_4E[2], out_4E[3]))
            begin += count
        self.look_again()

    def verify(self, lane: int) -> None:
        kind, begin = 0, 0
        if lane >= StampLane.TAIL_K and self._coefficients_L22W is not None:
            kind = 2
            self._digest_to(len(self._layers_kv))
        for entries, (columns_7B, count) in zip(self._pieces, self._now().pieces, strict=True):
            verify_entries(
                self._stamps_LS4, lane, entries, self._ring, digests=self._sums_P22E[0, :, :, begin:], digest_kind=kind,
                live_1=columns_7B[6, -1:],
            )  # fmt: skip
            begin += count
        if self._bound is not None:
            self._ops.canary_bind(self._stamps_LS4, lane, *self._bound, *self._ring)

    def _slots_of(self, entries_E: Tensor) -> Tensor:
        slots_E = super()._slots_of(entries_E)
        if len(self._pieces) > 1:
            return slots_E
        return torch.where(entries_E < self._now().pieces[0][0][6, -1], slots_E, 0)  # behind all there is anything

    def write(self, lane: int) -> None:
        if lane < StampLane.TAIL_K or self._coefficients_L22W is None or self._batch is None:
            super().write(lane)
            return
        self._ops.canary_write(self._stamps_LS4, lane, *self._batch, self._written_T2)
        slots_T, positions_T, tokens_T = (each.contiguous() for each in self._batch[:3])
        count = len(slots_T)
        if not count:
            return
        out_5E = torch.empty((5, count + count % 2), dtype=torch.int64, device=slots_T.device)  # rows of whole 16 bytes
        _stored[(triton.cdiv(out_5E.shape[1], _BLOCK),)](
            self._table_RC, self._table_RC.stride(0), self._stamps_LS4.shape[1], slots_T, positions_T, self._rows_T,
            count, out_5E, out_5E.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
        found_T2 = out_5E[:2].view(-1)[: 2 * count].view(count, 2)
        entries = (*(row[:count] for row in out_5E[2:]), self._names_T)
        digest_into(found_T2, self._layers_kv, entries[0], self._coefficients_L22W)
        verify_entries(
            self._stamps_LS4, lane, entries, self._stored, tokens_E=tokens_T, digests=found_T2, digest_kind=1
        )  # fmt: skip

    def look_again(self) -> None:
        bound_5B = self._now().bound_5B
        found_3B = torch.empty((3, bound_5B.shape[1]), dtype=torch.int64, device=bound_5B.device)
        if bound_5B.shape[1]:
            _look[(bound_5B.shape[1],)](
                self._table_RC, self._written_RC, self._table_RC.shape[1], bound_5B, bound_5B.shape[1], found_3B,
                BLOCK=_BLOCK,
            )  # fmt: skip
        self._bound = found_3B[0], found_3B[1], found_3B[2], bound_5B[0]

    def reads(self, layer: int, batch: AttentionBatch) -> LayerDigest | None:
        if not self._factors or not self.entry_count:
            return None
        self._digest_to(layer)
        staged = self._now()
        due_7D = staged.due_7D
        if batch.sequence_count != staged.sequence_count:
            assert staged.chosen is not None, "kernels: attention reads a batch that was not staged"
            due_7D, left_E = staged.chosen
            self._digest_entries(layer, left_E)
        return self._digest_of(layer, due_7D)

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor,
        first_name: int,
    ) -> None:  # fmt: skip
        self._batch = (slots_T, positions_T, tokens_T, q_starts_B1, self._table_RC, rows_B)
        self._names_T, self._rows_T = self._now().names_T, self._now().rows_T
        self._written_T2 = torch.zeros((len(slots_T), 2), dtype=torch.int64, device=slots_T.device)


def _joined(due: Sequence[tuple[Words, int]]) -> tuple[Words, int]:
    """The columns of all pieces with entries that count through, and how many these are."""
    if len(due) == 1:
        return due[0]
    columns, begin = [np.empty((7, 0), np.int64)], 0
    for piece, count in due:
        columns.append(piece.copy())
        columns[-1][6] += begin
        begin += count
    return np.concatenate(columns, axis=1), begin


def _filled(columns: Words, count: int, field: int, value: int) -> Words:
    """With columns of nothing behind, up to `count` of them: zeros, and `value` in one field."""
    filled = np.zeros((len(columns), count), np.int64)
    filled[:, : columns.shape[1]] = columns
    filled[field, columns.shape[1] :] = value
    return filled


_jit: Any = triton.jit
_UNKNOWN = tl.constexpr(UNKNOWN)


@_jit(do_not_specialize=["count", "width"])
def _stored(table, columns, slot_count, slots, positions, rows, count, out, width, BLOCK: tl.constexpr):
    """What is read back of tokens that were stored: two rows of zeros; slots where the rows say that they are, since
    attention has read them there; positions, -1 of padding; nothing is known of the slots before them."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = t < count
    is_real = tl.load(slots + t, mask=live, other=0) != 0
    position = tl.load(positions + t, mask=live, other=0)
    at = table + tl.load(rows + t, mask=live, other=0) * columns
    slot = tl.load(at + position, mask=live & is_real, other=0).to(tl.int64)
    tl.store(out + t, position * 0, mask=t < width)
    tl.store(out + width + t, position * 0, mask=t < width)
    tl.store(out + 2 * width + t, tl.where((slot < 0) | (slot >= slot_count), 0, slot), mask=live)
    tl.store(out + 3 * width + t, tl.where(is_real, position, -1), mask=live)
    tl.store(out + 4 * width + t, position * 0 + _UNKNOWN, mask=live)


@_jit(do_not_specialize=["count"])
def _look(table, written, columns, bound, count, found, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    row = tl.load(bound + count + b) * columns
    low, last = tl.load(bound + 2 * count + b), tl.load(bound + 3 * count + b)
    chain = tl.load(bound + 4 * count + b)
    first = last + 1
    for at in range(low, last + 1, BLOCK):
        p = at + tl.arange(0, BLOCK)
        inside = p <= last
        is_other = tl.load(table + row + p, mask=inside, other=0) != tl.load(written + row + p, mask=inside, other=0)
        first = tl.minimum(first, tl.min(tl.where(inside & is_other, p, last + 1), 0))
    # Of all entries that differ the first one stands, with a hash that no slot has.
    position = tl.minimum(first, last)
    slot = tl.load(table + row + position, mask=position >= 0, other=0).to(tl.int64)
    tl.store(found + b, slot)
    tl.store(found + count + b, position)
    tl.store(found + 2 * count + b, tl.where(first <= last, ~chain, chain))
