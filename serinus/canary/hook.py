"""CanaryHook: the canary's ForwardHook. HEAD stamps are verified and written before the layers, TAIL stamps after them.

It carries out what CanaryRank armed it with; it decides nothing and does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.canary.coverage import pieces
from serinus.canary.lanes import PartLanes
from serinus.canary.ring import Ring
from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.kernels import (
    AttentionBatch,
    DuePages,
    Kernels,
    LayerDigest,
    LayerDigests,
    StampLane,
    WatchPlan,
    WrittenRows,
    slots_in,
)
from serinus.models import ForwardBatch, HostBatch, Put


class Spent:
    """The seconds between entering and leaving it, in all. Not to be entered twice at once."""

    def __init__(self, clock: Clock) -> None:
        self._now, self._begun = clock.now, 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, *error: object) -> None:
        self.seconds += self._now() - self._begun


@dataclass(slots=True, kw_only=True)
class Entries:
    """Slots to verify, one entry of each tensor for one slot; int64."""

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
    """The number of the step's first sequence in the rings; the others follow."""
    rids: tuple[str, ...] = ()
    """Requests of the step's work, in order."""
    reads: dict[Part, NDArray[np.int64]] = field(default_factory=dict)
    """What each of them reads: reads_6B of `canary_due`."""
    due: dict[Part, DuePages] = field(default_factory=dict)
    """What of it is verified in this step."""
    stored: dict[Part, int] = field(default_factory=dict)
    """Rows that the step stores, which are read back after it: once its batch is known."""
    write_check: WriteCheck | None = None


