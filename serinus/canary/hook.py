"""CanaryHook: stands around the forward pass. HEAD stamps are verified and written before it, TAIL stamps after it.

It carries out what `Canary` armed it with; it decides nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.canary.coverage import DuePages, Span, pieces
from serinus.canary.ring import Ring
from serinus.core.parts import Part
from serinus.core.plan import StepResult
from serinus.kernels.canary import CanaryKernels, StampLane
from serinus.models import ForwardBatch

__all__ = ["CanaryHook", "Entries", "Faults", "NoFaults", "PartLanes", "StepChecks", "WriteCheck"]


@dataclass(slots=True, kw_only=True, eq=False)
class PartLanes:
    """What the canary sees of one part. S = slots, R, C = rows and columns of the table."""

    part: Part
    layers_kv: Sequence[tuple[Tensor, Tensor]]
    """(k, v) pools of the part's layers."""
    stamps_LS4: Tensor
    table_RC: Tensor
    """req_to_token of the part, int32."""
    coefficients_L22W: Tensor | None
    """Of the digest; None where no KV is digested."""
    running: Ring
    """What checks around the forward pass and at arrival note."""
    sweeping: Ring
    """What the sweep notes."""
    writing: Ring
    """What differed from the token oracle."""

    @property
    def rings(self) -> tuple[Ring, Ring, Ring]:
        """All of them."""
        return self.running, self.sweeping, self.writing


@dataclass(slots=True, kw_only=True)
class Entries:
    """Slots to verify, expanded; one tensor entry each, int64."""

    slots_E: Tensor
    positions_E: Tensor
    previous_E: Tensor
    sequences_E: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheck:
    """What a token oracle says the step's tokens must be; arrays of T."""

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class StepChecks:
    """What the next forward pass is told to verify."""

    step: int
    first_sequence: int
    """The number that the ring knows this step's work 0 by."""
    rids: tuple[str, ...] = ()
    """Of the step's work, in order."""
    spans: dict[Part, list[Span]] = field(default_factory=dict)
    """What each of them reads."""
    due: dict[Part, list[DuePages]] = field(default_factory=dict)
    """What of it is verified in this step."""
    write_check: WriteCheck | None = None


