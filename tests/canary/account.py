"""An account of its own of what each step read on which page, and when that was verified, for tests of the horizon.

A token is right if all that its step read was verified in that step or later, on the page that it was read from, and so
was that each slot belongs before the next one (the last one read is held against the request itself). So a page that
leaves a row (exchanged for the tree's, behind a window, given back) takes nothing unverified along.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from serinus.canary import CanaryLead, CanaryRank
from serinus.core.parts import OwnPages, Part
from serinus.core.plan import StepPlan
from serinus.kernels.due import entries_of
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import ReqState
from serinus.selftest import EngineDriver

__all__ = ["Account", "accounts_of"]

_Slot = tuple[Part, int, int]
"""A part, a position in it, and the page that has it."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What a step read of one part to compute one position, or more from there on."""

    step: int
    start: int
    part: Part
    low: int
    """The first position that was read; the pages are those of it and the following."""
    pages: list[int]


class Account:
    """Of one engine. Times are numbers of steps; what is verified beside steps is as late as the step before."""

    def __init__(self, driver: EngineDriver, left: Counter[str]) -> None:
        self.canary, self.page_size = driver.built.canary, driver.built.cache.page_size
        self.states: Mapping[str, ReqState] = driver.engine.scheduler._states
        self.reads: dict[str, list[_Read]] = defaultdict(list)
        """By request, until its horizon has passed them."""
        self.verified: dict[str, dict[_Slot, int]] = defaultdict(dict)
        self.linked: dict[str, dict[tuple[_Slot, int], int]] = defaultdict(dict)
        """With the page of the position before it."""
        self.step, self.left = 0, left

    def page(self, rid: str, part: Part, position: int) -> int:
        row = next(row for row in self.states[rid].rows if row.part is part)
        return int(row.pages[position // self.page_size])

    def begun(self, plan: StepPlan) -> None:
        """What the rank is about to read and to verify."""
        assert self.canary is not None
        self.step += 1
        checks = self.canary.hook._checks
        assert checks is not None
        runs = {each.rid for each in plan.work if each.rid in self.states and self.states[each.rid].row == each.row}
        for part in checks.reads:  # those that were healed since they were planned are computed for nothing
            for work, (_, _, low, high, *_) in zip(plan.work, checks.reads[part].T.tolist(), strict=True):
                if work.rid in runs:
                    pages = [self.page(work.rid, part, at) for at in range(low, high)]
                    self.reads[work.rid].append(_Read(self.step, work.start, part, low, pages))
            turn = self.canary.parts[part].turn_size
            for column in checks.due[part].columns_7B.T.tolist():
                rid = checks.rids[column[0] - checks.first_sequence]
                for at in entries_of(column, 0, 1 << 30, turn)[0].tolist() if rid in runs else ():
                    before = self.page(rid, part, at - 1) if at > column[2] else None  # what is before it is not read
                    self._note(rid, (part, at, self.page(rid, part, at)), before)

    def rows(self, rows: Mapping[str, OwnPages]) -> None:
        """These rows are verified by themselves, beside any step."""
        for rid, own in rows.items():
            for span in own.spans:
                first, pages = span.first * self.page_size, np.repeat(span.pages, self.page_size).tolist()
                for at, page in enumerate(pages[: max(0, len(own.tokens) - first)]):
                    self._note(rid, (span.part, first + at, page), pages[at - 1] if at else None)

    def _note(self, rid: str, slot: _Slot, before: int | None) -> None:
        self.verified[rid][slot] = self.step
        if before is not None:
            self.linked[rid][slot, before] = self.step

    def check(self, state: ReqState) -> None:
        """All that was read for the tokens up to the horizon is verified by now."""
        rid, later = state.rid, []
        for read in self.reads[rid]:
            if read.start >= state.verified:
                later.append(read)
                continue
            before = None
            for at, page in enumerate(read.pages, read.low):
                slot = read.part, at, page
                found = self.verified[rid].get(slot, 0)
                if before is not None:
                    found = min(found, self.linked[rid].get((slot, before), 0))
                before = page
                assert found >= read.step, (
                    f"{rid}: position {read.start} is within the horizon, {state.verified}, but position {at} of"
                    f" {read.part.name}, page {page}, was read in step {read.step} and verified in step {found}"
                )
        self.reads[rid] = later

    def forget(self, rid: str) -> None:
        """The request has given its pages back."""
        for each in (self.reads, self.verified, self.linked):
            each.pop(rid, None)

    def check_all(self) -> None:
        """The same for every request that runs."""
        for state in self.states.values():
            if state.running:
                self.check(state)


@contextmanager
def accounts_of(drivers: Iterable[EngineDriver], left: Counter[str]) -> Iterator[list[Account]]:
    """The accounts of some engines, kept while this lasts; `left` counts pages that leave rows, by how they do. What is
    beyond the horizon raises AssertionError in the engine that it is of."""
    accounts = [Account(driver, left) for driver in drivers]
    found: dict[int, Account] = {}
    """By the object of the product that tells: its rank, its lead, its allocator."""
    for driver, account in zip(drivers, accounts, strict=True):
        for each in (driver.built.canary, driver.engine.canary, driver.engine.scheduler._allocator):
            found[id(each)] = account
    begin, verify, insert = CanaryRank.begin, CanaryLead._verify_rows, PageAllocator._insert
    advance, release = PageAllocator.advance, PageAllocator.release

    def begins(self: CanaryRank, plan: StepPlan) -> None:
        begin(self, plan)
        if id(self) in found and self._is_started:
            found[id(self)].begun(plan)

    def verifies(self: CanaryLead, rows: Any, **more: Any) -> Any:
        if id(self) in found:
            found[id(self)].rows(rows)
        return verify(self, rows, **more)

    def leaves(self: PageAllocator, state: ReqState, how: str, act: Any) -> None:
        before = {(row.part, at): int(row.pages[at]) for row in state.rows for at in range(row.first, row.end)}
        account = found.get(id(self))
        if account is not None and state.phase.name in ("PREFILL", "DECODE"):
            account.check(state)
        act()
        after = {(row.part, at): int(row.pages[at]) for row in state.rows for at in range(row.first, row.end)}
        if account is not None:
            gone = [place for place, page in before.items() if after.get(place) != page]
            account.left[how] += len(gone)
            if how == "exchanged" and gone:
                assert state.verified == state.computed, "what was read of it since has no turn any more"
            if how == "given back":
                account.forget(state.rid)

    def releases(self: PageAllocator, state: ReqState, **more: Any) -> None:
        if id(self) in found and more.get("park"):
            assert state.right == state.known, "all of it was verified: no later heal may compute it again"
        leaves(self, state, "given back", lambda: release(self, state, **more))

    ours: dict[tuple[type, str], Callable[..., Any]] = {
        (CanaryRank, "begin"): begins,
        (CanaryLead, "_verify_rows"): verifies,
        (PageAllocator, "_insert"): lambda self, state, end: leaves(
            self, state, "exchanged", lambda: insert(self, state, end)
        ),
        (PageAllocator, "advance"): lambda self, state, at: leaves(
            self, state, "behind the window", lambda: advance(self, state, at)
        ),
        (PageAllocator, "release"): releases,
    }
    before = {(kind, name): getattr(kind, name) for kind, name in ours}
    try:
        for (kind, name), function in ours.items():
            setattr(kind, name, function)
        yield accounts
    finally:
        for (kind, name), function in before.items():
            setattr(kind, name, function)
