"""Real processes under test: start a `serinus` command, wait for a line it prints, talk to it, stop or kill it.

Nothing here sleeps: a reader thread wakes the callers that wait for a line, and processes are waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType

from serinus.core.addresses import http_url
from serinus.core.free_ports import free_ports

READY = r"^\[.*ready to roll"
"""What every serving command prints when it can answer (lines of the children of `serinus up` begin with a name)."""


class Server:
    """`with Server("serve", path, "--port", "1234") as server: ...`; ends its whole process group at exit."""

    def __init__(
        self, *arguments: str, port: int = 0, host: str = "127.0.0.1", ready: str = READY, timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start `python -m serinus ARGUMENTS --host HOST --port PORT` (a free one by default); ready when a line
        matches. Of `up` prompts are handed over however small its model is, unless ARGUMENTS say otherwise. `env`:
        None = ours."""
        if arguments[:1] == ("up",) and "--disaggregation-local-gain" not in arguments:
            arguments = (*arguments, "--disaggregation-local-gain", "0")
        self.port = port or free_ports(1)[0]
        self.url = http_url(host, self.port)
        self._ready = ready
        self._timeout_s = timeout_s
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serinus", *arguments, "--host", host, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Everything it printed so far."""
        with self._news:
            return "\n".join(self._lines)

    def wait_line(self, pattern: str, timeout_s: float | None = None) -> str:
        """The first line that matches; raises AssertionError, with the output, where none comes."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        with self._news:
            found = self._news.wait_for(lambda: self._match(pattern) or self._ended, limit)
            line = self._match(pattern)
        if not found or line is None:
            raise AssertionError(f"testing: no line matches {pattern!r}; the output was:\n{self.output}")
        return line

    def _match(self, pattern: str) -> str | None:
        return next((line for line in self._lines if re.search(pattern, line)), None)

    def __enter__(self) -> Server:
        try:
            self.wait_line(self._ready)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM to the command alone, as an operator would; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to its whole process group, and wait."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self._reader.join(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