class Faults(Protocol):
    """Whoever damages KV (or the tokens that come of it) on purpose."""

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """The rows are written; nothing of the step is verified or computed yet."""
        ...

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Everything is computed, verified and stamped."""
        ...

    def returned(self, result: StepResult) -> StepResult:
        """The tokens that the scheduler is to get."""
        ...

    def sweep(self, lanes: PartLanes, slots: NDArray[np.int64]) -> None:
        """These cached slots, which nobody uses, are about to be swept."""
        ...


class NoFaults:
    """Nobody."""

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Nothing."""

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Nothing."""

    def returned(self, result: StepResult) -> StepResult:
        """Those that came."""
        return result

    def sweep(self, lanes: PartLanes, slots: NDArray[np.int64]) -> None:
        """Nothing."""


class CanaryHook:
    """A ForwardHook. Stand it behind the gate of loads: layer 0 is the first moment when all stamps are there."""

    def __init__(
        self,
        parts: Mapping[Part, PartLanes],
        kernels: CanaryKernels,
        *,
        page_size: int,
        entries_max: int,
        faults: Faults,
    ) -> None:
        self._parts = parts
        self._kernels = kernels
        self._page_size = page_size
        self._entries_max = entries_max
        self._faults = faults
        self._checks: StepChecks | None = None
        self._batch: ForwardBatch | None = None
        self._entries: dict[Part, list[Entries]] = {}
        self._previous: dict[Part, Tensor] = {}

    def arm(self, checks: StepChecks) -> None:
        """Say what the next forward pass verifies. A pass that was not armed (a warm-up) is left alone."""
        self._checks = checks

    def before(self, batch: ForwardBatch) -> None:
        """Remember the batch; stamps may still be loading."""
        self._batch = batch

    def before_layer(self, layer_index: int) -> None:
        """Before the first layer: HEAD is verified, then written."""
        checks, batch = self._checks, self._batch
        if layer_index or checks is None or batch is None:
            return
        self._faults.before(checks, batch)
        for part, lanes in self._parts.items():
            self._entries[part] = [self._expand(lanes, checks, due) for due in self._pieces(checks, part)]
            for entries in self._entries[part]:
                self._verify(lanes, StampLane.HEAD_K, entries, None)
            self._previous[part] = _slots_before(lanes.table_RC, batch)
            self._write(lanes, StampLane.HEAD_K, batch, None)
            if checks.write_check is not None:
                self._check_written(lanes, batch, checks.write_check, checks.first_sequence)

    def after(self, batch: ForwardBatch) -> None:
        """After the last layer: TAIL is verified, with the KV itself where that is digested, then written."""
        checks, self._checks, self._batch = self._checks, None, None
        if checks is None:
            return
        for part, lanes in self._parts.items():
            for entries in self._entries.pop(part):
                self._verify(lanes, StampLane.TAIL_K, entries, self._digest(lanes, entries.slots_E))
            self._write(lanes, StampLane.TAIL_K, batch, self._digest(lanes, batch.slots_of(part)))
        self._faults.after(checks, batch)

    def verify_now(self, lanes: PartLanes, entries: Entries, tokens_E: Tensor | None, ring: Ring) -> None:
        """Verify TAIL stamps outside of a forward pass: at arrival, or in the sweep."""
        digests_E2 = self._digest(lanes, entries.slots_E)
        self._kernels.verify(
            lanes.stamps_LS4, StampLane.TAIL_K, entries.slots_E, entries.positions_E, entries.previous_E, tokens_E,
            digests_E2, entries.sequences_E, ring.rows_QF, ring.count_1, ring.checked_L,
        )  # fmt: skip

    def _pieces(self, checks: StepChecks, part: Part) -> list[tuple[DuePages, slice]]:
        return [
            (due, piece)
            for due in checks.due.get(part, ())
            for piece in pieces(due, self._page_size, self._entries_max)
        ]

    def _expand(self, lanes: PartLanes, checks: StepChecks, piece: tuple[DuePages, slice]) -> Entries:
        due, at = piece
        counts = due.page_count[at] * self._page_size
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        device = lanes.table_RC.device
        columns = (due.rows[at], due.low[at], due.high[at], due.first_page[at], offsets)
        slots_E, positions_E, previous_E, index_E = self._kernels.plan(
            lanes.table_RC, *(torch.from_numpy(column).to(device) for column in columns), int(offsets[-1]),
            page_size=self._page_size, stride=due.stride,
        )  # fmt: skip
        named_B = torch.from_numpy(due.index[at] + checks.first_sequence).to(device)
        return Entries(
            slots_E=slots_E, positions_E=positions_E, previous_E=previous_E, sequences_E=named_B[index_E]
        )  # fmt: skip

    def _verify(self, lanes: PartLanes, lane: StampLane, entries: Entries, digests_E2: Tensor | None) -> None:
        ring = lanes.running
        self._kernels.verify(
            lanes.stamps_LS4, lane, entries.slots_E, entries.positions_E, entries.previous_E, None, digests_E2,
            entries.sequences_E, ring.rows_QF, ring.count_1, ring.checked_L,
        )  # fmt: skip

    def _write(self, lanes: PartLanes, lane: StampLane, batch: ForwardBatch, digests_T2: Tensor | None) -> None:
        self._kernels.write(
            lanes.stamps_LS4, lane, batch.slots_of(lanes.part), batch.positions_T, batch.tokens_T,
            batch.attention.q_starts_B1, self._previous[lanes.part], digests_T2,
        )  # fmt: skip

    def _check_written(self, lanes: PartLanes, batch: ForwardBatch, expected: WriteCheck, first_sequence: int) -> None:
        """HEAD stamps of the step's own tokens against what the oracle says."""
        device, ring = lanes.table_RC.device, lanes.writing
        slots_T = batch.slots_of(lanes.part)
        starts_B1 = batch.attention.q_starts_B1
        index_T = torch.bucketize(torch.arange(len(slots_T), device=device), starts_B1[1:], right=True)
        self._kernels.verify(
            lanes.stamps_LS4, StampLane.HEAD_K, slots_T, torch.from_numpy(expected.positions_T).to(device),
            torch.full_like(slots_T, -1), torch.from_numpy(expected.tokens_T).to(device), None,
            index_T + first_sequence, ring.rows_QF, ring.count_1, ring.checked_L,
        )  # fmt: skip

    def _digest(self, lanes: PartLanes, slots_E: Tensor) -> Tensor | None:
        if lanes.coefficients_L22W is None:
            return None
        return self._kernels.digest(lanes.layers_kv, slots_E, lanes.coefficients_L22W)


def _slots_before(table_RC: Tensor, batch: ForwardBatch) -> Tensor:
    """The slot before each sequence's first new token, [B]; 0 where that is position 0."""
    attention = batch.attention
    starts_B = attention.context_B - (attention.q_starts_B1[1:] - attention.q_starts_B1[:-1])
    before_B = table_RC[attention.rows_B, (starts_B - 1).clamp_min(0)].long()
    return torch.where(starts_B > 0, before_B, 0)
