"""LeaderSupervisor: the leader's thread that starts the ranks of this machine and notices when any rank is lost.

A rank is lost when its process ends, its connection (links.py) breaks, or its process stands still. What is seen within
a moment is weighed together, as the loss of one rank makes others fail; then the reason is recorded, the other ranks
are told and ended, and, where this process is an engine's own, it is ended too if its loop stands in something that
will never return.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.log import get_logger
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, EngineExit, ExitRecord, exit_words
from serinus.ranks.links import LeaderLinks, Sign, Weight
from serinus.wire.messages import EngineEnd

_TICK_S: Final = 0.1
_ENDS_TICK_S: Final = 0.02
_WEIGH_S: Final = 0.3
"""From the first sign of a loss to the decision which rank is lost."""
_END_S: Final = 0.5
"""Told that the engine ends, a rank of this machine has this long before it is killed."""
_LOOP_S: Final = 2.0
"""The loop of an engine has this long to end by itself, and to tell its clients."""
_LEAVE_S: Final = 5.0
"""Ranks that were told to stop have this long."""
_log = get_logger("engine")


class LeaderSupervisor:
    """The leader's. Public methods are for the loop's thread."""

    def __init__(
        self, links: LeaderLinks, *, silence_s: float, clock: Clock, exit_record: ExitRecord, ends_process: bool
    ) -> None:
        """`links`: to the ranks. `ends_process`: whether this process may be ended with its engine."""
        self._links = links
        self._mesh = links.mesh
        self._silence_s = silence_s
        self._clock = clock
        self._exit_record = exit_record
        self._ends_process = ends_process
        self._processes: Mapping[int, subprocess.Popen[bytes]] = {}
        """Of the ranks of this machine."""
        self._signs: list[Sign] = []
        self._first_sign = 0.0
        self._failure: EngineExit | None = None
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

    def check(self) -> None:
        """Raise PeerGone (ConfigError where settings are at fault) once a rank is lost. Cost: an attribute."""
        if self._exit_record.ending is not None:
            raise self.error(self._exit_record.ending)

    @staticmethod
    def error(ending: EngineExit) -> ConfigError | PeerGone:
        """An ending as the error that a waiting caller gets."""
        return ConfigError(ending.reason) if ending.code == CONFIG_CODE else PeerGone(ending.reason)

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

    # ---- its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._processes = self._spawn()
        except OSError as error:
            self._sign(Sign(weight=Weight.WORDS, rank=0, reason=f"cannot start the ranks of this machine: {error}"))
        while not self._leaving.wait(_TICK_S):
            self._look()
            weighed = bool(self._signs) and self._clock.now() - self._first_sign > _WEIGH_S
            if weighed and not self._dismissed.is_set():
                self._verdict()
                return
        self._leave()

    def _look(self) -> None:
        for sign in self._links.look():
            process = self._processes.get(sign.rank)
            if sign.weight is Weight.SILENCE and process is not None:
                stopped = " (its process is stopped)" if _is_stopped(process.pid) else ""
                sign = replace(sign, reason=f"gave no sign of life for {self._silence_s:g} s{stopped}")
            self._sign(sign)
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                words, code = exit_words(code), CONFIG_CODE if code == CONFIG_CODE else LOST_CODE
                self._sign(Sign(weight=Weight.EXIT, rank=rank, reason=words, code=code))

    def _sign(self, sign: Sign) -> None:
        if not self._signs:
            self._first_sign = self._clock.now()
        if all((each.rank, each.weight) != (sign.rank, sign.weight) for each in self._signs):
            self._signs.append(sign)

    # ---- ends -------------------------------------------------------------------------------------------------

    def _verdict(self) -> None:
        """A rank is lost: the engine ends."""
        sign = min(self._signs, key=lambda sign: sign.weight)
        ending = self._exit_record.record(f"engine: {self._name(sign.rank)}{sign.reason}", sign.code)
        _log.error("%s; the engine ends", ending.reason)
        self._tell(ending)
        self._wait_for_ends(_END_S)
        self._kill()
        self._judged.set()
        if self._ends_process:
            threading.Event().wait(_LOOP_S)
            _log.error("engine: %s ends with exit code %d", self._mesh.name(0), ending.code)
            os._exit(ending.code)

    def _name(self, rank: int) -> str:
        if rank == 0:
            return ""
        facts = self._links.facts.get(rank)
        where = "" if facts is None else f" (pid {facts.pid} on {facts.host})"
        return f"rank {self._mesh.name(rank)}{where} "

    def _leave(self) -> None:
        """The loop has ended: the ranks know it, or are told why."""
        failure = self._exit_record.ending or self._failure
        if failure is None and not self._dismissed.is_set():
            failure = EngineExit(reason="engine: the leader broke, or was interrupted", code=LOST_CODE)
        if failure is not None:
            self._tell(failure)
        late = self._wait_for_ends(_LEAVE_S if failure is None else _END_S)
        if failure is None and late:
            _log.warning("engine: %s did not end, killed", ", ".join(map(self._mesh.name, late)))
            self._tell(EngineExit(reason="engine: the leader has stopped", code=LOST_CODE))
        self._kill()

    def _tell(self, ending: EngineExit) -> None:
        self._links.tell(EngineEnd(reason=ending.reason, code=ending.code))

    def _wait_for_ends(self, s_max: float) -> list[int]:
        """Wait until no rank is left, as far as can be seen; those that are after so long."""
        end = self._clock.now() + s_max
        while left := [rank for rank in range(1, self._mesh.size) if self._is_alive(rank)]:
            if self._clock.now() > end:
                break
            threading.Event().wait(_ENDS_TICK_S)
            self._links.look()
        return left

    def _is_alive(self, rank: int) -> bool:
        process = self._processes.get(rank)
        return self._links.is_connected(rank) if process is None else process.poll() is None

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()  # a stopped one too
                process.wait()


def _is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP (or its like), where that can be seen."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[:1] == ["T"]
