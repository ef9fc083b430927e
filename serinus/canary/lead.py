"""CanaryLead: the leader's half of the canary. It commands what ranks check, and says what follows from what they find.

    lead.begin(plan)                    before the plan is commanded
    verdicts = lead.judge(findings)     before the commit: requests that must not go on
    found = lead.check(rows)            the same for requests that are about to end; waits for the ranks
    arrival = lead.arrived(rid, own)    pages came by handoff; waits for the ranks

Ranks know bytes (rank.py); the owner, the users and the history of a page are known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache as remember
from typing import Any, Final

import msgspec
import numpy as np

from serinus.cache import Condemned, PrefixCache, Tier
from serinus.canary.commands import (
    CanaryAnswer,
    CheckHost,
    CheckRows,
    HostFindings,
    HostPages,
    RingOverflow,
    RowPages,
    StartCanary,
    SweepSlots,
    TellCounts,
    by_check,
    slots_checked,
)
from serinus.canary.copies import CopyCheck
from serinus.canary.faults import LeadFaults
from serinus.canary.findings import Findings
from serinus.canary.judge import ArrivalVerdict, Judge, Requests, RowsVerdict, Verdict
from serinus.canary.page_health import PageHealth
from serinus.canary.perturb import Injection
from serinus.canary.recalls import Recalls
from serinus.canary.violation import Violation
from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.core.handoff import HandoffFinding
from serinus.core.line import CommandLine
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import OwnPages, Part
from serinus.core.plan import StepPlan
from serinus.core.settings import CanarySettings, coverage_stride
from serinus.wire.fault_order import FaultOrder

_SWEEP_SLOTS: Final = 4096
"""Slots of one sweep, by part."""
_SWEEP_SLOTS_MIN: Final = 1024
"""By time, sweeps wait until so many slots are due, or a sixteenth of the part, and a page at least."""
_SWEEP_HASTE: Final = 1.2
"""So much faster than asked for, so that a pass ends in time though sweeps are cut and may come late."""
_LOOK_S: Final = 0.05
_SEEN_S: Final = 1.0
_ORDERS: Final = msgspec.json.Decoder(FaultOrder)
_log = get_logger("canary")


class CanaryLead:
    """One for an engine, of one rank or of many. The engine's thread owns it."""

    def __init__(
        self,
        settings: CanarySettings,
        line: CommandLine,
        cache: PrefixCache,
        requests: Requests,
        *,
        clock: Clock,
        parts: Sequence[Part],
        names: Sequence[str],
        faults: LeadFaults | None = None,
    ) -> None:
        """Ranks check from now on.

        Args:
            requests: those of the engine.
            parts: those in which the model has layers.
            names: of the ranks, as reports have them; one rank alone has the name "".
            faults: those on purpose; None = there are none.
        """
        self._findings = findings = Findings(cache, requests, clock, parts, names)
        self.violations, self.incidents = findings.violations, findings.incidents
        self.injections, self.listeners = findings.injections, findings.listeners
        """As Findings has them."""
        self.steps = 0
        """Steps begun; the warm-up is not counted."""
        self._settings = settings
        self._raises = settings.fails
        self._line = line
        self._cache = cache
        self._requests, self._clock = requests, clock
        self.health = PageHealth(cache, settings.kv_canary_retire_max)
        """Which pages failed, and whether they are too many."""
        self._recalls = Recalls(cache, requests)
        copies = CopyCheck(settings, cache, self._verify_copies)
        self._judgement = Judge(cache, requests, self._verify, copies.verified, self._was_condemned)
        self._seen_at = clock.now()
        """When the pages of all running requests were last noted as verified."""
        self._names = names
        self.faults = faults
        """Faults on purpose; None where the settings neither ask for some nor allow orders."""
        self.sweep_slots = _SWEEP_SLOTS
        """Slots of one sweep at most, by part."""
        self._cursor = dict.fromkeys(parts, 0)
        self._swept_at = dict.fromkeys(parts, clock.now())
        self._sweep_passes = 0
        self._outside: dict[str, Verdict] = {}
        """What follows from findings outside of a step; given out with the next one."""
        self._numbers = 0
        self._answers: dict[int, dict[int, CanaryAnswer]] = {}
        """By number of the command and rank, of commands that wait for all ranks."""
        cache.keep_times(clock)
        line.subscribe(CanaryAnswer, self._take)
        line.subscribe(HostFindings, lambda rank, found: findings.add_host(rank, found, self.steps))
        line.command(StartCanary())

    # ---- the step -----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Command what ranks check before they run this plan: a sweep, where it is due."""
        self.steps += 1
        self._judgement.begin(self.steps, self._cursor)
        self._note_verified(plan)
        self.health.look()
        interval = self._settings.kv_canary_sweep_interval
        budgets = self._due_by_time()
        if interval and self.steps % interval == 0:
            budgets = dict.fromkeys(self._cursor, self.sweep_slots)
        if self.faults is not None:
            self.faults.begin(sweeps=bool(budgets))
        self._sweep(budgets)

    def idle(self) -> None:
        """No step is under way: sweep what is due by time. Waits for all ranks where something is."""
        self.health.look()
        budgets = self._due_by_time()
        if budgets:
            # Pages that were loaded or handed out since the last step began are swept too.
            self._judgement.begin(self.steps, self._cursor)
            self._sweep(budgets)
            self._counts()

    def judge(self, findings: Iterable[tuple[int, object]]) -> Sequence[Verdict]:
        """What follows from what ranks found in a step, before it is committed: (rank, Finding or RingOverflow).

        A line is logged for each new incident. Unless the mode is log, pages whose KV is wrong are condemned, and the
        requests that they touch are named (judge.py). Raises KvViolation: nothing can be named.
        """
        found = tuple(findings)
        if found:
            self._judge_later(self._filed(found))
        return self._take_outside()

    def check(self, rows: Mapping[str, OwnPages]) -> RowsVerdict:
        """Requests are about to end (by id: their tokens whose KV is computed, and their pages): verify all of it, and
        name those that must not. Waits for all ranks. Raises as CommandLine.pump and `judge`. Cost: one read of these
        pages."""
        answers = self._verify_rows(rows)
        self._follow(self._filed(_findings(answers)))
        slots = dict(zip(rows, slots_checked(answer.checked for _, answer in answers), strict=True))
        return RowsVerdict(verdicts=self._take_outside(), slots=slots)

    def arrived(self, rid: str, own: OwnPages | None) -> ArrivalVerdict:
        """The last pages of a prompt came by handoff: whether they may be used; in mode log they always may. Waits
        until all ranks have checked them. Raises as CommandLine.pump and `judge`."""
        if own is None:
            return ArrivalVerdict()
        answers = self._verify_rows({rid: own}, is_arrival=True)
        self._follow(self._filed(_findings(answers)), is_arrival=True)
        verdict = self._outside.pop(rid, None)
        (slots,) = slots_checked(answer.checked for _, answer in answers)
        return ArrivalVerdict(reason="" if verdict is None else verdict.reason, slots=slots)

    def heard(self, finding: HandoffFinding) -> None:
        """The canary of another engine found wrong KV on a page that a handoff moved between it and this one. Where it
        ended the handoff for it, it says so twice, and knows the place the second time."""
        self._findings.heard(finding)
        if finding.is_recall and self._raises:
            verdicts, others = self._recalls.heard(finding)
            self._outside = {each.rid: each for each in verdicts} | self._outside
            self._findings.untold += others

    def take_findings(self) -> list[HandoffFinding]:
        """What other engines are to be told, since the last call: of each handoff, part and reason the first."""
        return self._findings.take_untold()

    # ---- reports ------------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """For `GET /canary`. Waits for all ranks."""
        answers, settings = self._counts(), self._settings
        view = {
            "mode": settings.kv_canary,
            "real_data": settings.kv_canary_real_data,
            "stride": coverage_stride(settings.kv_canary_coverage),
            "steps": self.steps,
            "sweep_passes": self._sweep_passes,
            "slots_due": sum(each.slots_due for _, each in answers),
            "slots_checked": sum(each.slots_checked for _, each in answers),
            "last_verified_seconds": self._last_verified(),
            "checks": by_check(answer for _, answer in answers),
            "violations": self.violations.total,
            "pages": self.health.view(),
            **self._findings.view(),
        }
        if self._line.size > 1:
            view["ranks"] = [
                {"rank": self._names[rank], "slots_due": each.slots_due, "slots_checked": each.slots_checked,
                 "violations": each.total} for rank, each in answers
            ]  # fmt: skip
        return view

    @property
    def mode(self) -> str:
        """log, raise or heal."""
        return self._settings.kv_canary

    def counts(self) -> dict[str, int]:
        """How much was found so far. Waits for nothing."""
        return {**self._findings.totals(), "failed_pages": len(self._cache.tiers.quarantine.failures),
                "sweep_passes": self._sweep_passes, "steps": self.steps}  # fmt: skip

    def story(self) -> dict[str, Any]:
        """Incidents, what other engines told, faults planted, pages that failed: those of `view` that take no rank."""
        return {"pages": self.health.view(), **self._findings.view()}

    def refresh(self, metrics: Metrics) -> None:
        """Bring the canary's counters up to now, for a scrape. Waits for all ranks."""
        answers = self._counts()
        self._findings.refresh(metrics)
        due, checked = sum(each.slots_due for _, each in answers), sum(each.slots_checked for _, each in answers)
        metrics.set("kv_canary_slots", due, "due")
        metrics.set("kv_canary_slots", checked, "checked")
        metrics.set("kv_canary_coverage_ratio", checked / due if due else 1.0)
        for leg, counts in by_check(answer for _, answer in answers).items():
            metrics.set("kv_canary_checks", counts["checked"], leg)
        metrics.set("kv_canary_overhead_seconds", sum(each.seconds for _, each in answers))
        for page, seconds in self._last_verified().items():
            metrics.set("kv_canary_last_verified_seconds", seconds, page)
        metrics.set("kv_canary_sweep_passes", self._sweep_passes)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _note_verified(self, plan: StepPlan) -> None:
        """A request is verified whole in a step that says so, as its first one does, and at least once in so many steps
        as coverage says: noted for the first kind at once, for all of them about once in a second."""
        now = self._clock.now()
        is_time = now - self._seen_at >= _SEEN_S
        if is_time:
            self._seen_at = now
        noted = [work.rid for work in plan.work if is_time or work.whole]
        for part, pages in self._requests.rows_of(noted).items() if noted else ():
            self._cache.seen(part, pages)

    def _last_verified(self) -> dict[str, float]:
        """Seconds since cached pages of the device were verified last: of the oldest, and the median."""
        ages = self._cache.ages()
        both = (float(ages.max()), float(np.median(ages))) if len(ages) else (0.0, 0.0)
        return {"oldest": both[0], "median": both[1]}

    def _due_by_time(self) -> dict[Part, int]:
        """Slots that a sweep should verify now, by part, so that a pass over each takes no longer than is asked for."""
        period, now, budgets = self._settings.kv_canary_sweep_seconds / _SWEEP_HASTE, self._clock.now(), {}
        for part, since in self._swept_at.items() if period else ():
            size, pages = self._cache.page_size, self._cache.ledgers[Tier.DEVICE, part].page_count
            due = int(size * pages * (now - since) / period)
            if due >= max(size, min(_SWEEP_SLOTS_MIN, size * pages // 16)):
                whole = max(1, min(due, self.sweep_slots) // size)  # pages: the time of what is left is not spent
                budgets[part] = whole * size
                # What is more than one sweep stays due, up to one pass.
                self._swept_at[part] = max(since + whole * period / pages, now - period)
        return budgets

    def _sweep(self, budgets: Mapping[Part, int]) -> None:
        """Have all ranks verify the next cached slots that no request uses: so many of each part, its free ones too."""
        for part, budget in budgets.items():
            found = self._cache.walk(self._cursor[part], budget, part=part, unlocked_only=True)
            self._cursor[part] = found.cursor
            size = self._cache.page_size
            self._cache.seen(part, (found.slots[::size] // size).astype(np.int32))
            ends_pass = found.cursor == 0
            self._sweep_passes += ends_pass
            self._line.command(
                SweepSlots(
                    part=part, slots=found.slots, positions=found.positions, previous=found.previous,
                    tokens=found.tokens, ends_pass=ends_pass,
                )
            )  # fmt: skip

    def _judge_later(self, violations: Sequence[Violation]) -> None:
        """What follows from these violations is given out with the next step, or with this one."""
        self._add(self._judgement.step(violations) if self._raises else ())

    def _follow(self, violations: Sequence[Violation], *, is_arrival: bool = False) -> None:
        """The same for what was found on the pages of requests that were checked by themselves."""
        self._add(self._judgement.rows(violations, is_arrival=is_arrival) if self._raises else ())

    def _add(self, verdicts: Iterable[Verdict]) -> None:
        self._outside = {each.rid: each for each in verdicts} | self._outside

    def _take_outside(self) -> Sequence[Verdict]:
        if not self._outside:
            return ()
        verdicts, self._outside = tuple(self._outside.values()), {}
        return verdicts

    def _verify(self, rows: Mapping[str, OwnPages]) -> list[Violation]:
        """Have all ranks verify these pages of requests; what they found there is filed."""
        return self._filed(_findings(self._verify_rows(rows)))

    def _verify_rows(self, rows: Mapping[str, OwnPages], *, is_arrival: bool = False) -> list[tuple[int, CanaryAnswer]]:
        pages = tuple(RowPages(rid=rid, spans=own.spans, tokens=own.tokens, row=own.row) for rid, own in rows.items())
        return self._ask(CheckRows(number=self._number(), rows=pages, is_arrival=is_arrival))

    def _verify_copies(self, copies: tuple[HostPages, ...]) -> list[CanaryAnswer]:
        """Have all ranks verify these pages of the host tier."""
        return [answer for _, answer in self._ask(CheckHost(number=self._number(), copies=copies))]

    def _overflowed(self, rank: int, overflow: RingOverflow) -> None:
        """Anything that the check looked at may be wrong: its pages are condemned, its requests must not go on. Where
        KV of some never came from the host, the violations are of that: the others are verified by themselves."""
        if unloaded := self._requests.unloaded() & set(overflow.rids):
            rows = {rid: self._requests.computed_pages(rid) for rid in overflow.rids if rid not in unloaded}
            known = {rid: own for rid, own in rows.items() if own is not None and len(own.tokens)}
            self._follow(self._verify(known) if known else ())
            return
        where = f" of rank {self._names[rank]}" if self._names[rank] else ""
        reason = (
            f"KV integrity: {overflow.lost} violations more than the ring has rows for, {overflow.check},"
            f" part {overflow.part.name}{where} (step {overflow.step})"
        )
        _log.error(
            "kv_canary overflow: part=%s check=%s lost=%d step=%d reqs=%s pages=%d",
            overflow.part.name, overflow.check.replace(" ", "_"), overflow.lost, overflow.step,
            ",".join(overflow.rids) or "-", len(overflow.pages),
            extra={"rids": overflow.rids, "step": overflow.step},
        )  # fmt: skip
        self.violations.overflowed(overflow.lost)
        if not self._raises:
            return
        suspect = {overflow.part: overflow.pages} if len(overflow.pages) else self._requests.rows_of(overflow.rids)
        for part, pages in suspect.items():
            for page in np.unique(pages):  # one by one: each has a prefix of its own, which peers are told
                condemned = self._cache.condemn(part, page[None], counts=False)
                self._findings.untold += self._recalls.suspected(part, condemned, reason)
        self._add(Verdict(rid=rid, reason=reason) for rid in overflow.rids)

    def _filed(self, findings: Iterable[tuple[int, object]]) -> list[Violation]:
        """The violations, with what the leader knows of their pages. They and the injections are kept for reports.
        Nothing is said of KV that never came from the host."""
        violations, unloaded = [], self._requests.unloaded()
        users_of = remember(self._requests.users_of)  # a wrong page has many wrong slots, of several stamps each
        for rank, finding in findings:
            if isinstance(finding, Injection):
                self._findings.planted(rank, finding)
                continue
            if isinstance(finding, RingOverflow):
                self._overflowed(rank, finding)
                continue
            assert isinstance(finding, Violation), f"canary: rank {rank} found {finding!r}, expected a Violation"
            if finding.rid in unloaded:
                continue
            violations.append(self._findings.add(rank, finding, users_of))
        return violations

    def _was_condemned(self, violation: Violation, condemned: Condemned) -> None:
        if not condemned.pages:
            return
        self.health.note(violation)
        self._findings.untold += self._recalls.told(violation, condemned)
        _log.error(
            "kv_canary condemned: part=%s page=%d position=%d tokens=%d pages=%d kept_on_host=%d",
            violation.part.name, violation.page, violation.position, condemned.tokens,
            sum(map(len, condemned.pages.values())), condemned.kept,
        )  # fmt: skip

    def _counts(self) -> list[tuple[int, CanaryAnswer]]:
        """What all ranks have checked so far. What their sweeps found meanwhile is filed."""
        answers = self._ask(TellCounts(number=self._number()))
        self._judge_later(self._filed(_findings(answers)))
        return answers

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, command: CheckRows | CheckHost | TellCounts) -> list[tuple[int, CanaryAnswer]]:
        """What every rank answers, by rank. Waits until all have obeyed what was commanded before."""
        heard = self._answers[command.number] = {}
        self._line.command(command)
        self._line.pump()
        while len(heard) < self._line.size:
            self._line.pump(_LOOK_S)
        return sorted(self._answers.pop(command.number).items())

    def _take(self, rank: int, answer: CanaryAnswer) -> None:
        """Keep an answer; nothing is judged here, as it may come in the middle of another pump."""
        for injection in answer.injections:
            self._findings.planted(rank, injection)
        self._answers[answer.number][rank] = answer


def _findings(answers: Iterable[tuple[int, CanaryAnswer]]) -> Iterator[tuple[int, object]]:
    return ((rank, each) for rank, answer in answers for each in (*answer.violations, *answer.overflows))


def perturb(lead: CanaryLead | None, order: bytes = b"") -> dict[str, Any]:
    """Have faults planted by an order (FaultOrder as JSON), where there is one; for `/canary/perturb`, what is planted.

    Raises ConfigError, BadRequest: the settings do not allow it, or the order makes no sense in this engine.
    """
    faults = None if lead is None else lead.faults
    if order:
        if faults is None:
            raise ConfigError(
                "canary: this engine plants no faults, expected one started with --kv-canary log, raise or heal and"
                " --kv-canary-perturb-api"
            )
        faults.order(_ORDERS.decode(order))
    injected = [] if lead is None else [injection.as_json() for injection in lead.injections]
    view = {"enabled": False, "active": False, "perturb": {}} if faults is None else faults.view()
    return {**view, "injected": injected}
