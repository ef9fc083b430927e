"""`serinus up` as a child of the demo, which alone hears Ctrl-C, and with which it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from serinus.core.errors import SerinusError
from serinus.core.free_ports import free_ports

_READY_S_MAX = 180.0
_STOP_S_MAX = 60.0


class DemoFailed(SerinusError):
    """The demo did not do what it promises."""


class Group:
    """`serinus up` as a child."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """One prefill engine, one decode engine and a router. `flags`: more of `serinus up`."""
        read_end, write_end = os.pipe()
        self._read_end = read_end
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the group
        words = ("-m", "serinus", "up", str(folder), "--prefill", "1", "--decode", "1")
        own = ("--port", str(free_ports(1)[0]), "--ready-fd", str(write_end), "--parent", str(os.getpid()))
        # A model so small would stay where it was asked.
        always = ("--disaggregation-local-gain", "0", "--served-model-name", "demo")
        self._process = subprocess.Popen(
            (sys.executable, *words, *own, *always, *flags),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            process_group=0,  # Ctrl-C would reach it beside the SIGTERM of `stop`: two signals stop it at once
        )
        os.close(write_end)

    def wait_ready(self) -> dict[str, Any]:
        """What it says when all engines are ready. Raises DemoFailed where it ends, or is silent for too long."""
        import select

        ready, _, _ = select.select([self._read_end], [], [], _READY_S_MAX)
        with os.fdopen(self._read_end) as pipe:
            line = pipe.readline() if ready else ""
        if not line:
            raise DemoFailed(f"serinus up is not ready, expected it within {_READY_S_MAX:g} s:\n{self.tail()}")
        report: dict[str, Any] = json.loads(line)
        return report

    def wait_interrupted(self) -> None:
        """Until it ends, or until Ctrl-C."""
        with suppress(KeyboardInterrupt):
            self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code. Raises DemoFailed where it goes on."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DemoFailed(f"serinus up did not stop within {_STOP_S_MAX:g} s:\n{self.tail()}") from None

    def tail(self) -> str:
        """The last lines it wrote."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-30:])
