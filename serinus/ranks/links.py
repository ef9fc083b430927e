"""The one connection between the leader of an engine and each other rank, over zmq.

    rank                       leader
    RankHello         ->         rank, process, host; the settings, which must be equal
                      <-       RankWelcome: where the tensors meet
                      <-       RankHeader, RankHeader...: the line of commands
    RankAnswers...    ->
    RankExit          ->         why it ends (nothing, where it is killed)
                      <-       EngineEnd: the engine ends, and why

What each side sends arrives in order. A connection that breaks is a rank, or a leader, that is lost; zmq's own threads
ask for signs of life, so that a process which stands still is noticed and one that is merely busy is not. At both ends
two threads share the socket, one at a time: the thread that works has it for each call, and while it waits there; a
second one looks in now and then, so that the end of a process is told and heard wherever the first thread stands. Knows
frames and ranks; what commands and answers mean, codec.py and body.py know.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, FrameError, PeerGone
from serinus.core.log import get_logger
from serinus.parallel import Mesh
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE
from serinus.ranks.handshake import difference, signed
from serinus.wire import Frame, Gone, Parts, ZmqChannel, decode, encode, wait_any
from serinus.wire.messages import EngineEnd, RankAnswers, RankExit, RankHello, RankWelcome

_LEADER: Final = "leader"
_TICK_S: Final = 0.1
"""How often the second thread looks in, and how long one wait of the first takes where it has to check something."""
_FAREWELL_S: Final = 2.0
"""Ranks get so long to hang up once they were told to stop."""
WATCHER: Final = 0
"""The rank that a process which only watches the leader names in its hello."""
_log = get_logger("engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Where a rank is."""

    rank: int
    pid: int
    host: str


class Weight(IntEnum):
    """Of a sign that a rank is lost; the smallest wins."""

    WORDS = 0
    """It says what is wrong with itself."""
    EXIT = 1
    """The process of the rank ended."""
    SILENCE = 2
    """The connection of the rank broke."""
    SUFFERS = 3
    """It says that another rank fails it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something that tells of a lost rank."""

    weight: Weight
    rank: int
    reason: str
    code: int = LOST_CODE


