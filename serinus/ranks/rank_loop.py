"""RankLoop: the loop of a rank that does not lead. Wait for a header, check it, obey, answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from serinus.core.errors import FrameError, InvariantError
from serinus.ranks.body import RankBody
from serinus.ranks.codec import Header, decode_header, encode_answers, make_reader
from serinus.ranks.line import LineReader
from serinus.wire import Frame, Parts

_BUSY_S: Final = 0.001
_IDLE_S: Final = 0.5


class LeaderLink(Protocol):
    """The end of the line at a rank that does not lead (RankLink of links.py, or a simulated one)."""

    def headers(self, wait_s: float) -> Sequence[Frame | Parts]:
        """What has come, in order; waits up to `wait_s` for the first. Raises PeerGone: the leader is gone, and all
        that came before its end was given out."""

    def send(self, parts: Parts) -> None:
        """Send answers to the leader."""


class RankLoop:
    """One rank behind its leader's line."""

    def __init__(self, body: RankBody, link: LeaderLink, ends: Sequence[Callable[[], object]] = ()) -> None:
        """`ends`: called by `close`."""
        self.body = body
        self._line = LineReader(body.name)
        self._reader = make_reader()
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
            self._link.send(encode_answers((), f"{error}; commands of the rank: {self.body.command_tail()}"))
            raise

    def turn(self, wait_s: float) -> None:
        """One round: obey and answer the headers that came, then tell what ended by itself.

        A copy that ended in a step is told before the next step: the leader commits it meanwhile.
        """
        for came in self._link.headers(wait_s):
            answers = self.body.obey(self._line.take(self._header(came)))
            if self.body.stopped:
                return
            self.answer([*answers, *self.body.news()])
        self.answer(self.body.news())

    def answer(self, answers: Sequence[object]) -> None:
        """Tell the leader; nothing is sent where there is nothing to tell."""
        if answers:
            self._link.send(encode_answers(answers))

    def close(self) -> None:
        """Give back what the rank holds."""
        self.body.close()
        for end in self._ends:
            end()

    def _header(self, came: Frame | Parts) -> Header:
        try:
            return decode_header(came, self._reader)
        except FrameError as error:
            name = self.body.name
            raise InvariantError(f"ranks: rank {name} got what it cannot read from its leader: {error}") from None