class Faults(Protocol):
    """What damages KV on purpose around a forward pass; perturb.Perturber."""

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """The rows are written; nothing of the step is verified or computed yet."""

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Everything is computed, verified and stamped."""


class CanaryHook:
    """A ForwardHook. It must come after the gate of loads: at layer 0 all stamps have been loaded."""

    def __init__(
        self, parts: Mapping[Part, PartLanes], kernels: Kernels, spent: Spent, *, entries_max: int,
        faults: Faults | None,
    ) -> None:  # fmt: skip
        """`spent`: counts the seconds before and after the layers."""
        self._parts = parts
        self._spent = spent
        self._kernels = kernels
        self._entries_max = entries_max
        self._faults = faults
        self._checks: StepChecks | None = None
        self._batch: ForwardBatch | None = None
        self._slots: Mapping[Part, NDArray[np.int64]] = {}
        """Where the tokens of the step go."""
        self._is_watching = self._has_begun = False
        self._is_staged = any(lanes.watch.is_staged for lanes in parts.values())
        of_layer = sorted((i, part, at) for part, lanes in parts.items() for at, i in enumerate(lanes.layer_ids))
        self._of_layer = [(parts[part], at) for _, part, at in of_layer]
        """The part of each layer of this rank, and its number within that part."""

    def arm(self, checks: StepChecks) -> None:
        """Say what the next forward pass verifies, which is due from now on. A pass without checks (a warm-up) is not
        touched."""
        self._checks, self._has_begun = checks, False
        for part, pages in checks.due.items():
            self._parts[part].running.due += pages.slot_count + pages.bound_5B.shape[1]

    def abandon(self) -> None:
        """The forward pass was broken off. Where it had begun, what it was to verify is verified to the end, by bytes
        as they are now; else that is not due any more. No TAIL is written for its rows, and none is read back."""
        checks, self._checks, self._batch, self._is_watching = self._checks, None, None, False
        if checks is None:
            return
        for part, count in checks.stored.items():
            self._parts[part].stored.due -= count
        for part, lanes in self._parts.items():
            if self._has_begun:
                lanes.watch.drop_digests()  # the attention that was broken off may have made some of its own
                lanes.watch.verify(StampLane.TAIL_K)
            elif part in checks.due:
                lanes.running.due -= checks.due[part].slot_count + checks.due[part].bound_5B.shape[1]

    def can_replay(self, room: int) -> bool:
        """Whether checks are armed, as a recorded pass makes them: without planted faults, without a token oracle."""
        checks = self._checks
        if checks is None or checks.write_check is not None or self._faults is not None:
            return False
        return not self._is_staged or all(
            lanes.watch.has_room(room, checks.due[part].entry_count) for part, lanes in self._parts.items()
        )

    def stage(self, batch: HostBatch, put: Put) -> None:
        """Note where the tokens go, and tell watches that are staged what they verify in the pass; one that is
        recorded verifies nothing yet."""
        if not len(batch.rows_B):
            self._checks = _nothing(self._parts)
        checks = self._checks
        if checks is None:
            return
        self._slots = batch.slots
        if self._is_staged:
            with self._spent:
                self._stage(checks, batch, put)

    def _count_stored(self, checks: StepChecks) -> None:
        """What the pass stores is to be read back."""
        for part, lanes in self._parts.items():
            if lanes.coefficients_L22W is not None:
                count = checks.stored[part] = int(np.count_nonzero(self._slots[part]))
                lanes.stored.due += count

    def _stage(self, checks: StepChecks, batch: HostBatch, put: Put) -> None:
        self._count_stored(checks)
        for part, lanes in self._parts.items():
            due, is_cut = checks.due[part], batch.room is None
            lanes.watch.stage(
                WatchPlan(
                    due=pieces(due, self._entries_max) if is_cut else [(due.columns_7B, due.entry_count)],
                    bound_5B=due.bound_5B,
                    rows_B=batch.rows_B,
                    counts_B=batch.counts_B,
                    first_name=checks.first_sequence,
                    chosen_W=batch.chosen_W,
                    room=batch.room,
                    sets=2 if part is Part.SWA else 1,
                ),
                put,
            )

    def replayed(self) -> None:
        """What was staged is verified by the pass as it was recorded."""
        self._checks = self._batch = None

    def before(self, batch: ForwardBatch) -> None:
        """Remember the batch; stamps may still be loading."""
        self._batch = batch

    def before_layer(self, layer_index: int) -> None:
        """Before the first layer: HEAD is verified, then written."""
        if layer_index:
            return
        self._is_watching = self._checks is not None and self._batch is not None
        if self._checks is not None and self._batch is not None:
            with self._spent:
                self._begin(self._checks, self._batch)

    def writes(self, layer_index: int) -> WrittenRows | None:
        """Where a layer's digests of what it stores are added up."""
        if not self._is_watching:
            return None
        lanes, at = self._of_layer[layer_index]
        return lanes.watch.writes(at)

    def reads(self, layer_index: int, attention: AttentionBatch) -> LayerDigest | None:
        """What attention digests as it reads; what it does not read of what is due is digested after the layers."""
        if not self._is_watching:
            return None
        lanes, at = self._of_layer[layer_index]
        return lanes.watch.reads(at, attention)

    def layer_digests(self, attention: AttentionBatch) -> Sequence[LayerDigests]:
        """Both of all layers at once."""
        if not self._is_watching:
            return ()
        if len(self._parts) == 1:
            return self._of_layer[0][0].watch.layer_digests(attention)
        told = {part: lanes.watch.layer_digests(attention) for part, lanes in self._parts.items()}
        return [told[lanes.part][at] if told[lanes.part] else (None, None) for lanes, at in self._of_layer]

    def after(self, batch: ForwardBatch) -> None:
        """After the last layer: TAIL is verified, with the KV itself where that is digested, then written with the
        digests of what the layers stored, and the rows are read back."""
        checks, self._checks, self._batch, self._is_watching = self._checks, None, None, False
        if checks is None:
            return
        with self._spent:
            for lanes in self._parts.values():
                lanes.watch.look_again()
                lanes.watch.verify_and_write(StampLane.TAIL_K)
        if self._faults is not None:
            self._faults.after(checks, batch)

    def _begin(self, checks: StepChecks, batch: ForwardBatch) -> None:
        self._has_begun = True
        if not self._is_staged:
            self._count_stored(checks)
        if self._faults is not None:
            self._faults.before(checks, batch)
        starts_B1, rows_B = batch.attention.q_starts_B1, batch.attention.rows_B
        for part, lanes in self._parts.items():
            watch = lanes.watch
            due = checks.due[part]
            watch.expand(pieces(due, self._entries_max), due.bound_5B)
            first = checks.first_sequence
            watch.stand(batch.slots_of(part), batch.positions_T, batch.tokens_T, starts_B1, rows_B, first)
            watch.verify_and_write(StampLane.HEAD_K)
            if checks.write_check is not None:
                self._check_written(lanes, batch, checks.write_check, checks.first_sequence)

    def verify_now(
        self, lanes: PartLanes, lane: StampLane, entries: Entries, tokens_E: Tensor | None, ring: Ring,
        by_sequence_N4: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Verify stamps outside of a forward pass: at arrival, or in the sweep."""
        digests_E2 = None
        if lane is StampLane.TAIL_K and lanes.coefficients_L22W is not None:
            digests_E2 = self._kernels.canary_digest(lanes.layers_kv, entries.slots_E, lanes.coefficients_L22W)
        self._kernels.canary_verify(
            lanes.stamps_LS4, lane, entries.slots_E, entries.positions_E, entries.previous_E, tokens_E,
            digests_E2, entries.sequences_E, *ring.tensors, by_sequence_N4,
        )  # fmt: skip

    def _check_written(self, lanes: PartLanes, batch: ForwardBatch, expected: WriteCheck, first_sequence: int) -> None:
        """HEAD stamps of the step's own tokens against what the oracle says."""
        device, ring = lanes.table_RC.device, lanes.writing
        slots_T = batch.slots_of(lanes.part)
        starts_B1 = batch.attention.q_starts_B1
        ring.due += len(slots_T)
        index_T = torch.bucketize(torch.arange(len(slots_T), device=device), starts_B1[1:], right=True)
        # Nothing is asked of twins: that of a latent row's HEAD, its TAIL, is not written yet.
        rows_T, before_T = batch.attention.rows_B[index_T], (batch.positions_T - 1).clamp_min(0)
        wanted_T = torch.from_numpy(expected.tokens_T).to(device)
        previous_T = slots_in(lanes.table_RC[rows_T, before_T], lanes.stamps_LS4.shape[1])
        self._kernels.canary_verify(
            lanes.stamps_LS4, StampLane.HEAD_K, slots_T,
            torch.where(slots_T == 0, -1, torch.from_numpy(expected.positions_T).to(device)),
            torch.where(batch.positions_T > 0, previous_T, 0),
            torch.where(wanted_T < 0, batch.tokens_T, wanted_T), None, index_T + first_sequence, *ring.tensors,
        )  # fmt: skip


def _nothing(parts: Mapping[Part, PartLanes]) -> StepChecks:
    """The checks of a pass of padding alone."""
    columns_7B, bound_5B = np.empty((7, 0), np.int64), np.empty((5, 0), np.int64)
    due = DuePages(columns_7B=columns_7B, entry_count=0, slot_count=0, bound_5B=bound_5B)
    return StepChecks(step=0, first_sequence=0, due=dict.fromkeys(parts, due))
