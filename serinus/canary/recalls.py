"""Recalls: KV that was condemned here and was handed over, or had come by a handoff, is condemned at the peer too.

What an engine sent before it was found wrong was verified at its arrival by its own stamps; what was computed from it
afterwards, and sent, nothing there can tell from right. So a peer that took pages condemns what lies behind the wrong
page and came from here; a peer that sent it condemns the page itself, with all that it computed from it. KV is named by
its tokens: that holds after eviction, on every tier, and for pages of any size.
"""

from __future__ import annotations

from typing import Final

from serinus.cache import Condemned, PrefixCache, Tier
from serinus.canary.judge import Requests, Verdict, reason_of
from serinus.canary.violation import Violation
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.parts import Part

_BYTES_MAX: Final = 4 << 20
"""Of tokens in one recall: longer prefixes are named by their handoffs alone."""
_HANDOFFS_MAX: Final = 64
"""Handoffs that one condemned page recalls, the latest."""
_KEPT: Final = 4096


class Recalls:
    """Says what peers are to be told, and what follows from what they tell."""

    def __init__(self, cache: PrefixCache, requests: Requests) -> None:
        self._cache = cache
        self._requests = requests
        self._lowest: dict[tuple[str, str], int] = {}
        """By engine and handoff, the lowest position that was recalled: nothing is told twice, so no two engines can
        go on telling each other."""

    def told(self, violation: Violation, condemned: Condemned) -> list[HandoffFinding]:
        """What follows for peers from pages that were condemned for a violation here."""
        size = self._cache.page_size
        start = violation.position // size * size
        return self._findings(condemned, violation.part.name, start, reason_of(violation), but="")

    def suspected(self, part: Part, condemned: Condemned, reason: str) -> list[HandoffFinding]:
        """The same of a page that is one of those in which something is wrong; where nothing of it was cached, of all
        that its handoff moved."""
        start = max(0, condemned.prefix_tokens - self._cache.page_size)
        return self._findings(condemned, part.name, start, reason, but="")

    def heard(self, finding: HandoffFinding) -> tuple[list[Verdict], list[HandoffFinding]]:
        """A peer condemned KV: the requests that are touched here, and what other peers are to be told."""
        arrived_from = finding.engine if finding.is_source else ""
        condemned = self._cache.tiers.quarantine.condemn_prefix(
            finding.salt, finding.tokens, finding.position, arrived_from
        )
        touched = dict.fromkeys(
            rid for part, pages in condemned.pages.items() for rid in self._requests.users_of(part, pages)
        )
        touched |= dict.fromkeys(rid for rid in (finding.rid, finding.xid) if self._reaches(rid, finding.position))
        reason = f"recalled by {finding.engine}: {finding.reason}"
        others = self._findings(condemned, finding.part, finding.position, finding.reason, but=finding.peer)
        return [Verdict(rid=rid, reason=reason) for rid in touched], others

    def _reaches(self, rid: str, position: int) -> bool:
        """Whether a request of this engine has KV there."""
        own = self._requests.computed_pages(rid)
        return own is not None and len(own.tokens) > position

    def _findings(self, condemned: Condemned, part: str, start: int, reason: str, *, but: str) -> list[HandoffFinding]:
        """One for each handoff that moved condemned pages; the tokens go with the first over each connection, as
        engines may have one name. `but`: the connection over which it was told here; empty = it was found here."""
        found: list[HandoffFinding] = []
        named: set[str] = set()
        for trace in self._traces(condemned):
            position = self._position(trace, start, condemned)
            if trace.peer == but or position is None or not self._is_new(trace, position):
                continue
            tokens = b"" if trace.peer in named or len(condemned.prefix) > _BYTES_MAX else condemned.prefix
            named.add(trace.peer)
            found.append(
                HandoffFinding(
                    engine=trace.engine, peer=trace.peer, xid=trace.xid, rid=trace.rid, part=part, position=position,
                    reason=reason, salt=condemned.salt, tokens=tokens, is_source=not trace.arrived,
                    is_recall=True,
                )
            )  # fmt: skip
        return found

    def _traces(self, condemned: Condemned) -> list[PageTrace]:
        """The latest handoff of each condemned page, each once, the latest first."""
        ledgers = self._cache.ledgers
        traces = {
            trace.xid: trace
            for part, pages in condemned.pages.items()
            for trace in ledgers[Tier.DEVICE, part].traces_of(pages)
        }
        return list(traces.values())[:_HANDOFFS_MAX]

    def _position(self, trace: PageTrace, start: int, condemned: Condemned) -> int | None:
        """From where on the peer's KV is in doubt; None = nothing of it is."""
        if trace.arrived:
            return start
        size = self._cache.page_size
        behind = start + size
        return behind if trace.span.end * size > behind else None

    def _is_new(self, trace: PageTrace, position: int) -> bool:
        key = trace.engine, trace.xid
        if self._lowest.get(key, position + 1) <= position:
            return False
        self._lowest[key] = position
        if len(self._lowest) > _KEPT:
            del self._lowest[next(iter(self._lowest))]
        return True
