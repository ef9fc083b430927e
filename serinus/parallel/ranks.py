"""What a rank keeps of each request, moved by decisions alone: its queues (for the gauges) and what it began for it.

Queues that are worked on exist on the leader only; here they are counted, so that every rank shows the gauges and
nothing is forgotten anywhere: a request that only ever waited to be bootstrapped here is let go like any other.
"""

from __future__ import annotations

from typing import Final, Protocol

from serinus.core.errors import InvariantError
from serinus.parallel.decisions import Decision, DecisionKind

__all__ = ["QUEUES", "RankTable", "RankWorker"]

QUEUES: Final = {
    "bootstrap": "num_prefill_bootstrap_queue_reqs",
    "inflight": "num_prefill_inflight_queue_reqs",
    "prealloc": "num_decode_prealloc_queue_reqs",
    "transfer": "num_decode_transfer_queue_reqs",
    "waiting": "num_queue_reqs",
    "running": "num_running_reqs",
}
"""Queue -> the gauge that counts it."""


class RankWorker(Protocol):
    """What a rank does for a request besides computing."""

    def placed(self, rid: str, queue: str) -> None:
        """It entered a queue: begin what belongs to that (a prefetch from storage while it is bootstrapping...)."""
        ...

    def dropped(self, rid: str, code: str) -> None:
        """It is over: release whatever was begun. Called once."""
        ...


class RankTable:
    """One rank's requests."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        self._queue_of: dict[str, str] = {}
        self._counts = dict.fromkeys(QUEUES, 0)
        self.batches: list[tuple[str, ...]] = []
        """The batches it was told to run and has not taken yet, in order."""

    def apply(self, decision: Decision) -> None:
        """Do what was decided. Raises InvariantError for a batch with a request that is not here, or an odd queue."""
        match decision.kind:
            case DecisionKind.PLACE:
                queue = str(decision.payload.get("queue"))
                if queue not in QUEUES:
                    raise InvariantError(f"parallel: {decision} names queue {queue!r}, expected one of {list(QUEUES)}")
                self._leave(decision.rid)
                self._queue_of[decision.rid] = queue
                self._counts[queue] += 1
                self._worker.placed(decision.rid, queue)
            case DecisionKind.DROP:
                if self._leave(decision.rid):
                    self._worker.dropped(decision.rid, str(decision.payload.get("code", "")))
            case DecisionKind.RUN:
                found = decision.payload.get("batch")
                batch = tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()
                missing = [rid for rid in batch if rid not in self._queue_of]
                if missing or not batch:
                    raise InvariantError(f"parallel: {decision} names {missing}, expected requests that are here")
                self.batches.append(batch)

    def __contains__(self, rid: object) -> bool:
        return rid in self._queue_of

    def __len__(self) -> int:
        return len(self._queue_of)

    def take_batch(self) -> tuple[str, ...]:
        """The next batch to run. Raises InvariantError where none was decided."""
        if not self.batches:
            raise InvariantError("parallel: a batch is to be run, expected a decision for it")
        return self.batches.pop(0)

    @property
    def counts(self) -> tuple[int, ...]:
        """Requests in each of QUEUES, in their order."""
        return tuple(self._counts.values())

    def gauges(self) -> dict[str, int]:
        """All gauges of QUEUES, those at 0 too."""
        return {gauge: self._counts[queue] for queue, gauge in QUEUES.items()}

    def _leave(self, rid: str) -> bool:
        queue = self._queue_of.pop(rid, None)
        if queue is None:
            return False
        self._counts[queue] -= 1
        return True
