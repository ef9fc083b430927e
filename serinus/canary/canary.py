"""Canary: an engine's face of the room. It says what each step verifies, reads what was found, and names who it was.

    canary.begin(plan)                  before runner.run
    result = canary.returned(result)    after it (faults may exchange tokens here)
    violations = canary.end()           before the scheduler commits: nothing that is wrong leaves the engine

Knows neither queues nor sockets: who owns a page is asked through PageFacts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.cache import ResidentSlots
from serinus.canary.coverage import DuePages, Span, due_pages
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
_SEQUENCES_PER_STEP = 1 << 16


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
    ) -> None:
        """`layer_ids`: the model's numbers of each part's layers; a part without layers is left out."""
        self.settings = settings
        self.violations = ViolationLog()
        self._facts = facts
        self._oracle = oracle
        self._faults: Faults = faults or NoFaults()
        self.parts = {
            part: _lanes(part, pool, tables[part], layer_ids[part], settings)
            for part, pool in pools.items()
            if pool.stamps_LS4 is not None
        }
        if not self.parts:
            raise InvariantError("canary: no pool keeps stamps, expected at least one")
        self.hook = CanaryHook(
            self.parts, kernels, page_size=settings.page_size, entries_max=settings.entries_max, faults=self._faults
        )
        self.steps = 0
        """Steps begun."""
        self.sweep_passes = 0
        """Complete walks over the cached pages."""
        self.due_slots = dict.fromkeys(self.parts, 0)
        """Slots that had to be verified around forward passes so far, by part."""
        self._cursor = dict.fromkeys(self.parts, 0)
        self._expected_start: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._arrivals = 0

    # ---- the step -----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Decide what this step verifies, and tell the hook."""
        self.steps += 1
        base = self.steps * _SEQUENCES_PER_STEP
        rids = tuple(work.rid for work in plan.work)
        self._names = {name: rid for name, rid in self._names.items() if name >= base - 4 * _SEQUENCES_PER_STEP}
        self._names.update((base + index, rid) for index, rid in enumerate(rids))
        checks = StepChecks(step=self.steps, first_sequence=base, write_check=self._write_check(plan.work), rids=rids)
        fresh = [self._expected_start.get(work.rid) != work.start for work in plan.work]
        self._expected_start = {work.rid: work.start + len(work.tokens) for work in plan.work}
        for part in self.parts:
            spans = checks.spans[part] = [self._span(work, part) for work in plan.work]
            checks.due[part] = self._due(spans, fresh, part)
            self.due_slots[part] += sum(due.slot_count for due in checks.due[part])
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
        self._verify(lanes, found.slots, found.positions, previous, None, nobody, lanes.sweeping)

    def arrived(self, rid: str, spans: Sequence[PageSpan], length: int, tokens: NDArray[np.int32]) -> list[Violation]:
        """Verify pages that came from elsewhere for positions below `length`, before anybody computes with them.

        `tokens`: the request's own, from position 0. Waits for the device. Cost: one read of these pages.
        """
        page_size = self.settings.page_size
        self._arrivals += 1
        name = -1 - self._arrivals
        self._names[name] = rid
        for span in spans:
            lanes = self.parts.get(span.part)
            if lanes is None or not len(span.pages):
                continue
            slots = (span.pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
            positions = np.arange(span.first * page_size, span.end * page_size)
            live = positions < length
            slots, positions = slots[live], positions[live]
            previous = np.concatenate(([-1 if span.first else 0], slots[:-1]))
            names = np.full(len(slots), name)
            self._verify(lanes, slots, positions, previous, tokens[positions].astype(np.int64), names, lanes.running)
            self.due_slots[span.part] += len(slots)
        found = self.take(wait=True)
        del self._names[name]
        return found

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

    def _span(self, work: SeqWork, part: Part) -> Span:
        low = 0
        if part is Part.SWA:
            assert self.settings.window is not None, "canary: part SWA without a window"
            low = max(0, work.start - self.settings.window + 1)
        return Span(row=work.row, low=low, high=work.start)

    def _due(self, spans: Sequence[Span], fresh: Sequence[bool], part: Part) -> list[DuePages]:
        """Those that just came whole, the others by turns; a slot has its turn before it leaves the window."""
        page_size, found = self.settings.page_size, []
        turns = self.settings.stride
        if part is Part.SWA and self.settings.window is not None:
            turns = min(turns, max(1, self.settings.window - 1))
        for is_fresh, stride in ((True, 1), (False, turns)):
            index = [i for i, new in enumerate(fresh) if new is is_fresh]
            due = due_pages([spans[i] for i in index], index, step=self.steps, stride=stride, page_size=page_size)
            if len(due.rows):
                found.append(due)
        return found

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
        self, lanes: PartLanes, slots: NDArray[np.int64], positions: NDArray[np.int64], previous: NDArray[np.int64],
        tokens: NDArray[np.int64] | None, names: NDArray[np.int64], ring: Ring,
    ) -> None:  # fmt: skip
        device = lanes.table_RC.device
        slots_E, positions_E, previous_E, names_E = (
            torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device)
            for a in (slots, positions, previous, names)
        )
        tokens_E = None if tokens is None else torch.from_numpy(tokens).to(device)
        entries = Entries(slots_E=slots_E, positions_E=positions_E, previous_E=previous_E, sequences_E=names_E)
        self.hook.verify_now(lanes, entries, tokens_E, ring)

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
            rid=self._names.get(name, ""),
            owner=self._facts.owner(part, page),
            users=self._facts.users(part, page),
            history=self._facts.history(part, page),
        )

    def _check_watch(self, part: Part, checked: list[int]) -> None:
        """Slots due = slots checked, or the canary itself is broken (on an accelerator: not more than were due)."""
        due = self.due_slots[part]
        tail = checked[StampLane.TAIL_K], checked[StampLane.TAIL_V]
        on_cpu = self.parts[part].table_RC.device.type == "cpu"
        if any(count > due for count in tail) or (on_cpu and any(count < due for count in tail)):
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
    part: Part, pool: DevicePool, table: RequestTable, layer_ids: Sequence[int], settings: CanarySettings
) -> PartLanes:
    spec = pool.spec
    assert pool.stamps_LS4 is not None, "canary: a pool without stamps"
    coefficients = None
    if settings.real_data != "none":
        factors = digest_coefficients(
            layer_ids, range(spec.kv_head_count), spec.head_size, spec.dtype.itemsize,
            partial=settings.real_data == "partial",
        )  # fmt: skip
        coefficients = torch.from_numpy(factors).to(spec.device)
    return PartLanes(
        part=part,
        layers_kv=pool.layers,
        stamps_LS4=pool.stamps_LS4,
        table_RC=table.table,
        coefficients_L22W=coefficients,
        running=Ring(spec.device, settings.ring_rows),
        sweeping=Ring(spec.device, settings.ring_rows),
        writing=Ring(spec.device, settings.ring_rows),
    )
