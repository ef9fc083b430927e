"""RankSupervisor: a rank's thread that reports to the leader, hears that the engine ends, and notices a lost leader.

The other end of leader_supervisor.py. When the leader is gone, or says that the engine ends, nothing is left to do
here: the process ends, whatever its main thread stands in.
"""

from __future__ import annotations

import os
import threading
from queue import Empty, SimpleQueue
from typing import Final

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, FrameError, PeerGone
from serinus.core.log import get_logger
from serinus.ranks.exit_reason import LOST_CODE
from serinus.wire import Arrived, ZmqChannel, decode, encode
from serinus.wire.messages import WatchEnd, WatchExit, WatchHello, WatchWelcome

__all__ = ["RankSupervisor"]

_TICK_S: Final = 0.1
_FLUSH_S: Final = 0.2
"""A reason gets this long to be sent."""
_log = get_logger("engine")


class RankSupervisor:
    """One rank's. Public methods are for its main thread."""

    def __init__(self, address: str, hello: WatchHello, *, silence_s: float, join_s_max: float, clock: Clock) -> None:
        """`address`: of the leader's supervisor, which is looked for as long as `join_s_max` seconds."""
        self._address = address
        self._hello = hello
        self._silence_s = silence_s
        self._join_s_max = join_s_max
        self._clock = clock
        self._channel = ZmqChannel(clock=clock, silence_s=silence_s)
        self._peer = ""
        self._words: SimpleQueue[WatchExit] = SimpleQueue()
        self._welcome: WatchWelcome | None = None
        self._refused: ConfigError | PeerGone | None = None
        self._answered = threading.Event()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serinus-supervisor", daemon=True)

    def start(self) -> None:
        """Look for the leader, and report this rank to it."""
        self._thread.start()

    def welcome(self) -> WatchWelcome:
        """Wait to learn where everything is. Raises ConfigError (refused), PeerGone."""
        self._answered.wait()
        if self._welcome is None:
            assert self._refused is not None, "engine: neither welcome nor refusal"
            raise self._refused
        return self._welcome

    def say(self, reason: str, code: int, *, suffers: bool = False) -> None:
        """Tell the leader why this rank ends. Where another rank is at fault, the leader ends this process."""
        self._words.put(WatchExit(reason=reason[:16_000], code=code, suffers=suffers))
        if suffers and self._welcome is not None:  # else there is no leader, or its reason is already known
            self._leaving.wait(self._silence_s + 2 * _TICK_S)

    def leave(self) -> None:
        """This rank ends as it was told to: the leader may go. Sends what is left to send."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    # ---- its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._find()
        while self._welcome is not None and not self._leaving.is_set():
            self._turn(_TICK_S)
        self._turn(_FLUSH_S)
        self._channel.close()

    def _find(self) -> None:
        """Connect as often as it takes, and wait for the answer."""
        end, attempt = self._clock.now() + self._join_s_max, 0
        connected = False
        while self._welcome is None and self._refused is None and not self._leaving.is_set():
            if not connected:
                attempt += 1
                self._peer = f"leader-{attempt}"
                self._channel.connect(self._peer, self._address)
                self._channel.send(self._peer, encode(self._hello))
                connected = True
            for event in self._channel.poll(_TICK_S):
                if isinstance(event, Arrived):
                    self._answer(event)
                else:
                    connected = False
            if self._clock.now() > end:
                self._refused = PeerGone(
                    f"engine: no leader at {self._address} within {self._join_s_max:g} s, expected one (its log;"
                    f" --dist-init-addr, --dist-timeout)"
                )
            elif not connected:
                self._leaving.wait(_TICK_S)  # it is not there yet
        self._answered.set()

    def _answer(self, event: Arrived) -> None:
        """The leader's answer to our report."""
        message = _read(event)
        if isinstance(message, WatchWelcome):
            self._welcome = message
        elif isinstance(message, WatchEnd):
            self._refused = ConfigError(message.reason) if message.code != LOST_CODE else PeerGone(message.reason)

    def _turn(self, wait_s: float) -> None:
        while True:
            try:
                self._channel.send(self._peer, encode(self._words.get_nowait()))
            except Empty:
                break
        for event in self._channel.poll(wait_s):
            if not isinstance(event, Arrived):
                self._end(f"the leader is gone: it ended, or gave no sign of life for {self._silence_s:g} s", LOST_CODE)
            elif isinstance(message := _read(event), WatchEnd):
                self._end(message.reason, message.code)

    def _end(self, reason: str, code: int) -> None:
        if self._leaving.is_set():
            return
        _log.error("engine: this rank ends with the engine: %s", reason)
        os._exit(code)


def _read(event: Arrived) -> object:
    try:
        return decode(event.parts).message
    except FrameError as error:
        _log.warning("engine: dropped a frame of the leader: %s", error)
        return None
