"""What must hold between steps: queues, rows, pages and the ledger tell one story. Otherwise InvariantError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from serinus.cache import RowView, Tier
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.sched.batch import Batch
from serinus.sched.open_step import OpenStep
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.page_row import PageRow
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(f"sched: {message}")


def check_result(under_way: StepPlan | None, plan: StepPlan, result: StepResult) -> None:
    """Raises InvariantError where `plan` is not the one under way, or `result` is not its result."""
    if plan is not under_way:
        expected = f"step {under_way.step}" if under_way else "no commit without a plan"
        raise InvariantError(f"sched: step {plan.step} is committed, expected {expected}")
    if result.step != plan.step or len(result.seqs) != len(plan.work):
        raise InvariantError(
            f"sched: the result of step {result.step} has {len(result.seqs)} parts,"
            f" expected {len(plan.work)} of step {plan.step}"
        )


def check_scheduler(
    *,
    states: Mapping[str, ReqState],
    waiting: ReqQueue,
    prealloc: ReqQueue,
    batch: Batch,
    inflight: Mapping[str, ReqState],
    allocator: PageAllocator,
    settings: SchedSettings,
    steps: Collection[OpenStep],
) -> None:
    """Every request is in the one queue of its phase; rows are given once; pages are owned or leased; holds add up."""
    places: dict[Phase, Iterable[ReqState]] = {
        Phase.WAITING: waiting,
        Phase.PREALLOC: prealloc,
        Phase.PREFILL: batch.prefilling,
        Phase.DECODE: batch.decoding,
        Phase.TRANSFER: batch.transfer.values(),
        Phase.INFLIGHT: inflight.values(),
    }
    found: Counter[str] = Counter()
    for phase, members in places.items():
        for state in members:
            _require(state.phase is phase, f"request {state.rid} is {state.phase.name}, but among the {phase.name}")
            found[state.rid] += 1
    _require(found == Counter(list(states)), f"requests in queues are {found}, expected each of {list(states)} once")
    _check_rows(states.values(), allocator, settings)
    for state in states.values():
        _check_positions(state, settings, allocator)
    _check_steps(states, steps, settings)
    _check_ledger(states, allocator)
    allocator.cache.sanity_check(
        [
            RowView(rid=state.rid, lease=state.lease, spans=tuple(row.span() for row in state.rows))
            for state in states.values()
            if state.lease is not None
        ]
    )


def _check_steps(states: Mapping[str, ReqState], steps: Collection[OpenStep], settings: SchedSettings) -> None:
    """Plans under way hand out the positions from `computed` to `planned`, in order, of requests that run."""
    _require(len(steps) <= settings.depth, f"{len(steps)} plans are under way, expected at most {settings.depth}")
    reached: dict[str, int] = {}
    for step in steps:
        for state, work in zip(step.states, step.plan.work, strict=True):
            if state is None:
                continue
            name = f"request {state.rid} ({state.phase.name})"
            _require(states.get(state.rid) is state, f"{name} is in step {step.plan.step}, but unknown")
            _require(state.running and state.row == work.row, f"{name} has row {state.row}, its work row {work.row}")
            start = reached.get(state.rid, state.computed)
            _require(work.start == start, f"{name} is at {work.start} in step {step.plan.step}, expected {start}")
            reached[state.rid] = work.start + len(work.tokens)
    for state in states.values():
        end = reached.get(state.rid, state.computed)
        _require(state.planned == end, f"request {state.rid} has planned {state.planned} tokens, its plans reach {end}")
        _require(not state.aborting or state.under_way or not state.running, f"aborting {state.rid} stays for no plan")


def _check_rows(states: Iterable[ReqState], allocator: PageAllocator, settings: SchedSettings) -> None:
    taken = [state.row for state in states if state.running]
    rows = sorted([*taken, *allocator.free_rows])
    _require(
        rows == list(range(1, settings.rows)),
        f"rows taken {taken} and free {allocator.free_rows} are not all rows once",
    )
    idle = [state.rid for state in states if state.row and not state.running]
    _require(not idle, f"requests {idle} have rows, expected only running ones to")


def _check_positions(state: ReqState, settings: SchedSettings, allocator: PageAllocator) -> None:
    name = f"request {state.rid} ({state.phase.name})"
    _require(
        0
        <= state.published
        <= state.verified
        <= state.computed
        <= state.planned
        <= state.known
        <= settings.context_length,
        f"{name} has published {state.published}, verified {state.verified}, computed {state.computed}, planned"
        f" {state.planned} of {state.known}",
    )
    _require(state.known <= state.limit, f"{name} knows {state.known} tokens, expected at most {state.limit}")
    if state.phase in (Phase.WAITING, Phase.PREALLOC) or (state.phase is Phase.INFLIGHT and state.aborting):
        _require(state.full.end == 0 and state.lease is None, f"{name} has {state.full.end} pages, expected none")
        return
    leased = -1 if state.lease is None else state.lease.end
    _require(leased == state.published, f"{name} leases {leased} tokens, expected {state.published}, as published")
    _require(state.computed <= state.full.room, f"{name} has computed {state.computed} in room for {state.full.room}")
    if state.phase is Phase.DECODE:
        _require(state.computed == state.known - 1, f"{name} has computed {state.computed} of {state.known}")
    if state.phase is Phase.PREFILL:
        _require(state.computed < state.known <= state.full.room, f"{name} has {state.computed}/{state.known}")
    if state.phase is Phase.DECODE and state.generated:
        recent = int(state.tokens[state.known - 1])
        _require(0 <= recent < settings.vocab_size, f"{name} generated {recent}")
    for row in state.rows:
        _check_slots(name, row)
        if row.windowed:
            _check_window(name, state, row, allocator, ahead=int(settings.overlaps))
        else:
            _require(row.first == 0, f"{name} has {row.part.name} pages from {row.first} on, expected all")
            _require(row.end == state.full.end, f"{name} has {row.end} {row.part.name} pages, {state.full.end} of FULL")


def _check_slots(name: str, row: PageRow) -> None:
    size = row.page_size
    _require(row.room == row.end * size, f"{name} has room {row.room} on {row.end} pages")
    slots = row.named().astype(np.int64)[:, None] * size + np.arange(size)
    same = np.array_equal(slots.reshape(-1), row.slots[row.first * size : row.room])
    _require(same, f"{name} has slots that are not its pages'")


def _check_window(name: str, state: ReqState, row: PageRow, allocator: PageAllocator, *, ahead: int) -> None:
    """What it reads next is there, and nothing older than one step needs. `ahead`: pages that it may have got early."""
    position = state.prompt_len if state.phase is Phase.TRANSFER else state.computed
    part, first = row.part.name, allocator.first_page(row.part, position)
    _require(row.first <= first, f"{name} has {part} pages from {row.first} on, too few for {position}")
    if state.phase is Phase.DECODE:
        most = allocator.window_pages[row.part] + ahead
        _require(row.count <= most, f"{name} has {row.count} {part} pages, expected at most {most}")
        _require(row.end == state.full.end, f"{name} has {part} pages up to {row.end}, FULL ones to {state.full.end}")


def _check_ledger(states: Mapping[str, ReqState], allocator: PageAllocator) -> None:
    held: dict[Part, Counter[int]] = {part: Counter() for part in allocator.windows}
    for state in states.values():
        for spans in state.holds:
            for span in spans:
                held[span.part].update(span.pages.tolist())
    for part in allocator.cache.geometry.parts:
        ledger = allocator.cache.ledgers[Tier.DEVICE, part]
        for rid in ledger.request_ids:
            known = states.get(rid)
            _require(known is not None and known.lease is not None, f"the ledger knows request {rid} without pages")
        announced = held[part]
        for page in np.flatnonzero(ledger.hold_P).tolist():
            count = ledger.holds_of(page).get("transfer", 0)
            _require(
                announced.pop(page, 0) == count, f"page {page} has {count} transfer holds, expected those of its chunks"
            )
        _require(not announced, f"{part.name} pages {list(announced)} are announced, but not held")
