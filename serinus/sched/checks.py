"""What must hold between steps: queues, rows, pages and the ledger tell one story. Otherwise InvariantError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from serinus.cache import RowView
from serinus.core.errors import InvariantError
from serinus.sched.batch import Batch
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats
from serinus.sched.settings import SchedSettings

__all__ = ["check_scheduler"]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(f"sched: {message}")


def check_scheduler(
    *,
    states: Mapping[str, ReqState],
    waiting: ReqQueue,
    prealloc: ReqQueue,
    batch: Batch,
    inflight: Mapping[str, ReqState],
    seats: Seats,
    settings: SchedSettings,
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
    _check_rows(states.values(), seats, settings)
    for state in states.values():
        _check_positions(state, settings)
    _check_ledger(states, seats)
    seats.cache.sanity_check(
        [
            RowView(rid=state.rid, lease=state.lease, pages=state.pages[: state.page_count])
            for state in states.values()
            if state.lease is not None
        ]
    )


def _check_rows(states: Iterable[ReqState], seats: Seats, settings: SchedSettings) -> None:
    taken = [state.row for state in states if state.running]
    rows = sorted([*taken, *seats.free_rows])
    _require(
        rows == list(range(1, settings.rows)), f"rows taken {taken} and free {seats.free_rows} are not all rows once"
    )
    idle = [state.rid for state in states if state.row and not state.running]
    _require(not idle, f"requests {idle} have rows, expected only running ones to")


def _check_positions(state: ReqState, settings: SchedSettings) -> None:
    name = f"request {state.rid} ({state.phase.name})"
    _require(
        0 <= state.published <= state.computed <= state.known <= settings.context_length,
        f"{name} has published {state.published}, computed {state.computed}, known {state.known} tokens",
    )
    _require(state.known <= state.limit, f"{name} knows {state.known} tokens, expected at most {state.limit}")
    if state.phase in (Phase.WAITING, Phase.PREALLOC) or (state.phase is Phase.INFLIGHT and state.doomed):
        _require(state.page_count == 0 and state.lease is None, f"{name} has {state.page_count} pages, expected none")
        return
    leased = -1 if state.lease is None else state.lease.end
    _require(leased == state.published, f"{name} leases {leased} tokens, expected {state.published}, as published")
    _require(state.room == state.page_count * settings.page_size, f"{name} has room {state.room}")
    _require(state.computed <= state.room, f"{name} has computed {state.computed} tokens in room for {state.room}")
    if state.phase is Phase.DECODE:
        _require(state.computed == state.known - 1, f"{name} has computed {state.computed} of {state.known}")
    if state.phase is Phase.PREFILL:
        _require(state.computed < state.known <= state.room, f"{name} has {state.computed}/{state.known}/{state.room}")
    if state.phase is Phase.DECODE and state.generated:
        recent = int(state.tokens[state.known - 1])
        _require(0 <= recent < settings.vocab_size, f"{name} generated {recent}")
    offsets = np.arange(settings.page_size)
    slots = state.pages[: state.page_count].astype(np.int64)[:, None] * settings.page_size + offsets
    _require(np.array_equal(slots.reshape(-1), state.slots[: state.room]), f"{name} has slots that are not its pages'")


def _check_ledger(states: Mapping[str, ReqState], seats: Seats) -> None:
    ledger = seats.cache.ledger
    for rid in ledger.request_ids:
        state = states.get(rid)
        _require(
            state is not None and state.lease is not None, f"the ledger knows request {rid}, which has no pages here"
        )
    held: Counter[int] = Counter()
    for state in states.values():
        for pages in state.holds:
            held.update(pages.tolist())
    for page in np.flatnonzero(ledger.hold_P).tolist():
        count = ledger.holds_of(page).get("transfer", 0)
        _require(held.pop(page, 0) == count, f"page {page} has {count} transfer holds, expected those of its chunks")
    _require(not held, f"pages {list(held)} are announced, but not held")
