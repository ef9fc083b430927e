"""The control line between the ranks of one engine, over zmq: headers down, reports up, in order, to and from each.

The leader listens, followers connect and say which rank they are. A connection that breaks is a rank that is lost: both
ends raise PeerGone. Knows frames and who is who; what orders and answers mean, codec.py and body.py know.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from serinus.core.clock import Clock
from serinus.core.errors import FrameError, InvariantError, PeerGone
from serinus.core.log import get_logger
from serinus.engine.ranks.codec import Reader, decode_header, decode_report, encode_header, encode_report
from serinus.parallel import Mesh, OrderTo, Report, ReportKind, StepHeader
from serinus.wire import Arrived, Gone, ZmqChannel, decode, encode
from serinus.wire.messages import RankHello

__all__ = ["FollowerGroup", "Followers", "RankGroup"]

_LEADER: Final = "leader"
_LOOK_S: Final = 0.05
_FAREWELL_S: Final = 2.0
"""Followers get so long to hang up once they were told to stop."""
_log = get_logger("engine")


class Followers(Protocol):
    """What a leader needs of those who lead."""

    why: Callable[[], str]
    """Who knows why a rank was lost, in words; empty = nobody."""

    @property
    def channels(self) -> Sequence[ZmqChannel]:
        """What to wait on for reports."""
        ...

    def announce(self, header: StepHeader) -> int:
        """Send to all followers; how many bytes that took."""
        ...

    def reports(self, wait_s: float) -> list[Report]:
        """What has come; waits so long for the first. Raises PeerGone: a rank is lost."""
        ...

    def close(self, wait_s: float | None = None) -> None:
        """Hang up, once the followers have; waits for them so long at most, None = as long as is fit."""
        ...


def _nobody() -> str:
    return ""


class RankGroup:
    """The leader's end."""

    def __init__(self, bind: str, *, mesh: Mesh, clock: Clock, token: bytes = b"") -> None:
        """
        Args:
            bind: where followers connect, `ipc://path` or `tcp://host:port` (port 0 = any).
            token: what they must know.
        Raises ConfigError: the address cannot be bound.
        """
        self.mesh = mesh
        self._token = token
        self._clock = clock
        self._channel = ZmqChannel(bind, clock=clock)
        self._rank_of: dict[str, int] = {}
        self._peer_of: dict[int, str] = {}
        self._reader = Reader()
        self._waiting: list[Report] = []
        self._closed = False
        self.why: Callable[[], str] = _nobody
        """Who knows why a rank was lost, in words; empty = nobody."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.mesh.size

    @property
    def address(self) -> str:
        """Where followers connect."""
        return self._channel.address

    @property
    def channels(self) -> Sequence[ZmqChannel]:
        return (self._channel,)

    @property
    def missing(self) -> list[int]:
        """Followers that have not said hello."""
        return [rank for rank in range(1, self.size) if rank not in self._peer_of]

    def gather(self, check: Callable[[], object], wait_s: float) -> None:
        """Wait until all followers have said hello; `check` raises where one never will. Raises PeerGone after
        `wait_s`."""
        end = self._clock.now() + wait_s
        while self.missing:
            check()
            self._waiting += self._poll(_LOOK_S)
            if self.missing and self._clock.now() > end:
                names = ", ".join(map(self.mesh.name, self.missing))
                raise PeerGone(f"engine: no word from rank {names} within {wait_s:.0f} s, expected hello")

    def announce(self, header: StepHeader) -> int:
        """Send to every follower; how many bytes that took."""
        parts = None
        size = 0
        own = any(isinstance(order, OrderTo) for order in header.orders)
        for rank, peer in self._peer_of.items():
            if parts is None or own:
                parts = encode_header(header, rank)
            self._channel.send(peer, parts)
            size += sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        return size

    def reports(self, wait_s: float = 0.0) -> list[Report]:
        """What has come, in order for each rank; waits for the first. Raises PeerGone: a rank is lost."""
        found, self._waiting = self._waiting, []
        return found + self._poll(0.0 if found else wait_s)

    def close(self, wait_s: float | None = None) -> None:
        """Hang up, once the followers have: a line that breaks loses what they have not read, the word to stop among
        it. Waits for them so long at most, None = two seconds. May be called again."""
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

    def _poll(self, wait_s: float) -> list[Report]:
        found: list[Report] = []
        for event in self._channel.poll(wait_s):
            rank = self._rank_of.get(event.peer)
            if isinstance(event, Gone):
                if rank is not None:
                    del self._rank_of[event.peer]
                    del self._peer_of[rank]
                    found += [r for r in self._waiting if r.kind is ReportKind.FAILED]
                    failed = [r for r in found if r.kind is ReportKind.FAILED]
                    if failed:
                        return failed  # its last words say more than the end of its connection
                    raise PeerGone(self.why() or f"engine: rank {self.mesh.name(rank)} is gone ({event.reason})")
            elif rank is None:
                self._greet(event)
            else:
                found.append(self._report(event, rank))
        return found

    def _report(self, event: Arrived, rank: int) -> Report:
        try:
            return decode_report(event.parts, rank, self._reader)
        except FrameError as error:
            raise InvariantError(f"engine: rank {self.mesh.name(rank)} sent what cannot be read: {error}") from None

    def _greet(self, event: Arrived) -> None:
        try:
            hello = decode(event.parts).message
        except FrameError as error:
            _log.warning("engine: a stranger on the ranks' line is sent away: %s", error)
            self._channel.disconnect(event.peer)
            return
        known = isinstance(hello, RankHello) and hmac.compare_digest(hello.token, self._token)
        if not isinstance(hello, RankHello) or not known or hello.rank not in self.missing:
            _log.warning("engine: a stranger on the ranks' line is sent away, expected one of ranks %s", self.missing)
            self._channel.disconnect(event.peer)
            return
        self._rank_of[event.peer] = hello.rank
        self._peer_of[hello.rank] = event.peer


class FollowerGroup:
    """A follower's end."""

    def __init__(self, address: str, *, mesh: Mesh, rank: int, clock: Clock, token: bytes = b"") -> None:
        """Connects to the leader and says hello."""
        self.mesh = mesh
        self.rank = rank
        self.control_bytes = 0
        """Received and sent."""
        self._gone = ""
        self._reader = Reader()
        self._channel = ZmqChannel(clock=clock)
        self._channel.connect(_LEADER, address)
        self._channel.send(_LEADER, encode(RankHello(rank=rank, token=token)))

    def headers(self, wait_s: float) -> list[StepHeader]:
        """What has come, in order; waits for the first. Raises PeerGone: the leader is, and all that came before its
        end was given out; InvariantError: what it sent cannot be read."""
        if self._gone:
            raise PeerGone(f"engine: the leader of rank {self.mesh.name(self.rank)} is gone ({self._gone})")
        found: list[StepHeader] = []
        for event in self._channel.poll(wait_s):
            if isinstance(event, Gone):
                self._gone = event.reason
                continue
            try:
                found.append(decode_header(event.parts, self._reader))
            except FrameError as error:
                name = self.mesh.name(self.rank)
                raise InvariantError(f"engine: rank {name} got what it cannot read from its leader: {error}") from None
        return found

    def report(self, report: Report) -> None:
        """Tell the leader."""
        self._channel.send(_LEADER, encode_report(report))

    def last_words(self, reason: str) -> None:
        """This rank cannot go on."""
        self.report(Report(rank=self.rank, kind=ReportKind.FAILED, reason=reason))

    def close(self) -> None:
        """Hang up; what was reported still leaves."""
        self._channel.close()
