"""Canary: an engine's face of the room. It says what each step verifies, reads what was found, and names who it was.

    canary.begin(plan)                  before runner.run
    result = canary.returned(result)    after it (faults may exchange tokens here)
    violations = canary.end()           before the scheduler commits: nothing that is wrong leaves the engine

Knows neither queues nor sockets: who owns a page is asked through PageFacts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.cache import ResidentSlots
from serinus.canary.coverage import DuePages, reads_of
from serinus.canary.hook import CanaryHook, Entries, Faults, NoFaults, PartLanes, StepChecks, WriteCheck
from serinus.canary.ring import Ring
from serinus.canary.settings import CanarySettings
from serinus.canary.violation import Violation, ViolationLog, launch_tag
from serinus.core.errors import InvariantError
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import SampleSpec, SeqWork, StepPlan, StepResult
from serinus.kernels.canary import CanaryKernels, Reason, StampLane
from serinus.kernels.ref.canary import digest_coefficients
from serinus.pool import DevicePool, RequestTable

__all__ = ["Canary", "PageFacts", "TokenOracle"]

TokenOracle = Callable[[SampleSpec, int], int]
"""(how the request's next token is chosen, position) -> the token that the sampler must have emitted there."""

_SWEEP = -1
_ARRIVAL = -2
_SEQUENCES_PER_STEP = 1 << 16
_STEPS_NAMED = 4
"""Steps whose requests are known by name: a ring is read one step late at most."""


class PageFacts(Protocol):
    """Who has to do with a page of the device tier; the engine asks its cache and its scheduler."""

    def owner(self, part: Part, page: int) -> str:
        """In words, by the ledger."""
        ...

    def users(self, part: Part, page: int) -> tuple[str, ...]:
        """Requests whose rows name it."""
        ...

    def history(self, part: Part, page: int) -> str:
        """Its last operations, in words."""
        ...

    def walk(self, cursor: int, budget: int, part: Part) -> ResidentSlots:
        """About `budget` cached slots that nobody uses, from `cursor` on."""
        ...


class Canary:
    """One engine's. Raises InvariantError where it finds itself silent: slots that were due and not checked."""

    def __init__(
        self,
        settings: CanarySettings,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        layer_ids: Mapping[Part, Sequence[int]],
        kernels: CanaryKernels,
        facts: PageFacts,
        *,
        faults: Faults | None = None,
        oracle: TokenOracle | None = None,
        head_ids: Sequence[int] | None = None,
    ) -> None:
        """`layer_ids`: the model's numbers of each part's layers on this rank; a part without layers is left out.
        `head_ids`: the numbers of this rank's KV heads; None = all. So the digests of all ranks add up."""
        self.settings = settings
        self.violations = ViolationLog()
        self._facts = facts
        self._kernels = kernels
        self._oracle = oracle
        self._faults: Faults = faults or NoFaults()
        self.parts = {
            part: _lanes(part, pool, tables[part], layer_ids[part], head_ids, settings, kernels)
            for part, pool in pools.items()
            if pool.stamps_LS4 is not None
        }
        if not self.parts:
            raise InvariantError("canary: no pool keeps stamps, expected at least one")
        self.hook = CanaryHook(self.parts, kernels, entries_max=settings.entries_max, faults=self._faults)
        self.steps = 0
        """Steps begun."""
        self.sweep_passes = 0
        """Complete walks over the cached pages."""
        self.due_slots = dict.fromkeys(self.parts, 0)
        """Slots that had to be verified around forward passes so far, by part."""
        self._cursor = dict.fromkeys(self.parts, 0)
        self._expected_starts: deque[dict[str, int]] = deque(maxlen=settings.plans_open)
        self._rids: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_STEPS_NAMED)
        self._arriving = ""

    # ---- the step -----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Decide what this step verifies, and tell the hook."""
        self.steps += 1
        base, work = self.steps * _SEQUENCES_PER_STEP, plan.work
        rids = tuple([each.rid for each in work])
        self._rids.append((base, rids))
        checks = StepChecks(step=self.steps, first_sequence=base, write_check=self._write_check(work), rids=rids)
        rows, starts = [each.row for each in work], [each.start for each in work]
        is_fresh = [self._expected(rid) != start for rid, start in zip(rids, starts, strict=True)]
        self._expected_starts.append({each.rid: each.start + len(each.tokens) for each in work})
        settings = self.settings
        for part in self.parts:
            window = settings.window if part is Part.SWA else None
            reads = checks.reads[part] = reads_of(
                rows, starts, is_fresh, first_name=base, stride=settings.stride, window=window
            )
            columns, entries, slots = self._kernels.due(reads, self.steps, settings.page_size)
            checks.due[part] = DuePages(columns_7B=columns, entry_count=entries, slot_count=slots)
            self.due_slots[part] += slots
        self.hook.arm(checks)

    def returned(self, result: StepResult) -> StepResult:
        """The result as the scheduler gets it."""
        return self._faults.returned(result)

    def end(self) -> list[Violation]:
        """Sweep where that is due; everything found up to now. On an accelerator, up to the step before."""
        if self.settings.sweep_interval and self.steps % self.settings.sweep_interval == 0:
            self.sweep()
        return self.take()

    def take(self, *, wait: bool = False) -> list[Violation]:
        """Read the rings; `wait` also for what the device has not finished."""
        found: list[Violation] = []
        for lanes in self.parts.values():
            for ring in lanes.rings:
                if ring.is_silent and ring is not lanes.running:
                    continue
                ring.mark()
                news = ring.take(wait=wait)
                if news is None:
                    continue
                rows, lost, checked = news
                found += [self._violation(lanes, row, ring) for row in rows]
                self.violations.total += len(rows) + lost
                if ring is lanes.running:
                    self._check_watch(lanes.part, checked)
        for violation in found:
            self.violations.add(violation)
        return found

    # ---- outside of the step ------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Verify the next cached slots that nobody uses."""
        for part in self.parts:
            found = self._facts.walk(self._cursor[part], self.settings.sweep_slots, part)
            self._cursor[part] = found.cursor
            self.sweep_passes += found.cursor == 0
            self.swept(part, found)

    def swept(self, part: Part, found: ResidentSlots) -> None:
        """Verify these cached slots that nobody uses; nothing where the part is not checked here."""
        lanes = self.parts.get(part)
        if lanes is None:
            return
        self._faults.sweep(lanes, found.slots)
        # A predecessor that is not there cannot be checked against; at position 0 there is none.
        previous = np.where((found.previous == 0) & (found.positions > 0), -1, found.previous)
        nobody = np.full(len(found.slots), _SWEEP)
        tail = StampLane.TAIL_K
        self._verify(lanes, tail, found.slots, found.positions, previous, None, nobody, lanes.sweeping)

    def arrived(self, rid: str, spans: Sequence[PageSpan], length: int, tokens: NDArray[np.int32]) -> list[Violation]:
        """Verify pages that came from elsewhere for positions below `length`, before anybody computes with them.

        `tokens`: the request's own, from position 0. Waits for the device. Cost: one read of these pages.
        """
        page_size = self.settings.page_size
        self._arriving = rid
        for span in spans:
            lanes = self.parts.get(span.part)
            if lanes is None or not len(span.pages):
                continue
            slots = (span.pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
            positions = np.arange(span.first * page_size, span.end * page_size)
            live = positions < length
            slots, positions = slots[live], positions[live]
            previous = np.concatenate(([-1 if span.first else 0], slots[:-1]))
            names = np.full(len(slots), _ARRIVAL)
            own = tokens[positions].astype(np.int64)
            for lane in (StampLane.HEAD_K, StampLane.TAIL_K):
                self._verify(lanes, lane, slots, positions, previous, own, names, lanes.running)
            self.due_slots[span.part] += len(slots)
        return self.take(wait=True)

    def stats_line(self) -> str:
        """For the log, every so many steps."""
        tags = {tag for part in self.parts for tag in self._tags(part)}
        active = {tag for part in self.parts for tag in self._active_tags(part)}
        return (
            f"[canary] step={self.steps} protected_tokens={sum(self.due_slots.values())} "
            f"sweep_passes={self.sweep_passes} violations={self.violations.total} "
            f"launch_tags_active={len(active)}/{len(tags)}"
        )

    def divergence_line(self) -> str:
        """How many slots each part had to verify so far: sliding layers see only their window. One parsable line."""
        full, swa = (self.due_slots.get(part, 0) for part in (Part.FULL, Part.SWA))
        return f"[canary] step={self.steps} full_slots={full} swa_slots={swa} difference={full - swa}"

    def checked_slots(self) -> int:
        """Slots whose keys were verified so far around forward passes and at arrival. Waits for a device."""
        return sum(int(lanes.running.checked_L[StampLane.TAIL_K]) for lanes in self.parts.values())

    # ---- inside -------------------------------------------------------------------------------------------------

    def _expected(self, rid: str) -> int:
        """Where a request that ran in one of the latest plans goes on; -1 = it did not."""
        for starts in reversed(self._expected_starts):
            if rid in starts:
                return starts[rid]
        return -1

    def _write_check(self, work: Sequence[SeqWork]) -> WriteCheck | None:
        if self._oracle is None or not work:
            return None
        tokens, positions = [], []
        for item in work:
            at = np.arange(item.start, item.start + len(item.tokens), dtype=np.int64)
            expected = np.full(len(at), -1, np.int64)
            if item.sample is not None and item.sample.generated:
                begin = item.sample.position - item.sample.generated
                for i in np.flatnonzero(at >= begin).tolist():
                    expected[i] = self._oracle(item.sample, int(at[i]))
            tokens.append(expected)
            positions.append(at)
        return WriteCheck(tokens_T=np.concatenate(tokens), positions_T=np.concatenate(positions))

    def _verify(
        self, lanes: PartLanes, lane: StampLane, slots: NDArray[np.int64], positions: NDArray[np.int64],
        previous: NDArray[np.int64], tokens: NDArray[np.int64] | None, names: NDArray[np.int64], ring: Ring,
    ) -> None:  # fmt: skip
        device = lanes.table_RC.device
        slots_E, positions_E, previous_E, names_E = (
            torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device)
            for a in (slots, positions, previous, names)
        )
        tokens_E = None if tokens is None else torch.from_numpy(tokens).to(device)
        entries = Entries(slots_E=slots_E, positions_E=positions_E, previous_E=previous_E, sequences_E=names_E)
        self.hook.verify_now(lanes, lane, entries, tokens_E, ring)

    def _violation(self, lanes: PartLanes, row: list[int], ring: Ring) -> Violation:
        lane, reasons, slot, position, *stored, name = row
        if ring is lanes.writing:
            reasons = (reasons & 4) << 2 | (reasons & 2) << 4
        page, part = slot // self.settings.page_size, lanes.part
        return Violation(
            step=self.steps,
            tag=launch_tag(StampLane(lane), part, sweep=ring is lanes.sweeping),
            reasons=Reason(reasons),
            part=part,
            slot=slot,
            page=page,
            position=position,
            stored_position=stored[0],
            stored_token=stored[1],
            expected_token=stored[2],
            stored_hash=stored[3],
            expected_hash=stored[4],
            stored_digest=stored[5],
            found_digest=stored[6],
            rid=self._rid(name),
            owner=self._facts.owner(part, page),
            users=self._facts.users(part, page),
            history=self._facts.history(part, page),
        )

    def _rid(self, name: int) -> str:
        if name == _ARRIVAL:
            return self._arriving
        for base, rids in self._rids:
            if base <= name < base + len(rids):
                return rids[name - base]
        return ""

    def _check_watch(self, part: Part, checked: list[int]) -> None:
        """Slots due = slots checked, or the canary itself is broken (on an accelerator: not more than were due)."""
        due = self.due_slots[part]
        tail = checked[StampLane.TAIL_K], checked[StampLane.TAIL_V]
        if tail == (due, due):
            return
        if max(tail) > due or self.parts[part].table_RC.device.type == "cpu":
            raise InvariantError(
                f"canary: part {part.name} had {due} slots to verify, {tail} were (K, V); expected the same: a canary"
                f" that does not sing"
            )

    def _tags(self, part: Part) -> list[str]:
        tags = [launch_tag(lane, part, sweep=False) for lane in StampLane]
        if self.settings.sweep_interval:
            tags += [launch_tag(lane, part, sweep=True) for lane in (StampLane.TAIL_K, StampLane.TAIL_V)]
        return tags

    def _active_tags(self, part: Part) -> list[str]:
        """Checks of this part that looked at a slot at least once."""
        lanes = self.parts[part]
        active = []
        for ring, sweep in ((lanes.running, False), (lanes.sweeping, True)):
            counts = ring.checked_L.tolist()
            active += [launch_tag(lane, part, sweep=sweep) for lane in StampLane if counts[lane]]
        return active


