"""LeaderSupervisor: the leader's thread that starts the ranks of this machine and notices when any rank is lost.

    rank                       leader's supervisor
    WatchHello        ->         rank, process, host; the settings, which must be equal
                      <-       WatchWelcome: where everything is
    WatchExit        ->         why it ends (nothing, where it is killed)
                      <-       WatchEnd: the engine ends, and why

A rank is lost when its process ends, its connection breaks, or its process stands still: zmq's own threads ask for
signs of life, so that a rank which is merely busy is not lost. What is seen within a moment is weighed together, as the
loss of one rank makes others fail; then the reason is recorded, the other ranks are told and ended, and, where this
process is an engine's own, it is ended too if its loop stands in something that will never return.
"""

from __future__ import annotations

import hmac
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig, settings_in
from serinus.core.errors import ConfigError, FrameError, PeerGone
from serinus.core.log import get_logger
from serinus.parallel import Mesh
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, EngineExit, ExitRecord, exit_words
from serinus.wire import Arrived, ZmqChannel, decode, encode
from serinus.wire.messages import Message, WatchEnd, WatchExit, WatchHello, WatchWelcome

__all__ = ["LeaderSupervisor", "RankFacts", "difference"]

_TICK_S: Final = 0.1
_WEIGH_S: Final = 0.3
"""From the first sign of a loss to the decision which rank is lost."""
_END_S: Final = 0.5
"""Told that the engine ends, a rank of this machine has this long before it is killed."""
_LOOP_S: Final = 2.0
"""The loop of an engine has this long to end by itself, and to tell its clients."""
_LEAVE_S: Final = 5.0
"""Ranks that were told to stop have this long."""
_log = get_logger("engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Where a rank is."""

    rank: int
    pid: int
    host: str


class _Weight(IntEnum):
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
class _Sign:
    weight: _Weight
    rank: int
    reason: str
    code: int = LOST_CODE


@dataclass(slots=True)
class _Member:
    """What is known of one rank."""

    process: subprocess.Popen[bytes] | None = None
    """Only on this machine."""
    peer: str = ""
    facts: RankFacts | None = None
    welcomed: bool = False
    gone: bool = False
    """Whether its connection has ended."""


class LeaderSupervisor:
    """The leader's. Public methods are for the loop's thread."""

    def __init__(
        self,
        bind: str,
        *,
        mesh: Mesh,
        settings: str,
        expected_mac: Callable[[int, str], bytes],
        silence_s: float,
        clock: Clock,
        exit_record: ExitRecord,
        ends_process: bool,
    ) -> None:
        """Listen at `bind`. `settings`: what all ranks must agree on, as JSON; `expected_mac`: of (rank, settings).

        Raises ConfigError: the address cannot be had.
        """
        self._channel = ZmqChannel(bind, clock=clock, silence_s=silence_s)
        self.address = self._channel.address
        self._mesh = mesh
        self._settings = settings
        self._expected_mac = expected_mac
        self._silence_s = silence_s
        self._clock = clock
        self._exit_record = exit_record
        self._ends_process = ends_process
        self._members = {rank: _Member() for rank in range(1, mesh.size)}
        self._signs: list[_Sign] = []
        self._first_sign = 0.0
        self._welcome: WatchWelcome | None = None
        self._failure: EngineExit | None = None
        self._here = threading.Event()
        self._leaving = threading.Event()
        self._dismissed = threading.Event()
        self._judged = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serinus-supervisor", daemon=True)
        self._spawn: Callable[[], Mapping[int, subprocess.Popen[bytes]]] = dict

    # ---- the loop's thread ------------------------------------------------------------------------------------

    def start(self, spawn: Callable[[], Mapping[int, subprocess.Popen[bytes]]]) -> None:
        """Start the thread, and in it (their lives hang on it) the ranks of this machine."""
        self._spawn = spawn
        self._thread.start()

    def welcome(self, welcome: WatchWelcome) -> None:
        """What ranks that have reported, and those that will, are told."""
        self._welcome = welcome

    def gather(self, s_max: float) -> None:
        """Wait until every rank has reported and was welcomed. Raises ConfigError, PeerGone: some did not come (they
        are named), or were lost."""
        end = self._clock.now() + s_max
        while not self._here.wait(_TICK_S):
            self.check()
            if self._clock.now() > end:
                missing = [self._mesh.name(rank) for rank, member in self._members.items() if member.facts is None]
                raise ConfigError(
                    f"engine: {', '.join(missing)} did not report at {self.address} within {s_max:g} s, expected all"
                    f" {self._mesh.size} ranks (see their logs; --nnodes, --node-rank, --dist-init-addr)"
                )
        self.check()

    def check(self) -> None:
        """Raise PeerGone (ConfigError where settings are at fault) once a rank is lost. Cost: an attribute."""
        if self._exit_record.ending is not None:
            raise self.error(self._exit_record.ending)

    @staticmethod
    def error(ending: EngineExit) -> ConfigError | PeerGone:
        """An ending as the error that a waiting caller gets."""
        return ConfigError(ending.reason) if ending.code == CONFIG_CODE else PeerGone(ending.reason)

    def facts(self) -> list[RankFacts]:
        """Of the ranks that have reported, by rank."""
        return [member.facts for member in self._members.values() if member.facts is not None]

    def dismiss(self) -> None:
        """The ranks are about to be told to stop: from now on it is no loss that one ends, whenever the others do."""
        self._dismissed.set()

    def close(self, failure: EngineExit | None = None) -> None:
        """The engine stops: wait until its ranks have ended, kill what does not. With `failure`, or where they were not
        dismissed, they are told so, and not waited for. May be called again."""
        self._failure = self._failure or failure
        self._leaving.set()
        end = self._clock.now() + _LEAVE_S + 2 * _END_S
        while self._thread.is_alive() and not self._judged.is_set() and self._clock.now() < end:
            self._thread.join(_TICK_S)
        if self._thread.ident is None:
            self._channel.close()

    # ---- its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for rank, process in self._spawn().items():
                self._members[rank].process = process
        except OSError as error:
            self._sign(_Weight.WORDS, 0, f"cannot start the ranks of this machine: {error}")
        while not self._leaving.is_set():
            self._turn()
            weighed = bool(self._signs) and self._clock.now() - self._first_sign > _WEIGH_S
            if weighed and not self._dismissed.is_set():
                self._verdict()
                break
        else:
            self._leave()
        self._channel.close()

    def _turn(self) -> None:
        for event in self._channel.poll(_TICK_S):
            if isinstance(event, Arrived):
                self._take(event)
            else:
                self._lost(event.peer)
        welcome = self._welcome
        for rank, member in self._members.items():
            if welcome is not None and member.peer and not member.welcomed:
                member.welcomed = True
                self._send(member.peer, welcome)
            if member.process is not None and (code := member.process.poll()) is not None:
                self._sign(_Weight.EXIT, rank, exit_words(code), CONFIG_CODE if code == CONFIG_CODE else LOST_CODE)
        if all(member.welcomed for member in self._members.values()):
            self._here.set()

    def _take(self, event: Arrived) -> None:
        try:
            message = decode(event.parts).message
        except FrameError as error:
            _log.warning("engine: dropped a frame at %s: %s", self.address, error)
            return
        rank = next((rank for rank, member in self._members.items() if member.peer == event.peer), None)
        if isinstance(message, WatchHello) and rank is None:
            self._hello(event.peer, message)
        elif isinstance(message, WatchExit) and rank is not None:
            self._sign(_Weight.SUFFERS if message.suffers else _Weight.WORDS, rank, message.reason, message.code)
        else:
            _log.warning("engine: dropped a %s at %s, expected a rank's", type(message).__name__, self.address)

    def _hello(self, peer: str, hello: WatchHello) -> None:
        """A rank reports, or a stranger that claims to be one."""
        member = self._members.get(hello.rank)
        name = self._mesh.name(hello.rank)
        if not hmac.compare_digest(hello.mac, self._expected_mac(hello.rank, hello.settings)):
            self._refuse(peer, f"rank {hello.rank} of {hello.host} knows another --cluster-secret")
        elif member is None or member.facts is not None:
            self._refuse(peer, f"rank {hello.rank} of {hello.host}, expected each of {self._mesh.size} ranks once")
        elif hello.settings != self._settings:
            where = f"{name} on {hello.host} has other settings than its leader"
            reason = f"{where}: {difference(self._settings, hello.settings)}"
            self._refuse(peer, reason)
            self._sign(_Weight.WORDS, 0, reason, CONFIG_CODE)
        else:
            member.peer = peer
            member.facts = RankFacts(rank=hello.rank, pid=hello.pid, host=hello.host)

    def _refuse(self, peer: str, reason: str) -> None:
        _log.warning("engine: refused at %s: %s", self.address, reason)
        self._send(peer, WatchEnd(reason=f"engine: {reason}", code=CONFIG_CODE))

    def _lost(self, peer: str) -> None:
        for rank, member in self._members.items():
            if member.peer == peer:
                member.gone = True
                self._sign(_Weight.SILENCE, rank, self._silence(member))

    def _silence(self, member: _Member) -> str:
        if member.process is None:
            return f"is gone: it ended, its machine is cut off, or it gave no sign of life for {self._silence_s:g} s"
        stopped = " (its process is stopped)" if _is_stopped(member.process.pid) else ""
        return f"gave no sign of life for {self._silence_s:g} s{stopped}"

    def _sign(self, weight: _Weight, rank: int, reason: str, code: int = LOST_CODE) -> None:
        if not self._signs:
            self._first_sign = self._clock.now()
        if all(sign.rank != rank or sign.weight != weight for sign in self._signs):
            self._signs.append(_Sign(weight=weight, rank=rank, reason=reason, code=code))

    # ---- ends -------------------------------------------------------------------------------------------------

    def _verdict(self) -> None:
        """A rank is lost: the engine ends."""
        sign = min(self._signs, key=lambda sign: sign.weight)
        ending = self._exit_record.record(f"engine: {self._who(sign.rank)}{sign.reason}", sign.code)
        _log.error("%s; the engine ends", ending.reason)
        self._tell(ending)
        end = self._clock.now() + _END_S
        while self._alive() and self._clock.now() < end:
            self._channel.poll(_TICK_S)
        self._kill()
        self._judged.set()
        if self._ends_process:
            threading.Event().wait(_LOOP_S)
            _log.error("engine: %s ends with exit code %d", self._mesh.name(0), ending.code)
            os._exit(ending.code)

    def _who(self, rank: int) -> str:
        if rank == 0:
            return ""
        facts = self._members[rank].facts
        where = "" if facts is None else f" (pid {facts.pid} on {facts.host})"
        return f"rank {self._mesh.name(rank)}{where} "

    def _leave(self) -> None:
        """The loop has ended: the ranks know it, or are told why."""
        failure = self._exit_record.ending or self._failure
        if failure is None and not self._dismissed.is_set():
            failure = EngineExit(reason="engine: the leader broke, or was interrupted", code=LOST_CODE)
        if failure is not None:
            self._tell(failure)
        end = self._clock.now() + (_LEAVE_S if failure is None else _END_S)
        while self._alive() and self._clock.now() < end:
            for event in self._channel.poll(_TICK_S):
                if not isinstance(event, Arrived):
                    self._lost(event.peer)
        if failure is None and (late := self._alive()):
            _log.warning("engine: %s did not end, killed", ", ".join(map(self._mesh.name, late)))
            self._tell(EngineExit(reason="engine: the leader has stopped", code=LOST_CODE))
        self._kill()

    def _tell(self, ending: EngineExit) -> None:
        for member in self._members.values():
            if member.peer:
                self._send(member.peer, WatchEnd(reason=ending.reason, code=ending.code))

    def _alive(self) -> list[int]:
        """Ranks that have not ended, as far as can be seen."""
        return [
            rank
            for rank, member in self._members.items()
            if (member.process.poll() is None if member.process is not None else bool(member.peer) and not member.gone)
        ]

    def _kill(self) -> None:
        for member in self._members.values():
            if member.process is not None and member.process.poll() is None:
                member.process.kill()  # a stopped one too
                member.process.wait()

    def _send(self, peer: str, message: Message) -> None:
        self._channel.send(peer, encode(message))


def difference(ours: str, theirs: str) -> str:
    """The first setting in which two trees of settings differ, by its flag, in words."""
    flags = {f"{group}.{setting.name}": setting.flag for group, setting in settings_in(ServeConfig)}
    one, other = json.loads(ours), json.loads(theirs)
    for group in sorted({*one, *other}):
        left, right = one.get(group, {}), other.get(group, {})
        for name in sorted({*left, *right}):
            if left.get(name) != right.get(name):
                what = flags.get(f"{group}.{name}", f"{group}.{name}")
                return f"{what} is {right.get(name)!r}, expected {left.get(name)!r}"
    return "nothing that can be named"


def _is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP (or its like), where that can be seen."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[:1] == ["T"]
