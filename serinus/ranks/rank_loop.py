"""RankLoop: the loop of a rank that does not lead. Wait for a header, check it, obey, answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from serinus.core.errors import InvariantError
from serinus.ranks.body import RankBody
from serinus.ranks.codec import Header
from serinus.ranks.line import LineReader

__all__ = ["LeaderLink", "RankLoop"]

_BUSY_S: Final = 0.001
_IDLE_S: Final = 0.5


class LeaderLink(Protocol):
    """The end of the line at a rank that does not lead (RankLink of links.py, or a simulated one)."""

    def headers(self, wait_s: float) -> list[Header]:
        """What has come, in order; waits up to `wait_s` for the first. Raises PeerGone, InvariantError."""
        ...

    def answer(self, answers: Sequence[object]) -> None:
        """Tell the leader; nothing is sent where there is nothing to tell."""
        ...

    def fail(self, reason: str) -> None:
        """Tell the leader that this rank cannot go on."""
        ...

    def close(self) -> None:
        """Hang up; what was answered still leaves."""
        ...


class RankLoop:
    """One rank behind its leader's line."""

    def __init__(
        self,
        body: RankBody,
        link: LeaderLink,
        info: dict[str, Any] | None = None,
        ends: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`info`: what the rank has of the model, for people; `ends`: called by `close`."""
        self.body = body
        self.info = info or {}
        self._reader = LineReader(body.name)
        self._link = link
        self._ends = ends

    def run(self) -> None:
        """Obey until told to stop.

        Raises InvariantError after the leader was told; PeerGone: the leader, or a rank it computes with, is gone.
        """
        try:
            while not self.body.stopped:
                self.turn(_BUSY_S if self.body.busy else _IDLE_S)
        except InvariantError as error:
            self._link.fail(f"{error}; commands of the rank: {self.body.command_tail()}")
            raise

    def turn(self, wait_s: float) -> None:
        """One round: obey and answer the headers that came, then tell what ended by itself.

        A copy that ended in a step is told before the next step: the leader commits it meanwhile.
        """
        for header in self._link.headers(wait_s):
            answers = self.body.obey(self._reader.take(header))
            if self.body.stopped:
                return
            self._link.answer([*answers, *self.body.news()])
        self._link.answer(self.body.news())

    def close(self) -> None:
        """Give everything back and hang up."""
        self.body.close()
        for end in self._ends:
            end()
        self._link.close()