def _lanes(
    part: Part, pool: DevicePool, table: RequestTable, layer_ids: Sequence[int], head_ids: Sequence[int] | None,
    settings: CanarySettings, kernels: CanaryKernels,
) -> PartLanes:  # fmt: skip
    spec = pool.spec
    assert pool.stamps_LS4 is not None, "canary: a pool without stamps"
    coefficients = None
    if settings.real_data != "none":
        factors = digest_coefficients(
            layer_ids, head_ids or range(spec.kv_head_count), spec.head_size, spec.dtype.itemsize,
            partial=settings.real_data == "partial",
        )  # fmt: skip
        coefficients = torch.from_numpy(factors).to(spec.device)
    running = Ring(spec.device, settings.ring_rows)
    watch = kernels.watch(table.table, pool.stamps_LS4, pool.layers, coefficients, running.tensors, settings.page_size)
    return PartLanes(
        part=part,
        layers_kv=pool.layers,
        layer_ids=layer_ids,
        early_bytes=spec.slot_bytes // spec.layer_count if settings.real_data == "all" else 0,
        stamps_LS4=pool.stamps_LS4,
        table_RC=table.table,
        coefficients_L22W=coefficients,
        running=running,
        sweeping=Ring(spec.device, settings.ring_rows),
        writing=Ring(spec.device, settings.ring_rows),
        watch=watch,
    )
