"""CanaryRank: the canary of one rank. It checks this rank's KV around each step, and what the leader commands.

    canary.begin(plan)                  before runner.run; begin_ahead(work) for work that a plan is still to bring
    result = canary.returned(result)    after it (planted faults may exchange tokens here)
    findings = canary.found()           sent to the leader with the result of the step
    answers = canary.obey(command)      one of CANARY_COMMANDS, in the order of the line

A rank knows bytes, stamps and its row tables. Owners and users of pages are the leader's (lead.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.canary.begin import begin_checks
from serinus.canary.check_counts import by_part, with_counts
from serinus.canary.commands import (
    CachedPages,
    CanaryAnswer,
    CanaryCommand,
    CheckHost,
    CheckRows,
    Finding,
    PlantFaults,
    RingOverflow,
    RowPages,
    StartCanary,
    SweepSlots,
    TellCounts,
)
from serinus.canary.coverage import ReadsRoom, due_pages, reads_of
from serinus.canary.hook import CanaryHook, Entries, Spent, StepChecks, WriteCheck
from serinus.canary.host_check import HostCheck
from serinus.canary.lanes import PartLanes, lanes_of, sent
from serinus.canary.perturb import Injection, Perturber
from serinus.canary.ring import CanaryMark, Ring, RingNews
from serinus.canary.settings import CheckSettings
from serinus.canary.violation import Violation, launch_tag
from serinus.core.clock import Clock, WallClock
from serinus.core.errors import InvariantError
from serinus.core.log import get_logger
from serinus.core.parts import PageSpan, PageStore, Part
from serinus.core.plan import SampleSpec, SeqWork, StepPlan, StepResult
from serinus.core.stamps import CHAIN_ANCHOR
from serinus.kernels import SEQUENCES, Kernels, Reason, StampLane, load, stamp_lanes
from serinus.pool import DevicePool, HostPool, RequestTable

TokenOracle = Callable[[SampleSpec, int], int]
"""(how the request's next token is chosen, position) -> the token that the sampler must have emitted there."""

_SWEEP: Final = -1
_ROWS: Final = -4 * SEQUENCES
"""The first row of a command; the others follow."""
_NOBODY: Final = frozenset[str]()
_PASSES_KEPT: Final = 4
_READ: Final = attrgetter("rid", "row", "start", "whole", "chain")
"""What a step verifies of the work of a sequence follows from these."""
_log = get_logger("canary")


class CanaryRank:
    """Checks nothing before the command StartCanary. Where a slot was due and was not checked, `found` and `obey` raise
    InvariantError: a canary that is silent by mistake must not be taken for sound KV."""

    def __init__(
        self,
        settings: CheckSettings,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        layer_ids: Mapping[Part, Sequence[int]],
        kernels: Kernels,
        *,
        perturber: Perturber | None = None,
        oracle: TokenOracle | None = None,
        head_ids: Sequence[int] | None = None,
        host: Mapping[Part, HostPool] = MappingProxyType({}),
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            layer_ids: the model's numbers of each part's layers on this rank; a part without stamps is left out.
            perturber: plants faults on purpose.
            oracle: says which token must have been sampled; with it the tokens that a step writes are checked too.
            head_ids: the numbers of this rank's KV heads; None = all. So the digests of all ranks add up.
            host: the host pools behind the device's; empty = there are none.
            clock: of the seconds that it counts; None = the machine's.
        Raises InvariantError: no pool has stamps.
        """
        self.settings = settings
        self.perturber = perturber
        self.parts = {
            part: lanes_of(part, pool, tables[part], layer_ids[part], head_ids, settings, kernels)
            for part, pool in pools.items()
            if pool.stamps_LS4 is not None
        }
        if not self.parts:
            raise InvariantError("canary: no pool keeps stamps, expected at least one")
        self.spent = Spent(clock or WallClock())
        """Seconds in its calls; what digests add to attention is part of the forward pass."""
        self.hook = CanaryHook(
            self.parts, kernels, self.spent, entries_max=settings.entries_max, faults=perturber
        )  # fmt: skip
        """Stands around the forward pass, behind the gate of loads."""
        self.steps = 0
        """Steps begun since the latest StartCanary."""
        self.step_size = 0
        """Requests of the latest of them."""
        self.violation_count = 0
        """Ever, those whose detail was lost to the ring's overflow included."""
        self._sweep_passes = 0
        self._kernels = kernels
        self._oracle = oracle
        self._is_started = False
        self._injections_told = 0
        self._rooms = {part: ReadsRoom() for part in self.parts}
        """For what a pass reads, by part: that of the pass before is overwritten."""
        self._given_up: deque[frozenset[str]] = deque(maxlen=settings.depth - 1)
        """Requests of the latest steps that were abandoned: a plan that was made before the leader knew of it may go on
        with them, on KV that is not there."""
        self._unread: set[int] = set()
        """Sequences that do: their rows are stamped behind stamps that are not there, and nothing is told of them."""
        self._passes: deque[tuple[int, tuple[str, ...]]] = deque([(0, ())], maxlen=_PASSES_KEPT)
        """Of the latest passes, the number of the first sequence, and the requests."""
        self._checking: tuple[str, ...] = ()
        """Requests of the rows that are checked by command."""
        self._swept: dict[Part, list[NDArray[np.int64]]] = {part: [] for part in self.parts}
        """Slots swept since the rings were read."""
        self.host_check = None if not host else HostCheck(host, self.parts, settings.page_size, load("cpu"))
        """Verifies pages of this rank's host tier; None = it has none."""
        if perturber is not None:
            perturber.attach(self.parts, page_size=settings.page_size, partial=settings.real_data == "partial")

    # ---- the step -----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Decide what this step verifies, and arm the hook with it."""
        if self._is_started:
            with self.spent:
                self._count(plan)
                self._begin(plan.work)

    def begin_ahead(self, work: Sequence[SeqWork]) -> None:
        """The same for a pass that is queued before its plan has come; `follow` where the plan comes."""
        if self._is_started:
            with self.spent:
                self._begin(work)

    def follow(self, plan: StepPlan) -> None:
        """The plan of a pass that is queued has come."""
        if self._is_started:
            self._count(plan)

    @property
    def looks_ahead(self) -> bool:
        """Whether a pass may be queued before its plan has come: not where tokens or KV are exchanged on purpose."""
        return self.perturber is None and self._oracle is None

    def mark(self) -> CanaryMark | None:
        """What is queued by now; `found` tells what came of that and of nothing later. Does not wait."""
        if not self._is_started:
            return None
        size = len(self._passes[-1][1])
        counts = {part: lanes.counts.mark(size) for part, lanes in self.parts.items()}
        swept = {part: len(each) for part, each in self._swept.items()}
        return CanaryMark(step=self.steps, rids=self._passes[-1][1], counts=counts, swept=swept)

    def _count(self, plan: StepPlan) -> None:
        self.steps += 1
        self.step_size = len(plan.work)

    def _begin(self, work: Sequence[SeqWork]) -> None:
        base, settings = self._passes[-1][0] + SEQUENCES, self.settings
        read = map(_READ, self._reading(work, base))
        rids, rows, starts, wholes, chains = zip(*read, strict=True) if work else ((),) * 5
        self._passes.append((base, rids))
        checks = StepChecks(step=self.steps, first_sequence=base, write_check=self._write_check(work), rids=rids)
        for part, lanes in self.parts.items():
            window = settings.window if part is Part.SWA else None
            reads = checks.reads[part] = reads_of(
                rows, starts, wholes, chains, first_name=base, stride=settings.stride, window=window,
                room=self._rooms[part],
            )  # fmt: skip
            # Of a part with a window some is worked out twice, which needs arrays that stay.
            due = lanes.watch.due if window is None else self._kernels.canary_due
            checks.due[part] = due_pages(due, reads, lanes.turn_size, window)
        self.hook.arm(checks)

    def returned(self, result: StepResult | None) -> StepResult | None:
        """The result as the leader gets it; None on a rank that does not sample."""
        if result is None or self.perturber is None or not self._is_started:
            return result
        return self.perturber.returned(result)

    def abandoned(self) -> None:
        """The step was broken off: what of it was to be verified is, or does not count as due."""
        if not self._is_started:
            return
        self.hook.abandon()
        if self._given_up:
            self._given_up[-1] = frozenset(self._passes[-1][1])

    def found(self, mark: CanaryMark | None = None) -> tuple[Finding | RingOverflow, ...]:
        """Violations and planted faults up to this step, itself included; or up to a mark. Waits for the device, where
        that has not come so far."""
        if not self._is_started:
            return ()
        with self.spent:
            findings = self._take(mark)
        self._log_statistics()
        return (*findings, *self._new_injections())

    def checked(self, mark: CanaryMark | None = None) -> list[list[int]] | None:
        """Slots that the last pass, or that of a mark, verified of each of its sequences, in its order, counted as they
        were verified (by_part). None: nothing is checked. Waits as `found`."""
        if mark is None:
            mark = self.mark()
        return None if mark is None else by_part({part: marked.by_sequence() for part, marked in mark.counts.items()})

    # ---- commands -----------------------------------------------------------------------------------------------

    def obey(self, command: CanaryCommand) -> tuple[CanaryAnswer, ...]:
        """Do what the leader commands; the answer, if there is one, is complete. CheckRows and TellCounts wait for the
        device, CheckHost reads the host tier."""
        with self.spent:
            return self._obey(command)

    def _obey(self, command: CanaryCommand) -> tuple[CanaryAnswer, ...]:
        match command:
            case StartCanary():
                begin_checks(self.hook, self.parts.values())
                self._is_started, self.steps = True, 0
            case SweepSlots():
                self._sweep(command)
            case CheckRows():
                found, checked = self._check_rows(command)
                return (replace(self._answer(command.number, found), checked=checked),)
            case CheckHost():
                return (replace(self._answer(command.number, ()), sound=self._check_host(command)),)
            case TellCounts():
                answer = self._answer(command.number, self._take())
                host_slots = None if self.host_check is None else self.host_check.slots
                return (with_counts(answer, self.parts.values(), host_slots, self.spent.seconds, self.violation_count),)
            case CachedPages() if self.perturber is not None:
                self.perturber.cached["host" if command.is_host else "device", command.part] = command.pages
            case PlantFaults() if self.perturber is not None:
                self.perturber.replan(command.plan)
        return ()

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """The pools as a handoff reads them: with the fault transfer_bytes, damaged on their way out."""
        return pools if self.perturber is None else self.perturber.outgoing(pools)

    @property
    def due_slots(self) -> dict[Part, int]:
        """Slots of requests that had to be verified so far, by part: in steps, at arrival, at the end."""
        return {part: lanes.due_slots for part, lanes in self.parts.items()}

    def checked_slots(self) -> int:
        """Slots of requests whose keys were verified so far. Waits for the device."""
        return sum(lanes.checked_slots() for lanes in self.parts.values())

    def stats_line(self) -> str:
        """For the log, every so many steps."""
        tags = {tag for part in self.parts for tag in self._tags(part)}
        active = {tag for part in self.parts for tag in self.parts[part].active_tags}
        return (
            f"[canary] step={self.steps} protected_tokens={sum(self.due_slots.values())} "
            f"sweep_passes={self._sweep_passes} violations={self.violation_count} "
            f"launch_tags_active={len(active)}/{len(tags)}"
        )

    def divergence_line(self) -> str:
        """How many slots each part had to verify so far: sliding layers see only their window. One parsable line."""
        full, swa = (self.due_slots.get(part, 0) for part in (Part.FULL, Part.SWA))
        return f"[canary] step={self.steps} full_slots={full} swa_slots={swa} difference={full - swa}"

    # ---- inside -------------------------------------------------------------------------------------------------

    def _take(self, mark: CanaryMark | None = None) -> list[Violation | RingOverflow]:
        """Read what is new in the rings of steps and sweeps."""
        found: list[Violation | RingOverflow] = []
        for part, lanes in self.parts.items():
            found += self._read(lanes, lanes.rings, mark)
            if swept := self._swept[part]:
                del swept[: len(swept) if mark is None else mark.swept[part]]
        return found

    def _read(
        self, lanes: PartLanes, rings: Sequence[Ring], mark: CanaryMark | None = None
    ) -> list[Violation | RingOverflow]:
        """What is new in some rings of a part."""
        lanes.counts.expire()
        marked = None if mark is None else mark.counts[lanes.part]
        found: list[Violation | RingOverflow] = []
        for ring in rings:
            news = ring.take(marked)
            if news is not None:
                found += self._told(lanes, ring, news, mark)
        return found

    def _told(
        self, lanes: PartLanes, ring: Ring, news: RingNews, mark: CanaryMark | None
    ) -> list[Violation | RingOverflow]:
        """Slots due = slots checked, or the canary itself is broken."""
        if not news.is_whole:
            raise InvariantError(
                f"canary: part {lanes.part.name} had {news.due} slots to verify {lanes.check_of(ring)},"
                f" {news.checked} were, lane by lane; expected the same: a canary that does not sing"
            )
        step, told = self.steps if mark is None else mark.step, [r for r in news.rows if r[-1] not in self._unread]
        found: list[Violation | RingOverflow] = [self._violation(lanes, row, ring, step) for row in told]
        self.violation_count += len(found) + news.lost
        if news.lost:
            rids = self._passes[-1][1] if mark is None else mark.rids
            found.append(self._overflow(lanes, ring, news.lost, step, rids))
        return found

    def _overflow(self, lanes: PartLanes, ring: Ring, lost: int, step: int, rids: tuple[str, ...]) -> RingOverflow:
        pages = np.empty(0, np.int32)
        if ring is lanes.arriving or ring is lanes.ending:
            rids = self._checking
        elif ring is lanes.sweeping:
            rids = ()
            pages = np.unique(np.concatenate(self._swept[lanes.part]) // self.settings.page_size).astype(np.int32)
        check = lanes.check_of(ring)
        return RingOverflow(step=step, part=lanes.part, check=check, lost=lost, rids=rids, pages=pages)

    def _sweep(self, command: SweepSlots) -> None:
        self._sweep_passes += command.ends_pass
        lanes = self.parts.get(command.part)
        if lanes is None:
            return
        slots, positions, previous = command.slots, command.positions, command.previous
        if self.perturber is not None:
            self.perturber.sweep(command.part, self.steps + 1)
        # A predecessor that is not there cannot be checked against; at position 0 there is none.
        previous = np.where((previous == 0) & (positions > 0), -1, previous)
        names = np.full(len(slots), _SWEEP)
        lanes.sweeping.due += len(slots)
        self._swept[command.part].append(slots)
        tokens = command.tokens.astype(np.int64)
        self._verify(lanes, StampLane.TAIL_K, slots, positions, previous, tokens, names, lanes.sweeping)

    def _check_rows(self, command: CheckRows) -> tuple[list[Violation | RingOverflow], list[list[int]]]:
        """What was found; and the slots that were verified of each row, as `checked` has them. Cost: one read of these
        pages, and some 10 ns a token for the chain hashes."""
        self._checking = tuple(row.rid for row in command.rows)
        zeros = torch.zeros((len(command.rows), len(StampLane)), dtype=torch.int64)
        counts = {part: zeros.to(lanes.table_RC.device, copy=True) for part, lanes in self.parts.items()}
        for index, row in enumerate(command.rows):
            chains = self._kernels.chain_hashes(row.tokens, 0, CHAIN_ANCHOR)
            for span in row.spans:
                lanes = self.parts.get(span.part)
                if lanes is not None and len(span.pages):
                    ring = lanes.arriving if command.is_arrival else lanes.ending
                    self._check_span(lanes, span, row, chains, _ROWS + index, ring, counts[span.part])
        parts = self.parts.values()
        found = [each for lanes in parts for each in self._read(lanes, (lanes.arriving, lanes.ending))]
        return found, by_part({part: each.flatten().tolist() for part, each in counts.items()})

    def _check_host(self, command: CheckHost) -> tuple[int, ...]:
        """Cost: one read of these pages."""
        check, counts = self.host_check, []
        for each in command.copies:
            sound = check is not None and check(each.part, each.pages, each.origin, 0)
            counts.append(int(np.append(sound, False).argmin()))
        return tuple(counts)

    def _check_span(
        self, lanes: PartLanes, span: PageSpan, row: RowPages, chains: NDArray[np.int64], name: int, ring: Ring,
        counts_N4: Tensor,
    ) -> None:  # fmt: skip
        """The slots that the row names here, where there is a row: those that its steps have read. 0 = none at all."""
        page_size, tokens = self.settings.page_size, row.tokens
        slots = (span.pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
        positions = np.arange(span.first * page_size, span.end * page_size)
        live = positions < len(tokens)
        slots, positions = slots[live], positions[live]
        if row.row and len(slots):
            named = lanes.table_RC[row.row, int(positions[0]) : int(positions[-1]) + 1].cpu().numpy().astype(np.int64)
            slots = np.where((named > 0) & (named < lanes.stamps_LS4.shape[1]), named, 0)
        previous = np.concatenate(([-1 if span.first else 0], slots[:-1]))
        names, own = np.full(len(slots), name), tokens[positions].astype(np.int64)
        for lane in (StampLane.HEAD_K, StampLane.TAIL_K):
            self._verify(lanes, lane, slots, positions, previous, own, names, ring, counts_N4)
            if len(slots):  # what lies before a window is bound by the hash behind it alone
                self._bind(lanes, lane, slots[-1:], positions[-1:], chains[positions[-1:]], names[-1:], ring, counts_N4)
        ring.due += len(slots) + min(1, len(slots))

    def _answer(self, number: int, found: Sequence[Violation | RingOverflow]) -> CanaryAnswer:
        return CanaryAnswer(
            number=number,
            violations=tuple(each for each in found if isinstance(each, Violation)),
            overflows=tuple(each for each in found if isinstance(each, RingOverflow)),
            injections=self._new_injections(),
        )

    def _new_injections(self) -> tuple[Injection, ...]:
        """Those that the leader has not been told."""
        if self.perturber is None:
            return ()
        new = tuple(self.perturber.injections[self._injections_told :])
        self._injections_told += len(new)
        return new

    def _log_statistics(self) -> None:
        settings = self.settings
        if settings.stats_interval and self.steps % settings.stats_interval == 0:
            _log.info("%s", self.stats_line())
        if settings.divergence_interval and self.steps % settings.divergence_interval == 0:
            _log.info("%s", self.divergence_line())

    def _reading(self, work: Sequence[SeqWork], base: int) -> Sequence[SeqWork]:
        """The work of a plan by what is verified of it: what goes on behind an abandoned step has nothing to read."""
        given_up = frozenset[str]().union(*self._given_up) if any(self._given_up) else _NOBODY
        self._given_up.append(_NOBODY)
        if not given_up:
            return work
        self._unread = {name for name in self._unread if name >= self._passes[0][0]}
        self._unread |= {base + place for place, each in enumerate(work) if each.rid in given_up}
        return [replace(each, start=0) if each.rid in given_up else each for each in work]

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
        counts_N4: Tensor | None = None,
    ) -> None:  # fmt: skip
        device = lanes.table_RC.device
        slots_E, positions_E, previous_E, names_E = (sent(a, device) for a in (slots, positions, previous, names))
        tokens_E = None if tokens is None else sent(tokens, device)
        entries = Entries(slots_E=slots_E, positions_E=positions_E, previous_E=previous_E, sequences_E=names_E)
        self.hook.verify_now(lanes, lane, entries, tokens_E, ring, counts_N4)

    def _bind(
        self, lanes: PartLanes, lane: StampLane, slots: NDArray[np.int64], positions: NDArray[np.int64],
        chains: NDArray[np.int64], names: NDArray[np.int64], ring: Ring, counts_N4: Tensor,
    ) -> None:  # fmt: skip
        """Hold the last slots of rows against the requests."""
        device = lanes.table_RC.device
        inputs = (sent(each, device) for each in (slots, positions, chains, names))
        self._kernels.canary_bind(lanes.stamps_LS4, lane, *inputs, *ring.tensors, counts_N4)

    def _violation(self, lanes: PartLanes, row: list[int], ring: Ring, step: int) -> Violation:
        lane, reasons, slot, position, *stored, name = row
        if ring is lanes.writing:  # VERIFY_TOKEN becomes WRITE_TOKEN, VERIFY_POSITION becomes WRITE_POSITION
            reasons = (reasons & 4) << 2 | (reasons & 2) << 4
        return Violation(
            step=step,
            tag=launch_tag(StampLane(lane), lanes.part, sweep=ring is lanes.sweeping),
            reasons=Reason(reasons),
            part=lanes.part,
            slot=slot,
            page=slot // self.settings.page_size,
            position=position,
            stored_position=stored[0],
            stored_token=stored[1],
            expected_token=stored[2],
            stored_hash=stored[3],
            expected_hash=stored[4],
            stored_digest=stored[5],
            found_digest=stored[6],
            rid=self._rid(name),
        )

    def _rid(self, name: int) -> str:
        if name < _SWEEP:
            return self._checking[name - _ROWS]
        found = (rids[name - base] for base, rids in self._passes if base <= name < base + len(rids))
        return next(found, "")

    def _tags(self, part: Part) -> list[str]:
        lanes = stamp_lanes(part)
        swept = lanes[part.halves :] if self.settings.is_swept else ()
        return [launch_tag(lane, part, sweep=sweep) for sweep, some in ((False, lanes), (True, swept)) for lane in some]
