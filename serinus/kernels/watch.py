"""Watch: the canary's checks of one part around forward passes, put together of its ops. The specification: a column
may have one of its own that does the same with fewer calls (cpu/watch.py).

    watch.expand(due)                  which slots are verified in this pass
    watch.verify(StampLane.HEAD_K)     their stamps, without digests
    watch.stand(slots, ...)            the step's tokens
    watch.write(StampLane.HEAD_K)      their stamps
    watch.digest(layer)                may be called layer by layer, in order, before somebody reads those bytes
    watch.verify(StampLane.TAIL_K)     with the digests of all layers; those not digested yet are now
    watch.write(StampLane.TAIL_K)

Knows no requests. B = sequences, T = tokens of the step, E = slots verified, L = layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.ref.canary import add_digests

__all__ = ["CommonWatch", "Watch", "WatchOps"]

_DIGEST_LANES_FIRST = 2
"""Stamps from this lane on (TAIL) have digests."""


class WatchOps(Protocol):
    """The canary's ops of one column."""

    @property
    def digest(self) -> Callable[..., Tensor]: ...

    @property
    def plan(self) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]: ...

    @property
    def verify(self) -> Callable[..., None]: ...

    @property
    def write(self) -> Callable[..., None]: ...


class Watch(Protocol):
    """See the file's first lines."""

    entry_count: int
    """Slots expanded for this pass."""

    def expand(self, due: Iterable[tuple[NDArray[np.int64], int]]) -> None:
        """Pieces of a plan: columns due_7B of `canary_plan`, and their entries. Forgets those of the pass before."""
        ...

    def digest(self, layer: int) -> None:
        """Digest one more layer of what was expanded; from 0 on, without gaps."""
        ...

    def verify(self, lane: int) -> None:
        """HEAD_K or TAIL_K, and the lane of V beside it."""
        ...

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor
    ) -> None:
        """The tokens that this pass computes, as `canary_write` has them."""
        ...

    def write(self, lane: int) -> None:
        """Their stamps of HEAD_K or TAIL_K, and of V beside it; in TAIL with the digests of their slots."""
        ...


class CommonWatch:
    """For any device."""

    def __init__(
        self, ops: WatchOps, table_RC: Tensor, stamps_LS4: Tensor, layers_kv: Sequence[tuple[Tensor, Tensor]],
        coefficients_L22W: Tensor | None, ring: tuple[Tensor, Tensor, Tensor], page_size: int,
    ) -> None:  # fmt: skip
        """`ring`: rows, count and checked of `canary_verify`; without coefficients no KV is digested."""
        self._ops, self._table_RC, self._stamps_LS4 = ops, table_RC, stamps_LS4
        self._layers_kv, self._coefficients_L22W, self._ring, self._page_size = (
            layers_kv, coefficients_L22W, ring, page_size,
        )  # fmt: skip
        self._pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sums: list[Tensor] = []
        self._digested = 0
        self._batch: tuple[Tensor, ...] | None = None
        self.entry_count = 0

    def expand(self, due: Iterable[tuple[NDArray[np.int64], int]]) -> None:
        device, page_size = self._table_RC.device, self._page_size
        self._digested, self.entry_count = 0, 0
        self._pieces, self._sums = [], []
        for columns, count in due:
            due_7B = torch.from_numpy(columns).to(device)
            self._pieces.append(self._ops.plan(self._table_RC, due_7B, count, page_size=page_size))
            self.entry_count += count

    def digest(self, layer: int) -> None:
        self._digest_to(layer + 1)

    def verify(self, lane: int) -> None:
        digests: Sequence[Tensor | None] = [None] * len(self._pieces)
        if lane >= _DIGEST_LANES_FIRST and self._coefficients_L22W is not None:
            self._digest_to(len(self._layers_kv))
            digests = self._sums
        for (slots_E, positions_E, previous_E, names_E), sums_E2 in zip(self._pieces, digests, strict=True):
            self._ops.verify(
                self._stamps_LS4, lane, slots_E, positions_E, previous_E, None, sums_E2, names_E, *self._ring
            )

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor
    ) -> None:
        self._batch = (slots_T, positions_T, tokens_T, q_starts_B1, self._table_RC, rows_B)

    def write(self, lane: int) -> None:
        assert self._batch is not None, "kernels: a watch writes stamps of a pass that it was told nothing of"
        digests_T2 = None
        if lane >= _DIGEST_LANES_FIRST and self._coefficients_L22W is not None:
            digests_T2 = self._ops.digest(self._layers_kv, self._batch[0], self._coefficients_L22W)
        self._ops.write(self._stamps_LS4, lane, *self._batch, digests_T2)

    def _digest_to(self, end: int) -> None:
        factors, first = self._coefficients_L22W, self._digested
        if factors is None or end <= first:
            return
        self._digested = end
        sums = [self._ops.digest(self._layers_kv[first:end], piece[0], factors[first:end]) for piece in self._pieces]
        self._sums = [add_digests(a, b) for a, b in zip(self._sums, sums, strict=True)] if first else sums
