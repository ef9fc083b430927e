"""The canary's watch with buffers and addresses that stay: a decode step has few slots to verify, and then the calls of
the kernels cost more than the kernels.

What a batch reads is digested by its attention; what it does not read in a layer (a prompt whose chunk wants no token
of the last one), by a pass of its own after the layers. Both kinds of sums meet in verify.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.canary import UNKNOWN, StampLane
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import CanaryOps, LayerDigest, LayersKv, Watch, WrittenRows
from serinus.kernels.cpu import canary as kernels
from serinus.kernels.cpu import canary_bind
from serinus.kernels.cpu.body import thread_count
from serinus.kernels.cpu.paged_attention import cuts_of
from serinus.kernels.cpu.watched_attention import pack_factors
from serinus.kernels.due import match_columns
from serinus.kernels.packed import PackedFactors

__all__ = ["canary_watch"]

_WORD = 8
_Span = tuple[int, int]
"""Entries: the first, how many."""


def canary_watch(
    ops: CanaryOps, table_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv, coefficients_L22W: Tensor | None,
    ring: tuple[Tensor, Tensor, Tensor], stored: tuple[Tensor, Tensor, Tensor], page_size: int,
) -> Watch:  # fmt: skip
    """A watch over one part; see the reference. `ops` is not used: this watch calls the kernels of its column.

    Raises:
        ValueError: the coefficients are not those of these pools, or strided.
    """
    return _CpuWatch(table_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored, page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What is digested how, of the layers that one attention batch reads."""

    batch: AttentionBatch
    due_7D: Tensor
    """As `LayerDigest` has it."""
    has_watched: bool
    rest: tuple[_Span, ...]
    """What attention does not digest."""


