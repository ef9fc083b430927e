"""Findings: what ranks found and planted, with what the leader knows of the pages; kept for reports and for peers.

A rank knows slots and bytes; owner, users and history of a page are the leader's. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from serinus.cache import PrefixCache, Tier
from serinus.canary.commands import Finding, HostFindings
from serinus.canary.incidents import IncidentLog
from serinus.canary.judge import Requests, reason_of
from serinus.canary.perturb import Injection
from serinus.canary.violation import Violation, ViolationLog, possible_counts
from serinus.core.clock import Clock
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.kernels import Reason

_INJECTIONS_KEPT: Final = 1024
_HEARD_KEPT: Final = 256
_TOLD_KEPT: Final = 4096
_log = get_logger("canary")


class Findings:
    """Those of one engine and, in words, those that other engines tell it."""

    def __init__(
        self, cache: PrefixCache, requests: Requests, clock: Clock, parts: Sequence[Part], names: Sequence[str]
    ) -> None:
        """`parts`, `names`: as CanaryLead has them."""
        self.violations = ViolationLog()
        self.incidents = IncidentLog()
        """The violations, those of one slot, reason and owner as one."""
        self.injections: list[Injection] = []
        """The latest faults that ranks planted on purpose."""
        self.listeners: list[Callable[[Finding], None]] = []
        """Called with every violation and every planted fault, as ranks tell them, with what is known here."""
        self._cache, self._requests, self._clock = cache, requests, clock
        self._names = names
        self._possible = possible_counts(parts)
        self._injected: Counter[str] = Counter()
        """How many there ever were, by mode."""
        self._heard: dict[tuple[str, str, str], HandoffFinding] = {}
        """What canaries of other engines told, by engine, handoff and reason; the latest."""
        self.untold: list[HandoffFinding] = []
        """What other engines are to be told."""
        self._told: dict[tuple[str, Part, Reason], None] = {}
        """Handoffs of which the other engine was told, part by part and reason by reason; the latest."""

    def add(self, rank: int, finding: Violation, users_of: Callable[[Part, int], tuple[str, ...]]) -> Violation:
        """A violation on the device, with what the leader knows of its page; a line is logged where it begins an
        incident. The history of the page is that of the incident's beginning. `users_of`: as Requests has it."""
        part, page = finding.part, finding.page
        ledger = self._cache.ledgers[Tier.DEVICE, part]
        owner = ledger.describe(int(ledger.owner_P[page]))
        client = self._requests.client_of(finding.rid) if finding.rid else ""
        known = replace(
            finding, rank=self._names[rank], owner=owner, users=users_of(part, page),
            client="" if client == finding.rid else client,
        )  # fmt: skip
        incident = self.incidents.same(known)
        if incident is not None:
            incident.again(known, self._clock.unix())
            return self._file(replace(known, history=incident.first.history))
        known = replace(known, history=ledger.history(page))
        trace = ledger.trace_of(page)
        self.incidents.begin(known, self._clock.unix(), None if trace is None else trace.as_json(page))
        _log.error("%s", known.line(), extra=_fields(known))
        if trace is not None:
            self._tell(known, trace)
        return self._file(known)

    def add_host(self, rank: int, found: HostFindings, step: int) -> None:
        """Host pages that were not stored, or not believed: the cache drops them by the answer of the storage, so they
        are only reported."""
        for finding in found.violations:
            ledger = self._cache.ledgers[Tier.HOST, finding.part]
            owner = ledger.describe(int(ledger.owner_P[finding.page]))
            known = self._file(replace(finding, step=step, rank=self._names[rank], owner=f"host {owner}"))
            incident = self.incidents.same(known)
            if incident is not None:
                incident.again(known, self._clock.unix())
                continue
            known = replace(known, history=ledger.history(finding.page))
            self.incidents.begin(known, self._clock.unix(), None)
            _log.error("%s", known.line(), extra=_fields(known))

    def planted(self, rank: int, injection: Injection) -> None:
        """A rank planted a fault on purpose."""
        self._injected[injection.mode] += 1
        self.injections.append(replace(injection, rank=self._names[rank]))
        del self.injections[:-_INJECTIONS_KEPT]
        self._announce(self.injections[-1])

    def heard(self, finding: HandoffFinding) -> None:
        """The canary of another engine found wrong KV on a page that a handoff moved between it and this one. Where it
        ended the handoff for it, it says so twice, and knows the place the second time."""
        key = finding.engine, finding.xid, finding.reason
        earlier = self._heard.get(key)
        if earlier is None:
            _log.error(
                "kv_canary told: by=%s handoff=%s req=%s part=%s position=%d reason=%s",
                finding.engine, finding.xid, finding.rid, finding.part or "-", finding.position,
                finding.reason.replace(" ", "_"), extra={"rid": finding.rid, "xid": finding.xid, "by": finding.engine},
            )  # fmt: skip
        if earlier is None or not earlier.part:
            self._heard[key] = finding
        if len(self._heard) > _HEARD_KEPT:
            del self._heard[next(iter(self._heard))]

    def take_untold(self) -> list[HandoffFinding]:
        """What other engines are to be told, since the last call: of each handoff, part and reason the first."""
        untold, self.untold = self.untold, []
        return untold

    def totals(self) -> dict[str, int]:
        """How many there ever were."""
        return {
            "violations": self.violations.counts.total(), "incidents": self.incidents.total,
            "told": len(self._heard), "injected": self._injected.total(),
        }  # fmt: skip

    def view(self) -> dict[str, Any]:
        """Their part of `GET /canary`."""
        return {
            "counts": [
                {"reason": reason, "tag": tag, "count": count}
                for (reason, tag), count in sorted(self.violations.counts.items())
            ],
            "incidents_total": self.incidents.total,
            "incidents": [incident.as_json() for incident in self.incidents],
            "told": [
                {"by": each.engine, "xid": each.xid, "rid": each.rid, "part": each.part, "position": each.position,
                 "reason": each.reason}
                for each in self._heard.values()
            ],
            "injected_total": self._injected.total(),
            "injected": [injection.as_json() for injection in self.injections],
        }  # fmt: skip

    def refresh(self, metrics: Metrics) -> None:
        """Bring their counters up to now."""
        for reason, tag in self._possible | self.violations.counts.keys():
            metrics.set("kv_canary_violations", self.violations.counts[reason, tag], reason, tag)
        metrics.set("kv_canary_incidents", self.incidents.total)
        for name, number in self._injected.items():
            metrics.set("kv_faults_injected", number, name)

    def _file(self, violation: Violation) -> Violation:
        self.violations.add(violation)
        self._announce(violation)
        return violation

    def _announce(self, finding: Finding) -> None:
        for hear in self.listeners:
            hear(finding)

    def _tell(self, violation: Violation, trace: PageTrace) -> None:
        key = trace.xid, violation.part, violation.reasons
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > _TOLD_KEPT:
            del self._told[next(iter(self._told))]
        self.untold.append(
            HandoffFinding(
                engine=trace.engine, peer=trace.peer, xid=trace.xid, rid=trace.rid, part=violation.part.name,
                position=violation.position, reason=reason_of(violation),
            )
        )  # fmt: skip


def _fields(violation: Violation) -> dict[str, Any]:
    """What a line about it has as fields."""
    return {"rid": violation.rid, "step": violation.step, "violation": violation.as_json()}
