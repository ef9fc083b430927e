"""CanaryHook: stands around the forward pass. HEAD stamps are verified and written before it, TAIL stamps after it.

It carries out what `Canary` armed it with; it decides nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.canary.coverage import DuePages, pieces
from serinus.canary.ring import Ring
from serinus.core.parts import Part
from serinus.core.plan import StepResult
from serinus.kernels.canary import CanaryKernels, StampLane, Watch
from serinus.models import ForwardBatch

_EARLY_BYTES: Final = 1 << 20
"""So much KV of one layer is worth a call of its own: whoever computes the layer next then finds it in a cache."""

__all__ = ["CanaryHook", "Entries", "Faults", "NoFaults", "PartLanes", "StepChecks", "WriteCheck"]


@dataclass(slots=True, kw_only=True, eq=False)
class PartLanes:
    """What the canary sees of one part. S = slots, R, C = rows and columns of the table."""

    part: Part
    layers_kv: Sequence[tuple[Tensor, Tensor]]
    """(k, v) pools of the part's layers."""
    layer_ids: Sequence[int]
    """The model's numbers of them."""
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
    early_bytes: int
    """Of a slot in one layer, k and v, where all of them are digested; else 0."""
    watch: Watch
    """What verifies and writes around the forward pass, into `running`."""

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
    reads: dict[Part, NDArray[np.int64]] = field(default_factory=dict)
    """What each of them reads: reads_5B of `canary_due`."""
    due: dict[Part, DuePages] = field(default_factory=dict)
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
        self, parts: Mapping[Part, PartLanes], kernels: CanaryKernels, *, entries_max: int, faults: Faults
    ) -> None:
        self._parts = parts
        self._kernels = kernels
        self._entries_max = entries_max
        self._faults = faults
        self._checks: StepChecks | None = None
        self._batch: ForwardBatch | None = None
        self._early: dict[Part, bool] = {}
        self._is_early = False
        of_layer = sorted((i, part, at) for part, lanes in parts.items() for at, i in enumerate(lanes.layer_ids))
        self._of_layer = [(part, at) for _, part, at in of_layer]
        """Part of each layer of this rank, and its number within that part."""

    def arm(self, checks: StepChecks) -> None:
        """Say what the next forward pass verifies. A pass that was not armed (a warm-up) is left alone."""
        self._checks = checks

    def before(self, batch: ForwardBatch) -> None:
        """Remember the batch; stamps may still be loading."""
        self._batch = batch

    def before_layer(self, layer_index: int) -> None:
        """Before the first layer: HEAD is verified, then written. Where much of a layer is verified it is digested
        now: attention then finds its bytes in a cache, and they are read from memory once."""
        if not layer_index:
            checks, batch = self._checks, self._batch
            self._is_early = False
            if checks is None or batch is None:
                return
            self._begin(checks, batch)
        if not self._is_early:
            return
        part, at = self._of_layer[layer_index]
        if self._early[part]:
            self._parts[part].watch.digest(at)

    def after(self, batch: ForwardBatch) -> None:
        """After the last layer: TAIL is verified, with the KV itself where that is digested, then written."""
        checks, self._checks, self._batch = self._checks, None, None
        if checks is None:
            return
        for lanes in self._parts.values():
            lanes.watch.verify(StampLane.TAIL_K)
            lanes.watch.write(StampLane.TAIL_K)
        self._faults.after(checks, batch)

    def _begin(self, checks: StepChecks, batch: ForwardBatch) -> None:
        self._faults.before(checks, batch)
        starts_B1, rows_B = batch.attention.q_starts_B1, batch.attention.rows_B
        for part, lanes in self._parts.items():
            watch = lanes.watch
            watch.expand(pieces(checks.due[part], self._entries_max))
            self._early[part] = lanes.early_bytes * watch.entry_count >= _EARLY_BYTES
            self._is_early |= self._early[part]
            watch.verify(StampLane.HEAD_K)
            watch.stand(batch.slots_of(part), batch.positions_T, batch.tokens_T, starts_B1, rows_B)
            watch.write(StampLane.HEAD_K)
            if checks.write_check is not None:
                self._check_written(lanes, batch, checks.write_check, checks.first_sequence)

    def verify_now(
        self, lanes: PartLanes, lane: StampLane, entries: Entries, tokens_E: Tensor | None, ring: Ring
    ) -> None:
        """Verify stamps outside of a forward pass: at arrival, or in the sweep."""
        digests_E2 = None
        if lane is StampLane.TAIL_K and lanes.coefficients_L22W is not None:
            digests_E2 = self._kernels.digest(lanes.layers_kv, entries.slots_E, lanes.coefficients_L22W)
        self._kernels.verify(
            lanes.stamps_LS4, lane, entries.slots_E, entries.positions_E, entries.previous_E, tokens_E,
            digests_E2, entries.sequences_E, *ring.tensors,
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
            index_T + first_sequence, *ring.tensors,
        )  # fmt: skip
