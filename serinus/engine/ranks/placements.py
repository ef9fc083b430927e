"""Placements: where requests are, as decisions. What the scheduler journals becomes PLACE and DROP."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from serinus.parallel import DecisionKind, DecisionLog

__all__ = ["Placements"]

_BOOTSTRAP = "bootstrap"


class Placements:
    """The leader's view of queues, for its log. A request that a peer asked for and has not granted yet is counted as
    bootstrapping, wherever the scheduler has it. Costs O(changes), and O(ungranted) where there are any."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._queue_of: dict[str, str] = {}
        """What the scheduler said."""
        self._ungranted: set[str] = set()
        """Those among them that are placed as bootstrapping."""

    def take(self, moves: Sequence[tuple[str, str]], ungranted: Collection[str]) -> None:
        """Write what changed into the log: `moves` are (rid, queue) in their order, queue empty = gone."""
        for rid, queue in moves:
            self._move(rid, queue, ungranted)
        if not ungranted and not self._ungranted:
            return
        for rid in [rid for rid in self._ungranted if rid not in ungranted]:
            self._ungranted.discard(rid)
            self._log.decide(DecisionKind.PLACE, rid, queue=self._queue_of[rid])
        for rid in ungranted:
            if rid in self._queue_of and rid not in self._ungranted:
                self._ungranted.add(rid)
                self._log.decide(DecisionKind.PLACE, rid, queue=_BOOTSTRAP)

    def _move(self, rid: str, queue: str, ungranted: Collection[str]) -> None:
        if not queue:
            if self._queue_of.pop(rid, None) is not None:
                self._ungranted.discard(rid)
                self._log.decide(DecisionKind.DROP, rid)
            return
        self._queue_of[rid] = queue
        if rid not in self._ungranted and rid not in ungranted:
            self._log.decide(DecisionKind.PLACE, rid, queue=queue)
        elif rid not in self._ungranted:
            self._ungranted.add(rid)
            self._log.decide(DecisionKind.PLACE, rid, queue=_BOOTSTRAP)
