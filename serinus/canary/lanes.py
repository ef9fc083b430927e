"""PartLanes: what the canary of a rank sees of one part: its KV and stamps, its row table, and its violation rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.canary.coverage import turn_size
from serinus.canary.ring import Ring, RingCounts
from serinus.canary.settings import CheckSettings
from serinus.canary.violation import launch_tag
from serinus.core.parts import Part
from serinus.core.stamps import digest_coefficients
from serinus.kernels import Kernels, StampLane, Watch, stamp_lanes
from serinus.pool import DevicePool, RequestTable

_CHECKS: Final = ("around forward passes", "at arrival", "at the end", "in the sweep", "as written", "as stored")


@dataclass(slots=True, kw_only=True, eq=False)
class PartLanes:
    """One part on one rank. S = slots, R, C = rows and columns of the table."""

    part: Part
    layers_kv: Sequence[tuple[Tensor, ...]]
    """(k, v) pools of the part's layers, or those of latent rows."""
    layer_ids: Sequence[int]
    """The model's numbers of them."""
    head_ids: Sequence[int]
    """The model's numbers of the KV heads."""
    stamps_LS4: Tensor
    table_RC: Tensor
    """req_to_token of the part, int32."""
    written: RequestTable
    """Its twin: the same as the leader wrote it. Rows are held against it, nothing is found by it."""
    coefficients_L22W: Tensor | None
    """Of the digest; None where no KV is digested."""
    running: Ring
    """Violations found around the forward pass."""
    arriving: Ring
    """Violations found at arrival."""
    ending: Ring
    """Violations found at the end of requests."""
    sweeping: Ring
    """Violations found by the sweep."""
    writing: Ring
    """Tokens that differ from those of the token oracle."""
    stored: Ring
    """Rows of a step that, read back after it, were not what had been stored."""
    counts: RingCounts
    """Those of all rings."""
    watch: Watch
    """Verifies and writes around the forward pass, into `running` and `stored`."""
    turn_size: int
    """Positions whose turn comes in one step, where each has its turn."""
    rings: tuple[Ring, ...] = field(init=False)
    """Those of the part that steps and sweeps write to; the others are read with the check that they serve."""

    def __post_init__(self) -> None:
        self.rings = self.running, self.sweeping, self.writing, self.stored

    @property
    def of_requests(self) -> tuple[Ring, ...]:
        """Those of checks of requests' own rows."""
        return self.running, self.arriving, self.ending

    @property
    def due_slots(self) -> int:
        """Slots of requests that had to be verified so far."""
        return sum(ring.due for ring in self.of_requests)

    @property
    def active_tags(self) -> list[str]:
        """Checks of this part that looked at a slot at least once, as far as the host has read."""
        active = []
        for ring, sweep in (*((ring, False) for ring in self.of_requests), (self.sweeping, True)):
            counts = ring.looked
            active += [launch_tag(lane, self.part, sweep=sweep) for lane in StampLane if counts[lane]]
        return active

    def check_of(self, ring: Ring) -> str:
        """The check that a ring serves, in words."""
        rings = (self.running, self.arriving, self.ending, self.sweeping, self.writing, self.stored)
        return _CHECKS[[each is ring for each in rings].index(True)]

    def checked_slots(self) -> int:
        """Slots of requests whose keys were verified so far. Waits for the device."""
        self.counts.expire()
        return sum(ring.fewest((StampLane.TAIL_K,)) for ring in self.of_requests)


def lanes_of(
    part: Part, pool: DevicePool, table: RequestTable, layer_ids: Sequence[int], head_ids: Sequence[int] | None,
    settings: CheckSettings, kernels: Kernels,
) -> PartLanes:  # fmt: skip
    """Allocate what the canary needs for one part. `pool` has stamps; `head_ids`: KV heads of this rank, None = all."""
    spec = pool.spec
    assert pool.stamps_LS4 is not None, "canary: a pool without stamps"
    head_ids = head_ids or range(spec.kv_head_count)
    coefficients = None
    if settings.real_data != "none":
        factors = digest_coefficients(
            layer_ids, head_ids, spec.head_size, spec.dtype.itemsize,
            partial=settings.real_data == "partial", halves=spec.halves,
        )  # fmt: skip
        coefficients = torch.from_numpy(factors).to(spec.device)
    counts = RingCounts(spec.device, len(_CHECKS), len(table.table))
    rows, lanes = settings.ring_rows, stamp_lanes(part)
    tail = lanes[spec.halves :]
    running, stored = Ring(rows, counts, lanes, by_sequence=True), Ring(rows, counts, tail)
    written = table.twin()
    watch = kernels.canary_watch(
        kernels, table.table, written.table, pool.stamps_LS4, pool.layers, coefficients, running.tensors,
        stored.tensors, turn := turn_size(settings.page_size),
    )  # fmt: skip
    return PartLanes(
        part=part,
        layers_kv=pool.layers,
        layer_ids=layer_ids,
        head_ids=head_ids,
        stamps_LS4=pool.stamps_LS4,
        table_RC=table.table,
        written=written,
        coefficients_L22W=coefficients,
        running=running,
        arriving=Ring(rows, counts, lanes),
        ending=Ring(rows, counts, lanes),
        sweeping=Ring(rows, counts, tail),
        writing=Ring(rows, counts, ()),
        stored=stored,
        counts=counts,
        watch=watch,
        turn_size=turn,
    )


def sent(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy there. Does not wait for what the device is to do before."""
    here = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