class LeaderLinks:
    """The leader's end (RankLinks of line.py). Its loop's thread works with it, its supervisor looks in."""

    def __init__(
        self, bind: str, *, mesh: Mesh, clock: Clock, settings: str = "", secret: str = "", silence_s: float = 0.0
    ) -> None:
        """
        Args:
            bind: where ranks connect, `ipc://path` or `tcp://host:port` (port 0 = any).
            settings: what all ranks must agree on (handshake.py).
            secret: what a rank must know; empty = nothing.
            silence_s: a rank that gives no sign of life for so long is gone; 0 = it is waited for.
        Raises ConfigError: the address cannot be bound.
        """
        self._channel = ZmqChannel(bind, clock=clock, silence_s=silence_s)
        self.address = self._channel.address
        """The address where ranks connect."""
        self.mesh = mesh
        self.facts: dict[int, RankFacts] = {}
        """Of the ranks that have reported."""
        self.why: Callable[[], str] = str
        """Tells why a rank was lost, in words; empty = unknown."""
        self._settings, self._secret, self._silence_s = settings, secret, silence_s
        self._clock = clock
        self._lock = threading.Lock()
        """Held by the thread that uses the channel or changes what is below."""
        self._welcome: RankWelcome | None = None
        self._rank_of: dict[str, int] = {}
        self._peer_of: dict[int, str] = {}
        self._answers: list[tuple[int, Frame | Parts]] = []
        self._signs: deque[Sign] = deque()
        self._watchers = 0
        """Connections so far of processes that start ranks, and only want to see the end of the leader."""
        self._gone = ""
        self._closed = False

    # ---- the loop's thread ----------------------------------------------------------------------------------------

    def welcome(self, welcome: RankWelcome) -> None:
        """What ranks that have reported, and those that will, are told."""
        with self._lock:
            self._welcome = welcome
            self._send_all(encode(welcome))

    def gather(self, check: Callable[[], object], s_max: float) -> None:
        """Wait until every rank has reported; `check` raises where one never will. Raises ConfigError: some did not
        within `s_max`; they are named."""
        end = self._clock.now() + s_max
        while missing := [self.mesh.name(rank) for rank in range(1, self.mesh.size) if rank not in self.facts]:
            with self._lock:
                self._take_in(_TICK_S)
            check()
            if self._clock.now() > end:
                raise ConfigError(
                    f"engine: {', '.join(missing)} did not report at {self.address} within {s_max:g} s, expected all"
                    f" {self.mesh.size} ranks (see their logs; --nnodes, --node-rank, --dist-init-addr)"
                )
        check()

    def send(self, rank: int, parts: Parts) -> None:
        with self._lock:
            if (peer := self._peer_of.get(rank)) is not None:
                self._channel.send(peer, parts)

    def answers(self, wait_s: float = 0.0) -> list[tuple[int, Frame | Parts]]:
        """See RankLinks. Raises PeerGone: a rank is lost."""
        with self._lock:
            self._take_in(0.0 if self._answers or self._gone else wait_s)
            found, self._answers = self._answers, []
        if self._gone:
            failed = [each for each in found if _tells_failure(each[1])]
            if failed:
                return failed  # the reason it gave says more than the end of its connection
            raise PeerGone(self.why() or self._gone)
        return found

    def wait_any(self, others: Sequence[ZmqChannel], wait_s: float) -> None:
        with self._lock:
            if not self._answers and not self._gone:
                wait_any([*others, self._channel], wait_s)

    def close(self, wait_s: float | None = None) -> None:
        """Hang up once the ranks have: a connection that breaks loses what they have not read, the command to stop
        among it. Waits for them up to `wait_s`, None = two seconds. May be called again."""
        with self._lock:
            end = self._clock.now() + (_FAREWELL_S if wait_s is None else wait_s)
            while not self._closed and self._peer_of and (left_s := end - self._clock.now()) > 0:
                self._take_in(left_s)
            self._closed = True
            self._peer_of.clear()
            self._channel.close()

    # ---- the supervisor -------------------------------------------------------------------------------------------

    def look(self) -> list[Sign]:
        """What tells of lost ranks since the last look."""
        if self._lock.acquire(blocking=False):  # else the loop waits there, and takes in what comes
            try:
                self._take_in(0.0)
            finally:
                self._lock.release()
        return [self._signs.popleft() for _ in range(len(self._signs))]

    def tell(self, end: EngineEnd) -> None:
        """Tell all ranks that the engine ends."""
        with self._lock:
            self._send_all(encode(end))

    def is_connected(self, rank: int) -> bool:
        """Whether a rank has reported and its connection has not ended."""
        return rank in self._peer_of

    # ---- whichever thread has the lock ----------------------------------------------------------------------------

    def _send_all(self, parts: Parts) -> None:
        for peer in self._peer_of.values():
            self._channel.send(peer, parts)

    def _take_in(self, wait_s: float) -> None:
        if self._closed:
            return
        for event in self._channel.poll(wait_s):
            rank = self._rank_of.get(event.peer)
            if isinstance(event, Gone):
                if rank is not None:
                    del self._rank_of[event.peer], self._peer_of[rank]
                    self._gone = self._gone or f"ranks: rank {self.mesh.name(rank)} is gone ({event.reason})"
                    silence = f"it ended, its machine is cut off, or it gave no sign of life for {self._silence_s:g} s"
                    self._signs.append(Sign(weight=Weight.SILENCE, rank=rank, reason=f"is gone: {silence}"))
                continue
            came = _opened(event.parts)
            said = came.message if isinstance(came, Frame) else came
            if rank is None:
                self._greet(event.peer, said)
            elif isinstance(said, RankExit):
                weight = Weight.SUFFERS if said.suffers else Weight.WORDS
                self._signs.append(Sign(weight=weight, rank=rank, reason=said.reason, code=said.code))
            else:
                self._answers.append((rank, came))

    def _greet(self, peer: str, said: object) -> None:
        """A rank reports, or a stranger that claims to be one: it is sent away."""
        if not isinstance(said, RankHello):
            self._refuse(peer, "a stranger's frame, expected a rank's hello")
            return
        name = f"rank {said.rank} of {said.host}"
        if not hmac.compare_digest(said.mac, signed(self._secret, said.rank, said.settings)):
            self._refuse(peer, f"{name} knows another --cluster-secret")
        elif said.rank == WATCHER and self._watchers < self.mesh.size:
            self._watchers += 1
            self._channel.trust(peer)
        elif not 0 < said.rank < self.mesh.size or said.rank in self.facts:
            self._refuse(peer, f"{name}, expected each of {self.mesh.size} ranks once")
        elif said.settings != self._settings:
            where = f"{self.mesh.name(said.rank)} on {said.host} has other settings than its leader"
            reason = f"{where}: {difference(self._settings, said.settings)}"
            self._refuse(peer, reason)
            self._signs.append(Sign(weight=Weight.WORDS, rank=0, reason=reason, code=CONFIG_CODE))
        else:
            self._channel.trust(peer)
            self._rank_of[peer], self._peer_of[said.rank] = said.rank, peer
            self.facts[said.rank] = RankFacts(rank=said.rank, pid=said.pid, host=said.host)
            if self._welcome is not None:
                self._channel.send(peer, encode(self._welcome))

    def _refuse(self, peer: str, reason: str) -> None:
        _log.warning("engine: refused at %s: %s", self.address, reason)
        self._channel.send(peer, encode(EngineEnd(reason=f"engine: {reason}", code=CONFIG_CODE)))
        self._channel.disconnect(peer)


