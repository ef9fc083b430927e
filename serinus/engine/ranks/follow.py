"""Follower: the life of a rank that does not lead. Wait for a header, obey, answer; again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from serinus.core.errors import InvariantError
from serinus.engine.ranks.body import RankBody
from serinus.engine.ranks.group import FollowerGroup
from serinus.engine.ranks.orders import StepDone
from serinus.parallel import Report, ReportKind, StepHeader

__all__ = ["Follower"]

_BUSY_S: Final = 0.001
_IDLE_S: Final = 0.5


class Follower:
    """One rank behind its leader's line. `stats` and `info` may be read by another thread."""

    def __init__(
        self,
        body: RankBody,
        group: FollowerGroup,
        info: dict[str, Any] | None = None,
        ends: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`ends`: called by `close`."""
        self.body = body
        self.info = info or {}
        """What it has of the model, for people."""
        self._group = group
        self._ends = ends
        self._step = 0

    def run(self) -> None:
        """Obey until told to stop. Raises what breaks: InvariantError after the leader was told, PeerGone where the
        leader, or a rank it computes with, is gone."""
        try:
            while not self.body.stopped:
                self.turn(_BUSY_S if self.body.busy else _IDLE_S)
        except InvariantError as error:
            self._group.last_words(f"{error}; log of the rank: {self.body.log_tail()}")
            raise

    def turn(self, wait_s: float) -> None:
        """One round: what came is obeyed and answered, and what ended by itself is told."""
        for header in self._group.headers(wait_s):
            self._obey(header)
            if self.body.stopped:
                return
            self._tell()  # a copy that ended in this step: the leader commits it while the next one is computed
        self._tell()

    def stats(self) -> dict[str, float]:
        """Gauges and seconds, cumulative."""
        return self.body.stats()

    def close(self) -> None:
        """Give everything back and hang up."""
        for end in self._ends:
            end()
        self._group.close()

    def _obey(self, header: StepHeader) -> None:
        answers = self.body.obey(header)
        self._step = header.step
        for answer in answers:
            self._answer(answer)

    def _tell(self) -> None:
        for answer in self.body.news():
            self._answer(answer)

    def _answer(self, answer: object) -> None:
        kind = ReportKind.STEP if isinstance(answer, StepDone) else ReportKind.ANSWER
        self._group.report(Report(rank=self.body.rank, kind=kind, step=self._step, body=answer))
