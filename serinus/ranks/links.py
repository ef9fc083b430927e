"""The line between the ranks of one engine over zmq: headers down, answers up, in order, to and from each rank.

The leader listens, the other ranks connect and say which rank they are. A connection that breaks is a rank that is
lost: both ends raise PeerGone. Knows frames and ranks; what commands and answers mean, codec.py and body.py know.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Final

from serinus.core.clock import Clock
from serinus.core.errors import FrameError, InvariantError, PeerGone
from serinus.core.log import get_logger
from serinus.parallel import Mesh
from serinus.ranks.codec import Answers, Header, decode_answers, decode_header, encode_answers, make_reader
from serinus.wire import Arrived, Gone, Parts, ZmqChannel, decode, encode
from serinus.wire.messages import RankHello

__all__ = ["LeaderLinks", "RankLink"]

_LEADER: Final = "leader"
_LOOK_S: Final = 0.05
_FAREWELL_S: Final = 2.0
"""Ranks get so long to hang up once they were told to stop."""
_log = get_logger("engine")


def _unknown() -> str:
    return ""


class LeaderLinks:
    """The leader's end (RankLinks of line.py)."""

    def __init__(
        self, bind: str, *, mesh: Mesh, clock: Clock, token: bytes = b"", why: Callable[[], str] = _unknown
    ) -> None:
        """
        Args:
            bind: where ranks connect, `ipc://path` or `tcp://host:port` (port 0 = any).
            token: the secret that a rank must know.
            why: tells why a rank was lost, in words; empty = unknown.
        Raises ConfigError: the address cannot be bound.
        """
        self.mesh = mesh
        self.why = why
        self._token = token
        self._clock = clock
        self._channel = ZmqChannel(bind, clock=clock)
        self._rank_of: dict[str, int] = {}
        self._peer_of: dict[int, str] = {}
        self._reader = make_reader()
        self._waiting: list[tuple[int, Answers]] = []
        self._closed = False

    @property
    def address(self) -> str:
        """The address where ranks connect."""
        return self._channel.address

    @property
    def channels(self) -> Sequence[ZmqChannel]:
        return (self._channel,)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not said hello."""
        return [rank for rank in range(1, self.mesh.size) if rank not in self._peer_of]

    def gather(self, check: Callable[[], object], wait_s: float) -> None:
        """Wait until all ranks have said hello; `check` raises where one never will. Raises PeerGone after `wait_s`."""
        end = self._clock.now() + wait_s
        while self.missing:
            check()
            self._waiting += self._poll(_LOOK_S)
            if self.missing and self._clock.now() > end:
                names = ", ".join(map(self.mesh.name, self.missing))
                raise PeerGone(f"ranks: no hello from rank {names} within {wait_s:.0f} s, expected one")

    def send(self, rank: int, parts: Parts) -> None:
        if (peer := self._peer_of.get(rank)) is not None:
            self._channel.send(peer, parts)

    def answers(self, wait_s: float = 0.0) -> list[tuple[int, Answers]]:
        found, self._waiting = self._waiting, []
        return found + self._poll(0.0 if found else wait_s)

    def close(self, wait_s: float | None = None) -> None:
        """Hang up once the ranks have: a connection that breaks loses what they have not read, the command to stop
        among it. Waits for them up to `wait_s`, None = two seconds. May be called again."""
        if self._closed:
            return
        self._closed = True
        end = self._clock.now() + (_FAREWELL_S if wait_s is None else wait_s)
        while self._rank_of and (left_s := end - self._clock.now()) > 0:
            for event in self._channel.poll(left_s):
                if isinstance(event, Gone):
                    self._rank_of.pop(event.peer, None)
        self._peer_of.clear()
        self._channel.close()

    def _poll(self, wait_s: float) -> list[tuple[int, Answers]]:
        found: list[tuple[int, Answers]] = []
        for event in self._channel.poll(wait_s):
            rank = self._rank_of.get(event.peer)
            if isinstance(event, Gone):
                if rank is not None:
                    del self._rank_of[event.peer]
                    del self._peer_of[rank]
                    failed = [each for each in (*self._waiting, *found) if each[1].failure]
                    if failed:
                        return failed  # the reason it gave says more than the end of its connection
                    raise PeerGone(self.why() or f"ranks: rank {self.mesh.name(rank)} is gone ({event.reason})")
            elif rank is None:
                self._greet(event)
            else:
                found.append((rank, self._read(event, rank)))
        return found

    def _read(self, event: Arrived, rank: int) -> Answers:
        try:
            return decode_answers(event.parts, self._reader)
        except FrameError as error:
            raise InvariantError(f"ranks: rank {self.mesh.name(rank)} sent what cannot be read: {error}") from None

    def _greet(self, event: Arrived) -> None:
        try:
            hello = decode(event.parts).message
        except FrameError as error:
            _log.warning("ranks: a stranger on the ranks' line is sent away: %s", error)
            self._channel.disconnect(event.peer)
            return
        known = isinstance(hello, RankHello) and hmac.compare_digest(hello.token, self._token)
        if not isinstance(hello, RankHello) or not known or hello.rank not in self.missing:
            _log.warning("ranks: a stranger on the ranks' line is sent away, expected one of ranks %s", self.missing)
            self._channel.disconnect(event.peer)
            return
        self._rank_of[event.peer] = hello.rank
        self._peer_of[hello.rank] = event.peer


class RankLink:
    """The end of a rank that does not lead."""

    def __init__(self, address: str, *, mesh: Mesh, rank: int, clock: Clock, token: bytes = b"") -> None:
        """Connects to the leader and says hello."""
        self.mesh = mesh
        self.rank = rank
        self._gone = ""
        self._reader = make_reader()
        self._channel = ZmqChannel(clock=clock)
        self._channel.connect(_LEADER, address)
        self._channel.send(_LEADER, encode(RankHello(rank=rank, token=token)))

    def headers(self, wait_s: float) -> list[Header]:
        """What has come, in order; waits for the first.

        Raises PeerGone: the leader is gone, and all that came before its end was given out; InvariantError: a header
        cannot be read.
        """
        if self._gone:
            raise PeerGone(f"ranks: the leader of rank {self.mesh.name(self.rank)} is gone ({self._gone})")
        found: list[Header] = []
        for event in self._channel.poll(wait_s):
            if isinstance(event, Gone):
                self._gone = event.reason
                continue
            try:
                found.append(decode_header(event.parts, self._reader))
            except FrameError as error:
                name = self.mesh.name(self.rank)
                raise InvariantError(f"ranks: rank {name} got what it cannot read from its leader: {error}") from None
        return found

    def answer(self, answers: Sequence[object]) -> None:
        """Tell the leader; nothing is sent where there is nothing to tell."""
        if answers:
            self._channel.send(_LEADER, encode_answers(answers))

    def fail(self, reason: str) -> None:
        """Tell the leader that this rank cannot go on."""
        self._channel.send(_LEADER, encode_answers((), reason))

    def close(self) -> None:
        """Hang up; what was answered still leaves."""
        self._channel.close()