class RankLink:
    """The end of a rank that does not lead (LeaderLink of rank_loop.py). Its main thread works with it; once `start`ed,
    a thread of its own looks in.

    When the leader is gone, or says that the engine ends, nothing is left to do in a rank's process: it ends, whatever
    its main thread stands in.
    """

    def __init__(
        self,
        address: str,
        hello: RankHello,
        *,
        clock: Clock,
        silence_s: float = 0.0,
        join_s_max: float = 60.0,
        ends_process: bool = False,
    ) -> None:
        """
        Args:
            address: of the leader, which is looked for as long as `join_s_max` seconds.
            silence_s: a leader that gives no sign of life for so long is gone; 0 = it is waited for.
            ends_process: whether this process ends with the engine; else a call says it.
        """
        self._address, self._hello = address, encode(hello)
        self._clock = clock
        self._silence_s, self._join_s_max, self._ends_process = silence_s, join_s_max, ends_process
        self._channel = ZmqChannel(clock=clock, silence_s=silence_s)
        self._lock = threading.Lock()
        """Held by the thread that uses the channel or changes what is below."""
        self._peer = ""
        """The leader's name; a new one for each attempt to connect, empty between two."""
        self._attempts, self._next_attempt = 0, clock.now()
        self._welcome: RankWelcome | None = None
        self._headers: list[Frame | Parts] = []
        self._end: EngineEnd | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._look_in, name="serinus-supervisor", daemon=True)
        self._take_in(0.0)

    def start(self) -> None:
        """From now on the connection is looked after whatever the caller does."""
        self._thread.start()

    def welcome(self) -> RankWelcome:
        """Wait until the leader has answered. Raises ConfigError (refused), PeerGone."""
        end = self._clock.now() + self._join_s_max
        while self._welcome is None:
            with self._lock:
                self._take_in(_TICK_S)
            if self._end is not None:
                raise (PeerGone if self._end.code == LOST_CODE else ConfigError)(self._end.reason)
            if self._leaving.is_set():
                raise PeerGone("engine: hung up before the leader answered")
            if self._clock.now() > end:
                raise PeerGone(
                    f"engine: no leader at {self._address} within {self._join_s_max:g} s, expected one (its log;"
                    f" --dist-init-addr, --dist-timeout)"
                )
        return self._welcome

    def headers(self, wait_s: float) -> list[Frame | Parts]:
        """See LeaderLink. Raises PeerGone: the leader is gone, the engine ends, or another thread has closed this."""
        with self._lock:
            self._take_in(0.0 if self._headers or self._end is not None else wait_s)
            found, self._headers = self._headers, []
        if not found and self._end is not None:
            raise PeerGone(self._end.reason)
        if not found and self._leaving.is_set():
            raise PeerGone("engine: hung up before the leader ended")
        return found

    def send(self, parts: Parts) -> None:
        with self._lock:
            self._channel.send(self._peer, parts)

    def leave(self, reason: str, code: int, *, suffers: bool = False) -> None:
        """Tell the leader why this rank ends. Where another rank is at fault, the leader ends this process."""
        self.send(encode(RankExit(reason=reason[:16_000], code=code, suffers=suffers)))
        end = self._clock.now() + self._silence_s + 2 * _TICK_S
        while suffers and self._welcome is not None and self._end is None and self._clock.now() < end:
            with self._lock:
                self._take_in(_TICK_S)

    def close(self) -> None:
        """Hang up; what was sent still leaves."""
        self._leaving.set()
        with self._lock:
            self._channel.close()

    # ---- whichever thread has the lock ----------------------------------------------------------------------------

    def _look_in(self) -> None:
        while not self._leaving.wait(_TICK_S):
            if self._lock.acquire(blocking=False):  # else the main thread waits there, and takes in what comes
                try:
                    self._take_in(0.0)
                finally:
                    self._lock.release()

    def _take_in(self, wait_s: float) -> None:
        if self._leaving.is_set():
            return
        if not self._peer and self._clock.now() >= self._next_attempt:
            self._attempts += 1
            self._peer = f"{_LEADER}-{self._attempts}"
            self._channel.connect(self._peer, self._address)
            self._channel.send(self._peer, self._hello)
        for event in self._channel.poll(wait_s):
            if isinstance(event, Gone):
                self._lost()
                continue
            came = _opened(event.parts)
            said = came.message if isinstance(came, Frame) else came
            if isinstance(said, RankWelcome):
                self._welcome = said
            elif isinstance(said, EngineEnd):
                self._ended(said)
            else:
                self._headers.append(came)

    def _lost(self) -> None:
        if self._welcome is not None:
            silence = f"it ended, or gave no sign of life for {self._silence_s:g} s"
            self._ended(EngineEnd(reason=f"the leader is gone: {silence}", code=LOST_CODE))
        elif self._end is None:  # it is not there yet
            self._peer, self._next_attempt = "", self._clock.now() + _TICK_S

    def _ended(self, end: EngineEnd) -> None:
        self._end = end
        if self._ends_process and self._welcome is not None:
            _log.error("engine: this rank ends with the engine: %s", end.reason)
            os._exit(end.code)


def _opened(parts: Parts) -> Frame | Parts:
    """A frame; where it cannot be read the parts themselves: what reads them next says so."""
    try:
        return decode(parts)
    except FrameError:
        return parts


def _tells_failure(came: Frame | Parts) -> bool:
    return isinstance(came, Frame) and isinstance(came.message, RankAnswers) and bool(came.message.failure)
