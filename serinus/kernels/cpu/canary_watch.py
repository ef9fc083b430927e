"""The canary's watch with buffers and addresses that stay: a decode step has few slots to verify, and then the calls of
the kernels cost more than the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.canary import StampLane
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import CanaryOps, LayersKv, Watch
from serinus.kernels.cpu import canary as kernels

__all__ = ["canary_watch"]

_WORD = 8


def canary_watch(
    ops: CanaryOps, table_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv, coefficients_L22W: Tensor | None,
    ring: tuple[Tensor, Tensor, Tensor], page_size: int,
) -> Watch:  # fmt: skip
    """A watch over one part; see the reference. `ops` is not used: this watch calls the kernels of its column.

    Raises:
        ValueError: the coefficients are not those of these pools, or strided.
    """
    return _CpuWatch(table_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, page_size)


class _CpuWatch:
    """The argument structures of the kernels, filled once; of each pass only what differs is written into them."""

    def __init__(
        self, table_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
        coefficients_L22W: Tensor | None, ring: tuple[Tensor, Tensor, Tensor], page_size: int,
    ) -> None:  # fmt: skip
        self._holds = (table_RC, stamps_LS4, layers_kv, coefficients_L22W, ring)
        self._pools = _Pools(layers_kv, coefficients_L22W) if coefficients_L22W is not None else None
        self._plan = (table_RC.data_ptr(), table_RC.shape[1], page_size)
        rows_QF, count_1, checked_L = ring
        self._stamps = (stamps_LS4.data_ptr(), stamps_LS4.shape[1])
        self._ring = (rows_QF.data_ptr(), len(rows_QF), count_1.data_ptr(), checked_L.data_ptr())
        self._pieces: list[_Piece] = []
        self._live = 0
        self._digested = 0
        self._sums_T2 = np.empty((0, 2), np.int64)
        self._batch: list[Tensor] = []
        self._write = kernels.Write(0, *self._stamps, 0, 0, 0, 0, 0, 0, *self._plan[:2], 0, 0, 0)
        self.entry_count = 0

    def expand(self, due: Iterable[tuple[NDArray[np.int64], int]]) -> None:
        self._live, self._digested, self.entry_count = 0, 0, 0
        for columns, count in due:
            if self._live == len(self._pieces):
                self._pieces.append(_Piece(self._plan, self._stamps, self._ring))
            self._pieces[self._live].expand(columns, count)
            self._live += 1
            self.entry_count += count

    def digest(self, layer: int) -> None:
        self._digest_to(layer + 1)

    def verify(self, lane: int) -> None:
        with_digests = lane >= StampLane.TAIL_K and self._pools is not None
        if with_digests and self._pools is not None:
            self._digest_to(self._pools.layer_count)
        for piece in self._pieces[: self._live]:
            piece.verify(lane, with_digests=with_digests)

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor
    ) -> None:
        inputs = [t.contiguous() for t in (slots_T, positions_T, tokens_T, q_starts_B1, rows_B)]
        arguments = self._write
        arguments.slots, arguments.positions, arguments.tokens, arguments.starts, arguments.rows = (
            tensor.data_ptr() for tensor in inputs
        )
        arguments.sequence_count, arguments.total = len(rows_B), len(slots_T)
        self._batch = inputs  # as long as their addresses are in use

    def write(self, lane: int) -> None:
        arguments, pools = self._write, self._pools
        arguments.ticket, arguments.lane, arguments.digests = 0, lane, 0
        if lane >= StampLane.TAIL_K and pools is not None:
            count = arguments.total
            if len(self._sums_T2) < count:
                self._sums_T2 = np.empty((2 * count, 2), np.int64)
            arguments.digests = self._sums_T2.ctypes.data
            pools.digest(arguments.slots, arguments.digests, count, 0, pools.layer_count)
        kernels.run_write(arguments)

    def _digest_to(self, end: int) -> None:
        first, pools = self._digested, self._pools
        if pools is None or end <= first:
            return
        self._digested = end
        for piece in self._pieces[: self._live]:
            pools.digest(piece.slots_at, piece.sums_at, piece.count, first, end)


class _Pools:
    """The layers that are digested, and by what."""

    def __init__(self, layers_kv: LayersKv, coefficients_L22W: Tensor) -> None:
        check_digest(layers_kv, coefficients_L22W)
        if not coefficients_L22W.is_contiguous():
            raise ValueError("kernels: digest coefficients lie in strides, expected them contiguous")
        self.layer_count = len(layers_kv)
        self._addresses = (ctypes.c_int64 * (2 * len(layers_kv)))(*[t.data_ptr() for pair in layers_kv for t in pair])
        self._factors = coefficients_L22W.data_ptr()
        self._factor_bytes = coefficients_L22W[0].numel() * coefficients_L22W.element_size()
        pool = layers_kv[0][0]
        slot_bytes = pool.stride(0) * pool.element_size()
        self._digest = kernels.Digest(0, 0, 0, 0, 0, 0, 0, coefficients_L22W.shape[-1], slot_bytes, 0, 0, 0)

    def digest(self, slots_at: int, sums_at: int, count: int, first: int, end: int) -> None:
        """Of layers first .. end - 1; those behind the first are added."""
        arguments = self._digest
        arguments.ticket, arguments.adds = 0, int(first > 0)
        arguments.pools = ctypes.addressof(self._addresses) + first * 2 * _WORD
        arguments.coefficients = self._factors + first * self._factor_bytes
        arguments.slots, arguments.out, arguments.count, arguments.layers = slots_at, sums_at, count, end - first
        kernels.run_digest(arguments)


class _Piece:
    """Slots that are verified together: one piece of a plan."""

    def __init__(self, plan: tuple[int, int, int], stamps: tuple[int, int], ring: tuple[int, int, int, int]) -> None:
        table, columns, page_size = plan
        self._plan = kernels.Plan(0, table, 0, 0, 0, 0, columns, page_size)
        self._verify = kernels.Verify(0, *stamps, 0, 0, 0, 0, 0, 0, 0, *ring, 0, kernels.VERIFY_STEP)
        self._words = np.empty(0, np.int64)
        self.count = self.slots_at = self.sums_at = 0

    def expand(self, columns: NDArray[np.int64], count: int) -> None:
        """Addresses follow from `count`: slots, positions, previous slots, names, then two sums each."""
        if len(self._words) < 6 * count:
            self._words = np.empty(12 * count, np.int64)
        base, plan, verify = self._words.ctypes.data, self._plan, self._verify
        self.count, self.slots_at, self.sums_at = count, base, base + 4 * _WORD * count
        plan.ticket, plan.due, plan.out = 0, columns.ctypes.data, base
        plan.sequence_count, plan.entry_count = columns.shape[1], count
        kernels.run_plan(plan)
        verify.slots, verify.positions, verify.previous, verify.names = (base + i * _WORD * count for i in range(4))
        verify.count = count

    def verify(self, lane: int, *, with_digests: bool) -> None:
        """Against the stamps of that lane."""
        arguments = self._verify
        arguments.ticket, arguments.lane = 0, lane
        arguments.digests = self.sums_at if with_digests else 0
        kernels.run_verify(arguments)
