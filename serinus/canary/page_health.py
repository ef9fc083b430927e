"""Which pages failed, how often and on which ranks: one page, one rank, or everywhere. Retired pages are told here."""

from __future__ import annotations

from typing import Any, Final

from serinus.cache import PageState, PrefixCache, Tier
from serinus.canary.violation import Violation
from serinus.core.log import get_logger
from serinus.core.parts import Part

_LISTED: Final = 128
_STATE_MASK: Final = 7
_log = get_logger("canary")


class PageHealth:
    """Reads what the cache counts of its pages; keeps what it cannot know, the ranks."""

    def __init__(self, cache: PrefixCache, retired_max: int) -> None:
        """`retired_max`: with more pages that failed twice the engine is degraded."""
        self._cache = cache
        self._retired_max = retired_max
        self._ranks: dict[tuple[Part, int], dict[str, None]] = {}
        """By page that failed, the ranks on which it did."""
        self._told: set[tuple[Part, int]] = set()
        self.degraded = ""
        """Why no new requests should be sent here; empty = there is no reason."""

    def note(self, violation: Violation) -> None:
        """A violation that condemned its page."""
        self._ranks.setdefault((violation.part, violation.page), {})[violation.rank] = None

    def look(self) -> None:
        """Log pages that were retired since the last call, and once that there are too many. Cost: nothing of the pages
        that failed before."""
        quarantine = self._cache.tiers.quarantine
        for part, page in quarantine.retired - self._told if len(quarantine.retired) > len(self._told) else ():
            self._told.add((part, page))
            _log.error(
                "kv_canary retired: part=%s page=%d failures=%d ranks=%s retired=%d",
                part.name, page, quarantine.failures[part, page], self._named((part, page)), len(self._told),
            )  # fmt: skip
        if (worn := quarantine.worn) > self._retired_max and not self.degraded:
            self.degraded = (
                f"{worn} KV pages failed twice, expected at most {self._retired_max} (--kv-canary-retire-max):"
                f" {self._scope_words()}"
            )
            _log.error("kv_canary degraded: %s", self.degraded)

    def view(self) -> dict[str, Any]:
        """For `GET /canary`: the pages that failed, those that did most often first, and where that points to."""
        failed = sorted(self._failed().items(), key=lambda item: (-item[1], item[0]))
        return {
            "scope": self._scope(),
            "retired": len(self._cache.tiers.quarantine.retired),
            "retire_max": self._retired_max,
            "degraded": self.degraded,
            "by_rank": self._by_rank(),
            "failed": [
                {
                    "part": part.name,
                    "page": page,
                    "failures": count,
                    "state": self._state(part, page),
                    "ranks": list(self._ranks.get((part, page), ())),
                }
                for (part, page), count in failed[:_LISTED]
            ],
        }

    def _failed(self) -> dict[tuple[Part, int], int]:
        return {place: count for place, count in self._cache.tiers.quarantine.failures.items() if count}

    def _by_rank(self) -> dict[str, int]:
        """Pages that failed on each rank; a rank alone has the name ""."""
        counts: dict[str, int] = {}
        for place in self._failed():
            for rank in self._ranks.get(place, ()):
                counts[rank] = counts.get(rank, 0) + 1
        return counts

    def _scope(self) -> str:
        """none; page = one page alone; rank = several pages, of one of several ranks; everywhere."""
        pages, ranks = len(self._failed()), self._by_rank()
        if pages < 2:
            return "page" if pages else "none"
        return "rank" if len(ranks) == 1 and "" not in ranks else "everywhere"

    def _scope_words(self) -> str:
        return {
            "none": "none now", "page": "one page", "rank": f"all on rank {next(iter(self._by_rank()), '')}",
            "everywhere": f"{len(self._failed())} pages failed, not of one rank alone",
        }[self._scope()]  # fmt: skip

    def _named(self, place: tuple[Part, int]) -> str:
        return ",".join(rank.replace(" ", "_") for rank in self._ranks.get(place, ()) if rank) or "-"

    def _state(self, part: Part, page: int) -> str:
        owner = int(self._cache.ledgers[Tier.DEVICE, part].owner_P[page])
        return PageState(owner & _STATE_MASK).name.lower()