class _CpuWatch:
    """The argument structures of the kernels, filled once; of each pass only what differs is written into them."""

    def __init__(
        self, table_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
        coefficients_L22W: Tensor | None, ring: tuple[Tensor, Tensor, Tensor],
        stored: tuple[Tensor, Tensor, Tensor], page_size: int,
    ) -> None:  # fmt: skip
        self._holds = (table_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored)
        self._pools = _Pools(layers_kv, coefficients_L22W) if coefficients_L22W is not None else None
        self._page_size, self._row_count = page_size, len(table_RC)
        plan = (table_RC.data_ptr(), table_RC.shape[1])
        stamps = (stamps_LS4.data_ptr(), stamps_LS4.shape[1])
        self._slot_count = stamps_LS4.shape[1]
        self._plan = kernels.Plan(0, plan[0], 0, 0, 0, 0, plan[1], page_size, self._slot_count)
        self._verify, self._read_back = (
            kernels.Verify(0, *stamps, 0, 0, 0, 0, 0, 0, 0, *_addresses(of), 0, kernels.VERIFY_STEP, 0, 0)
            for of in (ring, stored)
        )
        self._bind = canary_bind.Bind(0, *stamps, 0, 0, 0, 0, 0, *_addresses(ring), 0)
        self._write = kernels.Write(0, *stamps, 0, 0, 0, 0, 0, 0, *plan, 0, 0, 0)
        self._table = table_RC.numpy()
        self._to_bind = np.empty((4, 0), np.int64)
        self._bound_4B = np.empty((4, 0), np.int64)
        """Slots, positions, hashes and names of `canary_bind`."""
        self._words = np.empty(0, np.int64)
        self._columns_7C = np.empty((7, 0), np.int64)
        self._written_T2 = torch.empty((0, 2), dtype=torch.int64)
        self._found_T2 = np.empty((0, 2), np.int64)
        self._batch: list[Tensor] = []
        self._named: tuple[NDArray[np.int64], ...] = ()
        self.entry_count = 0
        self._reading: _Reading | None = None
        """Of the batch that was asked about last."""
        self._sums_P22E: Tensor | None = None
        """What attention digests; None: nothing in this pass."""
        self._all: tuple[_Span, ...] = ()
        """All entries of this pass."""
        self._left: list[tuple[int, int, tuple[_Span, ...]]] = []
        """First layer, end, entries: what is to be digested by a pass of its own."""
        self._taken = 0
        """Layers of this pass of which that is settled."""
        self._has_digests = False
        """Whether sums lie behind the entries."""

    def expand(self, due: Iterable[tuple[NDArray[np.int64], int]], bound_4B: NDArray[np.int64]) -> None:
        """The pieces are put together again: what they would save is kept from pass to pass anyway."""
        columns, begin = [], 0
        for piece, count in due:
            columns.append(piece if not begin else piece + np.array([[0]] * 6 + [[begin]]))
            begin += count
        self.entry_count = count = begin
        self._columns_7C = np.concatenate(columns, axis=1) if columns else np.empty((7, 0), np.int64)
        self.drop_digests()
        self._take_bound(bound_4B)
        if not count:
            return
        # Slots, positions, previous slots, names, then two sums each.
        if len(self._words) < 6 * count:
            self._words = np.empty(12 * count, np.int64)
        base, plan, verify = self._words.ctypes.data, self._plan, self._verify
        plan.ticket, plan.due, plan.out = 0, self._columns_7C.ctypes.data, base
        plan.sequence_count, plan.entry_count = self._columns_7C.shape[1], count
        kernels.run_plan(plan)
        verify.slots, verify.positions, verify.previous, verify.names = (base + i * _WORD * count for i in range(4))
        verify.count = count

    def _take_bound(self, bound_4B: NDArray[np.int64]) -> None:
        """The slots are those that rows name now."""
        self._to_bind = bound_4B
        names, rows, positions, chains = bound_4B
        arguments = self._bind
        arguments.count = len(names)
        if not len(names):
            return
        self._bound_4B = np.stack((self._table[rows, positions], positions, chains, names))
        base, step = self._bound_4B.ctypes.data, len(names) * _WORD
        arguments.slots, arguments.positions, arguments.chains, arguments.names = (base + i * step for i in range(4))

    def reads(self, layer: int, batch: AttentionBatch) -> LayerDigest | None:
        pools = self._pools
        if pools is None or not self.entry_count:
            return None
        reading = self._reading
        if reading is None or reading.batch is not batch:
            reading = self._reading = self._read_by(batch, pools)
        self._leave(layer, self._all)
        self._leave(layer + 1, reading.rest)
        if not reading.has_watched or self._sums_P22E is None:
            return None
        return LayerDigest(
            factors=pools.packed[layer], due_7B=reading.due_7D, sums_P22E=self._sums_P22E, page_size=self._page_size,
            canary_digest=kernels.canary_digest,
        )  # fmt: skip

    def drop_digests(self) -> None:
        self._reading, self._sums_P22E, self._left, self._taken, self._has_digests = None, None, [], 0, False
        self._all = ((0, self.entry_count),) if self.entry_count else ()

    def look_again(self) -> None:
        if self._pools is not None:
            self._leave(self._pools.layer_count, self._all)
            self._digest_left()
        self._take_bound(self._to_bind)
        if self.entry_count:
            self._plan.ticket = 0
            kernels.run_plan(self._plan)

    def verify(self, lane: int) -> None:
        if self._bind.count:
            self._bind.lane = lane
            canary_bind.run_bind(self._bind)
        if not self.entry_count:
            return
        arguments, pools = self._verify, self._pools
        arguments.ticket, arguments.lane, arguments.digests, arguments.cuts = 0, lane, 0, 0
        if lane >= StampLane.TAIL_K and pools is not None:
            self._leave(pools.layer_count, self._all)
            self._digest_left()
            if self._has_digests:
                arguments.digests = self._digests_at
            if self._sums_P22E is not None:
                arguments.sums, arguments.cuts = self._sums_P22E.data_ptr(), len(self._sums_P22E)
        kernels.run_verify(arguments)

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor,
        first_name: int,
    ) -> None:  # fmt: skip
        inputs = [t.contiguous() for t in (slots_T, positions_T, tokens_T, q_starts_B1, rows_B)]
        arguments = self._write
        arguments.slots, arguments.positions, arguments.tokens, arguments.starts, arguments.rows = (
            tensor.data_ptr() for tensor in inputs
        )
        arguments.sequence_count, arguments.total = len(rows_B), len(slots_T)
        self._batch = inputs  # as long as their addresses are in use
        if self._pools is None:
            return
        back, count = self._read_back, len(slots_T)
        names_T = np.repeat(
            np.arange(first_name, first_name + len(rows_B)), inputs[3].numpy()[1:] - inputs[3].numpy()[:-1]
        )
        self._named = names_T, np.full(count, UNKNOWN, np.int64), np.empty(count, np.int64)
        self._written_T2 = torch.zeros((count, 2), dtype=torch.int64)
        back.positions, back.tokens = arguments.positions, arguments.tokens
        back.names, back.previous, back.slots = (each.ctypes.data for each in self._named)
        back.count = count

    def writes(self, layer: int) -> WrittenRows | None:
        pools = self._pools
        if pools is None:
            return None
        return WrittenRows(coefficients_22W=pools.coefficients_L22W[layer], sums_T2=self._written_T2)

    def write(self, lane: int) -> None:
        arguments, pools = self._write, self._pools
        arguments.ticket, arguments.lane, arguments.digests = 0, lane, 0
        if lane < StampLane.TAIL_K or pools is None:
            kernels.run_write(arguments)
            return
        arguments.digests = self._written_T2.data_ptr()
        kernels.run_write(arguments)
        back, count = self._read_back, arguments.total
        if len(self._found_T2) < count:
            self._found_T2 = np.empty((2 * count, 2), np.int64)
        back.ticket, back.lane, back.digests = 0, lane, self._found_T2.ctypes.data
        self._find_written()
        pools.digest(back.slots, back.digests, count, 0, pools.layer_count, adds=False)
        kernels.run_verify(back)

    def _find_written(self) -> None:
        """Where the rows say that the new tokens are: attention has read them there. 0 where that is no slot."""
        slots, positions, _, starts, rows = (each.numpy() for each in self._batch)
        found = self._table[np.repeat(rows, np.diff(starts)), positions]
        self._named[2][:] = np.where((slots == 0) | (found < 0) | (found >= self._slot_count), 0, found)

    # ---- what is digested how -----------------------------------------------------------------------------------

    def _read_by(self, batch: AttentionBatch, pools: _Pools) -> _Reading:
        columns = self._columns_7C
        due_7D, left_C = match_columns(columns, batch.rows_B.numpy(), self._row_count)
        has_watched = not left_C.all()
        if has_watched and self._sums_P22E is None:
            # Threads that share a sequence add to slices of their own.
            is_shared = int(batch.q_starts_B1[-1]) > batch.sequence_count
            is_shared = is_shared or cuts_of(batch.context_B.tolist(), pools.kv_heads) > 1
            shape = (thread_count() if is_shared else 1, 2, 2, self.entry_count)
            self._sums_P22E = torch.zeros(shape, dtype=torch.int32)
        ends = np.append(columns[6, 1:], self.entry_count)
        rest = tuple([(begin, end - begin) for begin, end in np.stack((columns[6], ends), 1)[left_C].tolist()])
        return _Reading(
            batch=batch,
            due_7D=torch.from_numpy(due_7D),
            has_watched=has_watched,
            rest=rest if has_watched else self._all,
        )

    def _leave(self, end: int, spans: tuple[_Span, ...]) -> None:
        """Of the layers up to `end` that are not settled, these entries are to be digested by a pass of their own."""
        if end > self._taken:
            first = self._taken
            if spans and self._left and self._left[-1][1:] == (first, spans):
                first = self._left.pop()[0]
            if spans:
                self._left.append((first, end, spans))
            self._taken = end

    def _digest_left(self) -> None:
        """Digest what was left; sums are added to those of other layers."""
        left, self._left = self._left, []
        pools = self._pools
        if not left or pools is None:
            return
        count = self.entry_count
        if not self._has_digests:
            self._words[4 * count : 6 * count] = 0
            self._has_digests = True
        for first, end, spans in left:
            for begin, entries in spans:
                slots_at = self._words.ctypes.data + begin * _WORD
                pools.digest(slots_at, self._digests_at + begin * 2 * _WORD, entries, first, end, adds=True)

    @property
    def _digests_at(self) -> int:
        return self._words.ctypes.data + 4 * _WORD * self.entry_count


