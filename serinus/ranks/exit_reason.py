"""How an engine ended: recorded once, by the first thread that knows, in a file that outlives its process.

A rank that is lost is seen by a thread while the loop may stand in a collective; the words wait here for the loop, and
in a file for the front, which reads them when the process has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

CONFIG_CODE = 2
"""Exit code: settings, checkpoint or machine are wrong; to start again would not help."""
LOST_CODE = 3
"""Exit code: a rank of the engine was lost or broke, so the engine ended as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit:
    """Why, and with which exit code."""

    reason: str
    code: int


class ExitRecord:
    """One engine's. Any thread may seal it, once."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file; None = no other process reads it."""
        self._path = path
        self._sealed = threading.Event()
        self._lock = threading.Lock()
        self._ending: EngineExit | None = None

    @property
    def folder(self) -> Path | None:
        """Where the file is: a private place that is cleared away when the engine has ended."""
        return None if self._path is None else self._path.parent

    @property
    def ending(self) -> EngineExit | None:
        """What was sealed in this process."""
        return self._ending

    def record(self, reason: str, code: int) -> EngineExit:
        """Record how the engine ends; returns the reason that holds: the first that was recorded."""
        with self._lock:
            if self._ending is None:
                if self._path is not None:
                    with contextlib.suppress(OSError), self._path.open("x") as file:  # the front may have been first
                        json.dump({"reason": reason, "code": code}, file)
                self._ending = EngineExit(reason=reason, code=code)
                self._sealed.set()
            return self._ending

    def wait(self, s_max: float) -> EngineExit | None:
        """What is sealed within `s_max` seconds."""
        self._sealed.wait(s_max)
        return self._ending

    @staticmethod
    def read(path: Path) -> EngineExit | None:
        """What a process that has ended left behind; None = no words, or not all of them."""
        try:
            said = json.loads(path.read_text())
            return EngineExit(reason=str(said["reason"]), code=int(said["code"]))
        except (OSError, ValueError, KeyError):
            return None


def exit_words(code: int) -> str:
    """Of an exit code, as Python gives it: `died of SIGKILL`, `ended with exit code 2`."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