def _addresses(ring: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int, int]:
    """Of a ring, as `Verify` has them."""
    rows_QF, count_1, checked_L = ring
    return rows_QF.data_ptr(), len(rows_QF), count_1.data_ptr(), checked_L.data_ptr()


class _Pools:
    """The layers that are digested, and by what."""

    def __init__(self, layers_kv: LayersKv, coefficients_L22W: Tensor) -> None:
        check_digest(layers_kv, coefficients_L22W)
        if not coefficients_L22W.is_contiguous():
            raise ValueError("kernels: digest coefficients lie in strides, expected them contiguous")
        self.layer_count = len(layers_kv)
        self._addresses = (ctypes.c_int64 * (2 * len(layers_kv)))(*[t.data_ptr() for pair in layers_kv for t in pair])
        self.coefficients_L22W = tuple(coefficients_L22W)
        self._factors = coefficients_L22W.data_ptr()
        self._factor_bytes = coefficients_L22W[0].numel() * coefficients_L22W.element_size()
        pool = layers_kv[0][0]
        slot_bytes, lanes = pool.stride(0) * pool.element_size(), coefficients_L22W.shape[-1]
        self._digest = kernels.Digest(0, 0, 0, 0, 0, 0, 0, lanes, slot_bytes, 0, 0, 0)
        self.kv_heads = pool.shape[1]
        self.packed = [
            pack_factors(factors_22W, self.kv_heads)
            if 2 * lanes == slot_bytes
            else PackedFactors(factors=factors_22W, bias=None, plain_22W=factors_22W)
            for factors_22W in coefficients_L22W
        ]
        """Factors for attention, by layer."""

    def digest(self, slots_at: int, sums_at: int, count: int, first: int, end: int, *, adds: bool) -> None:
        """Of layers first .. end - 1."""
        arguments = self._digest
        arguments.ticket, arguments.adds = 0, int(adds)
        arguments.pools = ctypes.addressof(self._addresses) + first * 2 * _WORD
        arguments.coefficients = self._factors + first * self._factor_bytes
        arguments.slots, arguments.out, arguments.count, arguments.layers = slots_at, sums_at, count, end - first
        kernels.run_digest(arguments)
